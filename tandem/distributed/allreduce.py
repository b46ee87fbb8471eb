"""Ways to average a vector of which each trainer has its own: one class per way.

The names AR, ASA and ASA16 are Theano-MPI's (Ma, Mao, Taylor 2016, arXiv 1605.08325, section 3.2).
Bytes are moved by a `Group`. Vectors are NumPy arrays, or PyTorch tensors where the group takes
them; the arithmetic follows from which they are.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from tandem.distributed.gloo import GlooGroup
from tandem.distributed.group import Group
from tandem.distributed.shares import weights_and_divisor

Format = Literal["float16", "bfloat16"]

BLOCK = 1 << 15  # elements that are worked on at a time, to stay in a core's cache
_TERMS = 8


class AllReduce(ABC):
    """A way to average vectors over the ranks of a group."""

    @abstractmethod
    def average(self, vector: Any, shares: Sequence[float]) -> None:
        """Replace every rank's vector by the weighted sum of all, the same bits at every rank.

        The vector, float (n,), is always the same memory. Of an average, the shares, which are
        weights by rank, add up to 1; then a vector that is the same at all ranks does not grow,
        but for roundings that cancel. A vector of weight 0 is not read.
        """

    def average_into_first(self, vector: Any, shares: Sequence[float]) -> None:
        """Do this for the first rank's vector at least; the others' hold anything afterwards."""
        self.average(vector, shares)


class SharedMemoryAllReduce(AllReduce):
    """Average vectors in host memory that all ranks of the group see.

    Between two barriers, rank i averages shard i of all vectors, in rank order, and writes it into
    all of them. No other rank touches shard i; each element is computed once, so all vectors hold
    the same bits afterwards.
    """

    def __init__(self, group: Group, vectors: Sequence[np.ndarray]) -> None:
        self._group = group
        part = shard(vectors[0].size, group.size, group.rank)
        self._parts = [vector[part] for vector in vectors]

    def average(self, vector: np.ndarray, shares: Sequence[float]) -> None:
        from tandem.distributed import kernels

        self._run(kernels.average_into_all, shares)

    def average_into_first(self, vector: np.ndarray, shares: Sequence[float]) -> None:
        from tandem.distributed import kernels

        self._run(kernels.average_into_first, shares)

    def _run(self, kernel: Callable[..., None], shares: Sequence[float]) -> None:
        if self._group.size == 1 and shares[0] == 1:
            return
        self._group.barrier()
        kernel(self._parts, shares)
        self._group.barrier()


class LibraryAllReduce(AllReduce):
    """AR: the library's own allreduce.

    The library chooses algorithm and order by size and number of ranks. MPI does not promise the
    same bits at every rank; with the usual algorithms for long vectors each element is added in one
    place, and then they are the same. `check_every` watches it.
    """

    def __init__(self, group: Group) -> None:
        self._group = group

    def average(self, vector: Any, shares: Sequence[float]) -> None:
        if self._group.size == 1:
            return
        weights, divisor = weights_and_divisor(shares)
        weigh(vector, weights[self._group.rank])
        self._group.all_reduce(vector)
        divide(vector, divisor)


class NcclAllReduce(LibraryAllReduce):
    """NCCL's allreduce, which weighs equal parts of 2, 4, 8 ... ranks itself.

    Its average multiplies what it reads by 1/N, rounded (NCCL's ncclAvg), and adds. Where N is a
    power of two these are the same products as here, with the same bits, in one pass over memory
    less. Where it is not, the average would grow or shrink by the rounding at every step.
    """

    def __init__(self, group: GlooGroup) -> None:
        super().__init__(group)
        self._nccl = group

    def average(self, vector: Any, shares: Sequence[float]) -> None:
        weights, divisor = weights_and_divisor(shares)
        if self._group.size > 1 and divisor == 1 and set(weights) == {1 / self._group.size}:
            self._nccl.average_by_nccl(vector)
        else:
            super().average(vector, shares)


class ShardedAllReduce(AllReduce):
    """ASA: every rank gets its shard of all vectors, adds them, and gives the sum to all.

    The terms are added in rank order, so the bits are always the same, and those of
    `SharedMemoryAllReduce`. A rank sends and receives ``2 n (N - 1) / N`` elements.
    """

    def __init__(self, group: Group, vector: Any) -> None:
        self._group = group
        self._parts = [shard(len(vector), group.size, rank) for rank in range(group.size)]
        self._own = self._parts[group.rank]
        self._received = zeros_like(vector, (group.size, self._own.stop - self._own.start))

    def average(self, vector: Any, shares: Sequence[float]) -> None:
        if self._group.size == 1:
            return
        self._group.all_to_all(vector, self._received, self._parts)
        add_weighted(vector[self._own], self._received, shares)
        self._group.all_gather(vector, self._parts)


class HierarchicalAllReduce(AllReduce):
    """Within each machine by memory that its ranks reach, between machines by one rank of each.

    The first rank of a machine is its leader, the only one with a `between`. The leader's vector
    becomes the weighted sum of its machine; the leaders add theirs to each other; then every rank
    takes its leader's, divided. Terms are added in rank order within a machine, then over machines
    in the order of their leaders. `machines` are the ranks of each, by their numbers among all, and
    `here` is which of them this machine is.
    """

    def __init__(
        self, within: AllReduce, machines: Sequence[Sequence[int]], here: int, between: Any
    ) -> None:
        self._within, self._machines, self._here = within, machines, here
        self._between: AllReduce | None = between

    def average(self, vector: Any, shares: Sequence[float]) -> None:
        weights, divisor = weights_and_divisor(shares)
        parts = [[weights[rank] for rank in ranks] for ranks in self._machines]
        own = parts[self._here]
        if any(own):
            self._within.average_into_first(vector, own)
        if self._between is not None:
            self._between.average(vector, [float(any(part)) for part in parts])
        self._within.average(vector, [1 / divisor] + [0.0] * (len(own) - 1))


class DeltaAllReduce(AllReduce):
    """Average differences from the last common vector, by another all-reduce.

    For weights in 16 bits: float16's spacing near 0.01 is 2**-17, as large as an update. What a
    step changes is small and is rounded finely. All ranks begin with the same bits, and add the
    same average to them, so they stay the same. Shares must add up to 1.
    """

    def __init__(self, all_reduce: AllReduce, vector: Any) -> None:
        self._all_reduce, self._common = all_reduce, vector * 1

    def average(self, vector: Any, shares: Sequence[float]) -> None:
        vector -= self._common
        self._all_reduce.average(vector, shares)
        self._common += vector
        vector[...] = self._common


# Arithmetic on vectors that are arrays or tensors


def shard(size: int, shards: int, number: int) -> slice:
    """The part of a vector that trainer `number` of `shards` averages.

    Parts are disjoint, cover the vector, and start on multiples of 1,024 elements, so no two
    trainers write to one cache line or page of float32.
    """
    blocks = -(-size // 1024)
    return slice(*(min(size, blocks * i // shards * 1024) for i in (number, number + 1)))


def blocks(vector: Any) -> list[slice]:
    """The parts of a vector that are worked on one after another; a tensor is one part."""
    block = BLOCK if isinstance(vector, np.ndarray) else len(vector)
    starts = range(0, len(vector), block) if len(vector) else ()
    return [slice(start, min(start + block, len(vector))) for start in starts]


def library_of(vector: Any) -> Any:
    """The module whose functions take such vectors: numpy or torch."""
    if isinstance(vector, np.ndarray):
        return np
    import torch

    return torch


def zeros_like(vector: Any, shape: int | tuple[int, ...], dtype: str = "") -> Any:
    """Make zeros where a vector lies, of its dtype or of one that is named."""
    library = library_of(vector)
    kind = getattr(library, dtype) if dtype else vector.dtype
    if library is np:
        return np.zeros(shape, kind)
    return library.zeros(shape, dtype=kind, device=vector.device)


def weigh(vector: Any, share: float) -> None:
    """Multiply a vector by its weight, in place; one of weight 0 may hold anything."""
    if share == 0:
        vector[...] = 0
    else:
        vector *= float(share)


def divide(vector: Any, divisor: float) -> None:
    """Divide a vector in place, and round each quotient once."""
    if divisor == 1:
        return
    # A tensor by a tensor: on a GPU a number would be replaced by its reciprocal.
    vector /= divisor if isinstance(vector, np.ndarray) else vector.new_full((1,), divisor)


def add_weighted(target: Any, terms: Any, shares: Sequence[float]) -> None:
    """Write the weighted sum of vectors, added in their order, into one that may be a term.

    They are multiplied and divided as `weights_and_divisor` has it. An array may be the first of
    the terms, a tensor any of them; terms of weight 0 are not read. Products, sums and quotients
    are rounded one by one, so arrays and tensors give the same bits.
    """
    weights, divisor = weights_and_divisor(shares)
    weighted = [(term, weight) for term, weight in zip(terms, weights, strict=True) if weight > 0]
    if not weighted:
        target[...] = 0
    elif isinstance(target, np.ndarray):
        from tandem.distributed import kernels

        # A few terms at a time: a loop is compiled for each number, and there may be hundreds.
        for first in range(0, len(weighted), _TERMS):
            part = [(target, 1.0)] * (first > 0) + weighted[first : first + _TERMS]
            vectors, factors = zip(*part, strict=True)
            is_last = first + _TERMS >= len(weighted)
            kernels.add_into(target, vectors, factors, divisor if is_last else 1.0)
    else:
        # Two kernels for each term: one would fuse product and sum, and round once.
        total = weighted[0][0] * weighted[0][1]
        for term, weight in weighted[1:]:
            total += term * weight
        divide(total, divisor)
        target.copy_(total)


# What the configuration chooses from
