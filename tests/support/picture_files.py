"""Pictures that encode their own label and number, and what preprocessing makes of them."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
from PIL import Image

SIDE = 8
PER_FILE = 4
GARBAGE = b"this is not a picture"
Refusal = Callable[..., str]  # runs a program with more options; its message
# ILSVRC as it is shipped: IDs in another order than wnids.
WNID_OF_ID = {1: "n20", 2: "n03", 3: "n10", 4: "n99"}


def encoded(split: str, wnid: str, number: int) -> np.ndarray:
    """Noise, uint8 (SIDE, SIDE, RGB), that is another for each picture, with its number in it."""
    name = f"{split}/{wnid}/{number}"
    pixels = np.random.default_rng(zlib.crc32(name.encode())).integers(0, 256, (SIDE, SIDE, 3))
    pixels[0, 0] = (int(wnid[1:]) % 256, number % 256, number // 256)
    return pixels.astype(np.uint8)


def write_exact(path: Path, pixels: np.ndarray) -> None:
    """Write a PNG whatever the suffix says: its pixels come back as they were."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, "PNG")


@dataclass(frozen=True)
class Pictures:
    """Class folders of encoded pictures under `root`: train/ and val/."""

    root: Path

    def write(self, split: str, counts: dict[str, int]) -> None:
        for wnid, count in counts.items():
            for number in range(count):
                write_exact(self.path(split, wnid, number), encoded(split, wnid, number))

    def path(self, split: str, wnid: str, number: int) -> Path:
        return self.root / split / wnid / f"{number:03d}.JPEG"

    def spoil(self, *names: tuple[str, str, int]) -> None:
        """Replace pictures by bytes that are none."""
        for name in names:
            self.path(*name).write_bytes(GARBAGE)

    def options(self, out: Path, *more: str) -> list[str]:
        """A command line that preprocesses these pictures into `out`."""
        return [
            *("--train-img-dir", str(self.root / "train"), "--val-img-dir", str(self.root / "val")),
            *("--tar-root-dir", str(out), "--image-size", str(SIDE)),
            *("--batch-size", str(PER_FILE), "--workers", "1", *more),
        ]


def write_small(root: Path) -> Pictures:
    """13 training and 6 validation pictures of three classes: short last files in both."""
    pictures = Pictures(root)
    pictures.write("train", {"n20": 5, "n03": 6, "n10": 2})
    pictures.write("val", {"n20": 2, "n03": 3, "n10": 1})
    return pictures


def stored(folder: Path, split: str, layout: str = "b01c") -> list[np.ndarray]:
    """The pictures of all batch files, in order, each uint8 (row, column, RGB)."""
    found: list[np.ndarray] = []
    for path in sorted((folder / f"{split}_hkl").iterdir()):
        with h5py.File(path) as file:
            batch = file["data"][...]
        found += list(batch if layout == "b01c" else batch.transpose(3, 1, 2, 0))
    return found


def contents(folder: Path) -> dict[str, bytes]:
    """Every file under `folder`."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def write_synsets(path: Path, table: dict[int, str]) -> None:
    synsets = np.zeros((1, len(table)), [("ILSVRC2014_ID", "O"), ("WNID", "O"), ("words", "O")])
    for column, (number, wnid) in enumerate(table.items()):
        synsets[0, column] = (np.uint16(number), wnid, "a thing, another word")
    import scipy.io

    scipy.io.savemat(path, {"synsets": synsets})
