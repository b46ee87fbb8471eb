"""Averaging over device memory: trainer i averages shard i by a kernel that reads all vectors."""

import copy
import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tandem.distributed.allreduce import AllReduce, shard
from tandem.distributed.gpu_kernel import MOST_TRAINERS, Kernel, compile_average
from tandem.distributed.group import Group
from tandem.distributed.shares import weights_and_divisor
from tandem.errors import InputError
from tandem.memory.cuda import BufferHandle, CudaBuffer, CudaDriver, Event, Stream

log = logging.getLogger(__name__)

PATTERN = 1 << 20  # bytes by which each pair tries its access
BLOCK = 16 << 20  # bytes that pass through the host at once, while those before are being added


class PeerVectors:
    """A flat vector of every trainer of a machine, in device memory that the others have opened.

    Making and closing it is collective: a trainer that opened a vector closes it before its owner
    does, which is the caller, after `close`.

    Two GPUs that can't reach each other pass a shard through page-locked host memory, to which both
    have access: the owner copies it there and back, since the other can't open its memory. So do
    two whom the driver reports to reach each other and who copy wrong bytes, which an IOMMU can
    cause: each pair copies a pattern once.

    Raises InputError if the system does not permit processes to share device memory.
    """

    def __init__(self, group: Group, driver: CudaDriver, own: CudaBuffer, dtype: str) -> None:
        self.group, self.driver, self.own, self.dtype = group, driver, own, np.dtype(dtype)
        handles = group.all_gather_object(own.handle())
        self._numbers = [handle.device for handle in handles]
        self._devices = group.all_gather_object(driver.identity)
        reach = group.all_gather_object(tuple(driver.can_reach(device) for device in self._devices))
        ranks = range(group.size)
        self._apart = [[i != j and not (reach[i][j] and reach[j][i]) for j in ranks] for i in ranks]
        self._warn("can't reach each other's memory", self._apart)
        if group.size > 1:
            wrong = group.all_gather_object(self._copies_wrongly())
            found = [[wrong[i][j] or wrong[j][i] for j in ranks] for i in ranks]
            self._warn("copy wrong bytes from each other's memory", found)
            self._apart = [[self._apart[i][j] or found[i][j] for j in ranks] for i in ranks]
        self._buffers = [self._open(rank, handle) for rank, handle in enumerate(handles)]
        self._staging = self._lock_pages() if self.is_any_apart else {}

    @property
    def size(self) -> int:
        return self.own.nbytes // self.dtype.itemsize

    @property
    def is_any_apart(self) -> bool:
        return any(any(row) for row in self._apart)

    def is_apart(self, rank: int) -> bool:
        """Return whether this trainer and another can't reach each other."""
        return self._apart[self.group.rank][rank]

    def address(self, rank: int, element: int) -> int:
        """Return where an element of a trainer's vector is, as this process sees it."""
        buffer = self._buffers[rank]
        if buffer is None:
            raise ValueError(f"trainer {rank}'s memory can't be reached from here")
        return buffer.address + element * self.dtype.itemsize

    def staging(self, owner: int, part: slice) -> np.ndarray:
        """The page-locked host memory through which elements of a trainer's vector pass."""
        return self._staging[owner].view(self.dtype)[part]

    def close(self) -> None:
        """Give up the others' vectors; after a barrier every owner may close its own."""
        for rank, buffer in enumerate(self._buffers):
            if buffer is not None and rank != self.group.rank:
                buffer.close()
        for pages in self._staging.values():
            self.driver.unlock_pages(pages)
        self._staging.clear()

    def _open(self, rank: int, handle: BufferHandle) -> CudaBuffer | None:
        if rank == self.group.rank:
            return self.own
        return None if self.is_apart(rank) else CudaBuffer.open(self.driver, handle)

    def _lock_pages(self) -> dict[int, np.ndarray]:
        """Page-lock host memory for each trainer that this one can't reach, and for its own."""
        shared = self.group.shared_memory(self.own.nbytes)
        others = [rank for rank in range(self.group.size) if self.is_apart(rank)]
        staging = {rank: shared[rank] for rank in ([self.group.rank, *others] if others else [])}
        for pages in staging.values():
            self.driver.lock_pages(pages)
        return staging

    def _copies_wrongly(self) -> tuple[bool, ...]:
        """Test if a copy from each other trainer differs from what is there, by rank. Collective.

        Not from those that are apart, or on the same device.
        """
        driver, here = self.driver, self.group.rank
        own, copied = (CudaBuffer.create(driver, PATTERN, name) for name in ("pattern", "copied"))
        stream, pages = driver.stream(), driver.page_locked(PATTERN)
        pages[:] = _pattern(here)
        driver.upload(own.address, pages, stream)
        stream.synchronize()
        wrong = [False] * self.group.size
        for rank, handle in enumerate(self.group.all_gather_object(own.handle())):
            if self._devices[rank] == self._devices[here] or self.is_apart(rank):
                continue
            other = CudaBuffer.open(driver, handle)
            driver.copy(copied.address, other.address, PATTERN, stream)
            driver.download(pages, copied.address, stream)
            stream.synchronize()
            wrong[rank] = not np.array_equal(pages, _pattern(rank))
            other.close()
        self.group.barrier()
        own.close()
        copied.close()
        return tuple(wrong)

    def _warn(self, what: str, apart: list[list[bool]]) -> None:
        """Name on rank 0, once, the pairs that are apart."""
        if self.group.rank > 0:
            return
        names = {d: f"cuda:{n}" for d, n in zip(self._devices, self._numbers, strict=True)}
        if len(set(names.values())) < len(names):  # each trainer is shown its own, as cuda:0
            names = {device: device for device in names}
        pairs = {
            " and ".join(sorted((names[self._devices[i]], names[self._devices[j]])))
            for i, j in itertools.combinations(range(self.group.size), 2)
            if apart[i][j]
        }
        if pairs:
            log.warning(
                "%s %s: what they exchange goes through the host, which is slower",
                ", ".join(sorted(pairs)),
                what,
            )


def _pattern(rank: int) -> np.ndarray:
    """The bytes that a trainer shows the others."""
    return np.random.default_rng(rank).integers(0, 256, PATTERN, np.uint8)


class DeviceBarrier(ABC):
    """A barrier of all trainers' devices.

    Work on a stream that follows it waits for what precedes it on those of all trainers.
    """

    def __init__(self, group: Group) -> None:
        self._group = group

    @abstractmethod
    def cross(self, stream: Stream, message: Any = None) -> tuple[Any, ...]:
        """Make later work on this stream wait for earlier work on those of all. Collective.

        Each host may pass a message to all; those of all are returned, by rank.
        """

    def close(self) -> None:  # noqa: B027
        """Give up what others have made, when the stream has no more work."""


class WaitingBarrier(DeviceBarrier):
    """Each host waits for its device, and then for the other hosts."""

    def cross(self, stream: Stream, message: Any = None) -> tuple[Any, ...]:
        stream.synchronize()
        return self._group.all_gather_object(message)


class EventBarrier(DeviceBarrier):
    """A barrier by shared events; no host waits for a device.

    Each trainer records an event on its stream, the hosts meet, and then each makes its stream wait
    for the others' events. The hosts must meet, since a stream does not wait for an event that has
    yet to be recorded.

    A stream waits for what an event had recorded when it was told to, whatever is recorded later
    (CUDA Driver API, cuEventRecord). But an event must not be recorded while another process is
    about to tell its stream to wait for it, which would then wait for other work. So two events of
    each trainer take turns. One that is recorded at a barrier is recorded again two barriers later,
    after the hosts have met at the barrier between; and a host goes there only after it has told
    its stream to wait at the one before. Nothing else limits how far hosts run ahead of devices.

    An event is recorded on its own device, and streams of any device may wait for it
    (cuStreamWaitEvent); each process opens the others' in its own context, as NVIDIA's sample
    simpleIPC does with a process for each GPU.
    """

    def __init__(self, group: Group, own: Sequence[Event], others: list[Sequence[Event]]) -> None:
        super().__init__(group)
        self._own, self._others, self._turn = own, others, 0

    def cross(self, stream: Stream, message: Any = None) -> tuple[Any, ...]:
        self._own[self._turn].record(stream)
        messages = self._group.all_gather_object(message)
        for events in self._others:
            stream.wait_for_event(events[self._turn])
        self._turn = 1 - self._turn
        return messages

    def close(self) -> None:
        self._others.clear()


def device_barrier(vectors: PeerVectors) -> DeviceBarrier:
    """Make a barrier by events, if all trainers can share them, else by waiting. Collective."""
    group, driver = vectors.group, vectors.driver
    if vectors.is_any_apart:
        return WaitingBarrier(group)
    refused = ""
    try:
        own = [driver.event(shared=True) for _ in range(2)]
        exported = [driver.export_event(event) for event in own]
    except InputError as error:
        own, exported, refused = [], [], str(error)
    others: list[Sequence[Event]] = []
    every = group.all_gather_object(exported)
    try:
        for rank, handles in enumerate(every):
            if rank != group.rank:
                others.append([driver.open_event(handle) for handle in handles])
    except InputError as error:
        refused = str(error)
    found = next(filter(None, group.all_gather_object(refused)), "")
    if not found:
        return EventBarrier(group, own, others)
    if group.rank == 0:
        log.warning("every exchange waits for the GPUs, which is slower: %s", found)
    return WaitingBarrier(group)


@dataclass(frozen=True)
class _Track:
    """A stream, and memory for one block of each vector that passes through the host on it."""

    stream: Stream
    scratch: CudaBuffer


class PeerToPeerAllReduce(AllReduce):
    """Average flat vectors in device memory, between the GPUs of one machine.

    Between two barriers of the devices, trainer i reads shard i of all vectors, adds them in rank
    order and writes the average into all vectors, by one kernel. Each element is computed once, so
    all vectors hold the same bits afterwards. No other trainer touches shard i, so there is no
    further barrier. All of it is work on the stream `step`, and the host waits for none.

    The kernel reads and writes other GPUs' memory directly, which is permitted to it where it is to
    copies (cuDeviceCanAccessPeer). So bytes travel while others are added, and need no memory here.

    Where two GPUs can't reach each other, each trainer waits for its device instead: shards pass
    through the host, block by block, and all trainers that are reached take part as before.

    Raises InputError if there are too many trainers, the device has too little memory for blocks,
    or the kernel can't be compiled.
    """

    def __init__(
        self,
        vectors: PeerVectors,
        step: Stream,
        kernel: Kernel | None = None,
        barrier: DeviceBarrier | None = None,
    ) -> None:
        self._vectors, self._step, self._driver = vectors, step, vectors.driver
        self._part = slice(0, vectors.size)
        group = vectors.group
        if group.size > MOST_TRAINERS:
            raise InputError(f"{group.size} trainers share a machine's GPUs: {MOST_TRAINERS} can")
        self._add = compile_average(vectors.driver, vectors.dtype) if kernel is None else kernel
        # Of two blocks, one is in flight while the other is added.
        self._tracks = [self._track() for _ in range(2)] if vectors.is_any_apart else []
        self._barrier = device_barrier(vectors) if barrier is None else barrier

    def of(self, part: slice) -> "PeerToPeerAllReduce":
        """The same for part of the vectors; the rest stays as it is."""
        found = copy.copy(self)
        found._part = part
        return found

    def close(self) -> None:
        """Wait for this trainer's work, and free the memory for blocks."""
        self._step.synchronize()
        for track in self._tracks:
            track.stream.synchronize()
            track.scratch.close()
        self._barrier.close()

    def _track(self) -> _Track:
        size = self._vectors.group.size * BLOCK
        return _Track(self._driver.stream(), CudaBuffer.create(self._driver, size, "blocks"))

    def average(self, vector: Any, shares: Sequence[float]) -> None:
        """Average the vectors that this was made with, wherever `vector` lies."""
        group = self._vectors.group
        if group.size == 1 and shares[0] == 1:
            return
        shards = self._shards()
        self._stage(shares, shards)
        self._barrier.cross(self._step)
        if self._tracks:
            self._average_blocks(shards[group.rank], shares)
        else:
            self._average(self._step, shards[group.rank], shares, {})
        self._barrier.cross(self._step)
        self._take_back(shards)

    def _shards(self) -> list[slice]:
        """Return what each trainer adds, by rank."""
        trainers, start = self._vectors.group.size, self._part.start
        shards = [shard(self._part.stop - start, trainers, rank) for rank in range(trainers)]
        return [slice(start + each.start, start + each.stop) for each in shards]

    def _average(
        self, stream: Stream, part: slice, shares: Sequence[float], copies: Mapping[int, int]
    ) -> None:
        """Average a part into all vectors that are reached; `copies` are of those that are not.

        They are addresses by rank.
        """
        if part.start == part.stop:
            return
        vectors, ranks = self._vectors, range(self._vectors.group.size)
        weights, divisor = weights_and_divisor(shares)
        reached = {r: vectors.address(r, part.start) for r in ranks if not vectors.is_apart(r)}
        sources = {**reached, **copies}
        terms = [(sources[rank], weight) for rank, weight in enumerate(weights) if weight > 0]
        count = part.stop - part.start
        self._add(list(reached.values()), terms, divisor, count, vectors.dtype, stream)

    # Of those that can't reach each other

    def _stage(self, shares: Sequence[float], shards: Sequence[slice]) -> None:
        """Copy to the host the shards of those who can't reach this vector."""
        if shares[self._vectors.group.rank] > 0:
            for address, pages in self._apart(shards):
                self._driver.download(pages, address, self._step)

    def _take_back(self, shards: Sequence[slice]) -> None:
        """Copy back from the host what they averaged."""
        for address, pages in self._apart(shards):
            self._driver.upload(address, pages, self._step)

    def _apart(self, shards: Sequence[slice]) -> list[tuple[int, np.ndarray]]:
        """Return where the shards lie, and pass, of those who can't reach this vector."""
        vectors, own = self._vectors, self._vectors.group.rank
        return [
            (vectors.address(own, part.start), vectors.staging(own, part))
            for rank, part in enumerate(shards)
            if vectors.is_apart(rank) and part.start < part.stop
        ]

    def _average_blocks(self, part: slice, shares: Sequence[float]) -> None:
        """Average a part block by block, and wait until it is done."""
        vectors, driver, own = self._vectors, self._driver, self._vectors.group.rank
        apart = [rank for rank in range(vectors.group.size) if vectors.is_apart(rank)]
        for track, block in zip(itertools.cycle(self._tracks), _blocks(part, vectors.dtype)):
            copies = {rank: track.scratch.address + rank * BLOCK for rank in apart}
            for rank, address in copies.items():
                if shares[rank] > 0:
                    driver.upload(address, vectors.staging(rank, block), track.stream)
            self._average(track.stream, block, shares, copies)
            for rank in apart:
                pages, there = vectors.staging(rank, block), vectors.address(own, block.start)
                driver.download(pages, there, track.stream)
        for track in self._tracks:
            track.stream.synchronize()


def _blocks(part: slice, dtype: np.dtype) -> list[slice]:
    """The parts of a shard that are worked on one after another."""
    step = BLOCK // dtype.itemsize
    starts = range(part.start, part.stop, step)
    return [slice(start, min(start + step, part.stop)) for start in starts]
