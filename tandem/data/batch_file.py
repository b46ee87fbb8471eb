"""Batch files: written by hickle, located by h5py.

A batch file is data, not code. `hickle.load` unpickles the type table of any file, so files are
never loaded with it: h5py locates the pixels, which are then read by offset.
"""

import contextlib
import io
import os
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from tandem.data.safe_io import open_file
from tandem.errors import InputError
from tandem.files import replacing
from tandem.memory import PICTURE_DTYPE
from tandem.validation import listed


@dataclass(frozen=True)
class BatchLocation:
    """Position of the pixels, uint8, or of rows of arrays in a batch file."""

    offset: int  # bytes from the start of the file to the first pixel
    # Of pictures (n, S, S, 3) = b01c, or (3, S, S, n) = c01b. A file of three pictures could be
    # either, so the manifest declares the layout. Of arrays (n, ...).
    shape: tuple[int, ...]


class _DeferringFile(io.FileIO):
    """A file for HDF5 that keeps the first write error until HDF5 is done.

    After an error of a full disk HDF5 cannot close its file, and the process crashes at exit.
    """

    error: OSError | None = None

    def write(self, content: Any) -> int:
        rest = memoryview(content).cast("B")
        while rest and self.error is None:
            with self._deferring():
                rest = rest[super().write(rest) :]
        return len(content)

    def truncate(self, size: int | None = None) -> int:
        with self._deferring():
            super().truncate(size)
        return self.tell() if size is None else size

    @contextlib.contextmanager
    def _deferring(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.error = self.error or error


def write_batch(path: Path, pictures: np.ndarray, layout: str) -> None:
    """Write pictures, uint8 (picture, row, column, RGB), with hickle, whole or not at all.

    `layout`, ``b01c`` or ``c01b``, is the order of axes in the file, which is uncompressed.
    """
    write_rows(path, pictures if layout == "b01c" else _pictures_last(pictures))


def write_rows(path: Path, rows: np.ndarray) -> None:
    """Write an array with hickle, whole or not at all, uncompressed in C order."""
    import hickle  # only the writer needs it; a loader starts faster without

    stored = np.ascontiguousarray(rows)
    with replacing(path) as partial, _DeferringFile(partial, "r+b") as written:
        with h5py.File(written, "w") as file:
            hickle.dump(stored, file, mode="w")
        if written.error is not None:
            raise written.error


def locate_batch(path: Path, rows: str | None = None) -> BatchLocation:
    """Find the pixels of a batch file without reading them.

    Raises InputError if the file is missing, truncated or not HDF5, or if its pixels are not one
    contiguous uncompressed block: of pictures, uint8 in one of their two layouts; of arrays, whose
    dtype is `rows`, in any shape.
    """
    dtype = rows or PICTURE_DTYPE
    size = _size_of(path)
    try:
        with h5py.File(path, "r") as file:
            location = _locate_dataset(path, _find_dataset(path, file), rows)
    except InputError:
        raise
    except Exception as error:
        # h5py raises OSError, RuntimeError, KeyError, ValueError or TypeError, depending on the
        # damage.
        reason = " ".join(str(error).split())
        raise InputError(
            f"{path}: found a file that h5py cannot open ({reason}), expected a whole batch file"
        ) from None
    end = location.offset + prod(location.shape) * np.dtype(dtype).itemsize
    if size < end:
        raise InputError(f"{path}: truncated: found {size} bytes, expected at least {end}")
    return location


def _pictures_last(pictures: np.ndarray) -> np.ndarray:
    """Turn (picture, row, column, RGB) into a contiguous (RGB, row, column, picture)."""
    count, rows, columns, channels = pictures.shape
    stored = np.empty((channels, rows, columns, count), np.uint8)
    # Row by row, in blocks that fit the cache: ten times as fast as one transposed copy.
    for row in range(rows):
        block = np.ascontiguousarray(pictures[:, row].reshape(count, -1))
        turned = np.ascontiguousarray(block.T).reshape(columns, channels, count)
        stored[:, row] = turned.transpose(1, 0, 2)
    return stored


def _size_of(path: Path) -> int:
    try:
        with open_file(path) as file:
            return os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        raise InputError(f"{path}: there is no such batch file") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{path}: the batch file cannot be read: {reason}") from None


def _find_dataset(path: Path, file: h5py.File) -> h5py.Dataset:
    for name in ("data", "data_0"):  # hickle 3 and later, and older files
        # A soft or external link could lead to any other file.
        if isinstance(file.get(name, getlink=True), h5py.HardLink):
            dataset = file[name]
            if isinstance(dataset, h5py.Dataset):
                return dataset
    # A name that is not UTF-8 comes as bytes, and control characters could fool a terminal.
    names = sorted(name if str(name).isprintable() else repr(name) for name in map(str, file))
    raise InputError(
        f"{path}: found {listed(names)}, expected the dataset /data of a hickle batch file"
    )


def _locate_dataset(path: Path, dataset: h5py.Dataset, rows: str | None) -> BatchLocation:
    # Checked first: asked for its shape, HDF5 opens the sources of a virtual dataset.
    created = dataset.id.get_create_plist()
    contiguous = created.get_layout() == h5py.h5d.CONTIGUOUS
    if not contiguous or created.get_external_count() != 0:
        raise InputError(
            f"{path}: found pixels in chunks, compressed or in another file, expected one"
            " uncompressed contiguous block (hickle.dump without compression)"
        )
    if dataset.dtype != np.dtype(dtype := rows or PICTURE_DTYPE):
        raise InputError(f"{path}: found dtype {dataset.dtype}, expected {dtype}")
    shape = dataset.shape
    if rows is not None:
        if not shape or min(shape) < 1:
            raise InputError(f"{path}: found shape {shape}, expected rows")
    elif not _is_batch_shape(shape):
        raise InputError(f"{path}: found shape {shape}, expected (n, S, S, 3) or (3, S, S, n)")
    offset = dataset.id.get_offset()
    if offset is None:
        raise InputError(f"{path}: found no pixels, although their shape is {shape}")
    return BatchLocation(offset, shape)


def _is_batch_shape(shape: Any) -> bool:
    return (
        shape is not None
        and len(shape) == 4
        and shape[1] == shape[2]
        and 3 in (shape[0], shape[3])
        and min(shape) > 0
    )
