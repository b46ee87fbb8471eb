"""A trainer's parameters and gradients, on the host or on a GPU, with the slots beside them."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import numpy as np

from tandem.memory.cuda import CudaBuffer, CudaDriver, CudaSlot, CudaSlots, Stream
from tandem.memory.flat import FlatLayout, Vectors
from tandem.memory.host import ArrayBuffer
from tandem.memory.slot import PICTURE_DTYPE, HostSlots, RowType

FlatName = Literal["parameters", "gradients"]


class HostMemory:
    """A trainer's memory on the host.

    The flat vectors, uint8 (n,), are by rank those of all trainers that see each other's, or this
    trainer's alone; the parameters of all may be one. Then this trainer updates `updated_part`,
    elements of them, from the gradients of the first.
    """

    shards: Vectors | None = None  # see `add_shards`
    device = "cpu"  # where PyTorch computes
    pictures: Mapping[str, Any] = {}  # none are kept on a GPU
    records = False  # whether functions are recorded over the slots, which are on a GPU

    def __init__(
        self,
        slots: HostSlots,
        layout: FlatLayout,
        parameters: Sequence[np.ndarray],
        gradients: Sequence[np.ndarray],
        rank: int = 0,
        updated_part: slice | None = None,
    ) -> None:
        self.layout, self.rank, self.area = layout, rank, slots
        self.flat: dict[FlatName, list[np.ndarray]] = {  # float (n,), by rank
            "parameters": [vector.view(layout.dtype) for vector in parameters],
            "gradients": [vector.view(layout.dtype) for vector in gradients],
        }
        own = ArrayBuffer(parameters[rank])
        self.vectors = Vectors.on(layout, own, ArrayBuffer(gradients[rank]))
        self.updated: Vectors | None = None  # None where it updates its own parameters
        if updated_part is not None:
            first = ArrayBuffer(gradients[0])
            self.updated = Vectors.within(layout, own, first, updated_part)
        self.partials: list[list[np.ndarray]] = []  # sums of gradients, as `flat` has them
        self.sums_nbytes = 0  # of what this trainer needs for them
        self.slots, self.slot_layout = slots.arrays, slots.layout
        self.nbytes = layout.parameters_nbytes  # of weights and optimizer state

    def add_shards(self, layout: FlatLayout) -> None:
        """Make vectors of this trainer alone, for its parts of arrays that trainers divide."""
        parameters, gradients = (
            ArrayBuffer(np.zeros(n, np.uint8)) for n in (layout.parameters_nbytes, layout.nbytes)
        )
        self.shards = Vectors.on(layout, parameters, gradients)

    def wait(self) -> None:
        """Wait for all work on it so far: on the host it is done when calls return."""

    def checksum(self) -> int:
        """CRC-32 of the bits of weights and optimizer state."""
        return zlib.crc32(self.flat["parameters"][self.rank].view(np.uint8).data)

    def close(self) -> None:
        """Do nothing: host memory goes with its last user."""


class CudaMemory:
    """A trainer's memory on its GPU. From now on PyTorch's work in this process is on one stream.

    Each GPU has parameters of its own. `use` returns the context in which PyTorch works on a
    stream.
    """

    records, updated = True, None
    shards: Vectors | None = None  # see `add_shards`
    kernel: Any = None  # adds vectors in the exchange; None has it compiled

    def __init__(
        self,
        slots: CudaSlots,
        layout: FlatLayout,
        driver: CudaDriver,
        use: Callable[[Stream], AbstractContextManager],
    ) -> None:
        self.layout, self.driver, self.use = layout, driver, use
        self.device = slots.torch_device
        self.stream = driver.stream()
        self._context = use(self.stream)
        self._context.__enter__()
        self.buffers: dict[FlatName, CudaBuffer] = {
            "parameters": CudaBuffer.create(driver, layout.parameters_nbytes or 1, "parameters"),
            "gradients": CudaBuffer.create(driver, layout.nbytes or 1, "gradients"),
        }
        self.vectors = Vectors.on(layout, *self.buffers.values())
        itemsize = np.dtype(layout.dtype).itemsize
        self.flat: dict[FlatName, Any] = {
            name: buffer.array((buffer.nbytes // itemsize,), layout.dtype)
            for name, buffer in self.buffers.items()
        }
        self.areas = [
            CudaSlot.create(driver, slots.layout, f"slot {n}", slots.has_loader) for n in (0, 1)
        ]
        self.slots, self.slot_layout = [area.arrays for area in self.areas], slots.layout
        self.nbytes = layout.parameters_nbytes
        self._more: list[CudaBuffer] = []
        self.kept: dict[str, CudaBuffer] = {}
        # uint8 (n, row, column, RGB), or rows of arrays, by the name of the split; empty where
        # slots hold pictures:
        self.pictures: dict[str, Any] = {}

    def keep_pictures(self, split: str, shape: Sequence[int], dtype: str = PICTURE_DTYPE) -> None:
        """Make memory for all pictures of a split, or rows of arrays, of that shape.

        Raises InputError if the GPU has too little.
        """
        nbytes = RowType(dtype, tuple(shape)).nbytes
        buffer = self.kept[split] = CudaBuffer.create(self.driver, nbytes, f"{split} pictures")
        self.pictures[split] = buffer.array(shape, dtype)

    def add_shards(self, layout: FlatLayout) -> None:
        """Make vectors of this trainer alone, for its parts of arrays that trainers divide.

        Raises InputError if the GPU has too little memory.
        """
        parameters = CudaBuffer.create(self.driver, layout.parameters_nbytes, "own parameters")
        self._more.append(parameters)
        gradients = CudaBuffer.create(self.driver, layout.nbytes, "own gradients")
        self._more.append(gradients)
        self.shards = Vectors.on(layout, parameters, gradients)

    def wait(self) -> None:
        """Wait for all work on it so far."""
        self.stream.synchronize()

    def checksum(self) -> int:
        """CRC-32 of the bits of weights and optimizer state."""
        copy = np.empty(self.nbytes, np.uint8)
        self.driver.download(copy, self.buffers["parameters"].address, self.stream)
        self.wait()
        return zlib.crc32(copy.data)

    def close(self) -> None:
        """Give the memory back, when no other process has it open: no loader, and no trainer.

        After a failure a process just ends.
        """
        self.wait()
        for area in self.areas:
            area.close()
        for buffer in (*self.buffers.values(), *self._more, *self.kept.values()):
            buffer.close()
        self._context.__exit__(None, None, None)
