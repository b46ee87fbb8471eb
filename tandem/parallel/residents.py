"""Resident variables: the same extent of every rank's memory, which all ranks see."""

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from tandem.distributed import LocalGroup, PeerLost
from tandem.distributed.allreduce import ShardedAllReduce, shard
from tandem.distributed.group import RankGroup
from tandem.distributed.shares import weights_and_divisor
from tandem.errors import InputError
from tandem.memory import HostBuffer
from tandem.memory.flat import ALIGNMENT
from tandem.parallel.fold import Fold
from tandem.parallel.messages import Extent

log = logging.getLogger(__name__)

LEAST_MEMORY = 1 << 20  # bytes of a rank's first memory


class RankMemory(NamedTuple):
    """The ranks of mpirun or torchrun, all on one machine, and the memory of each."""

    group: RankGroup
    buffers: Sequence[HostBuffer]


Access = Sequence[HostBuffer] | LocalGroup | RankGroup | RankMemory
"""The memory that a rank is given: that of all, or the group in which that of GPUs is opened.

Ranks of mpirun or torchrun that can't share it have their group, and memory of their own.
"""


class Residents(ABC):
    """The memory of a pool's resident variables, as one rank has it."""

    is_seen: ClassVar[bool]  # whether each rank reads and writes all ranks' values where they lie
    ranks: RankGroup  # of mpirun or torchrun

    @abstractmethod
    def join(self, access: Any, rank: int) -> None:
        """Become that of a rank of a team; the variables of an earlier one keep their values."""

    @abstractmethod
    def allocate(self, nbytes: int, dtype: np.dtype) -> tuple[int, int]:
        """Reserve zeros, in the master; return the block and the first byte of them.

        Raises InputError if there is too little memory.
        """

    @abstractmethod
    def variable(self, extent: Extent, name: str | None) -> Any:
        """Make this rank's variable over an extent, with the value that lies there."""

    @abstractmethod
    def reduce(self, extent: Extent, op: str, shares: Sequence[float]) -> None:
        """Do this rank's part of a reduction into all ranks' values, see `reduce_shard`.

        All ranks do it in one task, and have finished the task before.
        """

    def value(self, extent: Extent, rank: int) -> np.ndarray:
        """Return a rank's value, between tasks, where it lies and may be written, if `is_seen`."""
        raise TypeError("values of other ranks can't be seen")

    def reduces(self, extent: Extent, op: str) -> bool:
        """Return whether `reduce` can do it; another reduction goes through staging memory."""
        return True

    # Of GPUs

    @property
    def blocks(self) -> tuple[int, ...]:
        """Bytes of each block."""
        return ()

    def extend(self, blocks: Sequence[int]) -> None:  # noqa: B027
        """Allocate the blocks that this rank does not have yet; InputError if memory is short."""

    def is_open(self, extent: Extent, op: str) -> bool:
        """Return whether nothing has to be opened before `reduces` can be asked."""
        return True

    def open(self, extent: Extent) -> None:  # noqa: B027
        """Open the block in which an extent lies on all other ranks. Collective."""

    @property
    def has_opened(self) -> bool:
        """Return whether there is memory of other ranks to be released."""
        return False

    def release(self) -> None:  # noqa: B027
        """Give up the memory of other ranks, when all work on it is done."""

    def leave(self) -> None:  # noqa: B027
        """Leave the team; variables keep their values, until the process ends."""


class HostResidents(Residents):
    """Resident variables in host memory: one buffer for each rank, which only grows."""

    is_seen = True

    def __init__(self) -> None:
        self._buffers: Sequence[HostBuffer] = ()
        self._rank = self._end = 0

    def join(self, access: Sequence[HostBuffer], rank: int) -> None:
        self._buffers, self._rank = access, rank

    def allocate(self, nbytes: int, dtype: np.dtype) -> tuple[int, int]:
        start, end = self._end, self._end + -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
        for buffer in self._buffers:
            if end > (present := buffer.nbytes):
                try:  # pages that nobody has touched take no memory
                    buffer.resize(max(end, 2 * present, LEAST_MEMORY))
                except InputError:
                    buffer.resize(end)
        self._end = end
        return 0, start

    def variable(self, extent: Extent, name: str | None) -> Any:
        from tandem.backend import device_shared

        return device_shared(None, name, "cpu", self.value(extent, self._rank))

    def value(self, extent: Extent, rank: int) -> np.ndarray:
        return self._buffers[rank].array(extent.shape, np.dtype(extent.dtype), extent.offset)

    def reduce(self, extent: Extent, op: str, shares: Sequence[float]) -> None:
        vectors = [self.value(extent, rank).reshape(-1) for rank in range(len(self._buffers))]
        reduce_shard(vectors, op, shares, self._rank)


class NearResidents(HostResidents):
    """Resident variables of ranks of mpirun or torchrun that are all on one machine."""

    def join(self, access: Any, rank: int) -> None:
        self.ranks = access.group
        super().join(access.buffers, rank)


class RankResidents(HostResidents):
    """Resident variables of a rank of mpirun or torchrun, in memory of its own."""

    is_seen = False

    def __init__(self) -> None:
        super().__init__()
        self._buffers = [HostBuffer.create(0, "residents")]
        self._reductions: dict[Extent, ShardedReduction] = {}

    def join(self, access: Any, rank: int) -> None:
        self.ranks = access

    @property
    def blocks(self) -> tuple[int, ...]:
        return (self._buffers[0].nbytes,)

    def extend(self, blocks: Sequence[int]) -> None:
        self._buffers[0].resize(blocks[0])

    def reduce(self, extent: Extent, op: str, shares: Sequence[float]) -> None:
        vector = self.value(extent, 0).reshape(-1)
        if extent not in self._reductions:
            self._reductions[extent] = ShardedReduction(self.ranks, vector)
        self._reductions[extent].reduce(vector, op, shares)


class ShardedReduction(ShardedAllReduce):
    """Reductions of every kind, with the bits of `reduce_shard`."""

    def reduce(self, vector: np.ndarray, op: str, shares: Sequence[float]) -> None:
        """Replace every rank's vector by the reduction of all."""
        with met():
            if op in ("avg", "sum") and vector.dtype in (np.float32, np.float64):
                self.average(vector, shares)
            else:
                self._reduce(vector, op, shares)

    def _reduce(self, vector: np.ndarray, op: str, shares: Sequence[float]) -> None:
        group, nbytes = self._group, vector.dtype.itemsize
        parts = [slice(part.start * nbytes, part.stop * nbytes) for part in self._parts]
        # As bytes: MPI does not know every dtype.
        group.all_to_all(vector.view(np.uint8), self._received.view(np.uint8), parts)
        vector[self._own] = reduced(self._received, op, shares)
        group.all_gather(vector.view(np.uint8), parts)


def reduce_shard(
    vectors: Sequence[np.ndarray], op: str, shares: Sequence[float], rank: int
) -> None:
    """Replace shard `rank` of all vectors by its reduction over them, in rank order.

    Parameters
    ----------
    vectors : sequence of ndarray, (n,)
        By rank, of one size and dtype, each in one piece.
    op : "avg", "sum", "prod", "max" or "min"
    shares : sequence of float
        Weights by rank, which add up to 1 for "avg", and are 1 for other reductions. A vector of
        weight 0 is not read, but written.
    """
    part = shard(vectors[0].size, len(vectors), rank)
    parts = [vector[part] for vector in vectors]
    # Loops are compiled for the types of the processor, of which float16 is none.
    if op in ("avg", "sum") and parts[0].dtype in (np.float32, np.float64):
        from tandem.distributed import kernels

        kernels.average_into_all(parts, shares)
        return
    total = reduced(parts, op, shares)
    for piece in parts:
        piece[...] = total


def reduced(
    values: Sequence[np.ndarray], op: str, shares: Sequence[float], widens: bool = False
) -> np.ndarray:
    """Reduce values in rank order, weighted as `reduce_shard` does it, with the same bits.

    Sums and products of integers wrap, unless it `widens` them to 64 bits.
    """
    weights, divisor = weights_and_divisor(shares) if op == "avg" else (shares, 1.0)
    fold = Fold(op, divisor, widens)
    for value, weight in zip(values, weights, strict=True):
        if weight > 0:
            fold.add(value, weight)
    return np.array(fold.value())


@contextlib.contextmanager
def met() -> Iterator[None]:
    """Context of work in which ranks wait for each other: one that fails has to end.

    Otherwise the others would wait for ever.
    """
    try:
        yield
    except PeerLost:
        raise
    except Exception as error:
        log.exception("failed while other ranks waited")
        raise PeerLost(f"this rank has failed while others waited for it: {error}") from error
