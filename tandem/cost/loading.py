"""Minibatches of noise to measure by: written at once, or read from a batch file by a loader."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from tandem.data.augment import Augmentation
from tandem.data.batch_file import locate_batch, write_batch
from tandem.data.dataset import Dataset, StoredPictures
from tandem.data.minibatch import MinibatchBuilder, MinibatchRequest
from tandem.memory import HostSlots, RowType, Slot, SlotLayout


def noise_loader(
    folder: Path, pictures: int, stored: int, crop: int
) -> tuple[Callable[[], None], int]:
    """Write a batch file; return what fills a minibatch of its crops, and its bytes of pixels.

    Parameters
    ----------
    folder : Path
        For the file; each call reads it.
    pictures : int
        Of the file and of the minibatch.
    stored, crop : int
        Rows and columns of a picture in the file and in the minibatch.
    """
    dataset = _write(folder, pictures, stored)
    augmentation = Augmentation(crop, True, True, batch_crop_mirror=False, seed=1)
    builder = MinibatchBuilder(dataset, dataset, augmentation, crop_here=True)
    slot = HostSlots.create(SlotLayout.of_pictures(pictures, crop), rank=0).arrays[0]
    request = MinibatchRequest(0, "train", 0, 0, np.arange(pictures))
    return lambda: builder.fill(slot, request), slot.pictures.nbytes


def write_noise(slot: Slot, classes: int, seed: int = 1) -> None:
    """Fill a slot with noise: on zeros a few kernels are faster than on pictures."""
    rng, count = np.random.default_rng(seed), len(slot.labels)
    slot.pictures[...] = rng.integers(0, 256, slot.pictures.shape, np.uint8)
    slot.labels[...] = rng.integers(0, classes, count)
    slot.indices[...] = np.arange(seed * count, (seed + 1) * count)
    slot.valid[...] = count


def _write(folder: Path, pictures: int, side: int) -> Dataset:
    rng = np.random.default_rng(0)
    path, labels = folder / "0000.hkl", folder / "labels.npy"
    write_batch(path, rng.integers(0, 256, (pictures, side, side, 3), np.uint8), "b01c")
    np.save(labels, np.zeros(pictures, np.int64))
    return Dataset(
        paths=(str(path),),
        offsets=(locate_batch(path).offset,),
        counts=(pictures,),
        labels_file=str(labels),
        row=RowType("uint8", (side, side, 3)),
        pictures=StoredPictures(),
    )
