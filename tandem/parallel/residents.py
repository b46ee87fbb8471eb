"""Resident variables: the same extent of every rank's memory, which all ranks see."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from tandem.distributed.allreduce import shard
from tandem.distributed.shares import weights_and_divisor
from tandem.memory import HostBuffer
from tandem.parallel.fold import Fold
from tandem.parallel.messages import Extent


class Residents(ABC):
    """The memory of a pool's resident variables, as one rank has it."""

    @abstractmethod
    def variable(self, extent: Extent, name: str | None) -> Any:
        """Make this rank's variable over an extent, with the value that lies there."""

    @abstractmethod
    def read(self, extent: Extent, rank: int) -> np.ndarray:
        """Return a rank's value, between tasks; it may lie in place."""

    @abstractmethod
    def write(self, extent: Extent, rank: int, value: np.ndarray) -> None:
        """Set a rank's value, between tasks."""

    @abstractmethod
    def reduce(self, extent: Extent, op: str, shares: Sequence[float]) -> None:
        """Do this rank's part of a reduction into all ranks' values, see `reduce_shard`.

        All ranks do it in one task, and have finished the task before.
        """


class HostResidents(Residents):
    """Resident variables in host memory: one buffer for each rank, which only grows."""

    def __init__(self, buffers: Sequence[HostBuffer], rank: int) -> None:
        self._buffers, self._rank = buffers, rank

    def variable(self, extent: Extent, name: str | None) -> Any:
        from tandem.backend import device_shared

        return device_shared(None, name, "cpu", self.read(extent, self._rank))

    def read(self, extent: Extent, rank: int) -> np.ndarray:
        return self._buffers[rank].array(extent.shape, np.dtype(extent.dtype), extent.offset)

    def write(self, extent: Extent, rank: int, value: np.ndarray) -> None:
        np.copyto(self.read(extent, rank), value)

    def reduce(self, extent: Extent, op: str, shares: Sequence[float]) -> None:
        vectors = [self.read(extent, rank).reshape(-1) for rank in range(len(self._buffers))]
        reduce_shard(vectors, op, shares, self._rank)


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
    if op in ("avg", "sum") and np.issubdtype(parts[0].dtype, np.floating):
        from tandem.distributed import kernels

        kernels.average_into_all(parts, shares)
        return
    total = reduced(parts, op, shares)
    for piece in parts:
        piece[...] = total


def reduced(values: Sequence[np.ndarray], op: str, shares: Sequence[float]) -> np.ndarray:
    """Reduce values in rank order, weighted as `reduce_shard` does it, with the same bits."""
    weights, divisor = weights_and_divisor(shares) if op == "avg" else (shares, 1.0)
    fold = Fold(op, divisor)
    for value, weight in zip(values, weights, strict=True):
        if weight > 0:
            fold.add(value, weight)
    return np.array(fold.value())
