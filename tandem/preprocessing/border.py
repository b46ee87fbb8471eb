"""The border of stored pictures (``pad``): the mean colour of the training pictures, rounded.

The colour is known only when every training picture is decoded. So batch files are written with a
border of zeros, and at the end each is written again with its border filled. That takes the time
of reading and writing the batch files once, and less than decoding all pictures twice.
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from tandem.data.batch_file import BatchLocation, write_batch
from tandem.errors import InputError


def inside(pictures: np.ndarray, pad: int) -> np.ndarray:
    """View pictures, (..., row, column, RGB), without their border."""
    rows, columns = pictures.shape[-3:-1]
    return pictures[..., pad : rows - pad, pad : columns - pad, :]


def mean_colour(sums: np.ndarray, count: int) -> np.ndarray:
    """Return the mean colour of `count` pictures, rounded half up: uint8 (RGB,).

    `sums` are the sums of the pictures without their border, int64 (row, column, RGB).
    """
    rows, columns, _ = sums.shape
    pixels = count * rows * columns
    return ((2 * sums.sum((0, 1)) + pixels) // (2 * pixels)).astype(np.uint8)


def fill_borders(
    located: Iterable[tuple[Path, BatchLocation]], layout: str, pad: int, colour: np.ndarray
) -> None:
    """Fill the borders in batch files with a colour, uint8 (RGB,), each file whole or not at all.

    Files that a stopped run has filled are left alone. Raises InputError if one cannot be written.
    """
    for path, location in located:
        stored: np.ndarray = np.memmap(path, np.uint8, "r", location.offset, location.shape)
        pictures = stored if layout == "b01c" else stored.transpose(3, 1, 2, 0)
        # A file is replaced whole, so one pixel shows whether it is filled.
        if (pictures[0, 0, 0] == colour).all():
            continue
        filled = np.empty(pictures.shape, np.uint8)
        filled[...] = colour
        inside(filled, pad)[...] = inside(pictures, pad)
        try:
            write_batch(path, filled, layout)
        except OSError as error:
            raise unwritable(path, error) from error


def unwritable(path: Path, error: OSError) -> InputError:
    """Explain that a batch file cannot be written."""
    return InputError(
        f"{error.filename or path}: cannot be written: {error.strerror or error}; what is"
        " done is kept, and the same command continues from there"
    )
