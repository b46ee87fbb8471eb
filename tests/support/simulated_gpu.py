"""GPUs that are host memory: whole runs of the program go the way that they go on real ones.

What is allocated is memory that other processes open by a handle; copies are done at once. The
kernels are the CPU's. Order and synchronisation are tested elsewhere, against a fake CUDA driver.
"""

import ctypes
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from tandem.memory import HostSlots, Slot
from tandem.memory.cuda import CudaArray, CudaSlots, sharing_refused
from tandem.memory.flat import FlatLayout, Vectors
from tandem.memory.parameters import CudaMemory
from tandem.training import memory
from tandem.training.run_spec import RunSpec
from tests.support.fake_cuda import unlocked_pages

_PAGE = mmap.PAGESIZE

in_use: set[int] = set()
"""Addresses of what this process has allocated, opened or locked, and not given back."""


class SimulatedStream:
    """A stream, or an event in one: work is done when it is asked for."""

    handle = 0

    def wait_for_event(self, event: Any) -> None: ...

    def record(self, stream: Any) -> None: ...

    def synchronize(self) -> None: ...

    def ipc_handle(self) -> bytes:
        return b"event"


class SimulatedDriver:
    """One process's use of a simulated GPU."""

    def __init__(self, device: int, permits_sharing: bool = True, free: int = 1 << 30) -> None:
        self.device, self.process = device, os.getpid()
        self._permits_sharing, self._free = permits_sharing, free
        self.identity = f"GPU {device}"
        self._mapped: dict[int, tuple[mmap.mmap, int]] = {}
        self.locked: dict[int, range] = {}

    def borrowed(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _map(self, descriptor: int) -> int:
        pages = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        self._mapped[address] = pages, descriptor
        in_use.add(address)
        return address

    def allocate(self, nbytes: int) -> int:
        descriptor = os.memfd_create("simulated GPU")
        os.ftruncate(descriptor, -(-max(nbytes, 1) // _PAGE) * _PAGE)
        return self._map(descriptor)

    def free(self, address: int) -> None:
        # Whoever still looks at it may: the mapping goes with the process.
        os.close(self._mapped[address][1])
        in_use.remove(address)

    unmap = free

    def free_memory(self) -> int:
        return self._free

    def _check_sharing(self, what: str) -> None:
        if not self._permits_sharing:
            raise sharing_refused(what, self.device, "operation not supported")

    def export(self, address: int) -> bytes:
        self._check_sharing("memory")
        return f"/proc/{self.process}/fd/{self._mapped[address][1]}".encode()

    def open(self, data: bytes) -> int:
        return self._map(os.open(data, os.O_RDWR | os.O_CLOEXEC))

    def can_reach(self, identity: str) -> bool:
        return {self.identity, identity} != {"GPU 0", "GPU 1"}

    def stream(self) -> SimulatedStream:
        return SimulatedStream()

    def event(self, shared: bool = False) -> SimulatedStream:
        if shared:
            self._check_sharing("events")
        return SimulatedStream()

    def export_event(self, event: SimulatedStream) -> bytes:
        return event.ipc_handle()

    def open_event(self, data: bytes) -> SimulatedStream:
        return SimulatedStream()

    def page_locked(self, nbytes: int) -> np.ndarray:
        return np.zeros(nbytes, np.uint8)

    def lock_pages(self, array: np.ndarray) -> None:
        self.locked[array.ctypes.data] = unlocked_pages(array, self.locked)
        in_use.add(array.ctypes.data)

    def unlock_pages(self, array: np.ndarray) -> None:
        del self.locked[array.ctypes.data]
        in_use.remove(array.ctypes.data)

    def upload(self, address: int, source: np.ndarray, stream: Any) -> None:
        ctypes.memmove(address, source.ctypes.data, source.nbytes)

    def download(self, target: np.ndarray, address: int, stream: Any) -> None:
        ctypes.memmove(target.ctypes.data, address, target.nbytes)

    def copy(self, target: int, source: int, nbytes: int, stream: Any) -> None:
        ctypes.memmove(target, source, nbytes)

    def average(
        self,
        targets: Sequence[int],
        terms: Sequence[tuple[int, float]],
        divisor: float,
        count: int,
        dtype: np.dtype,
        stream: Any,
    ) -> None:
        """Add weighted vectors and divide, as the exchange's kernel does."""
        total = sum(at(address, (count,), dtype) * dtype.type(share) for address, share in terms)
        for target in targets:
            at(target, (count,), dtype)[:] = total / dtype.type(divisor)


def at(address: int, shape: tuple[int, ...], dtype: np.dtype, strides: Any = None) -> np.ndarray:
    """The memory at an address as an array."""
    nbytes = int(np.prod(shape)) * dtype.itemsize
    pages = (ctypes.c_char * nbytes).from_address(address)
    return np.ndarray(shape, dtype, pages, strides=strides)


def on_host(array: CudaArray) -> np.ndarray:
    """What a kernel of the CPU sees of it."""
    return at(array.address, array.shape, array.dtype, array.strides)


def all_on_host(arrays: Mapping[str, Any]) -> dict[str, Any]:
    return {name: on_host(array) for name, array in arrays.items()}


def vectors_on_host(vectors: Vectors) -> Vectors:
    return Vectors(
        all_on_host(vectors.weights),
        {name: all_on_host(state) for name, state in vectors.states.items()},
        all_on_host(vectors.gradients),
    )


class SimulatedMemory(CudaMemory):
    """`CudaMemory`, seen by the CPU."""

    def __init__(
        self,
        slots: CudaSlots,
        layout: FlatLayout,
        driver: "SimulatedDriver",
        use: Callable[[Any], AbstractContextManager],
    ) -> None:
        super().__init__(slots, layout, driver, use)
        self.vectors = vectors_on_host(self.vectors)
        self.flat = all_on_host(self.flat)
        self.slots = [Slot(**all_on_host(vars(slot))) for slot in self.slots]
        self.kernel = driver.average

    def add_shards(self, layout: FlatLayout) -> None:
        super().add_shards(layout)
        assert self.shards is not None
        self.shards = vectors_on_host(self.shards)

    def keep_pictures(self, split: str, shape: Sequence[int], dtype: str = "uint8") -> None:
        super().keep_pictures(split, shape, dtype)
        self.pictures[split] = on_host(self.pictures[split])


@dataclass(frozen=True)
class SimulatedSlots(CudaSlots):
    """`CudaSlots` of a simulated GPU."""

    torch_device = "cpu"
    permits_sharing: bool = True  # of memory and events between processes
    free: int = 1 << 30  # bytes of the GPU, at any time

    def driver(self) -> Any:
        return SimulatedDriver(self.device, self.permits_sharing, self.free)

    def trainer_memory(self, layout: FlatLayout, driver: Any, use: Any) -> CudaMemory:
        return SimulatedMemory(self, layout, driver, use)


def make_slots(spec: RunSpec, rank: int, permits_sharing: bool = True) -> HostSlots | CudaSlots:
    """Stands for `tandem.training.memory.make_slots`."""
    if spec.devices[rank] == "cpu":
        return memory.make_slots(spec, rank)
    layout = spec.slot_layout
    device, has_loader = int(spec.devices[rank][5:]), spec.config.para_load
    return SimulatedSlots(device, layout, has_loader, permits_sharing)
