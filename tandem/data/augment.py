"""Where each picture is cropped and whether it is mirrored: pure functions of what it is for."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from tandem.philox import Purpose, words

Mode = Literal["train", "validation"]


@dataclass(frozen=True)
class Augmentation:
    """The settings that decide crop and mirror.

    Attributes
    ----------
    crop_size : int
        Rows and columns of the crop, in pixels.
    rand_crop : bool
        In training, crop anywhere, every origin as likely as any other; otherwise in the centre.
    rand_mirror : bool
        In training, mirror left to right with probability 1/2; otherwise never.
    batch_crop_mirror : bool
        One choice for a whole global minibatch instead of one for each picture.
    seed : int
        Of the run.
    """

    crop_size: int
    rand_crop: bool
    rand_mirror: bool
    batch_crop_mirror: bool
    seed: int


def crop_origins(
    settings: Augmentation,
    image_size: int,
    mode: Mode,
    epoch: int,
    minibatch: int,
    indices: npt.NDArray[np.int64],
) -> npt.NDArray[np.int64]:
    """Where the crop windows begin.

    In training with `rand_crop`, row and column are ``w * (S - crop + 1) >> 32`` for a uniform
    32-bit word w each: integers from 0 to S - crop, equally likely to within 2^-32. Otherwise both
    are ``(S - crop) // 2``.

    Parameters
    ----------
    settings : Augmentation
        What is to be done.
    image_size : int
        S, rows and columns of a stored picture, at least the crop size.
    mode : "train" or "validation"
        Validation takes the centre.
    epoch, minibatch : int
        From 0; the minibatch is the global one.
    indices : int64 (n,)
        Dataset indices.

    Returns
    -------
    int64 (n, 2)
        Row and column.
    """
    room = image_size - settings.crop_size
    if mode == "validation" or not settings.rand_crop:
        return np.full((len(indices), 2), room // 2, np.int64)
    purposes = (Purpose.CROP, Purpose.BATCH_CROP)
    return _words(settings, purposes, epoch, minibatch, indices, 2) * (room + 1) >> 32


def mirror_flags(
    settings: Augmentation,
    mode: Mode,
    epoch: int,
    minibatch: int,
    indices: npt.NDArray[np.int64],
) -> npt.NDArray[np.uint8]:
    """Which pictures are mirrored left to right: in training with `rand_mirror`, one in two.

    Parameters
    ----------
    settings, mode, epoch, minibatch, indices
        As for `crop_origins`.

    Returns
    -------
    uint8 (n,)
        1 where the picture is mirrored, otherwise 0.
    """
    if mode == "validation" or not settings.rand_mirror:
        return np.zeros(len(indices), np.uint8)
    purposes = (Purpose.MIRROR, Purpose.BATCH_MIRROR)
    return (_words(settings, purposes, epoch, minibatch, indices, 1)[:, 0] >> 31).astype(np.uint8)


def _words(
    settings: Augmentation,
    purposes: tuple[Purpose, Purpose],
    epoch: int,
    minibatch: int,
    indices: npt.NDArray[np.int64],
    count: int,
) -> npt.NDArray[np.int64]:
    """Words (n, count), counted by picture or, equal in all rows, by minibatch."""
    by_picture, by_minibatch = purposes
    if not settings.batch_crop_mirror:
        return words(settings.seed, epoch, indices, by_picture, count)
    one = words(settings.seed, epoch, np.array([minibatch]), by_minibatch, count)
    return np.repeat(one, len(indices), axis=0)
