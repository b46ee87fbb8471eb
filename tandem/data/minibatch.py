"""Reading of minibatches from batch files into slots."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tandem.data.augment import Augmentation, Mode, colour_offsets, ten_crops, windows
from tandem.data.reader import PictureReader
from tandem.errors import InputError
from tandem.memory import PICTURE_DTYPE, RowType, Slot

if TYPE_CHECKING:
    from tandem.data.dataset import Dataset


@dataclass(frozen=True, eq=False)
class MinibatchRequest:
    """A trainer's message to its loader: the minibatch to read into a slot."""

    slot: int
    mode: Mode  # the split, and whether the pictures are augmented
    epoch: int  # from 0
    minibatch: int  # number of the global minibatch in the epoch, from 0
    indices: npt.NDArray[np.int64]  # dataset indices of this trainer's rows, perhaps none
    crop: int | None = None  # number of one of the `ten_crops`; None: the window of the mode


class MinibatchBuilder:
    """Reads pictures and labels into a slot, with crop origins, mirror flags and colour noise.

    Rows of arrays, of which `augmentation` is None, are read as they are. Of pictures, with
    `crop_here` the slot gets crops, mirrored if flagged, otherwise whole pictures for the
    device to crop, or none where the slot is made without: the device then has them all. `threads`
    read the pictures. A builder can be pickled; the copy opens the files for itself. Raises
    InputError if the crop is larger than the pictures, or the splits differ in image size.
    """

    def __init__(
        self,
        train: "Dataset",
        validation: "Dataset",
        augmentation: Augmentation | None,
        crop_here: bool,
        threads: int = 1,
    ) -> None:
        self._arguments = (train, validation, augmentation, crop_here, threads)
        self.augmentation, self.crop_here = augmentation, crop_here and augmentation is not None
        self.row = train.row  # of a slot
        if augmentation is not None:
            _check_sizes(train, validation, augmentation.crop_size)
            self.image_size = train.image_size
        if augmentation is not None and crop_here:
            self.row = RowType(PICTURE_DTYPE, (augmentation.crop_size,) * 2 + train.row.shape[2:])
        self._readers = {
            "train": PictureReader(train, threads=threads),
            "validation": PictureReader(validation, threads=threads),
        }

    @property
    def picture_size(self) -> int:
        """Rows and columns of the pictures in a slot."""
        return self.row.shape[0]

    def fill(self, slot: Slot, request: MinibatchRequest) -> None:
        """Read the minibatch of `request` into `slot`; rows beyond it are unchanged.

        Raises InputError if a batch file or the labels cannot be read any more, IndexError for an
        index outside the split, and ValueError if the slot is too small.
        """
        n, reader = len(request.indices), self._readers[request.mode]
        reads = self.crop_here or slot.pictures.size > 0
        if n > len(slot.pictures) or (reads and slot.pictures.shape[1:] != self.row.shape):
            raise ValueError(
                f"a slot with pictures {slot.pictures.shape} can't take {n} pictures of "
                f"{self.row.shape}"
            )
        if self.augmentation is not None:
            self._choose_windows(slot, request, self.augmentation)
        slot.indices[:n] = request.indices
        slot.labels[:n] = reader.labels(request.indices)
        if self.crop_here:
            self._read_crops(slot, reader, request.indices)
        elif reads:
            reader.read(request.indices, slot.pictures[:n])
        slot.valid[...] = n

    def close(self) -> None:
        """Close the batch files; `fill` reopens them."""
        for reader in self._readers.values():
            reader.close()

    def _choose_windows(
        self, slot: Slot, request: MinibatchRequest, settings: Augmentation
    ) -> None:
        n = len(request.indices)
        if request.crop is None:
            about = (request.mode, request.epoch, request.minibatch, request.indices)
            slot.origins[:n], slot.mirrored[:n] = windows(settings, self.image_size, *about)
        else:
            crop = ten_crops(self.image_size, settings.crop_size)[request.crop]
            slot.origins[:n], slot.mirrored[:n] = crop[:2], crop[2]
        if request.mode == "train" and settings.colour_basis:
            slot.colours[:n] = colour_offsets(settings, request.epoch, request.indices)

    def _read_crops(
        self, slot: Slot, reader: PictureReader, indices: npt.NDArray[np.int64]
    ) -> None:
        columns, mirrored = slot.origins[:, 1].tolist(), slot.mirrored.tolist()
        tops, height = slot.origins[: len(indices), 0], self.picture_size

        def crop(i: int, band: npt.NDArray[np.uint8]) -> None:
            window, out = band[:, columns[i] : columns[i] + height], slot.pictures[i]
            if not mirrored[i]:
                out[...] = window
                return
            # For a single channel NumPy's inner loop runs over a row of pixels; for all three it
            # would run over the channels of a pixel, which takes four times as long.
            for channel in range(3):
                out[..., channel] = window[:, ::-1, channel]

        reader.bands(indices, tops, height, crop)

    def __reduce__(self) -> tuple[Callable[..., "MinibatchBuilder"], tuple[Any, ...]]:
        return type(self), self._arguments


def _check_sizes(train: "Dataset", validation: "Dataset", crop: int) -> None:
    size = train.image_size
    if validation.image_size != size:
        raise InputError(
            f"the validation pictures have {validation.image_size} rows and columns, "
            f"expected {size} as the training pictures have"
        )
    if not 0 < crop <= size:
        raise InputError(f"crop_size: found {crop}, expected 1 to {size}, the pictures' size")
