"""Arrays in an ``.npz`` file, and what the arrays of a data set must be."""

import zipfile
from math import prod
from pathlib import Path

import numpy as np

from tandem.data.safe_io import open_file, read_header
from tandem.datasets.files import read_exactly, reading
from tandem.datasets.names import CLASSES, COARSE
from tandem.errors import InputError
from tandem.validation import listed

Pair = tuple[np.ndarray, np.ndarray]
Data = tuple[Pair, Pair]

SHAPES = {
    "mnist": (28, 28),
    "fashion_mnist": (28, 28),
    "cifar10": (32, 32, 3),
    "cifar100": (32, 32, 3),
}


_SPLITS = ("", "_train", "_test", "_val", "_valid", "_validation", "_dev")
_EXPECTED = "x_train, y_train, x_test and y_test, or x and y"


def read(path: Path) -> Data:
    """Read ``x_train``, ``y_train``, ``x_test`` and ``y_test``, or ``x`` and ``y``.

    Integer targets become labels, int64 (n,), also from (n, 1), and other targets float32. Raises
    InputError for anything else, and for pickled objects.
    """
    with reading(path), open_file(path) as file, zipfile.ZipFile(file) as archive:
        members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        first, second = ("x", "y") if "x" in members else ("x_train", "y_train")
        has_test = first == "x_train" and ("x_test" in members or "y_test" in members)
        wanted = [first, second, *(("x_test", "y_test") if has_test else ())]
        rows = {f"{name}{split}" for name in "xy" for split in _SPLITS}
        unused = [n for n in members if n in rows and n not in wanted]
        if unused:
            raise InputError(
                f"{path}: found {listed(sorted(members))}, of which {listed(sorted(unused))} would"
                f" be left out; expected {_EXPECTED}"
            )
        if missing := [name for name in wanted if name not in members]:
            raise InputError(
                f"{path}: found {listed(sorted(members))}, without {listed(missing)}, expected"
                f" {_EXPECTED}"
            )
        found = {name: _read_member(archive, members[name], path) for name in wanted}
    train = _pair(found[first], found[second], path, first, second)
    if not has_test:
        return train, (train[0][:0], train[1][:0])
    test = _pair(found["x_test"], found["y_test"], path, "x_test", "y_test")
    for ours, theirs, name in zip(train, test, "xy", strict=True):
        if ours.shape[1:] != theirs.shape[1:] or ours.dtype != theirs.dtype:
            raise InputError(
                f"{path}: found {name}_test of rows {theirs.shape[1:]} in {theirs.dtype}, expected"
                f" those of {name}_train, {ours.shape[1:]} in {ours.dtype}"
            )
    return train, test


def checked(data: Data, name: str, path: Path, labels: str = "fine") -> Data:
    """Return the arrays of a known data set; raises InputError unless they can be that."""
    names = COARSE if labels == "coarse" else CLASSES[name]
    if not len(data[0][0]):
        raise InputError(f"{path}: found no training pictures, expected at least one")
    for x, y in data:
        if x.dtype != np.uint8 or x.shape[1:] != SHAPES[name]:
            raise InputError(
                f"{path}: found pictures of {x.shape[1:]} in {x.dtype}, expected those of {name},"
                f" {SHAPES[name]} in uint8"
            )
        if len(x) != len(y):
            raise InputError(
                f"{path}: found {len(y)} labels, expected one for each of {len(x)} pictures"
            )
        if len(y) and not 0 <= y.min() <= y.max() < len(names):
            wrong = y.min() if y.min() < 0 else y.max()
            raise InputError(
                f"{path}: found the label {wrong}, expected the {len(names)} classes of {name}, 0"
                f" to {len(names) - 1}"
            )
    return data


def _read_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, path: Path) -> np.ndarray:
    where = f"{path}: {info.filename}"
    with archive.open(info) as member:
        dtype, shape, fortran = read_header(member)  # type: ignore[arg-type]
        claimed = prod(shape) * dtype.itemsize
        if (rest := info.file_size - member.tell()) != claimed:
            raise InputError(f"{where}: found {rest} bytes of numbers, expected {claimed}")
        numbers = np.frombuffer(read_exactly(member, claimed, where), dtype)
    return numbers.reshape(shape, order="F" if fortran else "C")


def _pair(x: np.ndarray, y: np.ndarray, path: Path, first: str, second: str) -> Pair:
    if not x.ndim or not y.ndim or len(x) != len(y) or not len(x):
        raise InputError(
            f"{path}: found {first} {x.shape} and {second} {y.shape}, expected as many targets as"
            " rows, and at least one"
        )
    if y.dtype.kind in "biu":
        y = y.reshape(len(y)) if y.shape[1:] == (1,) else y
        if y.ndim != 1:
            raise InputError(
                f"{path}: found integers {y.shape} as {second}, expected a label for each row, or"
                " targets as float32"
            )
        return x, y.astype(np.int64)
    return x, y.astype(np.float32, copy=False)
