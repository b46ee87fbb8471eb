"""Reading of untrusted files: their claims are checked before they cost time or memory."""

import hashlib
import io
import os
import stat
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.lib import format as npy

# The header of an array of numbers has a few hundred bytes; NumPy itself refuses 10,000.
_MOST_HEADER = 1 << 14
_BLOCK = 1 << 20
_READERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}

Check = Callable[[np.dtype, tuple[int, ...]], None]


def open_file(path: Path) -> BinaryIO:
    """Open a regular file for reading; raises OSError or ValueError for anything else.

    A pipe or a device, which an archive may hold under any name, could be read for ever.
    """
    # Without O_NONBLOCK, opening a pipe waits for its writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError("found something that is not a file, expected a file")
    return os.fdopen(descriptor, "rb")


def read_bytes(path: Path, most: int) -> bytes:
    """Read a regular file of at most `most` bytes; raises OSError or ValueError."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise ValueError(f"found {size} bytes, expected at most {most}")
        return file.read(size)


def read_npy(path: Path, check: Check) -> np.ndarray:
    """Read an array of numbers from an ``.npy`` file.

    `numpy.load` allocates the memory that a header claims before it looks at the file's size; here
    `check` is called with dtype and shape before that, and may raise. Raises OSError, or ValueError
    if it is not an ``.npy`` file, does not hold what its header claims, or holds objects, which
    would be unpickled.
    """
    with open_file(path) as file:
        dtype, shape, fortran = read_header(file)
        check(dtype, shape)
        claimed = prod(shape) * dtype.itemsize
        found = os.fstat(file.fileno()).st_size - file.tell()
        if found != claimed:
            raise ValueError(f"found {found} bytes of numbers, expected {claimed}")
        numbers = np.fromfile(file, dtype, prod(shape))
    return numbers.reshape(shape, order="F" if fortran else "C")


def sha256_of(path: Path) -> str:
    """SHA-256 of a regular file, in hexadecimal; raises OSError or ValueError."""
    with open_file(path) as file:
        digest = hashlib.sha256()
        while block := file.read(_BLOCK):
            digest.update(block)
        return digest.hexdigest()


def read_header(file: BinaryIO) -> tuple[np.dtype, tuple[int, ...], bool]:
    """Read dtype, shape and Fortran order from the start of an ``.npy`` file, and go to its end.

    Raises ValueError if it is no such header, or one of objects.
    """
    # NumPy reads a header of any claimed length before it checks that.
    start = io.BytesIO(file.read(_MOST_HEADER))
    version = npy.read_magic(start)
    if version not in _READERS:
        raise ValueError(f"found .npy version {version}, expected one of {list(_READERS)}")
    try:
        shape, fortran, dtype = _READERS[version](start)
    except Exception as error:
        # SyntaxError, TypeError, MemoryError, RecursionError and others, depending on the damage.
        raise ValueError(f"found no header of an .npy file ({type(error).__name__})") from None
    if any(type(length) is not int or length < 0 for length in shape):
        raise ValueError(f"found the shape {shape}, expected lengths")
    if dtype.kind not in "biuf":
        raise ValueError(f"found {dtype}, expected numbers; objects would be unpickled")
    file.seek(start.tell())
    return dtype, shape, fortran
