"""Averaging over host shared memory: trainer i averages shard i and writes it into all buffers."""

from collections.abc import Sequence

import numpy as np

from tandem.exchange.base import Exchange, Gathering


class _Average(Exchange):
    """Average flat vectors that all trainers can see.

    The trainers meet; trainer i averages shard i of all vectors, in rank order, and writes it into
    all of them; they meet again. Nobody else touches shard i, so no meeting lies between, and all
    vectors hold the same bits afterwards because each element was computed once.

    Parameters
    ----------
    meeting : Gathering
        This trainer's place.
    vectors : sequence of float arrays (n,)
        Every trainer's vector, by rank, in shared memory.
    """

    def __init__(self, meeting: Gathering, vectors: Sequence[np.ndarray]) -> None:
        self._meeting = meeting
        part = shard(vectors[0].size, len(vectors), meeting.rank)
        self._parts = [vector[part] for vector in vectors]

    def _average(self, shares: Sequence[float]) -> None:
        if len(self._parts) == 1:
            return
        self._meeting.meet()
        average_into_all(self._parts, shares)
        self._meeting.meet()


class AverageParameters(_Average):
    """The original's strategy: each trainer updates by itself, then all is averaged.

    The update is linear in the gradient, so this equals averaging gradients before it, in exact
    arithmetic, at twice the bytes (Ding et al. 2014, arXiv 1412.2302, section 2.2).
    """

    def after_update(self, shares: Sequence[float]) -> None:
        """Average weights and momenta over the trainers, weighted by `shares`."""
        self._average(shares)


class AverageGradients(_Average):
    """Average the gradients, then let every trainer make the same update: half the bytes."""

    def before_update(self, shares: Sequence[float]) -> None:
        """Average gradients over the trainers, weighted by `shares`."""
        self._average(shares)


def shard(size: int, shards: int, number: int) -> slice:
    """The part of a vector that one trainer averages.

    Parameters
    ----------
    size : int
        Elements of the vector.
    shards : int
        How many parts.
    number : int
        Which part, from 0.

    Returns
    -------
    slice
        Parts are disjoint, cover the vector, and start on multiples of 1,024 elements, so no two
        trainers write to one cache line or page of float32.
    """
    blocks = -(-size // 1024)
    return slice(*(min(size, blocks * i // shards * 1024) for i in (number, number + 1)))


def average_into_all(vectors: Sequence[np.ndarray], shares: Sequence[float]) -> None:
    """Replace every vector by their weighted average.

    Parameters
    ----------
    vectors : sequence of float arrays (n,)
        Of one dtype, each overwritten.
    shares : sequence of float
        Weights that add up to 1. A vector of weight 0 is not read.
    """
    from tandem.exchange import loops

    terms, weights = _weighted(vectors, shares)
    loops.run(loops.into_all, terms, weights)
    for vector, share in zip(vectors, shares, strict=True):
        if not share > 0:
            np.copyto(vector, terms[0])


def _weighted(
    vectors: Sequence[np.ndarray], shares: Sequence[float]
) -> tuple[list[np.ndarray], list[np.floating]]:
    """The vectors that have a weight, and these weights, rounded to the vectors' dtype."""
    pairs = [(v, v.dtype.type(s)) for v, s in zip(vectors, shares, strict=True) if s > 0]
    return [vector for vector, _ in pairs], [share for _, share in pairs]
