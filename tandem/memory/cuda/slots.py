"""Slots in device memory, which a loader fills and a trainer reads."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tandem.memory.cuda.buffer import BufferHandle, CudaBuffer
from tandem.memory.cuda.driver import CudaDriver, Event, Stream
from tandem.memory.host import ArrayBuffer
from tandem.memory.slot import Slot, SlotLayout

if TYPE_CHECKING:
    from tandem.memory.flat import FlatLayout
    from tandem.memory.parameters import CudaMemory


@dataclass(frozen=True)
class SlotHandle:
    """A small message by which a loader opens a trainer's `CudaSlot`."""

    memory: BufferHandle
    free: bytes  # the driver's handle of the event
    filled: bytes


class CudaSlot:
    """A slot in a trainer's device memory, with the two events that order its use.

    ``free`` follows the trainer's last read, ``filled`` the loader's last copy. The trainer records
    ``free`` and then requests a minibatch; the loader makes its copy wait for ``free``, records
    ``filled`` after it and then answers; the trainer makes its work wait for ``filled``. So neither
    host waits for a device. The messages ensure that an event has been recorded before a stream of
    another process waits for it.

    Made by `create`, or by `open` over one that another process has made. The loader closes before
    the trainer.
    """

    def __init__(
        self, driver: CudaDriver, buffer: CudaBuffer, layout: SlotLayout, free: Event, filled: Event
    ) -> None:
        self._driver, self.buffer, self.layout = driver, buffer, layout
        self.free, self.filled = free, filled

    @classmethod
    def create(
        cls, driver: CudaDriver, layout: SlotLayout, name: str = "slot", shared: bool = True
    ) -> "CudaSlot":
        """Allocate a slot on the trainer's device, which a loader can open if it is `shared`.

        Raises
        ------
        InputError
            There is too little memory, or the system does not permit processes to share events.
        """
        buffer = CudaBuffer.create(driver, layout.nbytes, name)
        return cls(driver, buffer, layout, driver.event(shared), driver.event(shared))

    @classmethod
    def open(cls, driver: CudaDriver, layout: SlotLayout, handle: SlotHandle) -> "CudaSlot":
        """Open a trainer's slot in its loader, on the same device."""
        if handle.memory.nbytes != layout.nbytes:
            raise ValueError(
                f"the slot {handle.memory.name!r} has {handle.memory.nbytes} bytes, its layout "
                f"needs {layout.nbytes}"
            )
        buffer = CudaBuffer.open(driver, handle.memory)
        events = (driver.open_event(handle.free), driver.open_event(handle.filled))
        return cls(driver, buffer, layout, *events)

    def handle(self) -> SlotHandle:
        """Return a message by which the loader opens the slot; InputError as of `CudaDriver`."""
        free, filled = (self._driver.export_event(event) for event in (self.free, self.filled))
        return SlotHandle(self.buffer.handle(), free, filled)

    @property
    def arrays(self) -> Slot:
        """The slot's arrays, each a `CudaArray`."""
        return Slot.on(self.buffer, self.layout)

    def begin_reading(self, stream: Stream) -> None:
        """Make later work wait for the copy into a slot that the loader has reported as filled."""
        stream.wait_for_event(self.filled)

    def end_reading(self, stream: Stream) -> None:
        """Mark the trainer's last read on its stream, before it requests the next minibatch."""
        self.free.record(stream)

    def close(self) -> None:
        """Release the memory; may be called twice."""
        self.buffer.close()


class SlotUploader:
    """The loader's side: makes minibatches in page-locked memory and copies them into device slots.

    Each slot has a staging area of its own, so that one is filled while the other is copied.
    """

    def __init__(self, driver: CudaDriver, slots: Sequence[CudaSlot]) -> None:
        self._driver, self._slots, self._stream = driver, slots, driver.stream()
        self._areas = [ArrayBuffer(driver.page_locked(slot.layout.nbytes)) for slot in slots]

    def fill(self, number: int, fill: Callable[[Slot], None]) -> None:
        """Let `fill` make a minibatch on the host and start its copy into a slot.

        The trainer has called `CudaSlot.end_reading`, and then sent its request. The call waits
        only for this slot's previous copy, which reads the same staging area. A full minibatch is
        one copy; of another one only the valid rows are copied.
        """
        slot, area = self._slots[number], self._areas[number]
        slot.filled.synchronize()
        staged = Slot.on(area, slot.layout)
        fill(staged)
        self._stream.wait_for_event(slot.free)
        self._upload(slot, area, int(staged.valid))
        slot.filled.record(self._stream)

    def close(self) -> None:
        """Wait for the last copies, then close the slots; may be called twice."""
        self._stream.synchronize()
        for slot in self._slots:
            slot.close()

    def _upload(self, slot: CudaSlot, area: ArrayBuffer, rows: int) -> None:
        layout = slot.layout
        parts = [slice(0, layout.nbytes)]
        if rows < layout.batch_size:
            labels = layout.offsets["labels"]  # with all behind it: targets, and what is small
            parts = [slice(0, rows * layout.pictures.nbytes), slice(labels, layout.nbytes)]
        for part in parts:
            if part.start < part.stop:
                address = slot.buffer.address + part.start
                self._driver.upload(address, area.memory[part], self._stream)


@dataclass(frozen=True)
class CudaSlots:
    """The two slots of a trainer on its GPU, which the trainer makes and its loader opens.

    They can be sent to a process that is being started.
    """

    device: int
    layout: SlotLayout
    has_loader: bool = True  # False where the trainer fills them itself: no process shares them

    def open(self, receive: Callable[[], Any]) -> SlotUploader:
        """Open the slots in the loader's process.

        `receive` returns their layout, which is without pictures if the trainer keeps them all on
        its GPU, and the tuple of `SlotHandle`.
        """
        driver, (layout, handles) = self.driver(), receive()
        return SlotUploader(driver, [CudaSlot.open(driver, layout, handle) for handle in handles])

    @property
    def torch_device(self) -> str:
        """The GPU by PyTorch's name."""
        return f"cuda:{self.device}"

    def driver(self) -> CudaDriver:
        """Begin to use the GPU in this process."""
        return CudaDriver(self.device)

    def trainer_memory(
        self,
        layout: "FlatLayout",
        driver: CudaDriver,
        use: Callable[[Stream], AbstractContextManager],
    ) -> "CudaMemory":
        """Make the trainer's memory, slots included; parameters as of `CudaMemory`."""
        from tandem.memory.parameters import CudaMemory

        return CudaMemory(self, layout, driver, use)
