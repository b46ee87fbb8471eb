"""Crop windows, mirror flags and colour noise: pure functions of seed, epoch and picture."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from tandem.data.colour import Basis
from tandem.philox import Purpose, normals, philox4x32

Mode = Literal["train", "validation"]
Crop = tuple[int, int, bool]
"""Row and column of a window's first pixel, and whether it is mirrored."""


@dataclass(frozen=True)
class Augmentation:
    """Settings of crop, mirror and colour noise."""

    crop_size: int  # rows and columns, pixels
    rand_crop: bool  # in training; otherwise the centre
    rand_mirror: bool  # in training, with probability 1/2
    batch_crop_mirror: bool  # one choice for a global minibatch instead of one for each picture
    seed: int
    colour_basis: Basis = ()  # of the colour noise in training; empty: there is none


def windows(
    settings: Augmentation,
    image_size: int,
    mode: Mode,
    epoch: int,
    minibatch: int,
    indices: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    """Compute origins of crop windows, int64 (n, 2), and mirror flags, uint8 (n,).

    An origin is (row, column). In training with `rand_crop`, both are ``w * (S - crop + 1) >> 32``
    for a uniform 32-bit word w each, where S is `image_size`: integers from 0 to S - crop, equally
    likely to within 2^-32. Otherwise both are ``(S - crop) // 2``. In training with `rand_mirror`,
    a window is mirrored left to right where the highest bit of a word is 1. `minibatch` is the
    global one; `indices` are dataset indices, int64 (n,).
    """
    count, margin = len(indices), image_size - settings.crop_size
    origins, mirrored = np.full((count, 2), margin // 2, np.int64), np.zeros(count, np.uint8)
    if mode == "train" and (settings.rand_crop or settings.rand_mirror):
        crop_words, mirror_words = _words(settings, epoch, minibatch, indices)
        if settings.rand_crop:
            origins[...] = crop_words * (margin + 1) >> 32
        if settings.rand_mirror:
            mirrored[...] = mirror_words >> 31
    return origins, mirrored


def ten_crops(image_size: int, crop_size: int) -> tuple[Crop, ...]:
    """The four corners and the centre of a picture, and then the same mirrored.

    Krizhevsky, Sutskever, Hinton 2012, section 4.1.
    """
    margin = image_size - crop_size
    origins = [(row, column) for row in (0, margin) for column in (0, margin)]
    origins.append((margin // 2, margin // 2))
    return tuple((*origin, mirrored) for mirrored in (False, True) for origin in origins)


def colour_offsets(
    settings: Augmentation, epoch: int, indices: npt.NDArray[np.int64]
) -> npt.NDArray[np.float32]:
    """Draw what colour noise adds to every pixel of a picture in training: float32 (n, RGB).

    Each picture has its own, in units of a pixel's 0 to 255, also with `batch_crop_mirror`.
    """
    drawn = normals(settings.seed, epoch, indices, Purpose.COLOUR, 3)
    # Not a product of matrices, whose bits might depend on the number of pictures.
    first, second, third = (
        drawn[:, i : i + 1] * np.array(settings.colour_basis[i]) for i in range(3)
    )
    return (first + second + third).astype(np.float32)


def _words(
    settings: Augmentation, epoch: int, minibatch: int, indices: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Words for row and column (n, 2), and for the mirror (n,); or one row for all n.

    They are the first of `tandem.philox.words` for either purpose, in one call to save time.
    """
    if settings.batch_crop_mirror:
        of, purposes = np.array([minibatch]), (Purpose.BATCH_CROP, Purpose.BATCH_MIRROR)
    else:
        of, purposes = indices, (Purpose.CROP, Purpose.MIRROR)
    counter = (np.zeros(1, np.int64), of[:, np.newaxis], np.array([epoch]), np.array(purposes))
    first, second, _, _ = philox4x32(counter, settings.seed)
    return np.stack([first[:, 0], second[:, 0]], axis=1), first[:, 1]
