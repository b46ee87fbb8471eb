"""Batch files: written by hickle, located by h5py.

A batch file is data, not code. `hickle.load` unpickles the type table of any file it is given, so
files are never loaded with it: h5py says where the pixels lie, and they are read by offset.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from tandem.errors import InputError
from tandem.files import replacing

# A plain array is /data in hickle 3 and later, /data_0 in older files.
_DATASET_NAMES = ("data", "data_0")


@dataclass(frozen=True)
class BatchLocation:
    """Where the pixels of a batch file lie.

    Attributes
    ----------
    offset : int
        Bytes from the start of the file to the first pixel.
    shape : tuple of four int
        (n, S, S, 3) = b01c, or (3, S, S, n) = c01b. Both hold of a file of three pictures, so the
        layout is the manifest's to say.
    dtype : numpy dtype
        Always uint8.
    """

    offset: int
    shape: tuple[int, int, int, int]
    dtype: np.dtype


def write_batch(path: Path, pictures: np.ndarray, layout: str) -> None:
    """Write a batch file with hickle, uncompressed, whole or not at all.

    Parameters
    ----------
    path : Path
        The file; its folder must exist.
    pictures : uint8 (picture, row, column, RGB)
        Whatever the layout of the file.
    layout : str
        ``b01c`` or ``c01b``: the order of axes in the file.
    """
    import hickle  # only the writer needs it: a loader starts sooner without

    stored = np.ascontiguousarray(pictures) if layout == "b01c" else _pictures_last(pictures)
    with replacing(path) as partial:
        hickle.dump(stored, str(partial), mode="w")


def locate_batch(path: Path) -> BatchLocation:
    """Find the pixels of a batch file without reading them.

    Raises
    ------
    InputError
        The file is missing, truncated or not HDF5, or its pixels are not one contiguous
        uncompressed block of uint8 in one of the two layouts.
    """
    try:
        size = path.stat().st_size
        with h5py.File(path, "r") as file:
            location = _locate_dataset(path, _find_dataset(path, file))
    except FileNotFoundError:
        raise InputError(f"{path}: there is no such batch file") from None
    except OSError as error:
        raise InputError(
            f"{path}: found a file that h5py cannot open ({error}), expected a whole batch file"
        ) from None
    end = location.offset + int(np.prod(location.shape))
    if size < end:
        raise InputError(f"{path}: truncated: found {size} bytes, expected at least {end}")
    return location


def _pictures_last(pictures: np.ndarray) -> np.ndarray:
    """Turn (picture, row, column, RGB) into a contiguous (RGB, row, column, picture)."""
    count, rows, columns, channels = pictures.shape
    stored = np.empty((channels, rows, columns, count), np.uint8)
    # Row by row, a block that fits the cache: ten times as fast as one transposed copy.
    for row in range(rows):
        block = np.ascontiguousarray(pictures[:, row].reshape(count, -1))
        turned = np.ascontiguousarray(block.T).reshape(columns, channels, count)
        stored[:, row] = turned.transpose(1, 0, 2)
    return stored


def _find_dataset(path: Path, file: h5py.File) -> h5py.Dataset:
    for name in _DATASET_NAMES:
        # A soft or external link could lead to any other file.
        if isinstance(file.get(name, getlink=True), h5py.HardLink):
            dataset = file[name]
            if isinstance(dataset, h5py.Dataset):
                return dataset
    names = ", ".join(sorted(file)) or "nothing"
    raise InputError(f"{path}: found {names}, expected the dataset /data of a hickle batch file")


def _locate_dataset(path: Path, dataset: h5py.Dataset) -> BatchLocation:
    if dataset.dtype != np.uint8:
        raise InputError(f"{path}: found dtype {dataset.dtype}, expected uint8")
    shape = dataset.shape
    if not _is_batch_shape(shape):
        raise InputError(f"{path}: found shape {shape}, expected (n, S, S, 3) or (3, S, S, n)")
    offset = dataset.id.get_offset()
    stored_here = dataset.external is None and not dataset.is_virtual
    if dataset.chunks is not None or offset is None or not stored_here:
        raise InputError(
            f"{path}: found pixels in chunks, compressed or in another file, expected one"
            " uncompressed contiguous block (hickle.dump without compression)"
        )
    return BatchLocation(offset, shape, dataset.dtype)


def _is_batch_shape(shape: Any) -> bool:
    return (
        shape is not None
        and len(shape) == 4
        and shape[1] == shape[2]
        and 3 in (shape[0], shape[3])
        and min(shape) > 0
    )
