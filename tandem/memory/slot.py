"""Slots: shared memory that a loader fills and its trainer reads."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from tandem.memory.buffer import Buffer
from tandem.memory.host import HostBuffer

ALIGNMENT = 64  # bytes: a cache line, and enough for every vector load


@dataclass(frozen=True)
class RowType:
    """Dtype and shape of a row of an array: of one picture or example, or of its target."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"


PICTURE_DTYPE = "uint8"
CLASS_LABEL = RowType("int64", ())


@dataclass(frozen=True)
class SlotLayout:
    """The layout of a slot's arrays. Every array starts on a 64-byte boundary."""

    batch_size: int  # b, pictures per trainer and step
    pictures: RowType  # of size 0 where the device keeps all pictures
    targets: RowType = CLASS_LABEL
    coloured: bool = False  # whether there is colour noise

    def __post_init__(self) -> None:
        if self.batch_size < 1 or min(self.pictures.shape + self.targets.shape, default=0) < 0:
            raise ValueError(f"a slot can't have the sizes of {self}")

    @classmethod
    def of_pictures(
        cls, batch_size: int, picture_size: int, coloured: bool = False
    ) -> "SlotLayout":
        """The layout of uint8 pictures, in RGB, with the numbers of their classes.

        `picture_size` is the stored size where the device crops, the crop size where the loader
        does, and 0 without pictures.
        """
        row = RowType(PICTURE_DTYPE, (picture_size, picture_size, 3))
        return cls(batch_size, row, coloured=coloured)

    def without_pictures(self) -> "SlotLayout":
        """The same where the device keeps all pictures."""
        return replace(self, pictures=replace(self.pictures, shape=(0, *self.pictures.shape[1:])))

    @property
    def arrays(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of each array, in the order in which they are stored."""
        b, pictures, targets = self.batch_size, self.pictures, self.targets
        return {
            "pictures": ((b, *pictures.shape), pictures.dtype),
            "labels": ((b, *targets.shape), targets.dtype),
            "indices": ((b,), "int64"),
            "origins": ((b, 2), "int64"),
            "mirrored": ((b,), "uint8"),
            "colours": ((b if self.coloured else 0, 3), "float32"),
            "valid": ((), "int64"),
        }

    @property
    def offsets(self) -> Mapping[str, int]:
        """First byte of each array."""
        offsets, end = {}, 0
        for name, (shape, dtype) in self.arrays.items():
            offsets[name] = end
            end += _aligned_nbytes(shape, dtype)
        return offsets

    @property
    def nbytes(self) -> int:
        """Bytes of a slot; a multiple of 64."""
        return sum(_aligned_nbytes(*array) for array in self.arrays.values())


@dataclass(frozen=True, eq=False)
class Slot:
    """One minibatch of one trainer, as arrays over a buffer. Rows from `valid` on are stale."""

    # uint8 (b, P, P, RGB), whole or crops, mirrored where flagged; or rows of arrays:
    pictures: npt.NDArray[Any]
    labels: npt.NDArray[Any]  # int64 (b,), or rows of targets, float32 (b, *)
    indices: npt.NDArray[np.int64]  # (b,), in the data set
    # (b, 2): row, column of the window's first pixel; this and the next two of pictures alone
    origins: npt.NDArray[np.int64]
    mirrored: npt.NDArray[np.uint8]  # (b,): 1 where the window is mirrored left to right, else 0
    # (b, RGB): what is added to each pixel in training; (0, RGB) without colour noise
    colours: npt.NDArray[np.float32]
    valid: npt.NDArray[np.int64]  # (): number of rows that hold a picture of this minibatch

    @classmethod
    def on(cls, buffer: Buffer, layout: SlotLayout, offset: int = 0) -> "Slot":
        """Return the slot that starts `offset` bytes, a multiple of 64, into `buffer`."""
        if offset % ALIGNMENT:
            raise ValueError(f"a slot starts on a {ALIGNMENT}-byte boundary, not at byte {offset}")
        if offset + layout.nbytes > buffer.nbytes:
            raise ValueError(
                f"a slot of {layout.nbytes} bytes at byte {offset} doesn't fit in a buffer of "
                f"{buffer.nbytes} bytes"
            )
        starts = layout.offsets
        return cls(
            **{
                name: buffer.array(shape, dtype, offset + starts[name])
                for name, (shape, dtype) in layout.arrays.items()
            }
        )

    def __reduce__(self) -> NoReturn:
        """Refuse pickling: pixels cross between processes as a buffer and a layout only."""
        raise TypeError("a Slot can't be pickled; pass its buffer and its layout")


@dataclass(frozen=True)
class HostSlots:
    """The two slots of a trainer in host memory, which its loader fills.

    It can be an argument of a process that is being started.
    """

    buffers: tuple[HostBuffer, ...]
    layout: SlotLayout

    @classmethod
    def create(cls, layout: SlotLayout, rank: int) -> "HostSlots":
        """Make the slots of one trainer."""
        first, second = (HostBuffer.create(layout.nbytes, f"slot {rank}.{n}") for n in (0, 1))
        return cls((first, second), layout)

    @cached_property
    def arrays(self) -> list[Slot]:
        """The slots by number."""
        return [Slot.on(buffer, self.layout) for buffer in self.buffers]

    def open(self, receive: Callable[[], Any]) -> "HostSlots":
        """Return the slots for the loader; nothing has to be received first."""
        return self

    def fill(self, number: int, fill: Callable[[Slot], None]) -> None:
        """Fill a slot."""
        fill(self.arrays[number])

    def close(self) -> None:
        """Do nothing: host memory is freed with its last user."""


def _aligned_nbytes(shape: tuple[int, ...], dtype: str) -> int:
    return -(-math.prod(shape) * np.dtype(dtype).itemsize // ALIGNMENT) * ALIGNMENT
