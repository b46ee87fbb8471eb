"""Averaging over host shared memory: trainer i averages shard i of all buffers."""

from collections.abc import Sequence

import numpy as np

from tandem.distributed.exchange import Exchange, Group


class _Average(Exchange):
    """Average flat vectors that all trainers can see.

    The trainers meet; trainer i averages shard i of all vectors, in rank order, and writes it into
    all of them; they meet again. Nobody else touches shard i, so no group lies between, and all
    vectors hold the same bits afterwards because each element was computed once.

    Parameters
    ----------
    group : Group
        This trainer's place.
    vectors : sequence of float arrays (n,)
        Every trainer's vector, by rank, in shared memory.
    """

    def __init__(self, group: Group, vectors: Sequence[np.ndarray]) -> None:
        self._meeting = group
        part = shard(vectors[0].size, len(vectors), group.rank)
        self._parts = [vector[part] for vector in vectors]

    def _average(self, shares: Sequence[float]) -> None:
        if len(self._parts) == 1:
            return
        from tandem.distributed import kernels

        self._meeting.barrier()
        kernels.average_into_all(self._parts, shares)
        self._meeting.barrier()


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


class SharedParameters(_Average):
    """One vector of weights and momenta for all trainers, of which each updates a shard.

    Each computes gradients into a vector of its own. They meet; trainer i averages shard i of the
    gradients, in rank order, into trainer 0's vector, and then updates shard i of the weights and
    momenta from there; they meet again. So nothing is averaged twice, and nothing updated twice.
    What is computed is what `AverageGradients` computes.
    """

    def before_update(self, shares: Sequence[float]) -> None:
        """Average this trainer's shard of the gradients, weighted by `shares`."""
        if len(self._parts) == 1:
            return
        from tandem.distributed import kernels

        # From here on nobody computes with the weights, until all of them have been updated.
        self._meeting.barrier()
        kernels.average_into_first(self._parts, shares)

    def after_update(self, shares: Sequence[float]) -> None:
        """Wait until every trainer has updated its shard."""
        self._meeting.barrier()


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
