"""Averaging over device memory: trainer i averages shard i by copies between the GPUs.

One of the two modules that import PyCUDA, and it does so only when its kernel is compiled.
"""

import copy
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tandem.distributed.allreduce import AllReduce, shard
from tandem.distributed.group import Group
from tandem.distributed.shares import weights_and_divisor
from tandem.errors import InputError
from tandem.memory.cuda import INSTALL, BufferHandle, CudaBuffer, CudaDriver, Stream, import_pycuda

log = logging.getLogger(__name__)

BLOCK = 16 << 20  # bytes that are copied at once, while those before them are being added

Kernel = Callable[[int, Sequence[tuple[int, float]], float, int, np.dtype, Stream], None]
"""Called with a target's address, (address, weight) of each term, what their sum is divided by, the
number of elements, their dtype, and a stream."""


class PeerVectors:
    """A flat vector of every trainer of a machine, in device memory that the others have opened.

    Making and closing it is collective: a trainer that opened a vector closes it before its owner
    does, which is the caller, after `close`.

    Two GPUs that can't reach each other pass a shard through page-locked host memory, to which both
    have access: the owner copies it there and back, since the other can't open its memory.

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
        self._buffers = [self._open(rank, handle) for rank, handle in enumerate(handles)]
        self._staging = self._lock_pages() if self.is_any_apart else {}
        if group.rank == 0:
            self._warn()

    @property
    def size(self) -> int:
        return self.own.nbytes // self.dtype.itemsize

    @property
    def is_any_apart(self) -> bool:
        return any(any(row) for row in self._apart)

    def is_apart(self, rank: int) -> bool:
        """Whether this trainer and another can't reach each other."""
        return self._apart[self.group.rank][rank]

    def is_here(self, rank: int) -> bool:
        """Whether a trainer's vector lies on this trainer's device, and can be read there."""
        return self._devices[rank] == self.driver.identity and not self.is_apart(rank)

    @property
    def are_all_here(self) -> bool:
        return all(self.is_here(rank) for rank in range(self.group.size))

    def address(self, rank: int, element: int) -> int:
        """Where an element of a trainer's vector is, as this process sees it."""
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

    def _warn(self) -> None:
        names = {d: f"cuda:{n}" for d, n in zip(self._devices, self._numbers, strict=True)}
        if len(set(names.values())) < len(names):  # each trainer is shown its own, as cuda:0
            names = {device: device for device in names}
        pairs = {
            " and ".join(sorted((names[self._devices[i]], names[self._devices[j]])))
            for i, j in itertools.combinations(range(self.group.size), 2)
            if self._apart[i][j]
        }
        if pairs:
            log.warning(
                "%s can't reach each other's memory: what they exchange goes through the host, "
                "which is slower",
                ", ".join(sorted(pairs)),
            )


@dataclass(frozen=True)
class _Track:
    """A stream, and memory for one block of each vector that is copied on it."""

    stream: Stream
    scratch: CudaBuffer


class PeerToPeerAllReduce(AllReduce):
    """Average flat vectors in device memory, by copies between the GPUs of one machine.

    Between two barriers, trainer i reads shard i of all vectors, block by block, adds them in rank
    order and writes the sum into all vectors. Each element is computed once, so all vectors hold
    the same bits afterwards. No other trainer touches shard i, so there is no further barrier.

    Copies between devices don't make the host wait. So a trainer lets its device finish before it
    enters a barrier: its step, on stream `step`, before the first, its copies before the others.

    Raises InputError if the device has too little memory for blocks of all vectors, or the kernel,
    which by default needs nvcc, can't be compiled.
    """

    def __init__(self, vectors: PeerVectors, step: Stream, kernel: Kernel | None = None) -> None:
        self._vectors, self._step, self._driver = vectors, step, vectors.driver
        self._part = slice(0, vectors.size)
        self._add = self._compile() if kernel is None else kernel
        # Of two blocks, one is in flight while the other is added.
        self._tracks = [self._track() for _ in range(2)]

    def of(self, part: slice) -> "PeerToPeerAllReduce":
        """The same for part of the vectors; the rest stays as it is."""
        found = copy.copy(self)
        found._part = part
        return found

    def close(self) -> None:
        """Wait for all copies, and free the memory for blocks."""
        for track in self._tracks:
            track.stream.synchronize()
            track.scratch.close()

    def _compile(self) -> Kernel:
        """Compile for any number of terms, one trainer after another.

        PyCUDA keeps what it has compiled in files that it does not write whole or not at all.
        """
        group = self._vectors.group
        for rank in range(group.size):
            if rank == group.rank:
                found = compile_average(self._vectors.dtype.name, group.size)
            group.barrier()
        return found

    def _track(self) -> _Track:
        size = 0 if self._vectors.are_all_here else self._vectors.group.size * BLOCK
        return _Track(self._driver.stream(), CudaBuffer.create(self._driver, size, "blocks"))

    def average(self, vector: Any, shares: Sequence[float]) -> None:
        """Average the vectors that this was made with, wherever `vector` lies."""
        vectors, group = self._vectors, self._vectors.group
        if group.size == 1 and shares[0] == 1:
            return
        shards = self._shards()
        self._step.synchronize()
        if vectors.is_any_apart:
            self._stage(shares, shards)
        group.barrier()
        blocks = _blocks(shards[group.rank], vectors)
        for track, block in zip(itertools.cycle(self._tracks), blocks):
            self._average_block(track, block, shares)
        self._finish()
        group.barrier()
        if vectors.is_any_apart:
            self._take_back(shards)

    def _shards(self) -> list[slice]:
        """What each trainer adds, by rank."""
        trainers, start = self._vectors.group.size, self._part.start
        shards = [shard(self._part.stop - start, trainers, rank) for rank in range(trainers)]
        return [slice(start + each.start, start + each.stop) for each in shards]

    def _stage(self, shares: Sequence[float], shards: Sequence[slice]) -> None:
        """Copy to the host the shards of those who can't reach this vector."""
        if shares[self._vectors.group.rank] > 0:
            for address, pages in self._apart(shards):
                self._driver.download(pages, address, self._tracks[0].stream)
        self._finish()

    def _take_back(self, shards: Sequence[slice]) -> None:
        """Copy back from the host what they averaged."""
        for address, pages in self._apart(shards):
            self._driver.upload(address, pages, self._tracks[0].stream)
        self._finish()

    def _apart(self, shards: Sequence[slice]) -> list[tuple[int, np.ndarray]]:
        """Where the shards lie, and pass, of those who can't reach this vector."""
        vectors, own = self._vectors, self._vectors.group.rank
        return [
            (vectors.address(own, part.start), vectors.staging(own, part))
            for rank, part in enumerate(shards)
            if vectors.is_apart(rank) and part.start < part.stop
        ]

    def _average_block(self, track: _Track, block: slice, shares: Sequence[float]) -> None:
        vectors, driver, group = self._vectors, self._driver, self._vectors.group
        weights, divisor = weights_and_divisor(shares)
        terms = [
            (self._fetch(track, rank, block), weight)
            for rank, weight in enumerate(weights)
            if weight > 0
        ]
        count = block.stop - block.start
        target = vectors.address(group.rank, block.start)
        self._add(target, terms, divisor, count, vectors.dtype, track.stream)
        for rank in range(group.size):
            if vectors.is_apart(rank):
                driver.download(vectors.staging(rank, block), target, track.stream)
            elif rank != group.rank:
                there = vectors.address(rank, block.start)
                driver.copy(there, target, count * vectors.dtype.itemsize, track.stream)

    def _fetch(self, track: _Track, rank: int, block: slice) -> int:
        """Return the address, on this device, of a block of a trainer's vector."""
        vectors, driver = self._vectors, self._driver
        if vectors.is_here(rank):
            return vectors.address(rank, block.start)
        target = track.scratch.address + rank * BLOCK
        if vectors.is_apart(rank):
            driver.upload(target, vectors.staging(rank, block), track.stream)
        else:
            nbytes = (block.stop - block.start) * vectors.dtype.itemsize
            driver.copy(target, vectors.address(rank, block.start), nbytes, track.stream)
        return target

    def _finish(self) -> None:
        for track in self._tracks:
            track.stream.synchronize()


def _blocks(part: slice, vectors: PeerVectors) -> list[slice]:
    """The parts of a shard that are worked on one after another; all at once, if none is copied."""
    step = vectors.size if vectors.are_all_here else BLOCK // vectors.dtype.itemsize
    starts = range(part.start, part.stop, step)
    return [slice(start, min(start + step, part.stop)) for start in starts]


def compile_average(dtype: str, most_terms: int) -> Kernel:
    """Compile the kernels that add 1 to `most_terms` weighted blocks, for the present context.

    Products, sums and the quotient are rounded one by one, never fused: the result has the bits of
    `tandem.distributed.kernels.average_into_all`. PyCUDA keeps the compiled kernels on disk. Raises
    InputError if PyCUDA or nvcc is missing, or the folder on disk can't be written.
    """
    cuda = import_pycuda()
    kernels = {n: _compile(cuda, average_source(dtype, n)) for n in range(1, most_terms + 1)}
    threads, largest_grid = 256, 4096

    def average(
        target: int,
        terms: Sequence[tuple[int, float]],
        divisor: float,
        count: int,
        dtype: np.dtype,
        stream: Stream,
    ) -> None:
        arguments: list[Any] = [np.uintp(target), np.uint64(count), dtype.type(divisor)]
        for source, share in terms:
            arguments += [np.uintp(source), dtype.type(share)]
        grid = (min(largest_grid, -(-count // threads)), 1)
        kernels[len(terms)](*arguments, block=(threads, 1, 1), grid=grid, stream=stream)

    return average


def _compile(cuda: Any, source: str) -> Any:
    from pycuda.compiler import SourceModule

    try:
        return SourceModule(source).get_function("average")
    except (OSError, cuda.Error) as error:
        raise InputError(
            f"the kernel of the exchange can't be compiled: {error}; PyCUDA needs the CUDA "
            f"toolkit ({INSTALL}) and a folder to keep kernels in (PYCUDA_CACHE_DIR)"
        ) from error


def average_source(dtype: str, terms: int) -> str:
    """The CUDA source of the kernel that adds `terms` vectors, at least 1."""
    real, letter = {"float32": ("float", "f"), "float64": ("double", "d")}[dtype]
    arguments = "".join(f", const {real} *x{k}, {real} s{k}" for k in range(terms))
    products = [f"__{letter}mul_rn(x{k}[i], s{k})" for k in range(terms)]
    total = products[0]
    for product in products[1:]:
        total = f"__{letter}add_rn({total}, {product})"
    return f"""
__global__ void average({real} *target, unsigned long long count, {real} divisor{arguments})
{{
    unsigned long long step = (unsigned long long) gridDim.x * blockDim.x;
    unsigned long long i = (unsigned long long) blockIdx.x * blockDim.x + threadIdx.x;
    for (; i < count; i += step)
        target[i] = __{letter}div_rn({total}, divisor);
}}
"""
