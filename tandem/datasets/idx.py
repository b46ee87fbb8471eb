"""IDX files, in which MNIST and Fashion-MNIST are published, gzipped or not.

The header is 0, 0, the type (8: unsigned bytes), the number of dimensions, and each dimension as a
big-endian word of 32 bits; the numbers follow, the last dimension fastest. See "THE IDX FILE
FORMAT", LeCun, Cortes, Burges, "The MNIST database".
"""

import struct
from math import prod
from pathlib import Path

import numpy as np

from tandem.datasets.arrays import Data
from tandem.datasets.files import MOST_RATIO, read_exactly, unpacked
from tandem.errors import InputError
from tandem.validation import listed

FILES = tuple(
    f"{split}-{kind}-ubyte"
    for split in ("train", "t10k")
    for kind in ("images-idx3", "labels-idx1")
)
_UBYTE = 8


def read(folder: Path) -> Data:
    """Read the four files of a folder: uint8 pictures (n, row, column), int64 labels (n,)."""
    found = {name: locate(folder, name) for name in FILES}
    if missing := [name for name, path in found.items() if path is None]:
        raise InputError(
            f"{folder}: found no {listed(missing)}, expected the four IDX files of the data set,"
            " with .gz or without"
        )
    arrays = [
        read_idx(path, 3 if "idx3" in name else 1)
        for name, path in found.items()
        if path is not None
    ]
    (x_train, y_train, x_test, y_test) = arrays
    return (x_train, y_train.astype(np.int64)), (x_test, y_test.astype(np.int64))


def locate(folder: Path, name: str) -> Path | None:
    """The file of that name in a folder, also gzipped or with a dot as ``images.idx3``."""
    names = (name, name.replace("-idx", ".idx"))
    paths = (folder / f"{each}{end}" for each in names for end in ("", ".gz"))
    return next((path for path in paths if path.is_file()), None)


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """Read the bytes of an IDX file: uint8 of that many dimensions.

    Raises InputError unless the header is right and the file has what it claims.
    """
    with unpacked(path) as file:
        start = file.read(4)
        if start != bytes((0, 0, _UBYTE, dimensions)):
            raise InputError(
                f"{path}: found {start.hex(' ') or 'nothing'} at its start, expected 00 00 08"
                f" {dimensions:02x}: an IDX file of unsigned bytes with"
                f" {dimensions} dimension{'s' * (dimensions > 1)}"
            )
        lengths = read_exactly(file, 4 * dimensions, path)
        shape = struct.unpack(f">{dimensions}I", lengths)
        claimed = prod(shape)
        size = path.stat().st_size
        if claimed > size * MOST_RATIO:
            raise InputError(
                f"{path}: found a claim of {' x '.join(map(str, shape))} bytes in a file of {size},"
                " expected no more than it can hold"
            )
        numbers = read_exactly(file, claimed, path)
        if file.read(1):
            raise InputError(
                f"{path}: found more than the {claimed} bytes that its header claims, expected its"
                " end"
            )
    return np.frombuffer(numbers, np.uint8).reshape(shape)
