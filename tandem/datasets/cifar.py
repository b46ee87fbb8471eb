"""CIFAR-10 and CIFAR-100: the binary version, or of CIFAR-10 pictures in class folders.

A record of the binary version is its label, one byte (CIFAR-100: the coarse label, then the fine
one), and 3,072 bytes of a picture, (RGB, row, column) (Krizhevsky 2009, "Learning multiple layers
of features from tiny images"; https://www.cs.toronto.edu/~kriz/cifar.html).
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from tandem.datasets.arrays import Data, Pair
from tandem.datasets.files import Entry, entries
from tandem.datasets.names import CLASSES
from tandem.errors import InputError
from tandem.philox import Purpose, permutation
from tandem.validation import listed, printable, suggestion

FILES = {
    "cifar10": (tuple(f"data_batch_{i}.bin" for i in range(1, 6)), ("test_batch.bin",)),
    "cifar100": (("train.bin",), ("test.bin",)),
}
_PICKLED = {
    "cifar10": {"test_batch", *(f"data_batch_{i}" for i in range(1, 6))},
    "cifar100": {"train", "test"},
}
_LABELS = {"fine": 1, "coarse": 0}  # byte of a record of CIFAR-100
_SIDE = 32
_PIXELS = 3 * _SIDE * _SIDE
_SPLITS = {"train": 0, "test": 1, "val": 1}
_MOST_PICTURE = 1 << 20  # bytes


def read(name: str, source: Path, labels: str = "fine") -> Data:
    """Read cifar10 or cifar100: uint8 pictures (n, row, column, RGB), int64 labels (n,).

    `source` is a folder or a tar archive, compressed or not. Pictures in class folders come in a
    shuffled order, which is always the same. Raises InputError if it holds neither, or the pickled
    version.
    """
    if labels not in _LABELS:
        raise InputError(
            f"labels: found {labels!r}, expected fine or coarse{suggestion(str(labels), _LABELS)}"
        )
    train, test = FILES[name]
    batches: dict[str, np.ndarray] = {}
    pictures = _Pictures(source)
    pickled: set[str] = set()
    with entries(source) as found:
        for entry in found:
            base = entry.name.rpartition("/")[2]
            if base in batches:
                raise InputError(f"{source}: found two files {base}, expected one")
            if base in (*train, *test):
                batches[base] = _records(entry, source, 1 if name == "cifar10" else 2)
            elif base in _PICKLED[name]:
                pickled.add(base)
            elif name == "cifar10":
                pictures.add(entry)
    if not batches and pickled:
        raise InputError(
            f"{source}: found the pickled version of {name} ({listed(sorted(pickled))}), which"
            f" could start programs, expected the binary version: cifar-{name[5:]}-binary.tar.gz"
        )
    if not batches and pictures.found:
        return pictures.arrays()
    if missing := [base for base in (*train, *test) if base not in batches]:
        raise InputError(
            f"{source}: found {listed(sorted(batches))}, without {listed(missing)}, expected the"
            f" binary version of {name}"
            + " or pictures in train/<class>/ and test/<class>/"
            * (name == "cifar10")
        )
    column = _LABELS[labels] if name == "cifar100" else 0
    return _pair(train, batches, column), _pair(test, batches, column)


def _records(entry: Entry, source: Path, labels: int) -> np.ndarray:
    """The records of a file: uint8 (n, labels + pixels)."""
    width = labels + _PIXELS
    if entry.size % width or not entry.size:
        raise InputError(
            f"{source}: found {printable(entry.name)} of {entry.size} bytes, expected a multiple of"
            f" {width}; it is incomplete, or of another data set"
        )
    content = entry.read()
    if len(content) != entry.size:
        raise InputError(
            f"{source}: found {len(content)} bytes of {printable(entry.name)}, expected"
            f" {entry.size}"
        )
    return np.frombuffer(content, np.uint8).reshape(-1, width)


def _pair(names: Iterable[str], batches: dict[str, np.ndarray], column: int) -> Pair:
    records = np.concatenate([batches[name] for name in names])
    planes = records[:, -_PIXELS:].reshape(-1, 3, _SIDE, _SIDE)
    pixels = np.ascontiguousarray(planes.transpose(0, 2, 3, 1))
    return pixels, records[:, column].astype(np.int64)


class _Pictures:
    """The pictures in class folders, ``train/<class>/name``, decoded as they come."""

    def __init__(self, source: Path) -> None:
        from tandem.data.decode import PICTURE_SUFFIXES, decode_picture

        self._suffixes, self._decode = PICTURE_SUFFIXES, decode_picture
        self._source = source
        self.found: dict[tuple[int, int, str], np.ndarray] = {}
        self._splits: set[str] = set()

    def add(self, entry: Entry) -> None:
        """Decode a file, if its name is that of a picture of a split."""
        from tandem.data.decode import BadPictureError

        split, _, rest = "/".join(entry.name.split("/")[-3:]).partition("/")
        wnid, _, name = rest.partition("/")
        if split not in _SPLITS or not name or Path(name).suffix.lower() not in self._suffixes:
            return
        if name.startswith("."):  # as archives of macOS have beside each file
            return
        self._splits.add(split)
        if {"test", "val"} <= self._splits:
            raise InputError(f"{self._source}: found both test/ and val/, expected one of them")
        classes = CLASSES["cifar10"]
        where = f"{self._source}: {printable(entry.name)}"
        if wnid not in classes:
            raise InputError(
                f"{where}: found the class {printable(wnid)}, expected one of {listed(classes, 10)}"
                f"{suggestion(wnid, classes)}"
            )
        if entry.size > _MOST_PICTURE:
            raise InputError(
                f"{where}: found {entry.size} bytes, expected at most {_MOST_PICTURE} of a picture"
            )
        try:
            pixels = self._decode(entry.read(), _SIDE)
        except BadPictureError as error:
            raise InputError(f"{where}: cannot be decoded: {error}") from None
        key = _SPLITS[split], classes.index(wnid), name
        if key in self.found:
            raise InputError(
                f"{where}: found two pictures of a class with this name, expected one archive or"
                " folder with train/<class>/ and test/<class>/"
            )
        self.found[key] = pixels

    def arrays(self) -> Data:
        """The pictures of both splits, each in an order that depends on their number alone."""
        pairs = []
        for split in (0, 1):
            keys = sorted(key for key in self.found if key[0] == split)
            if not keys:
                kind = "training" if split == 0 else "test"
                raise InputError(
                    f"{self._source}: found no {kind} pictures, expected train/<class>/ and"
                    " test/<class>/"
                )
            # By class, minibatches would be of one class, and the last rows no sample of all.
            order = permutation(len(keys), 0, split, Purpose.LISTING)
            x = np.stack([self.found[keys[i]] for i in order])
            pairs.append((x, np.array([keys[i][1] for i in order], np.int64)))
        return pairs[0], pairs[1]
