"""How ranks average a vector of which each has its own: one class per way.

The names are Theano-MPI's (Ma, Mao, Taylor 2016, arXiv 1605.08325, section 3.2): AR, ASA, ASA16.
They know nothing of MPI: what moves the bytes is an `Engine`. Nor do they know whether vectors are
NumPy's or PyTorch's: what computes is an `Arithmetic`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from tandem.distributed.average import shard
from tandem.distributed.exchange import Exchange
from tandem.distributed.group import Adder, Engine

BLOCK = 1 << 15  # elements that are worked on at a time, to stay in a core's cache
_TERMS = 8


class AllReduce(ABC):
    """A way to average vectors over the ranks of an engine."""

    @abstractmethod
    def average(self, vector: Any, shares: Sequence[float]) -> None:
        """Replace every rank's vector by the weighted sum of all, the same bits at every rank.

        Parameters
        ----------
        vector : float (n,)
            This rank's, always the same memory.
        shares : sequence of float
            Weights by rank; of an average they add up to 1. A vector of weight 0 counts for
            nothing, whatever it holds.
        """


class Arithmetic(Protocol):
    """What collectives compute with, on vectors that are arrays or tensors.

    Attributes
    ----------
    block : int
        Elements that are best worked on at a time.
    """

    block: int

    def zeros(self, shape: int | tuple[int, ...], kind: Any) -> Any:
        """Make a vector or a matrix. `kind` is another one's dtype or a name, such as "uint16"."""
        ...

    def multiply(self, vector: Any, by: float, *, out: Any) -> None:
        """Write a vector (n,) times a number into another."""
        ...

    def subtract(self, vector: Any, other: Any, *, out: Any) -> None:
        """Write the difference of vectors (n,) into another."""
        ...

    def add_weighted(self, target: Any, terms: Any, shares: Sequence[float]) -> None:
        """See `add_weighted`."""
        ...


class LibraryAllReduce(AllReduce):
    """AR: the library's own allreduce.

    The library chooses algorithm and order by size and number of ranks. MPI does not promise the
    same bits at every rank; with the usual algorithms for long vectors each element is added in one
    place, and then they are the same. `check_every` watches it.
    """

    def __init__(self, engine: Adder) -> None:
        self._engine = engine

    def average(self, vector: Any, shares: Sequence[float]) -> None:
        """See `AllReduce`."""
        if self._engine.size == 1:
            return
        weigh(vector, shares[self._engine.rank])
        self._engine.all_reduce(vector)


class ShardedAllReduce(AllReduce):
    """ASA: every rank gets its shard of all vectors, adds them, and gives the sum to all.

    The terms are added in rank order, so the bits are always the same, and those that
    `tandem.distributed.AverageParameters` gives on one machine. A rank sends and receives
    ``2 n (N - 1) / N`` elements.

    Parameters
    ----------
    engine : Engine
    vector : float (n,)
        Of the size and kind that is to be averaged.
    arithmetic : Arithmetic, optional
        Of such vectors; NumPy's by default.
    """

    def __init__(self, engine: Engine, vector: Any, arithmetic: Arithmetic | None = None) -> None:
        self._engine = engine
        self._arithmetic: Arithmetic = arithmetic or HostArithmetic()
        self._parts = [shard(len(vector), engine.size, rank) for rank in range(engine.size)]
        self._own = self._parts[engine.rank]
        shape = engine.size, self._own.stop - self._own.start
        self._received = self._arithmetic.zeros(shape, vector.dtype)

    def average(self, vector: Any, shares: Sequence[float]) -> None:
        """See `AllReduce`."""
        if self._engine.size == 1:
            return
        self._engine.all_to_all(vector, self._received, self._parts)
        self._arithmetic.add_weighted(vector[self._own], self._received, shares)
        self._engine.all_gather(vector, self._parts)


class TransferFormat(Protocol):
    """A floating-point format of 16 bits in which vectors travel.

    Attributes
    ----------
    largest_exponent : int or None
        Vectors are scaled so that their largest element is below two to this power; None where the
        format has float32's range.
    """

    largest_exponent: int | None

    def narrow(self, source: Any, target: Any) -> None:
        """Round float32 (n,) to the nearest, ties to even, into uint16 (n,) that hold its bits."""
        ...

    def widen(self, source: Any, target: Any) -> None:
        """Write what uint16 (n,) stand for into float32 (n,)."""
        ...


class CompressedAllReduce(AllReduce):
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
    wire : TransferFormat
        The format.
    feedback : bool
        Whether errors are fed back.
    arithmetic : Arithmetic, optional
        Of such vectors; NumPy's by default.
    """

    def __init__(
        self,
        engine: Engine,
        vector: Any,
        wire: TransferFormat,
        feedback: bool,
        arithmetic: Arithmetic | None = None,
    ) -> None:
        if str(vector.dtype) not in ("float32", "torch.float32"):
            raise ValueError(f"vectors of {vector.dtype} do not travel in 16 bits, float32 does")
        self._engine, self._wire = engine, wire
        self._arithmetic: Arithmetic = arithmetic or HostArithmetic()
        zeros, length = self._arithmetic.zeros, len(vector)
        self._parts = [shard(length, engine.size, rank) for rank in range(engine.size)]
        self._own = self._parts[engine.rank]
        size = self._own.stop - self._own.start
        self._packed = zeros(length, "uint16")
        self._received = zeros((engine.size, size), "uint16")
        self._total = zeros(size, "float32")
        self._lost = zeros(length, "float32") if feedback else None
        self._lost_sum = zeros(size, "float32") if feedback else None
        self._term = zeros(min(length, self._arithmetic.block), "float32")

    def average(self, vector: Any, shares: Sequence[float]) -> None:
        """See `AllReduce`."""
        if self._engine.size == 1:
            return
        weigh(vector, shares[self._engine.rank])
        scales = self._engine.all_gather_object(self._pack(vector, self._packed, self._lost))
        self._engine.all_to_all(self._packed, self._received, self._parts)
        self._total[...] = 0
        for packed, scale in zip(self._received, scales, strict=True):
            self._add(packed, scale, self._total)
        own = self._packed[self._own]
        scales = self._engine.all_gather_object(self._pack(self._total, own, self._lost_sum))
        self._engine.all_gather(self._packed, self._parts)
        vector[...] = 0
        for part, scale in zip(self._parts, scales, strict=True):
            self._add(self._packed[part], scale, vector[part])

    def _pack(self, values: Any, packed: Any, lost: Any | None) -> float:
        """Round values, with what was lost before, into 16 bits; the scale that they have there.

        `values` are overwritten, `lost` becomes what this rounding has lost.
        """
        if lost is not None:
            values += lost
        scale = self._scale(values)
        for block in self._blocks(values):
            term = self._term[: block.stop - block.start]
            self._arithmetic.multiply(values[block], scale, out=term)
            self._wire.narrow(term, packed[block])
            if lost is not None:
                self._wire.widen(packed[block], term)
                term *= 1 / scale
                self._arithmetic.subtract(values[block], term, out=lost[block])
        return scale

    def _add(self, packed: Any, scale: float, total: Any) -> None:
        for block in self._blocks(total):
            term = self._term[: block.stop - block.start]
            self._wire.widen(packed[block], term)
            term *= 1 / scale
            total[block] += term

    def _scale(self, values: Any) -> float:
        """A power of two that makes good use of the format's range."""
        if self._wire.largest_exponent is None:
            return 1.0
        largest = max((float(abs(values[b]).max()) for b in self._blocks(values)), default=0.0)
        if largest == 0 or not math.isfinite(largest):
            return 1.0
        return 2.0 ** min(self._wire.largest_exponent - math.frexp(largest)[1], 126)

    def _blocks(self, vector: Any) -> list[slice]:
        return blocks(len(vector), self._arithmetic.block)


class Within(Protocol):
    """How the ranks of one machine reach each other's vectors. They call these together."""

    def collect(self, shares: Sequence[float]) -> None:
        """Write the weighted sum of all their vectors into the first one's.

        Parameters
        ----------
        shares : sequence of float
            Weights by rank of this machine, of which one is not 0.
        """
        ...

    def hand_out(self) -> None:
        """Copy the first one's vector into all."""
        ...


class SharedWithin:
    """Ranks of one machine whose vectors lie in memory that all of them see. A `Within`.

    Parameters
    ----------
    local : Engine
        The ranks of this machine.
    vectors : sequence of float (n,)
        Theirs, by rank of this machine.
    """

    def __init__(self, local: Engine, vectors: Sequence[np.ndarray]) -> None:
        self._local, self._vectors = local, vectors
        self._own = shard(vectors[0].size, local.size, local.rank)

    def collect(self, shares: Sequence[float]) -> None:
        """See `Within`: each adds a shard."""
        own = self._own
        self._local.all_gather_object(None)
        add_weighted(self._vectors[0][own], [v[own] for v in self._vectors], shares)
        self._local.all_gather_object(None)

    def hand_out(self) -> None:
        """See `Within`: each copies to itself."""
        self._local.all_gather_object(None)
        if self._local.rank > 0:
            np.copyto(self._vectors[self._local.rank], self._vectors[0])
        self._local.all_gather_object(None)  # the first changes its vector only when all have it


class HierarchicalAllReduce(AllReduce):
    """Within a machine by memory that its ranks reach, between machines by one rank of each.

    The vectors of a machine are added into that of its leader, the first of its ranks; the leaders
    exchange theirs; then everybody takes the leader's. Terms are added in rank order within a
    machine, then over machines in the order of their leaders.

    Parameters
    ----------
    within : Within
        The ranks of this machine.
    machines : sequence of sequence of int
        The ranks of each machine, by their numbers among all.
    here : int
        Which of them is this one.
    between : AllReduce or None
        What adds the leaders' vectors; None for a rank that is no leader.
    """

    def __init__(
        self,
        within: Within,
        machines: Sequence[Sequence[int]],
        here: int,
        between: AllReduce | None,
    ) -> None:
        self._within, self._machines, self._here = within, machines, here
        self._between = between

    def average(self, vector: Any, shares: Sequence[float]) -> None:
        """See `AllReduce`. The vector is a leader's only, the others' are those of `Within`."""
        parts = [[shares[rank] for rank in ranks] for ranks in self._machines]
        if any(parts[self._here]):
            self._within.collect(parts[self._here])
        if self._between is not None:
            self._between.average(vector, [float(any(part)) for part in parts])
        self._within.hand_out()


class DeltaAllReduce(AllReduce):
    """Averages differences from what the ranks had in common last, by another collective.

    For weights in 16 bits: float16's spacing near .01 is 2**-17, as large as an update. What a step
    changes is small and is rounded finely. All ranks begin with the same bits, and add the same
    average to them, so they stay the same.

    Parameters
    ----------
    collective : AllReduce
        Averages the differences.
    vector : float (n,)
        Every rank's, the same bits at all of them.
    """

    def __init__(self, collective: AllReduce, vector: Any) -> None:
        self._collective, self._common = collective, vector * 1

    def average(self, vector: Any, shares: Sequence[float]) -> None:
        """See `AllReduce`. The shares must add up to 1."""
        vector -= self._common
        self._collective.average(vector, shares)
        self._common += vector
        vector[...] = self._common


class RankParameters(Exchange):
    """Average weights and momenta over ranks after the update.

    Parameters
    ----------
    collective : AllReduce
    vector : float (n,)
        This rank's parameters, an array or whatever else the collective averages.
    """

    def __init__(self, collective: AllReduce, vector: Any) -> None:
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


def weigh(vector: Any, share: float) -> None:
    """Multiply a vector by its weight, in place; one of weight 0 may hold anything."""
    if share == 0:
        vector[...] = 0
    else:
        vector *= float(share)


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
    from tandem.distributed import kernels

    kind = target.dtype.type
    weighted = [(t, kind(s)) for t, s in zip(terms, shares, strict=True) if s > 0]
    if not weighted:
        target.fill(0)
    # A few terms at a time: a compiled loop is for so many, and there may be hundreds.
    for first in range(0, len(weighted), _TERMS):
        some = [(target, kind(1))] * (first > 0) + weighted[first : first + _TERMS]
        vectors, weights = zip(*some, strict=True)
        kernels.add_into(target, vectors, weights)


def blocks(size: int, block: int = BLOCK) -> list[slice]:
    """The parts of a vector that are worked on one after another."""
    return [slice(start, min(start + block, size)) for start in range(0, size, block)]


class HostArithmetic:
    """NumPy's. An `Arithmetic`."""

    block = BLOCK

    def zeros(self, shape: int | tuple[int, ...], kind: Any) -> np.ndarray:
        """See `Arithmetic`."""
        return np.zeros(shape, kind)

    def multiply(self, vector: np.ndarray, by: float, *, out: np.ndarray) -> None:
        """See `Arithmetic`."""
        np.multiply(vector, by, out=out)

    def subtract(self, vector: np.ndarray, other: np.ndarray, *, out: np.ndarray) -> None:
        """See `Arithmetic`."""
        np.subtract(vector, other, out=out)

    def add_weighted(self, target: Any, terms: Any, shares: Sequence[float]) -> None:
        """See `Arithmetic`."""
        add_weighted(target, terms, shares)
