"""Files that may come from elsewhere: what they claim is checked before it costs time or memory."""

import ast
import os
import stat
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

# The header of an array of numbers has some hundred bytes; NumPy itself stops at ten thousand.
_MOST_HEADER = 10_000
# Bytes in which each version of the format says how long the header is.
_WIDTHS = {(1, 0): 2, (2, 0): 4, (3, 0): 4}
_HEADER_KEYS = {"descr", "fortran_order", "shape"}

Check = Callable[[np.dtype, tuple[int, ...]], None]


def open_file(path: Path) -> BinaryIO:
    """Open a regular file for reading.

    An archive may hold a pipe or a device under any name, whose reading would never end.

    Raises
    ------
    OSError
        The file cannot be opened.
    ValueError
        It is something else than a file, or no file can have such a name.
    """
    # Without O_NONBLOCK, to open a pipe is to wait for its writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError("found something that is not a file, expected a file")
    return os.fdopen(descriptor, "rb")


def read_bytes(path: Path, most: int) -> bytes:
    """Read a file.

    Raises
    ------
    OSError
        The file cannot be read.
    ValueError
        It has more than `most` bytes, or is not a file.
    """
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise ValueError(f"found {size} bytes, expected at most {most}")
        return file.read(size)


def read_text(path: Path, most: int) -> str:
    """Read a file of UTF-8.

    Raises
    ------
    OSError
        The file cannot be read.
    ValueError
        It has more than `most` bytes, is not UTF-8, or is not a file.
    """
    return read_bytes(path, most).decode("utf-8")


def read_npy(path: Path, check: Check) -> np.ndarray:
    """Read an array of numbers from an ``.npy`` file.

    `numpy.load` reserves the memory that a header claims before it looks at the file, and fails in
    many ways on headers that are no header.

    Parameters
    ----------
    path : Path
        The file.
    check : callable
        Is told dtype and shape before anything is reserved; may raise.

    Raises
    ------
    OSError
        The file cannot be read.
    ValueError
        It is not an ``.npy`` file, does not hold what its header claims, or holds objects, which
        would be unpickled.
    """
    with open_file(path) as file:
        dtype, shape, fortran = _read_header(file)
        check(dtype, shape)
        claimed = prod(shape) * dtype.itemsize
        found = os.fstat(file.fileno()).st_size - file.tell()
        if found != claimed:
            raise ValueError(f"found {found} bytes of numbers, expected {claimed}")
        numbers = np.fromfile(file, dtype, prod(shape))
    return numbers.reshape(shape, order="F" if fortran else "C")


def _read_header(file: BinaryIO) -> tuple[np.dtype, tuple[int, ...], bool]:
    version = np.lib.format.read_magic(file)
    if version not in _WIDTHS:
        raise ValueError(f"found .npy version {version}, expected one of {list(_WIDTHS)}")
    length = int.from_bytes(file.read(_WIDTHS[version]), "little")
    if length > _MOST_HEADER:
        raise ValueError(f"found a header of {length} bytes, expected that of an array of numbers")
    header = _parsed(file.read(length).decode("latin-1"))
    if not isinstance(header, dict) or header.keys() != _HEADER_KEYS:
        raise ValueError("found another header, expected that of an .npy file")
    shape, descr = header["shape"], header["descr"]
    if not isinstance(shape, tuple) or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError("found a header without a shape")
    dtype = _parsed_dtype(descr)
    if dtype.kind not in "biuf":
        raise ValueError(f"found {dtype}, expected numbers; objects would be unpickled")
    return dtype, shape, header["fortran_order"] is True


def _parsed(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except Exception:
        # SyntaxError, ValueError, TypeError, MemoryError, RecursionError: each for other nonsense.
        raise ValueError("found no header of an .npy file") from None


def _parsed_dtype(descr: Any) -> np.dtype:
    # Text alone: a list describes fields, and numpy.dtype also takes classes and more.
    if not isinstance(descr, str):
        raise ValueError("found no plain type of numbers")
    try:
        return np.dtype(descr)
    except Exception:
        raise ValueError("found no type of numbers that NumPy knows") from None
