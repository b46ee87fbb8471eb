"""The demo's pictures under ImageNet's names, in every layout in which people have ImageNet."""

import functools
import io
import json
import tarfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from tandem.data.class_names import imagenet_names
from tests.support.picture_files import write_synsets

SIDE = 16
TRAIN, VAL = 40, 25
WNIDS = tuple(imagenet_names())
CLASSES = WNIDS[::100]  # of the digits 0 to 9
# ILSVRC's IDs, in another order than the WordNet IDs.
WNID_OF_ID = dict(enumerate((*CLASSES[3:], *CLASSES[:3]), 1))


@dataclass(frozen=True)
class Digit:
    """A picture: `name` is ImageNet's, without a suffix; `content` is a JPEG."""

    split: str
    wnid: str
    name: str
    content: bytes

    @property
    def number(self) -> int:
        """The number of its class among ImageNet's thousand."""
        return WNIDS.index(self.wnid)


@functools.cache
def digits() -> tuple[Digit, ...]:
    """A few of the demo's pictures."""
    from sklearn.datasets import load_digits

    data, found = load_digits(), []
    pairs = zip(data.images[: TRAIN + VAL], data.target, strict=False)
    for number, (image, digit) in enumerate(pairs):
        wnid, buffer = CLASSES[digit], io.BytesIO()
        grey = np.rint(image * (255 / 16)).astype(np.uint8)
        Image.fromarray(grey).resize((SIDE, SIDE)).save(buffer, "JPEG", quality=95)
        train = number < TRAIN
        # Numbers of different lengths: 5, 95, 1005 and so on, whose order as text is another.
        name = f"{wnid}_{number * 37 + 5}" if train else f"ILSVRC2012_val_{number - TRAIN + 1:08d}"
        found.append(Digit("train" if train else "val", wnid, name, buffer.getvalue()))
    return tuple(found)


def of(split: str) -> list[Digit]:
    return [digit for digit in digits() if digit.split == split]


def write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def tar(files: Iterable[tuple[str, bytes]], **options: int) -> bytes:
    """An uncompressed archive of files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", **options) as archive:  # type: ignore[call-overload]
        for name, content in files:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def members(content: bytes) -> list[tuple[str, bytes]]:
    """The files in an archive."""
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        return [(m.name, archive.extractfile(m).read()) for m in archive]  # type: ignore[union-attr]


def class_folders(root: Path, split: str) -> None:
    for digit in of(split):
        write(root / split / digit.wnid / f"{digit.name}.JPEG", digit.content)


def flat(root: Path, split: str, *, ending: bool = False) -> None:
    for digit in of(split):
        end = f"_{digit.wnid}" if ending else ""
        write(root / split / f"{digit.name}{end}.JPEG", digit.content)


def kit(root: Path, truth: str | None = None) -> dict[str, bytes]:
    """The files of the development kit of 2012."""
    ids = {wnid: number for number, wnid in WNID_OF_ID.items()}
    table = root / "meta.mat"
    root.mkdir(parents=True, exist_ok=True)
    write_synsets(table, WNID_OF_ID)
    meta = table.read_bytes()
    table.unlink()
    lines = truth or "".join(f"{ids[digit.wnid]}\n" for digit in of("val"))
    data = "ILSVRC2012_devkit_t12/data"
    return {
        f"{data}/meta.mat": meta,
        f"{data}/ILSVRC2012_validation_ground_truth.txt": lines.encode(),
    }


def packed_kit(root: Path, truth: str | None = None) -> None:
    import gzip

    content = tar([("ILSVRC2012_devkit_t12/readme.txt", b"a kit"), *kit(root, truth).items()])
    write(root / "ILSVRC2012_devkit_t12.tar.gz", gzip.compress(content))


def folders_by_class(root: Path) -> None:
    class_folders(root, "train")
    class_folders(root, "val")


def folders_with_kit(root: Path) -> None:
    class_folders(root, "train")
    flat(root, "val")
    for name, content in kit(root).items():
        write(root / name, content)


def folders_with_packed_kit(root: Path) -> None:
    class_folders(root, "train")
    flat(root, "val")
    packed_kit(root)


def kaggle(root: Path) -> None:
    pictures = root / "ILSVRC/Data/CLS-LOC"
    class_folders(pictures, "train")
    flat(pictures, "val")
    write(pictures / "test/ILSVRC2012_test_00000001.JPEG", b"")
    lines = [f"{digit.name},{digit.wnid} 85 1 499 272 {digit.wnid} 1 2 3 4" for digit in of("val")]
    text = "\n".join(["ImageId,PredictionString", *lines[::-1]])
    write(root / "LOC_val_solution.csv", text.encode())
    names = imagenet_names()
    mapping = "".join(f"{wnid} {names[wnid]}\n" for wnid in CLASSES)
    write(root / "LOC_synset_mapping.txt", mapping.encode())


def official_archives(root: Path) -> None:
    inner = []
    for wnid in sorted({digit.wnid for digit in of("train")}):
        some = [(f"{d.name}.JPEG", d.content) for d in of("train") if d.wnid == wnid]
        inner.append((f"{wnid}.tar", tar(some, format=tarfile.GNU_FORMAT)))
    write(root / "ILSVRC2012_img_train.tar", tar(inner))
    val = [(f"{digit.name}.JPEG", digit.content) for digit in of("val")[::-1]]
    write(root / "ILSVRC2012_img_val.tar", tar(val))
    packed_kit(root)


def side_by_side(root: Path) -> None:
    """As Hugging Face's older archives unpack into two folders."""
    flat(root, "train", ending=True)
    flat(root, "val", ending=True)


def in_one_folder(root: Path) -> None:
    for digit in digits():
        write(root / f"{digit.name}_{digit.wnid}.JPEG", digit.content)


def write_shards(
    root: Path, sample: Callable[[int, Digit], Iterable[tuple[str, bytes]]], per_shard: int = 15
) -> None:
    """Write archives in webdataset's form, of the files that `sample` makes of a picture."""
    for split, name in (("train", "train-{:04d}"), ("val", "validation-{:02d}")):
        some = of(split)[::-1]
        for number, start in enumerate(range(0, len(some), per_shard)):
            part = enumerate(some[start : start + per_shard], start)
            files = [file for i, digit in part for file in sample(i, digit)]
            write(root / f"imagenet1k-{name.format(number)}.tar", tar(files))


def sample_of(number: int, digit: Digit) -> list[tuple[str, bytes]]:
    """A sample as in timm/imagenet-1k-wds."""
    folder = f"{digit.wnid}/" if digit.split == "train" else ""
    about = {"filename": f"{folder}{digit.name}.JPEG", "label": digit.number}
    return [
        (f"{digit.name}.cls", str(digit.number).encode()),
        (f"{digit.name}.jpg", digit.content),
        (f"{digit.name}.json", json.dumps(about).encode()),
    ]


def webdataset(root: Path) -> None:
    write_shards(root, sample_of)
    names = sorted(path.name for path in root.glob("*.tar"))
    splits = {
        split: {"filenames": [name for name in names if f"-{split}-" in name]}
        for split in ("train", "validation")
    }
    write(root / "_info.json", json.dumps({"splits": splits}).encode())


def webdataset_named_in_json(root: Path) -> None:
    """Keys are numbers, and the names and classes are in the .json alone."""

    def sample(number: int, digit: Digit) -> list[tuple[str, bytes]]:
        (_, (_, picture), (_, about)) = sample_of(number, digit)
        return [(f"./{number:08d}.jpg", picture), (f"./{number:08d}.json", about)]

    write_shards(root, sample)


def parquet(root: Path, files: int = 2) -> None:
    import pyarrow
    import pyarrow.parquet

    for split, name in (("train", "train"), ("val", "validation"), ("val", "test")):
        some: Sequence[Digit] = of(split)
        for number in range(files):
            part = some[number::files]
            rows = [{"bytes": d.content, "path": f"{d.name}_{d.wnid}.JPEG"} for d in part]
            table = pyarrow.table({"image": rows, "label": [digit.number for digit in part]})
            path = root / "data" / f"{name}-{number:05d}-of-{files:05d}.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            pyarrow.parquet.write_table(table, path, row_group_size=7)


LAYOUTS: dict[str, tuple[Callable[[Path], None], str]] = {
    layout.__name__: (layout, found)
    for layout, found in (
        (folders_by_class, "folders of pictures"),
        (folders_with_kit, "folders of pictures"),
        (folders_with_packed_kit, "folders of pictures"),
        (side_by_side, "folders of pictures"),
        (in_one_folder, "pictures side by side with the class in their names"),
        (kaggle, "Kaggle's folders"),
        (official_archives, "ImageNet's official archives"),
        (webdataset, "archives in webdataset's form"),
        (webdataset_named_in_json, "archives in webdataset's form"),
        (parquet, "Hugging Face's parquet files"),
    )
}
