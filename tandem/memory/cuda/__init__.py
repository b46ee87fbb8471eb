"""CUDA memory that two processes see, and the streams and events that order work on it.

One of the two modules that import PyCUDA, and it does so only when a `CudaDriver` is made: a
machine without a GPU imports this one like any other. All work goes through a `Driver`, which tests
replace by one that computes on the host.

Memory belongs to the process that allocates it. Another process opens it by a `BufferHandle`, a few
bytes that may go through a pipe. Whoever opened it closes it first, tells the owner so (a group,
or its own end), and then the owner closes. A process that ends, however it ends, needs no closing:
the driver takes back what it had allocated and what it had opened. An owner that dies takes the
memory along, and what others still compute on it fails.

Nothing here waits for a device unless its docstring says so.
"""

import atexit
import contextlib
import ctypes
import math
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from tandem.errors import InputError
from tandem.memory.host import ArrayBuffer
from tandem.memory.slot import Slot, SlotLayout

if TYPE_CHECKING:
    from tandem.memory.flat import FlatLayout
    from tandem.memory.parameters import CudaMemory

# An allocation smaller than this may share its block with another one, and a handle opens a whole
# block: what another process can see is kept apart from what it is not given.
_GRAIN = 2 << 20

INSTALL = (
    "install it with `pip install .[gpu]`, which compiles it and needs the CUDA toolkit, with nvcc "
    "on the PATH"
)


class Stream(Protocol):
    """Work that a device does in order. PyCUDA's `Stream` is one."""

    @property
    def handle(self) -> int:
        """The driver's own pointer, by which PyTorch can use the stream."""
        ...

    def wait_for_event(self, event: Any) -> None:
        """Let later work on this stream wait for what `event` has recorded so far."""
        ...

    def synchronize(self) -> None:
        """Wait, on the host, for all work on the stream."""
        ...


class Event(Protocol):
    """A place in a stream. PyCUDA's `Event` is one. Before it is recorded nobody waits for it."""

    def record(self, stream: Any) -> Any:
        """Mark the present end of `stream`."""
        ...

    def synchronize(self) -> Any:
        """Wait, on the host, until the stream has come to the mark."""
        ...

    def ipc_handle(self) -> Any:
        """What another process opens the event by."""
        ...


class Driver(Protocol):
    """One device, as one process uses it. Addresses are those of the process.

    Attributes
    ----------
    device : int
        The device's number.
    identity : str
        The device's, under whatever number another process sees it.
    process : int
        The process's number: a handle can't be opened in the process that made it.
    """

    device: int
    identity: str
    process: int

    def borrowed(self) -> AbstractContextManager[None]:
        """A context in which another thread than the one that made it may use it."""
        ...

    def allocate(self, nbytes: int) -> int:
        """Allocate zeros on the device; give the address, a multiple of 256."""
        ...

    def free(self, address: int) -> None:
        """Free what was allocated, once the device has done all its work."""
        ...

    def export(self, address: int) -> bytes:
        """Give the bytes by which another process opens what was allocated."""
        ...

    def open(self, data: bytes) -> int:
        """Map memory of another process; give its address here."""
        ...

    def unmap(self, address: int) -> None:
        """Undo `open`."""
        ...

    def can_reach(self, identity: str) -> bool:
        """Whether this device can copy to and from the memory of another."""
        ...

    def stream(self) -> Stream:
        """Make a stream, which doesn't wait for the default stream."""
        ...

    def event(self, shared: bool = False) -> Event:
        """Make an event, which other processes may open if it is `shared`."""
        ...

    def open_event(self, data: bytes) -> Event:
        """Open an event of another process on the same device."""
        ...

    def page_locked(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Allocate zeros on the host that the device can copy while the host goes on."""
        ...

    def lock_pages(self, array: npt.NDArray[np.uint8]) -> None:
        """Make host memory such as `page_locked` gives."""
        ...

    def unlock_pages(self, array: npt.NDArray[np.uint8]) -> None:
        """Undo `lock_pages`, when no copy is under way."""
        ...

    def upload(self, address: int, source: npt.NDArray[Any], stream: Stream) -> None:
        """Copy a contiguous page-locked host array to the device, in turn on `stream`."""
        ...

    def download(self, target: npt.NDArray[Any], address: int, stream: Stream) -> None:
        """Copy to a contiguous page-locked host array from the device, in turn on `stream`."""
        ...

    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        """Copy from one device address to another, in turn on `stream`."""
        ...


class CudaDriver:
    """A `Driver` by PyCUDA, in the device's primary context, which PyTorch uses too.

    It belongs to the thread that makes it, and there should be one in a process, whose PyTorch
    works on the same device (`tandem.backend.use_device`). It leaves the context when the thread
    ends: PyCUDA would abort a process of which a thread exits within one.

    Parameters
    ----------
    device : int
        The device's number, from 0.

    Raises
    ------
    InputError
        PyCUDA is not installed or can't be loaded, or the device is not there or not to be had.
    """

    def __init__(self, device: int) -> None:
        self.device, self.process = device, os.getpid()
        self._cuda = cuda = import_pycuda()
        try:
            cuda.init()
            self._context = cuda.Device(device).retain_primary_context()
        except cuda.Error as error:
            raise InputError(f"cuda:{device} can't be used: {error}") from error
        self._context.push()
        self.identity = gpu_identity(device)
        self._owned: dict[int, Any] = {}
        self._opened: dict[int, Any] = {}
        self._locked: dict[int, npt.NDArray[np.uint8]] = {}
        at_thread_end(self._close)
        # Never destroyed: PyCUDA's destructor of a primary context makes a call that is for others,
        # and to free memory may be to wait, with Python's lock held, for a device that waits for a
        # process that has died. The system takes all back.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))

    def allocate(self, nbytes: int) -> int:
        """Allocate zeros on the device; give the address. Waits until they are there.

        Raises
        ------
        InputError
            There is not so much memory.
        """
        size = max(1, -(-nbytes // _GRAIN)) * _GRAIN
        try:
            memory = self._cuda.mem_alloc(size)
        except self._cuda.MemoryError as error:
            raise InputError(self._shortage(size)) from error
        self._cuda.memset_d8(int(memory), 0, size)
        # Clearing runs on the default stream, for which other streams don't wait.
        self._cuda.Context.synchronize()
        self._owned[int(memory)] = memory
        return int(memory)

    def free(self, address: int) -> None:
        """Free what was allocated, once the device has done all its work."""
        self._owned.pop(address).free()

    def export(self, address: int) -> bytes:
        """Give the bytes by which another process opens what was allocated.

        Raises
        ------
        InputError
            The system does not permit it.
        """
        try:
            return bytes(self._cuda.mem_get_ipc_handle(address))
        except self._cuda.Error as error:
            raise self._no_sharing("memory", error) from error

    def open(self, data: bytes) -> int:
        """Map memory of another process; give its address here.

        Raises
        ------
        InputError
            The system does not permit it, or the owner has ended.
        """
        try:
            memory = self._cuda.IPCMemoryHandle(bytearray(data))
        except self._cuda.Error as error:
            raise self._no_sharing("memory", error) from error
        self._opened[int(memory)] = memory
        return int(memory)

    def unmap(self, address: int) -> None:
        """Undo `open`."""
        self._opened.pop(address).close()

    def can_reach(self, identity: str) -> bool:
        """Whether this device can copy to and from the memory of another."""
        if identity == self.identity:
            return True
        own = self._cuda.Device(self.device)
        seen = {gpu_identity(number): number for number in range(self._cuda.Device.count())}
        # What this process is not shown it can't open.
        return identity in seen and own.can_access_peer(self._cuda.Device(seen[identity]))

    def stream(self) -> Stream:
        """Make a stream, which doesn't wait for the default stream."""
        non_blocking = 1  # CU_STREAM_NON_BLOCKING, which PyCUDA has no name for
        return self._cuda.Stream(non_blocking)

    def event(self, shared: bool = False) -> Event:
        """Make an event, which other processes may open if it is `shared`."""
        flags = self._cuda.event_flags
        kind = int(flags.DISABLE_TIMING)
        return self._cuda.Event(kind | int(flags.INTERPROCESS) if shared else kind)

    def open_event(self, data: bytes) -> Event:
        """Open an event of another process on the same device.

        Raises
        ------
        InputError
            The system does not permit it, or the owner has ended.
        """
        try:
            return self._cuda.Event.from_ipc_handle(bytearray(data))
        except self._cuda.Error as error:
            raise self._no_sharing("events", error) from error

    def page_locked(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Allocate zeros on the host that the device can copy while the host goes on.

        Raises
        ------
        InputError
            There is not so much memory that can be locked.
        """
        try:
            array = self._cuda.pagelocked_empty(nbytes, np.uint8)
        except self._cuda.MemoryError as error:
            raise InputError(
                f"{nbytes} bytes of page-locked host memory can't be had: {error}"
            ) from error
        array[:] = 0
        return array

    def lock_pages(self, array: npt.NDArray[np.uint8]) -> None:
        """Make host memory such as `page_locked` gives, until it is unlocked.

        Raises
        ------
        InputError
            There is not so much memory that can be locked.
        """
        # PyCUDA 2026.1 has a call for this, which NumPy 2 does not let succeed.
        lock = ctypes.CDLL("libcuda.so.1").cuMemHostRegister_v2
        lock.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)
        if status := lock(array.ctypes.data, array.nbytes, 0):
            raise InputError(
                f"{array.nbytes} bytes of host memory can't be page-locked: CUDA error {status}"
            )
        self._locked[array.ctypes.data] = array

    def unlock_pages(self, array: npt.NDArray[np.uint8]) -> None:
        """Undo `lock_pages`, when no copy is under way.

        Raises
        ------
        RuntimeError
            The driver does not do it.
        """
        unlock = ctypes.CDLL("libcuda.so.1").cuMemHostUnregister
        unlock.argtypes = (ctypes.c_void_p,)
        if status := unlock(array.ctypes.data):
            raise RuntimeError(f"page-locked memory can't be unlocked: CUDA error {status}")
        del self._locked[array.ctypes.data]

    def upload(self, address: int, source: npt.NDArray[Any], stream: Stream) -> None:
        """Copy a contiguous page-locked host array to the device, in turn on `stream`."""
        self._cuda.memcpy_htod_async(address, source, stream)

    def download(self, target: npt.NDArray[Any], address: int, stream: Stream) -> None:
        """Copy to a contiguous page-locked host array from the device, in turn on `stream`."""
        self._cuda.memcpy_dtoh_async(target, address, stream)

    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        """Copy from one device address to another, in turn on `stream`."""
        self._cuda.memcpy_dtod_async(target, source, nbytes, stream)

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[None]:
        """A context in which another thread than the one that made it may use it."""
        self._context.push()
        try:
            yield
        finally:
            self._context.pop()

    def _close(self) -> None:
        self._context.pop()

    def _shortage(self, nbytes: int) -> str:
        free, total = self._cuda.mem_get_info()
        return (
            f"cuda:{self.device} has too little memory: {nbytes / 2**20:.0f} MiB were asked for, "
            f"{free / 2**20:.0f} of its {total / 2**20:.0f} MiB are free; a smaller batch_size or "
            "width needs less"
        )

    def _no_sharing(self, what: str, error: Exception) -> InputError:
        return InputError(
            f"{what} of cuda:{self.device} can't be shared between processes: {error}; some "
            "virtual machines and containers forbid CUDA's interprocess handles"
        )


def gpu_identity(number: int) -> str:
    """What tells a GPU from all others, whichever of them a process is shown (its UUID).

    Parameters
    ----------
    number : int
        The GPU's, from 0, in this process.

    Raises
    ------
    InputError
        The driver does not tell.
    """
    driver, handle, found = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), (ctypes.c_ubyte * 16)()
    tell = getattr(driver, "cuDeviceGetUuid_v2", None)
    if tell is None or driver.cuDeviceGet(ctypes.byref(handle), number) or tell(found, handle):
        raise InputError(
            f"the driver does not tell which GPU cuda:{number} is (its UUID): it is older than "
            "CUDA 11.4, or the GPU can't be used"
        )
    return str(uuid.UUID(bytes=bytes(found)))


_of_thread = threading.local()


def at_thread_end(work: Callable[[], None]) -> None:
    """Do something when this thread ends: the main thread does so when the process ends."""
    if threading.current_thread() is threading.main_thread():
        atexit.register(work)
    else:
        _of_thread.ends = (*getattr(_of_thread, "ends", ()), _AtEnd(work))


class _AtEnd:
    """What it is given is done when the last reference to it goes."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work

    def __del__(self) -> None:
        self._work()


def import_pycuda() -> Any:
    """Import ``pycuda.driver``.

    Raises
    ------
    InputError
        PyCUDA is not installed, or finds no driver.
    """
    try:
        import pycuda.driver
    except ModuleNotFoundError as error:
        raise InputError(f"training on a GPU needs PyCUDA: {INSTALL}") from error
    except ImportError as error:
        raise InputError(f"PyCUDA is installed and can't be loaded: {error}") from error
    return pycuda.driver


@dataclass(frozen=True)
class BufferHandle:
    """What another process opens a `CudaBuffer` by. A small message.

    Attributes
    ----------
    device : int
        Number of the device on which the memory is.
    nbytes : int
        Size of the buffer.
    process : int
        Who made it.
    name : str
        For messages.
    data : bytes
        The driver's handle.
    """

    device: int
    nbytes: int
    process: int
    name: str
    data: bytes


@dataclass(frozen=True)
class CudaArray:
    """An array in device memory, as PyTorch and others can take it without a copy.

    Attributes
    ----------
    buffer : CudaBuffer
        The memory. An array keeps the object, but not what is closed.
    address : int
        Where the first element is.
    shape : tuple of int
    dtype : numpy dtype
    strides : tuple of int or None
        Bytes from an element to the next of each axis; None in C order.
    """

    buffer: "CudaBuffer"
    address: int
    shape: tuple[int, ...]
    dtype: np.dtype
    strides: tuple[int, ...] | None = None

    @property
    def size(self) -> int:
        """How many elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self.dtype.itemsize

    def transpose(self, *axes: int) -> "CudaArray":
        """The same memory with its axes in another order, as NumPy's method."""
        strides = self.strides or _c_strides(self.shape, self.dtype.itemsize)
        return replace(
            self,
            shape=tuple(self.shape[axis] for axis in axes),
            strides=tuple(strides[axis] for axis in axes),
        )

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.address if self.size else 0, False),
            "version": 3,
            "strides": self.strides,
        }


def _c_strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) * itemsize for axis in range(len(shape)))


class CudaBuffer:
    """Device memory that other processes may open. A `tandem.memory.Buffer`.

    Make one with `create`, or with `open` over one that another process has made.
    """

    def __init__(
        self,
        driver: Driver,
        address: int,
        nbytes: int,
        name: str,
        device: int,
        release: Callable[[int], None],
    ) -> None:
        self.address, self.nbytes, self.name, self.device = address, nbytes, name, device
        self._driver = driver
        self._release: Callable[[int], None] | None = release

    @classmethod
    def create(cls, driver: Driver, nbytes: int, name: str = "tandem") -> "CudaBuffer":
        """Allocate a buffer of zeros on the driver's device.

        Parameters
        ----------
        driver : Driver
            The device.
        nbytes : int
            Size in bytes.
        name : str
            For messages.

        Raises
        ------
        InputError
            The device has not so much memory.
        """
        return cls(driver, driver.allocate(nbytes), nbytes, name, driver.device, driver.free)

    @classmethod
    def open(cls, driver: Driver, handle: BufferHandle) -> "CudaBuffer":
        """Open a buffer of another process, on this device or on one that it can reach.

        Parameters
        ----------
        driver : Driver
            The device from which the memory will be used.
        handle : BufferHandle
            Of a buffer that its owner has not closed.

        Raises
        ------
        InputError
            The system does not permit it, or the owner has ended.
        ValueError
            This process made the buffer: CUDA opens a handle in other processes only.
        """
        _check_foreign(driver, handle.process, f"the buffer {handle.name!r}")
        address = driver.open(handle.data)
        return cls(driver, address, handle.nbytes, handle.name, handle.device, driver.unmap)

    def handle(self) -> BufferHandle:
        """What another process opens the buffer by.

        Raises
        ------
        InputError
            The system does not permit it.
        ValueError
            The buffer is closed.
        """
        self._check_open()
        data = self._driver.export(self.address)
        return BufferHandle(self.device, self.nbytes, self._driver.process, self.name, data)

    def array(self, shape: int | Sequence[int], dtype: npt.DTypeLike, offset: int = 0) -> CudaArray:
        """A writable array over the memory, in C order.

        Parameters
        ----------
        shape : int or sequence of int
            Of the array; ``()`` gives an array without axes.
        dtype : numpy dtype
            Of the array.
        offset : int
            Bytes from the start of the buffer, which lies on a 256-byte boundary.

        Raises
        ------
        ValueError
            The array would reach past the buffer's end, or the buffer is closed.
        """
        self._check_open()
        kind = np.dtype(dtype)
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        end = offset + math.prod(shape) * kind.itemsize
        if offset < 0 or end > self.nbytes:
            raise ValueError(
                f"an array of {kind} {shape} at byte {offset} of {self.name!r} ends at byte {end}, "
                f"and the buffer has {self.nbytes}"
            )
        return CudaArray(self, self.address + offset, shape, kind)

    def close(self) -> None:
        """Give the memory back, or up, if another process owns it; may be called twice.

        Arrays over it, and tensors over these, must not be used any more. Whoever has opened the
        buffer closes before its owner does.
        """
        release, self._release = self._release, None
        if release is not None:
            release(self.address)

    def _check_open(self) -> None:
        if self._release is None:
            raise ValueError(f"the buffer {self.name!r} is closed")


def _check_foreign(driver: Driver, process: int, what: str) -> None:
    if process == driver.process:
        raise ValueError(
            f"{what} was made by this process, which can't open it again by its handle; use the "
            "object itself"
        )


@dataclass(frozen=True)
class SlotHandle:
    """What a loader opens a trainer's `CudaSlot` by. A small message.

    Attributes
    ----------
    memory : BufferHandle
        Of the slot.
    free, filled : bytes
        The driver's handles of the slot's two events.
    """

    memory: BufferHandle
    free: bytes
    filled: bytes


class CudaSlot:
    """A slot in a trainer's device memory, with the two events that order its use.

    ``free`` follows the trainer's last read, ``filled`` the loader's last copy. The trainer records
    ``free`` and then asks for the slot to be filled; the loader lets its copy wait for ``free``,
    records ``filled`` after it and then answers; the trainer lets its work wait for ``filled``. So
    neither host waits for a device. An event must have been recorded before another process lets a
    stream wait for it, and that is what the messages are for.

    Make one with `create`, or with `open` over one that another process has made. The loader closes
    before the trainer.

    Attributes
    ----------
    buffer : CudaBuffer
    layout : SlotLayout
    free, filled : Event
    """

    def __init__(
        self, driver: Driver, buffer: CudaBuffer, layout: SlotLayout, free: Event, filled: Event
    ) -> None:
        self.buffer, self.layout, self.free, self.filled = buffer, layout, free, filled
        self._process = driver.process

    @classmethod
    def create(cls, driver: Driver, layout: SlotLayout, name: str = "slot") -> "CudaSlot":
        """Allocate a slot on the trainer's device.

        Raises
        ------
        InputError
            The device has not so much memory.
        """
        buffer = CudaBuffer.create(driver, layout.nbytes, name)
        return cls(driver, buffer, layout, driver.event(shared=True), driver.event(shared=True))

    @classmethod
    def open(cls, driver: Driver, layout: SlotLayout, handle: SlotHandle) -> "CudaSlot":
        """Open a trainer's slot in its loader, on the same device.

        Raises
        ------
        InputError
            The system does not permit it, or the trainer has ended.
        ValueError
            This process made the slot, or its size is not that of `layout`.
        """
        if handle.memory.nbytes != layout.nbytes:
            raise ValueError(
                f"the slot {handle.memory.name!r} has {handle.memory.nbytes} bytes, its layout "
                f"needs {layout.nbytes}"
            )
        buffer = CudaBuffer.open(driver, handle.memory)
        events = (driver.open_event(handle.free), driver.open_event(handle.filled))
        return cls(driver, buffer, layout, *events)

    def handle(self) -> SlotHandle:
        """What the loader opens the slot by.

        Raises
        ------
        InputError
            The system does not permit it.
        """
        free, filled = (bytes(event.ipc_handle()) for event in (self.free, self.filled))
        return SlotHandle(self.buffer.handle(), free, filled)

    @property
    def arrays(self) -> Slot:
        """The slot's arrays, each a `CudaArray`."""
        return Slot.on(self.buffer, self.layout)

    def begin_reading(self, stream: Stream) -> None:
        """Let later work on the trainer's stream wait for the copy into the slot.

        To be called when the loader has said that the slot is filled.
        """
        stream.wait_for_event(self.filled)

    def end_reading(self, stream: Stream) -> None:
        """Mark the trainer's last read, on its stream, before it asks for the slot to be filled."""
        self.free.record(stream)

    def close(self) -> None:
        """Give the memory back; may be called twice."""
        self.buffer.close()


class SlotUploader:
    """The loader's side: minibatches are made in page-locked memory and copied into device slots.

    Each slot has a staging area of its own, so that one is filled while the other is copied.

    Parameters
    ----------
    driver : Driver
        The slots' device.
    slots : sequence of CudaSlot
        By number, of one layout: opened in a loader process, or a trainer's own where it loads by
        itself.
    """

    def __init__(self, driver: Driver, slots: Sequence[CudaSlot]) -> None:
        self._driver, self._slots, self._stream = driver, slots, driver.stream()
        self._areas = [ArrayBuffer(driver.page_locked(slot.layout.nbytes)) for slot in slots]

    def fill(self, number: int, fill: Callable[[Slot], None]) -> None:
        """Make a minibatch on the host and set off its copy into a slot.

        It waits for this slot's previous copy, which reads the same staging area; no longer.

        Parameters
        ----------
        number : int
            Of the slot. Its trainer has called `CudaSlot.end_reading`, and then asked for this.
        fill : callable
            Fills a host `Slot`. Only the rows that it says are valid are copied.
        """
        slot, area = self._slots[number], self._areas[number]
        slot.filled.synchronize()
        staged = Slot.on(area, slot.layout)
        fill(staged)
        self._stream.wait_for_event(slot.free)
        self._upload(slot, area, int(staged.valid))
        slot.filled.record(self._stream)

    def close(self) -> None:
        """Wait for the last copies, then give up the slots; may be called twice."""
        self._stream.synchronize()
        for slot in self._slots:
            slot.close()

    def _upload(self, slot: CudaSlot, area: ArrayBuffer, rows: int) -> None:
        layout = slot.layout
        pictures = rows * layout.picture_size**2 * 3
        labels = layout.offsets["labels"]  # from here on all is small
        for part in (slice(0, pictures), slice(labels, layout.nbytes)):
            if part.start < part.stop:
                address = slot.buffer.address + part.start
                self._driver.upload(address, area.memory[part], self._stream)


@dataclass(frozen=True)
class CudaSlots:
    """The two slots of a trainer on its GPU, which the trainer makes and its loader opens.

    It can be sent to a process that is being started.

    Attributes
    ----------
    device : int
        The GPU's number.
    layout : SlotLayout
        Of each slot.
    """

    device: int
    layout: SlotLayout

    def open(self, receive: Callable[[], Any]) -> SlotUploader:
        """Open the slots in the loader's process.

        Parameters
        ----------
        receive : callable
            Gives the trainer's first message: a tuple of `SlotHandle`, by number.

        Raises
        ------
        InputError
            The system does not permit it, or the trainer has ended.
        """
        driver = self.driver()
        slots = [CudaSlot.open(driver, self.layout, handle) for handle in receive()]
        return SlotUploader(driver, slots)

    @property
    def torch_device(self) -> str:
        """The GPU by PyTorch's name."""
        return f"cuda:{self.device}"

    def driver(self) -> Driver:
        """Begin to use the GPU in this process."""
        return CudaDriver(self.device)

    def trainer_memory(
        self,
        layout: "FlatLayout",
        driver: Driver,
        use: Callable[[Stream], AbstractContextManager],
    ) -> "CudaMemory":
        """Make the memory of the trainer, slots included; parameters as of `CudaMemory`."""
        from tandem.memory.parameters import CudaMemory

        return CudaMemory(self, layout, driver, use)
