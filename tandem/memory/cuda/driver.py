"""One CUDA device as one process uses it, through PyCUDA."""

import atexit
import contextlib
import ctypes
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from tandem.errors import InputError

# An allocation smaller than this may share its block with another one, and a handle opens a whole
# block: memory that is shared with another process must not share its block with other memory.
_GRAIN = 2 << 20

INSTALL = (
    "install it with `make gpu`, which compiles it and needs a C++ compiler, but no CUDA toolkit"
)

Stream = Any
"""PyCUDA's `Stream`: work that a device does in order."""

Event = Any
"""PyCUDA's `Event`: a position in a stream. Before it is recorded nothing waits for it."""


class CudaDriver:
    """One device, as one process uses it, in the primary context that PyTorch uses too.

    It belongs to the thread that makes it. A process should have one, and its PyTorch should work
    on the same device (`tandem.backend.use_device`). It leaves the context when the thread ends:
    PyCUDA would abort a process if one of its threads exits within a context. Addresses are those
    of the process.

    Raises
    ------
    InputError
        PyCUDA is not installed or can't be loaded, or the device doesn't exist or is not available;
        in `allocate` and `page_locked`, there is too little memory; in `export`, `open`,
        `event` if it is shared, `export_event` and `open_event`, the system does not permit
        processes to share, or the owner has ended.
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
        # Never destroyed: PyCUDA's destructor of a primary context makes a wrong call, and freeing
        # memory may wait, with Python's lock held, for a device that waits for a dead process. The
        # system reclaims everything.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))

    def allocate(self, nbytes: int) -> int:
        """Allocate zeros on the device and wait for them; return the address, a multiple of 256."""
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
        """Free an allocation, once the device has done all its work."""
        self._owned.pop(address).free()

    def free_memory(self) -> int:
        """Bytes of the device that nobody has allocated."""
        return int(self._cuda.mem_get_info()[0])

    def export(self, address: int) -> bytes:
        """Return the bytes by which another process opens an allocation."""
        try:
            return bytes(self._cuda.mem_get_ipc_handle(address))
        except self._cuda.Error as error:
            raise self._no_sharing("memory", error) from error

    def open(self, data: bytes) -> int:
        """Map memory of another process; return its address in this one."""
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
        """Return whether this device can read and write the memory of another."""
        if identity == self.identity:
            return True
        own = self._cuda.Device(self.device)
        seen = {gpu_identity(number): number for number in range(self._cuda.Device.count())}
        # A device that this process does not see can't be opened.
        return identity in seen and own.can_access_peer(self._cuda.Device(seen[identity]))

    def stream(self) -> Stream:
        """Make a stream that doesn't wait for the default stream."""
        non_blocking = 1  # CU_STREAM_NON_BLOCKING, for which PyCUDA has no name
        return self._cuda.Stream(non_blocking)

    def event(self, shared: bool = False) -> Event:
        """Make an event, which other processes can open if it is `shared`."""
        flags = self._cuda.event_flags
        kind = int(flags.DISABLE_TIMING)
        if not shared:
            return self._cuda.Event(kind)
        try:
            return self._cuda.Event(kind | int(flags.INTERPROCESS))
        except self._cuda.Error as error:
            raise self._no_sharing("events", error) from error

    def export_event(self, event: Event) -> bytes:
        """Return the bytes by which another process opens a shared event."""
        try:
            return bytes(event.ipc_handle())
        except self._cuda.Error as error:
            raise self._no_sharing("events", error) from error

    def open_event(self, data: bytes) -> Event:
        """Open an event of another process, whose device may be another one."""
        try:
            return self._cuda.Event.from_ipc_handle(bytearray(data))
        except self._cuda.Error as error:
            raise self._no_sharing("events", error) from error

    @property
    def architecture(self) -> str:
        """The device's architecture by the compilers' name, such as ``sm_90``."""
        major, minor = self._cuda.Device(self.device).compute_capability()
        return f"sm_{major}{minor}"

    def load_kernel(self, code: bytes, name: str) -> Any:
        """Load machine code for this device; return PyCUDA's function of a kernel in it."""
        try:
            return self._cuda.module_from_buffer(code).get_function(name)
        except self._cuda.Error as error:
            raise InputError(
                f"cuda:{self.device} can't load the kernel {name!r}: {error}"
            ) from error

    def page_locked(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Allocate zeros on the host that the device can copy while the host goes on."""
        try:
            array = self._cuda.pagelocked_empty(nbytes, np.uint8)
        except self._cuda.MemoryError as error:
            raise InputError(
                f"{nbytes} bytes of page-locked host memory can't be allocated: {error}"
            ) from error
        array[:] = 0
        return array

    def lock_pages(self, array: npt.NDArray[np.uint8]) -> None:
        """Page-lock existing host memory, or raise InputError."""
        # PyCUDA 2026.1 has a call for this, which fails with NumPy 2.
        lock = ctypes.CDLL("libcuda.so.1").cuMemHostRegister_v2
        lock.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)
        if status := lock(array.ctypes.data, array.nbytes, 0):
            raise InputError(
                f"{array.nbytes} bytes of host memory can't be page-locked: CUDA error {status}"
            )
        self._locked[array.ctypes.data] = array

    def unlock_pages(self, array: npt.NDArray[np.uint8]) -> None:
        """Undo `lock_pages`, when no copy is under way."""
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
        """Copy bytes within the device or from one that it can reach, in turn on `stream`."""
        self._cuda.memcpy_dtod_async(target, source, nbytes, stream)

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[None]:
        """Context manager: use the driver in another thread than its own."""
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
            f"cuda:{self.device} has too little memory: {nbytes / 2**20:.0f} MiB are needed, "
            f"{free / 2**20:.0f} of its {total / 2**20:.0f} MiB are free; a smaller batch_size or "
            "width, or data_on_gpu: false, needs less"
        )

    def _no_sharing(self, what: str, error: Exception) -> InputError:
        return sharing_refused(what, self.device, error)


def sharing_refused(what: str, device: int, error: object) -> InputError:
    """Return the error of a system that forbids processes to share `what` of a GPU."""
    return InputError(
        f"{what} of cuda:{device} can't be shared between processes: {error}; CUDA's interprocess "
        "handles are not permitted under WSL2 and in some virtual machines and containers. One "
        "trainer with para_load: false needs none"
    )


def gpu_identity(number: int) -> str:
    """Return the UUID of a GPU, whichever GPUs a process can see; `number` is this process's.

    Raises
    ------
    InputError
        The driver does not report it.
    """
    driver, handle, found = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), (ctypes.c_ubyte * 16)()
    get = getattr(driver, "cuDeviceGetUuid_v2", None)
    if get is None or driver.cuDeviceGet(ctypes.byref(handle), number) or get(found, handle):
        raise InputError(
            f"the driver does not report the UUID of cuda:{number}: it is older than CUDA 11.4, or "
            "the GPU can't be used"
        )
    return str(uuid.UUID(bytes=bytes(found)))


_of_thread = threading.local()


def at_thread_end(work: Callable[[], None]) -> None:
    """Call `work` when this thread ends; in the main thread, when the process ends."""
    if threading.current_thread() is threading.main_thread():
        atexit.register(work)
    else:
        _of_thread.ends = (*getattr(_of_thread, "ends", ()), _AtEnd(work))


class _AtEnd:
    """Calls `work` when its last reference goes."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work

    def __del__(self) -> None:
        self._work()


def import_pycuda() -> Any:
    """Import ``pycuda.driver``, or raise InputError."""
    try:
        import pycuda.driver
    except ModuleNotFoundError as error:
        raise InputError(f"training on a GPU needs PyCUDA: {INSTALL}") from error
    except ImportError as error:
        raise InputError(f"PyCUDA is installed and can't be loaded: {error}") from error
    return pycuda.driver
