"""What ranks need of whatever joins them, over one machine or many."""

from collections.abc import Sequence
from typing import Protocol, TypeVar

import numpy as np

Message = TypeVar("Message")


class Engine(Protocol):
    """A group of ranks, each with a trainer, and how vectors get from one to another.

    Every method is called by all ranks of the group together, with vectors of one size and dtype.
    Each raises `tandem.exchange.PeerLost` where another rank is known to have ended.

    Attributes
    ----------
    rank, size : int
        This rank's number in the group, from 0, and how many there are.
    """

    rank: int
    size: int

    def gather(self, message: Message) -> tuple[Message, ...]:
        """Pass a small message to every rank; those of all ranks, by rank."""
        ...

    def all_reduce(self, vector: np.ndarray) -> None:
        """Replace every rank's vector by the sum of all, in whatever order the library adds.

        Parameters
        ----------
        vector : float (n,)
        """
        ...

    def all_to_all(self, vector: np.ndarray, received: np.ndarray, parts: Sequence[slice]) -> None:
        """Give each rank its part of every vector.

        Parameters
        ----------
        vector : (n,)
            What is given.
        received : (size, m)
            Row r becomes this rank's part of the vector of rank r.
        parts : sequence of slice
            The parts of a vector, by rank.
        """
        ...

    def all_gather(self, vector: np.ndarray, parts: Sequence[slice]) -> None:
        """Give every rank the parts of all.

        Parameters
        ----------
        vector : (n,)
            Holds this rank's part; the others' parts are filled in.
        parts : sequence of slice
            As in `all_to_all`.
        """
        ...
