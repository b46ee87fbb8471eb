"""A machine of CUDA devices on the host, for tests: work is done only when somebody waits for it.

Memory is NumPy arrays, a process is a `FakeDriver`, and a stream is a queue of work that stays
undone until it is synchronised with, or until another stream's work waits for it. So whoever
forgets to wait reads what was there before. `FakeMachine.work_off` does all work instead, some
streams before others, as far as none has to wait.
"""

import contextlib
import itertools
import mmap
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from tandem.errors import InputError
from tandem.memory.cuda import CudaBuffer, sharing_refused


@dataclass
class Allocation:
    """Memory of one device; `opened` counts the processes that have mapped it."""

    device: int
    bytes: np.ndarray
    opened: int = 0


@dataclass
class FakeMachine:
    """What all processes of a test share."""

    devices: int = 1
    capacity: int = 1 << 30  # bytes of each device
    apart: frozenset[frozenset[int]] = frozenset()  # pairs that can't reach each other
    corrupt: frozenset[frozenset[int]] = frozenset()  # pairs that reach each other and copy zeros
    permits_sharing: bool = True  # of memory and events between processes
    handles: dict[bytes, Any] = field(default_factory=dict)
    allocations: list[Allocation] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)
    numbers: Any = field(default_factory=lambda: itertools.count(1))

    def used(self, device: int) -> int:
        return sum(a.bytes.nbytes for a in self.allocations if a.device == device)

    def work_off(self, streams: Sequence["FakeStream"]) -> None:
        """Do all work, always what the first stream has next that need not wait for another."""
        while any(stream.work for stream in streams):
            ready = next((stream for stream in streams if stream.is_ready), None)
            assert ready is not None, "the streams wait for each other, or for others"
            ready.work.popleft()()

    def check_sharing(self, what: str, device: int) -> None:
        if not self.permits_sharing:
            raise sharing_refused(what, device, "operation not supported")

    def publish(self, thing: Any) -> bytes:
        handle = next(self.numbers).to_bytes(64, "big")
        self.handles[handle] = thing
        return handle


@dataclass
class Mark:
    """What an event has recorded: a point in a stream's work."""

    stream: "FakeStream"
    reached: bool = False


@dataclass
class Waiting:
    """Work of a stream that waits until another stream has reached a mark."""

    mark: Mark

    def __call__(self) -> None:
        self.mark.stream.reach(self.mark)


class FakeStream:
    """Work in order, which is done when somebody waits for it."""

    def __init__(self, machine: FakeMachine, device: int) -> None:
        self.machine, self.device = machine, device
        self.work: deque[Callable[[], None]] = deque()
        self.handle = next(machine.numbers)
        self.waits = 0  # of the host for the stream
        self.check_thread: Callable[[], None] = lambda: None

    def wait_for_event(self, event: "FakeEvent") -> None:
        self.check_thread()
        event.history.append("wait")
        if event.mark is not None:
            self.work.append(Waiting(event.mark))

    @property
    def is_ready(self) -> bool:
        """Whether there is work that need not wait for another stream."""
        first = self.work[0] if self.work else None
        return first is not None and not (isinstance(first, Waiting) and not first.mark.reached)

    def synchronize(self) -> None:
        self.waits += 1
        with self.machine.lock:
            while self.work:
                self.work.popleft()()

    def reach(self, mark: Mark) -> None:
        with self.machine.lock:
            while not mark.reached:
                self.work.popleft()()


class FakeEvent:
    """A point in a stream; shared by the processes that have opened it."""

    def __init__(self, machine: FakeMachine, device: int, shared: bool) -> None:
        self.machine, self.device, self.shared = machine, device, shared
        self.mark: Mark | None = None
        self.history: list[str] = []  # "record" and "wait", in the order of the hosts' calls
        self.check_thread: Callable[[], None] = lambda: None

    def record(self, stream: FakeStream) -> None:
        assert stream.device == self.device, "an event is recorded on its own device"
        self.history.append("record")
        mark = self.mark = Mark(stream)

        def arrive() -> None:
            mark.reached = True

        stream.work.append(arrive)

    def synchronize(self) -> None:
        self.check_thread()
        if self.mark is not None:
            self.mark.stream.reach(self.mark)

    def ipc_handle(self) -> bytearray:
        assert self.shared, "only an interprocess event has a handle"
        return bytearray(self.machine.publish(self))


class FakeDriver:
    """One process's use of one device of a `FakeMachine`.

    One that is `bound` is for the thread that makes it, and for who borrows it.
    """

    def __init__(self, machine: FakeMachine, device: int = 0, bound: bool = False) -> None:
        self.machine, self.device, self.process = machine, device, next(machine.numbers)
        self.mapped: dict[int, Allocation] = {}
        self.locked: dict[int, range] = {}
        self.log: list[str] = []
        self._threads = [threading.get_ident()] if bound else None

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[None]:
        threads = [] if self._threads is None else self._threads
        threads.append(threading.get_ident())
        try:
            yield
        finally:
            threads.remove(threading.get_ident())

    def _check_thread(self) -> None:
        here = threading.get_ident()
        assert self._threads is None or here in self._threads, "another thread's context"

    def _begin(self, entry: str, stream: FakeStream, work: Callable[[], None]) -> None:
        self._check_thread()
        self.log.append(entry)
        stream.work.append(work)

    def _map(self, allocation: Allocation) -> int:
        address = (next(self.machine.numbers) << 32) | 0x100
        self.mapped[address] = allocation
        return address

    def adopt(self, array: np.ndarray) -> None:
        """Take an array of the test's for memory of the device."""
        flat = array.reshape(-1).view(np.uint8)
        self.mapped[array.ctypes.data] = Allocation(self.device, flat)

    def _device_of(self, address: int) -> int:
        base = max(base for base in self.mapped if base <= address)
        return self.mapped[base].device

    def at(self, address: int, nbytes: int) -> np.ndarray:
        """The bytes at an address of this process."""
        for base, allocation in self.mapped.items():
            first = address - base
            if first >= 0 and first + nbytes <= allocation.bytes.nbytes:
                return allocation.bytes[first : first + nbytes]
        raise AssertionError(f"an illegal address was encountered: {address:#x}")

    def read(self, array: Any) -> np.ndarray:
        """A copy of what a `CudaArray` holds, without waiting for anything."""
        found = self.at(array.address, array.nbytes).view(array.dtype)
        return found.reshape(array.shape).copy()

    def write(self, array: Any, values: Any) -> None:
        """Set what a `CudaArray` holds at once."""
        flat = np.ascontiguousarray(values, array.dtype).reshape(-1)
        self.at(array.address, array.nbytes)[:] = flat.view(np.uint8)

    def allocate(self, nbytes: int) -> int:
        if self.machine.used(self.device) + nbytes > self.machine.capacity:
            raise InputError(f"cuda:{self.device} has too little memory: {nbytes}")
        allocation = Allocation(self.device, np.zeros(nbytes, np.uint8))
        self.machine.allocations.append(allocation)
        return self._map(allocation)

    def free(self, address: int) -> None:
        allocation = self.mapped[address]
        assert not allocation.opened, "memory is freed while another process has it open"
        del self.mapped[address]
        self.machine.allocations = [a for a in self.machine.allocations if a is not allocation]

    def free_memory(self) -> int:
        return self.machine.capacity - self.machine.used(self.device)

    def export(self, address: int) -> bytes:
        self.machine.check_sharing("memory", self.device)
        return self.machine.publish(self.mapped[address])

    def open(self, data: bytes) -> int:
        allocation = self.machine.handles[bytes(data)]
        assert self.can_reach(f"GPU {allocation.device}"), (
            "the device's memory can't be mapped here"
        )
        allocation.opened += 1
        return self._map(allocation)

    def unmap(self, address: int) -> None:
        self.mapped.pop(address).opened -= 1

    @property
    def identity(self) -> str:
        return f"GPU {self.device}"

    def can_reach(self, identity: str) -> bool:
        return frozenset((self.device, int(identity[4:]))) not in self.machine.apart

    def stream(self) -> FakeStream:
        stream = FakeStream(self.machine, self.device)
        stream.check_thread = self._check_thread
        return stream

    def event(self, shared: bool = False) -> FakeEvent:
        if shared:
            self.machine.check_sharing("events", self.device)
        event = FakeEvent(self.machine, self.device, shared)
        event.check_thread = self._check_thread
        return event

    def export_event(self, event: FakeEvent) -> bytes:
        return bytes(event.ipc_handle())

    def open_event(self, data: bytes) -> FakeEvent:
        return self.machine.handles[bytes(data)]

    def page_locked(self, nbytes: int) -> np.ndarray:
        return np.zeros(nbytes, np.uint8)

    def lock_pages(self, array: np.ndarray) -> None:
        self.locked[array.ctypes.data] = unlocked_pages(array, self.locked)

    def unlock_pages(self, array: np.ndarray) -> None:
        del self.locked[array.ctypes.data]

    def upload(self, address: int, source: np.ndarray, stream: FakeStream) -> None:
        def work() -> None:
            self.at(address, source.nbytes)[:] = source.reshape(-1).view(np.uint8)

        self._begin(f"upload {source.nbytes}", stream, work)

    def download(self, target: np.ndarray, address: int, stream: FakeStream) -> None:
        def work() -> None:
            target.reshape(-1).view(np.uint8)[:] = self.at(address, target.nbytes)

        self._begin(f"download {target.nbytes}", stream, work)

    def copy(self, target: int, source: int, nbytes: int, stream: FakeStream) -> None:
        def work() -> None:
            pair = frozenset(self._device_of(address) for address in (target, source))
            self.at(target, nbytes)[:] = self.at(source, nbytes) * (
                pair not in self.machine.corrupt
            )

        self._begin(f"copy {nbytes}", stream, work)

    def average(
        self,
        targets: Sequence[int],
        terms: Sequence[tuple[int, float]],
        divisor: float,
        count: int,
        dtype: np.dtype,
        stream: FakeStream,
    ) -> None:
        """The exchange's kernel: the weighted sum of `terms`, in their order, divided."""

        def work() -> None:
            nbytes = count * dtype.itemsize
            pairs = {frozenset((self.device, self._device_of(a))) for a in (*targets, *dict(terms))}
            assert not pairs & self.machine.corrupt
            total = sum(
                self.at(source, nbytes).view(dtype) * dtype.type(share) for source, share in terms
            )
            for target in targets:
                self.at(target, nbytes)[:] = (total / dtype.type(divisor)).view(np.uint8)

        self._begin(f"average {len(terms)}", stream, work)


def unlocked_pages(array: np.ndarray, locked: Mapping[int, range]) -> range:
    """The numbers of an array's pages, none of which may be among those that are locked."""
    assert array.nbytes
    first, last = array.ctypes.data, array.ctypes.data + array.nbytes - 1
    pages = range(first // mmap.PAGESIZE, last // mmap.PAGESIZE + 1)
    for other in locked.values():
        assert pages.stop <= other.start or other.stop <= pages.start, "a page is locked already"
    return pages


def fake_memory(driver: FakeDriver, size: int, dtype: str = "float32") -> Any:
    """What an exchange needs of a `CudaMemory`, with a vector of gradients."""
    buffer = CudaBuffer.create(driver, size * np.dtype(dtype).itemsize)  # type: ignore[arg-type]
    return SimpleNamespace(
        driver=driver,
        stream=driver.stream(),
        use=lambda stream: contextlib.nullcontext(),
        buffers={"gradients": buffer},
        flat={"gradients": buffer.array(size, dtype)},
        layout=SimpleNamespace(dtype=dtype),
        kernel=driver.average,
    )
