"""A rank's flat vector, as an exchange reaches it on the host; `gpu_staging` has that on a GPU."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from tandem.distributed.allreduce import AllReduce, SharedMemoryAllReduce
from tandem.distributed.group import Group

Access = Callable[[], AbstractContextManager[Any]]
Wait = Callable[[], None]


class RankVector(ABC):
    """A flat vector of this rank, and how it is averaged with those of other ranks."""

    own: Any  # float (n,), an array or a tensor
    is_common: bool  # whether all ranks hold the same bits between steps, as of parameters
    # Elements that are never rounded for the way: averages of another size than what they lie with.
    exact: slice = slice(0, 0)

    @abstractmethod
    def by_memory(self, parts: Sequence[slice], group: Group) -> list[AllReduce]:
        """Make what averages each part over ranks of one machine. Collective."""

    @abstractmethod
    def by_messages(
        self, parts: Sequence[slice], make: Callable[[Any], AllReduce]
    ) -> list[AllReduce]:
        """Make what averages each part by messages.

        `make` makes the all-reduce of a part that it is given, on the host or where it lies.
        """

    @abstractmethod
    def on_host(self, size: int) -> tuple[np.ndarray, Access]:
        """Return the first elements as an array, and the context in which they may be used."""

    def mark(self) -> Wait:
        """Return what makes later averages wait for all that this thread has begun to compute."""
        return lambda: None

    def working(self) -> AbstractContextManager[Any]:
        """Context in which any thread may average the vector."""
        return nullcontext()

    def rejoin(self) -> None:  # noqa: B027
        """Make what the trainer computes later wait for what other threads have averaged."""

    def close(self) -> None:  # noqa: B027
        """Give up other ranks' memory. Collective."""


class HostVector(RankVector):
    """A vector in host memory, which is one of those that are shared, or this rank's alone."""

    def __init__(
        self, vectors: Sequence[np.ndarray], rank: int = 0, is_common: bool = True
    ) -> None:
        self._vectors, self.own, self.is_common = vectors, vectors[rank], is_common

    def by_memory(self, parts: Sequence[slice], group: Group) -> list[AllReduce]:
        return [SharedMemoryAllReduce(group, [v[part] for v in self._vectors]) for part in parts]

    def by_messages(
        self, parts: Sequence[slice], make: Callable[[Any], AllReduce]
    ) -> list[AllReduce]:
        return [make(self.own[part]) for part in parts]

    def on_host(self, size: int) -> tuple[np.ndarray, Access]:
        return self.own[:size], nullcontext
