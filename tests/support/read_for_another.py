"""Read files for a test that must outlive a crash, in an address space of limited size.

python read_for_another.py FOLDER, where FOLDER holds a tiny prepared data set. A line on stdin is
a kind of file and its path; the answer is a line of JSON: ["read"], ["refused", why], or ["raised",
what] where the parser let an exception through.
"""

import json
import resource
import sys
from collections.abc import Callable
from math import prod
from pathlib import Path

import numpy as np

from tandem.artifacts.checkpoint import initial_weights, read_checkpoint, read_header
from tandem.config.command_line import load_config
from tandem.data.batch_file import locate_batch
from tandem.data.dataset import Dataset, open_split
from tandem.data.manifest import read_manifest
from tandem.data.mean_image import read_mean
from tandem.data.reader import PictureReader
from tandem.errors import InputError
from tandem.memory import RowType

# What the largest of the parsers needs by itself, and far less than the claims of the tests.
_ROOM = 256 << 20


def read_batch(path: Path, folder: Path) -> None:
    location = locate_batch(path)
    if location.offset < 0 or location.offset + prod(location.shape) > path.stat().st_size:
        raise AssertionError(f"{location} is not inside the file")


def read_labels(path: Path, folder: Path) -> None:
    manifest = read_manifest(folder)
    split = open_split(manifest, folder, "train", path.parent)
    if path.name != "train_labels.npy" or split.size != len(manifest.splits["train"].labels):
        raise AssertionError("other labels were read")


def read_labels_again(path: Path, folder: Path) -> None:
    """As a loader does, which has only the size of the split to compare with."""
    size = len(read_manifest(folder).splits["train"].labels)
    with PictureReader(Dataset((), (), (size,), str(path), RowType("uint8", (1, 1, 3)))) as reader:
        if reader.labels(np.arange(size)).dtype != np.int64:
            raise AssertionError("these are no labels")


def read_mean_image(path: Path, folder: Path) -> None:
    size = read_manifest(folder).image_size
    if not np.isfinite(read_mean(path, size)).all():
        raise AssertionError("numbers that are none")


def read_all_of_a_manifest(path: Path, folder: Path) -> None:
    manifest = read_manifest(path)
    for name, split in manifest.splits.items():
        if sum(manifest.counts(name)) != len(split.labels):
            raise AssertionError("pictures and labels are not as many")
        for file in split.files:
            (folder / file).exists()  # fails on what can be no path
        "\n".join(split.pictures).encode()


def read_all_of_a_checkpoint(path: Path, folder: Path) -> None:
    read_header(path)
    found = read_checkpoint(path)
    initial_weights(path, {name: array.shape for name, array in found.weights.items()})


READERS: dict[str, Callable[[Path, Path], object]] = {
    "batch": read_batch,
    "labels": read_labels,
    "labels again": read_labels_again,
    "mean": read_mean_image,
    "manifest": read_all_of_a_manifest,
    "configuration": lambda path, folder: load_config(["--config", str(path)]),
    "checkpoint": read_all_of_a_checkpoint,
}


def answer(line: str, folder: Path) -> list[str]:
    kind, _, path = line.rstrip("\n").partition("\t")
    try:
        READERS[kind](Path(path), folder)
    except InputError as error:
        return ["refused", str(error)]
    except Exception as error:
        return ["raised", f"{type(error).__name__}: {error}"]
    return ["read"]


def main() -> int:
    folder = Path(sys.argv[1])
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _ROOM, used + _ROOM))
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(line, folder)), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
