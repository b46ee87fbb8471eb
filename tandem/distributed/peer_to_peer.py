"""Averaging over device memory: trainer i averages shard i by copies between the GPUs.

One of the two modules that import PyCUDA, and it does so only when its kernel is compiled.
"""

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tandem.distributed.average import shard
from tandem.distributed.exchange import Exchange, Group
from tandem.errors import InputError
from tandem.memory import HostBuffer
from tandem.memory.cuda import INSTALL, BufferHandle, CudaBuffer, Driver, Stream, import_pycuda

log = logging.getLogger(__name__)

BLOCK = 16 << 20  # bytes that are copied at once, while those before them are being added

Average = Callable[[int, Sequence[tuple[int, float]], int, np.dtype, Stream], None]
"""Called with a target address, (address, weight) of each term, elements, dtype and a stream."""

Detours = Callable[[int], Sequence[np.ndarray]]
"""Gives uint8 (n,) for each trainer, by rank, in host memory that all see. All call it together."""


def detours_by(buffers: Sequence[HostBuffer], group: Group) -> Detours:
    """Detours by buffers that all trainers have, one for each by rank, of any size at first."""

    def detours(nbytes: int) -> list[np.ndarray]:
        buffers[group.rank].resize(nbytes)
        # The others may map these buffers only once they have their size.
        group.barrier()
        return [buffer.array(nbytes, np.uint8) for buffer in buffers]

    return detours


class PeerVectors:
    """A flat vector of every trainer, in device memory that the others have opened.

    Making it is a thing that all trainers do together, and so is closing it: whoever opened a
    vector closes it before its owner does.

    Two GPUs that can't reach each other pass a shard through page-locked host memory, to which both
    have access: the owner copies it there and back, since the other can't open its memory.

    Parameters
    ----------
    group : Group
        This trainer's place.
    driver : Driver
        Its device.
    own : CudaBuffer
        Its vector, which stays the caller's to close, after `close`.
    dtype : str
        Of every vector, "float32" or "float64".
    detours : callable
        See `Detours`: called with a vector's bytes, if any two trainers can't reach each other.

    Raises
    ------
    InputError
        The system does not permit processes to share device memory.
    PeerLost
        Another trainer has ended.
    """

    def __init__(
        self,
        group: Group,
        driver: Driver,
        own: CudaBuffer,
        dtype: str,
        detours: Detours,
    ) -> None:
        self.group, self.driver, self.own, self.dtype = group, driver, own, np.dtype(dtype)
        self.rank = group.rank
        handles: tuple[BufferHandle, ...] = group.all_gather_object(own.handle())
        self.trainers = len(handles)
        self._numbers = [handle.device for handle in handles]
        self._devices = group.all_gather_object(driver.identity)
        reach = group.all_gather_object(tuple(driver.can_reach(device) for device in self._devices))
        self._apart = [
            [i != j and not (reach[i][j] and reach[j][i]) for j in range(self.trainers)]
            for i in range(self.trainers)
        ]
        self._buffers = [self._open(rank, handle) for rank, handle in enumerate(handles)]
        self._detours = self._lock(detours) if self.has_detours else {}
        if self.rank == 0:
            self._warn()

    @property
    def size(self) -> int:
        """Elements of each vector."""
        return self.own.nbytes // self.dtype.itemsize

    @property
    def has_detours(self) -> bool:
        """Whether any two trainers can't reach each other."""
        return any(any(row) for row in self._apart)

    def is_apart(self, rank: int) -> bool:
        """Whether this trainer and another can't reach each other."""
        return self._apart[self.rank][rank]

    def is_here(self, rank: int) -> bool:
        """Whether a trainer's vector can be read where it is: it lies on this trainer's device."""
        return self._devices[rank] == self.driver.identity and not self.is_apart(rank)

    @property
    def are_all_here(self) -> bool:
        """Whether every vector lies on this trainer's device."""
        return all(self.is_here(rank) for rank in range(self.trainers))

    def address(self, rank: int, element: int) -> int:
        """Where an element of a trainer's vector is, as this process sees it."""
        buffer = self._buffers[rank]
        if buffer is None:
            raise ValueError(f"trainer {rank}'s memory can't be reached from trainer {self.rank}")
        return buffer.address + element * self.dtype.itemsize

    def detour(self, owner: int, part: slice) -> np.ndarray:
        """The page-locked host memory by which elements of a trainer's vector pass."""
        return self._detours[owner].view(self.dtype)[part]

    def close(self) -> None:
        """Give up the others' vectors. Then meet them, and then every owner may close its own."""
        for rank, buffer in enumerate(self._buffers):
            if buffer is not None and rank != self.rank:
                buffer.close()
        for detour in self._detours.values():
            self.driver.unlock_pages(detour)
        self._detours.clear()

    def _open(self, rank: int, handle: BufferHandle) -> CudaBuffer | None:
        if rank == self.rank:
            return self.own
        return None if self.is_apart(rank) else CudaBuffer.open(self.driver, handle)

    def _lock(self, detours: Detours) -> dict[int, np.ndarray]:
        """Page-lock the host memory of each pair of which this trainer is one."""
        found = detours(self.own.nbytes)
        others = [rank for rank in range(self.trainers) if self.is_apart(rank)]
        passed_by = {rank: found[rank] for rank in ([self.rank, *others] if others else [])}
        for detour in passed_by.values():
            self.driver.lock_pages(detour)
        return passed_by

    def _warn(self) -> None:
        names = {d: f"cuda:{n}" for d, n in zip(self._devices, self._numbers, strict=True)}
        if len(set(names.values())) < len(names):  # each trainer is shown its own, as cuda:0
            names = {device: device for device in names}
        pairs = {
            " and ".join(sorted((names[self._devices[i]], names[self._devices[j]])))
            for i, j in itertools.combinations(range(self.trainers), 2)
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

    def place(self, rank: int) -> int:
        """Where the block of a trainer's vector goes."""
        return self.scratch.address + rank * BLOCK


class PeerAverage(Exchange):
    """Average flat vectors in device memory.

    The trainers meet; trainer i reads shard i of all vectors, block by block, adds them in rank
    order and writes the sum into all vectors; they meet again. Each element is computed once, so
    all vectors hold the same bits afterwards. Nobody else touches shard i, so no group lies
    between, unless shards pass through the host.

    Copies between devices don't make the host wait. So a trainer lets its device finish before it
    goes to a group: its step before the first, its copies before the others.

    Parameters
    ----------
    vectors : PeerVectors
        Every trainer's vector.
    step : Stream
        On which this trainer computes, before and after the exchange.
    average : callable, optional
        The kernel; by default it is compiled, which needs nvcc.

    Raises
    ------
    InputError
        The device has too little memory for blocks of all vectors, or the kernel can't be compiled.
    """

    def __init__(self, vectors: PeerVectors, step: Stream, average: Average | None = None) -> None:
        self._vectors, self._step, self._driver = vectors, step, vectors.driver
        self._add = self._compile() if average is None else average
        # Of two blocks, one is on its way while the other is added.
        self._tracks = [self._track() for _ in range(2)]

    @property
    def trainers(self) -> int:
        """How many there are."""
        return self._vectors.trainers

    def close(self) -> None:
        """Wait for what is under way, and free the memory for blocks."""
        for track in self._tracks:
            track.stream.synchronize()
            track.scratch.close()

    def _compile(self) -> Average:
        """Compile for any number of terms, one trainer after another.

        PyCUDA keeps what it has compiled in files that it does not write whole or not at all.
        """
        vectors = self._vectors
        for rank in range(vectors.trainers):
            if rank == vectors.rank:
                found = compile_average(vectors.dtype.name, vectors.trainers)
            vectors.group.barrier()
        return found

    def _track(self) -> _Track:
        size = 0 if self._vectors.are_all_here else self._vectors.trainers * BLOCK
        return _Track(self._driver.stream(), CudaBuffer.create(self._driver, size, "blocks"))

    def average(self, shares: Sequence[float], part: slice | None = None) -> None:
        """Replace every vector by the weighted sum of all.

        Parameters
        ----------
        shares : sequence of float
            Weights by rank, of which one is not 0. A vector of weight 0 is not read.
        part : slice, optional
            Of the vectors; the rest stays as it is.
        """
        vectors = self._vectors
        if vectors.trainers == 1 and shares[0] == 1:
            return
        shards = self._shards(slice(0, vectors.size) if part is None else part)
        self._step.synchronize()
        if vectors.has_detours:
            self._lend(shares, shards)
        vectors.group.barrier()
        blocks = _blocks(shards[vectors.rank], vectors)
        for track, block in zip(itertools.cycle(self._tracks), blocks):
            self._average_block(track, block, shares)
        self._finish()
        vectors.group.barrier()
        if vectors.has_detours:
            self._take_back(shards)

    def _shards(self, part: slice) -> list[slice]:
        """What each trainer adds, by rank."""
        trainers, start = self._vectors.trainers, part.start
        shards = [shard(part.stop - start, trainers, rank) for rank in range(trainers)]
        return [slice(start + each.start, start + each.stop) for each in shards]

    def _lend(self, shares: Sequence[float], shards: Sequence[slice]) -> None:
        """Copy to the host what is asked for by those who can't reach this vector."""
        vectors = self._vectors
        if shares[vectors.rank] > 0:
            for part in self._apart(shards):
                address = vectors.address(vectors.rank, part.start)
                target = vectors.detour(vectors.rank, part)
                self._driver.download(target, address, self._tracks[0].stream)
        self._finish()

    def _take_back(self, shards: Sequence[slice]) -> None:
        """Copy from the host what they have made of it."""
        vectors = self._vectors
        for part in self._apart(shards):
            address = vectors.address(vectors.rank, part.start)
            source = vectors.detour(vectors.rank, part)
            self._driver.upload(address, source, self._tracks[0].stream)
        self._finish()

    def _apart(self, shards: Sequence[slice]) -> list[slice]:
        """The shards of those who can't reach this vector."""
        return [
            part
            for rank, part in enumerate(shards)
            if self._vectors.is_apart(rank) and part.start < part.stop
        ]

    def _average_block(self, track: _Track, block: slice, shares: Sequence[float]) -> None:
        vectors, driver = self._vectors, self._driver
        terms = [
            (self._fetch(track, rank, block), share)
            for rank, share in enumerate(shares)
            if share > 0
        ]
        count = block.stop - block.start
        target = vectors.address(vectors.rank, block.start)
        self._add(target, terms, count, vectors.dtype, track.stream)
        for rank in range(vectors.trainers):
            if rank == vectors.rank:
                continue
            if vectors.is_apart(rank):
                driver.download(vectors.detour(rank, block), target, track.stream)
            else:
                there = vectors.address(rank, block.start)
                driver.copy(there, target, count * vectors.dtype.itemsize, track.stream)

    def _fetch(self, track: _Track, rank: int, block: slice) -> int:
        """Give the address, on this device, of a block of a trainer's vector."""
        vectors, driver = self._vectors, self._driver
        if vectors.is_here(rank):
            return vectors.address(rank, block.start)
        place = track.place(rank)
        if vectors.is_apart(rank):
            driver.upload(place, vectors.detour(rank, block), track.stream)
        else:
            nbytes = (block.stop - block.start) * vectors.dtype.itemsize
            driver.copy(place, vectors.address(rank, block.start), nbytes, track.stream)
        return place

    def _finish(self) -> None:
        for track in self._tracks:
            track.stream.synchronize()


class PeerAverageParameters(PeerAverage):
    """`AverageParameters` on GPUs: weights and momenta, after the update."""

    def after_update(self, shares: Sequence[float]) -> None:
        """Average weights and momenta over the trainers, weighted by `shares`."""
        self.average(shares)


class PeerAverageGradients(PeerAverage):
    """`AverageGradients` on GPUs: before the update, half the bytes."""

    def before_update(self, shares: Sequence[float]) -> None:
        """Average gradients over the trainers, weighted by `shares`."""
        self.average(shares)


class PeerWithin:
    """Ranks of one machine, on its GPUs. A `tandem.distributed.allreduce.Within`.

    Parameters
    ----------
    peers : PeerAverage
        Of the ranks of this machine.
    part : slice
        Of their vectors.
    """

    def __init__(self, peers: PeerAverage, part: slice) -> None:
        self._peers, self._part = peers, part

    def collect(self, shares: Sequence[float]) -> None:
        """See `Within`: all get the sum, and the first one's is used."""
        self._peers.average(shares, self._part)

    def hand_out(self) -> None:
        """See `Within`: the sum in which the first alone counts."""
        self._peers.average([1.0] + [0.0] * (self._peers.trainers - 1), self._part)


def _blocks(part: slice, vectors: PeerVectors) -> list[slice]:
    """The parts of a shard that are worked on one after another; all at once, if none is copied."""
    step = vectors.size if vectors.are_all_here else BLOCK // vectors.dtype.itemsize
    starts = range(part.start, part.stop, step)
    return [slice(start, min(start + step, part.stop)) for start in starts]


def compile_average(dtype: str, most_terms: int) -> Average:
    """Compile the kernels that add weighted blocks, for the device of the present context.

    Every product and every sum is rounded by itself, never fused: the result has the bits of
    `tandem.distributed.kernels.average_into_all`.

    Parameters
    ----------
    dtype : "float32" or "float64"
    most_terms : int
        How many vectors are added at most; PyCUDA keeps the compiled kernels on disk.

    Returns
    -------
    callable
        See `Average`.

    Raises
    ------
    InputError
        PyCUDA or nvcc is missing, or the place on disk can't be written.
    """
    cuda = import_pycuda()
    kernels = {n: _compile(cuda, average_source(dtype, n)) for n in range(1, most_terms + 1)}
    threads, largest_grid = 256, 4096

    def average(
        target: int,
        terms: Sequence[tuple[int, float]],
        count: int,
        dtype: np.dtype,
        stream: Stream,
    ) -> None:
        arguments: list[Any] = [np.uintp(target), np.uint64(count)]
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
    """The kernel's CUDA source.

    Parameters
    ----------
    dtype : "float32" or "float64"
    terms : int
        How many vectors it adds, at least 1.
    """
    real, letter = {"float32": ("float", "f"), "float64": ("double", "d")}[dtype]
    arguments = "".join(f", const {real} *x{k}, {real} s{k}" for k in range(terms))
    products = [f"__{letter}mul_rn(x{k}[i], s{k})" for k in range(terms)]
    total = products[0]
    for product in products[1:]:
        total = f"__{letter}add_rn({total}, {product})"
    return f"""
__global__ void average({real} *target, unsigned long long count{arguments})
{{
    unsigned long long step = (unsigned long long) gridDim.x * blockDim.x;
    unsigned long long i = (unsigned long long) blockIdx.x * blockDim.x + threadIdx.x;
    for (; i < count; i += step)
        target[i] = {total};
}}
"""
