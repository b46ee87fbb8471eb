"""How ranks average a vector of which each has its own: one class per way.

The names are Theano-MPI's (Ma, Mao, Taylor 2016, arXiv 1605.08325, section 3.2): AR, ASA, ASA16.
They know nothing of MPI: what moves the bytes is an `Engine`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from tandem.exchange.average import shard
from tandem.exchange.base import Exchange
from tandem.exchange.engine import Engine

BLOCK = 1 << 15  # elements that are worked on at a time, to stay in a core's cache
_TERMS = 8


class Collective(ABC):
    """A way to average vectors over the ranks of an engine."""

    @abstractmethod
    def average(self, vector: np.ndarray, shares: Sequence[float]) -> None:
        """Replace every rank's vector by the weighted average of all, the same bits at every rank.

        Parameters
        ----------
        vector : float (n,)
            This rank's, always the same memory.
        shares : sequence of float
            Weights by rank, which add up to 1. A vector of weight 0 counts for nothing, whatever
            it holds.
        """


class AllReduce(Collective):
    """AR: the library's own allreduce.

    The library chooses algorithm and order by size and number of ranks. MPI does not promise the
    same bits at every rank; with the usual algorithms for long vectors each element is added in one
    place, and then they are the same. `check_every` watches it.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def average(self, vector: np.ndarray, shares: Sequence[float]) -> None:
        """See `Collective`."""
        if self._engine.size == 1:
            return
        weigh(vector, shares[self._engine.rank])
        self._engine.all_reduce(vector)


class ShardSum(Collective):
    """ASA: every rank gets its shard of all vectors, adds them, and gives the sum to all.

    The terms are added in rank order, so the bits are always the same, and those that
    `tandem.exchange.AverageParameters` gives on one machine. A rank sends and receives
    ``2 n (N - 1) / N`` elements.
    """

    def __init__(self, engine: Engine, vector: np.ndarray) -> None:
        self._engine = engine
        self._parts = [shard(vector.size, engine.size, rank) for rank in range(engine.size)]
        self._own = self._parts[engine.rank]
        self._received = np.empty((engine.size, self._own.stop - self._own.start), vector.dtype)

    def average(self, vector: np.ndarray, shares: Sequence[float]) -> None:
        """See `Collective`."""
        if self._engine.size == 1:
            return
        self._engine.all_to_all(vector, self._received, self._parts)
        add_weighted(vector[self._own], self._received, shares)
        self._engine.all_gather(vector, self._parts)


class Wire(Protocol):
    """A floating-point format of 16 bits in which vectors travel.

    Attributes
    ----------
    largest_exponent : int or None
        Vectors are scaled so that their largest element is below two to this power; None where the
        format has float32's range.
    """

    largest_exponent: int | None

    def narrow(self, source: np.ndarray, target: np.ndarray) -> None:
        """Round float32 (n,) to the nearest, ties to even, into uint16 (n,) that hold its bits."""
        ...

    def widen(self, source: np.ndarray, target: np.ndarray) -> None:
        """Write what uint16 (n,) stand for into float32 (n,)."""
        ...


class RoundedShardSum(Collective):
    """ASA16: as ASA, but vectors travel in 16 bits; they are added in float32, in rank order.

    Rank r sends ``q_r = round(share_r x_r)``. Who has a shard adds ``y = sum q_r`` and sends
    ``z = round(y)``, which every rank takes, its owner too, so that all hold the same bits. With
    u the unit roundoff (2**-11 for float16, 2**-8 for bfloat16), and but for float32's own
    rounding and what lies below the format's normal numbers,

        ``|z - sum share_r x_r| <= u sum |share_r x_r| + u |y|``, and
        ``|y| <= (1 + u) sum |share_r x_r|``, so the error is at most ``(2 u + u**2)`` of that sum.

    float16 has a small range, so each rank multiplies what it sends by a power of two that brings
    its largest element to [2**14, 2**15), which is exact; elements that are smaller than 2**-29 of
    the largest lose relative precision, at an absolute error of at most 2**-40 of the largest.

    With error feedback, what a rounding has lost is added to what is sent in the next step (Seide
    et al. 2014, section 3; on both ways as Tang et al. 2019, "DoubleSqueeze"): the sums over many
    steps are then off by no more than one step's rounding. What is kept so is in no checkpoint.

    Parameters
    ----------
    engine : Engine
    vector : float32 (n,)
        Of the size and kind that is to be averaged.
    wire : Wire
        The format.
    feedback : bool
        Whether errors are fed back.
    """

    def __init__(self, engine: Engine, vector: np.ndarray, wire: Wire, feedback: bool) -> None:
        if vector.dtype != np.float32:
            raise ValueError(f"vectors of {vector.dtype} do not travel in 16 bits, float32 does")
        self._engine, self._wire = engine, wire
        self._parts = [shard(vector.size, engine.size, rank) for rank in range(engine.size)]
        self._own = self._parts[engine.rank]
        size = self._own.stop - self._own.start
        self._packed = np.empty(vector.size, np.uint16)
        self._received = np.empty((engine.size, size), np.uint16)
        self._total = np.empty(size, np.float32)
        self._lost = np.zeros(vector.size, np.float32) if feedback else None
        self._lost_sum = np.zeros(size, np.float32) if feedback else None
        self._block = np.empty(BLOCK, np.float32)

    def average(self, vector: np.ndarray, shares: Sequence[float]) -> None:
        """See `Collective`."""
        if self._engine.size == 1:
            return
        weigh(vector, shares[self._engine.rank])
        scales = self._engine.gather(self._pack(vector, self._packed, self._lost))
        self._engine.all_to_all(self._packed, self._received, self._parts)
        self._total.fill(0)
        for packed, scale in zip(self._received, scales, strict=True):
            self._add(packed, scale, self._total)
        own = self._packed[self._own]
        scales = self._engine.gather(self._pack(self._total, own, self._lost_sum))
        self._engine.all_gather(self._packed, self._parts)
        vector.fill(0)
        for part, scale in zip(self._parts, scales, strict=True):
            self._add(self._packed[part], scale, vector[part])

    def _pack(self, values: np.ndarray, packed: np.ndarray, lost: np.ndarray | None) -> float:
        """Round values, with what was lost before, into 16 bits; the scale that they have there.

        `values` are overwritten, `lost` becomes what this rounding has lost.
        """
        if lost is not None:
            values += lost
        scale = self._scale(values)
        for block in blocks(values.size):
            term = self._block[: block.stop - block.start]
            np.multiply(values[block], np.float32(scale), out=term)
            self._wire.narrow(term, packed[block])
            if lost is not None:
                self._wire.widen(packed[block], term)
                term *= np.float32(1 / scale)
                np.subtract(values[block], term, out=lost[block])
        return scale

    def _add(self, packed: np.ndarray, scale: float, total: np.ndarray) -> None:
        for block in blocks(total.size):
            term = self._block[: block.stop - block.start]
            self._wire.widen(packed[block], term)
            term *= np.float32(1 / scale)
            total[block] += term

    def _scale(self, values: np.ndarray) -> float:
        """A power of two that makes good use of the format's range."""
        if self._wire.largest_exponent is None:
            return 1.0
        largest = max((float(np.abs(values[b]).max()) for b in blocks(values.size)), default=0.0)
        if largest == 0 or not math.isfinite(largest):
            return 1.0
        return 2.0 ** min(self._wire.largest_exponent - math.frexp(largest)[1], 126)


class Hierarchical(Collective):
    """Shared memory within a machine, between machines one rank of each.

    The ranks of a machine add shards of all their vectors into that of their leader, the first of
    them; the leaders exchange theirs; then everybody takes the leader's. Terms are added in rank
    order within a machine, then over machines in the order of their leaders.

    Parameters
    ----------
    local : Engine
        The ranks of this machine.
    numbers : sequence of int
        Their numbers among all ranks, by their rank here.
    vectors : sequence of float (n,)
        Of the ranks of this machine, in memory that all of them see.
    between : Collective or None
        What averages over the leaders; None for a rank that isn't one.
    leaders : int
        How many machines there are.
    """

    def __init__(
        self,
        local: Engine,
        numbers: Sequence[int],
        vectors: Sequence[np.ndarray],
        between: Collective | None,
        leaders: int,
    ) -> None:
        self._local, self._numbers, self._vectors = local, numbers, vectors
        self._between, self._leaders = between, leaders
        self._own = shard(vectors[0].size, local.size, local.rank)

    def average(self, vector: np.ndarray, shares: Sequence[float]) -> None:
        """See `Collective`."""
        self._local.gather(None)
        target, own = self._vectors[0], self._own
        here = [shares[number] for number in self._numbers]
        add_weighted(target[own], [v[own] for v in self._vectors], here)
        self._local.gather(None)
        if self._between is not None:
            self._between.average(target, [1.0] * self._leaders)
        self._local.gather(None)
        if self._local.rank > 0:
            np.copyto(vector, target)
        self._local.gather(None)  # the leader changes its vector only when all have it


class FromCommon(Collective):
    """Averages differences from what the ranks had in common last, by another collective.

    For weights in 16 bits: float16's spacing near .01 is 2**-17, as large as an update. What a step
    changes is small and is rounded finely. All ranks begin with the same bits, and add the same
    average to them, so they stay the same.

    Parameters
    ----------
    collective : Collective
        Averages the differences.
    vector : float (n,)
        Every rank's, the same bits at all of them.
    """

    def __init__(self, collective: Collective, vector: np.ndarray) -> None:
        self._collective, self._common = collective, vector.copy()

    def average(self, vector: np.ndarray, shares: Sequence[float]) -> None:
        """See `Collective`. The shares must add up to 1."""
        vector -= self._common
        self._collective.average(vector, shares)
        self._common += vector
        np.copyto(vector, self._common)


class RankParameters(Exchange):
    """Average weights and momenta over ranks after the update.

    Parameters
    ----------
    collective : Collective
    vector : float (n,)
        This rank's parameters, an array or whatever else the collective averages.
    """

    def __init__(self, collective: Collective, vector: Any) -> None:
        self._collective, self._vector = collective, vector

    def after_update(self, shares: Sequence[float]) -> None:
        """See `Exchange`."""
        self._collective.average(self._vector, shares)


class RankGradients(RankParameters):
    """Average gradients over ranks before the update: half the bytes."""

    def before_update(self, shares: Sequence[float]) -> None:
        """See `Exchange`."""
        self._collective.average(self._vector, shares)

    def after_update(self, shares: Sequence[float]) -> None:
        """Nothing: all ranks have made the same update."""


def weigh(vector: np.ndarray, share: float) -> None:
    """Multiply a vector by its weight, in place; one of weight 0 may hold anything."""
    if share == 0:
        vector.fill(0)
    else:
        vector *= vector.dtype.type(share)


def weigh_tensor(vector: Any, share: float) -> None:
    """As `weigh`, of a tensor of PyTorch's."""
    if share == 0:
        vector.zero_()
    else:
        vector.mul_(share)


def add_weighted(
    target: np.ndarray, terms: Sequence[np.ndarray] | np.ndarray, shares: Sequence[float]
) -> None:
    """Write the weighted sum of vectors, added in their order, into one that may be their first.

    Parameters
    ----------
    target : float (n,)
    terms : sequence of float (n,)
        A term of weight 0 is not read.
    shares : sequence of float
        The weights.
    """
    from tandem.exchange import loops

    kind = target.dtype.type
    weighted = [(t, kind(s)) for t, s in zip(terms, shares, strict=True) if s > 0]
    if not weighted:
        target.fill(0)
    # A few terms at a time: a compiled loop is for so many, and there may be hundreds.
    for first in range(0, len(weighted), _TERMS):
        some = [(target, kind(1))] * (first > 0) + weighted[first : first + _TERMS]
        vectors, weights = zip(*some, strict=True)
        loops.add_into(target, vectors, weights)


def blocks(size: int) -> list[slice]:
    """The parts of a vector that are worked on one after another."""
    return [slice(start, min(start + BLOCK, size)) for start in range(0, size, BLOCK)]
