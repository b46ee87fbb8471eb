"""What ranks need of whatever joins them, over one machine or many."""

from collections.abc import Sequence
from typing import Any, Literal, NoReturn, Protocol, TypeVar

import numpy as np

Message = TypeVar("Message")
Starter = Literal["mpirun", "torchrun"]


class Adder(Protocol):
    """A group of ranks whose library adds vectors.

    Every method is called by all ranks of the group together, with vectors of one size and dtype.
    Each raises `tandem.distributed.PeerLost` where another rank is known to have ended.

    Vectors are arrays of NumPy's. An engine for GPUs takes PyTorch's tensors in their place.

    Attributes
    ----------
    rank, size : int
        This rank's number in the group, from 0, and how many there are.
    """

    rank: int
    size: int

    def all_reduce(self, vector: Any) -> None:
        """Replace every rank's vector by the sum of all, in whatever order the library adds.

        Parameters
        ----------
        vector : float (n,)
        """
        ...


class Engine(Adder, Protocol):
    """A group of ranks, each with a trainer, and how vectors get from one to another."""

    def all_gather_object(self, message: Message) -> tuple[Message, ...]:
        """Pass a small message to every rank; those of all ranks, by rank."""
        ...

    def all_to_all(self, vector: Any, received: Any, parts: Sequence[slice]) -> None:
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

    def all_gather(self, vector: Any, parts: Sequence[slice]) -> None:
        """Give every rank the parts of all.

        Parameters
        ----------
        vector : (n,)
            Holds this rank's part; the others' parts are filled in.
        parts : sequence of slice
            As in `all_to_all`.
        """
        ...


class RankGroup(Engine, Protocol):
    """All that a run needs of its ranks. Also a `Group`, for trainers.

    An engine is used by one thread at a time.

    Attributes
    ----------
    starter : "mpirun" or "torchrun"
        What has started the ranks.
    """

    starter: Starter

    @property
    def local(self) -> "RankGroup":
        """The ranks of this machine, in the same order. All ranks ask for it together."""
        ...

    def group(self, number: int) -> "RankGroup":
        """Those ranks that give the same number, in the same order. All ranks call it together."""
        ...

    def copy(self) -> "RankGroup":
        """The same ranks, for another thread. All ranks call it together."""
        ...

    def barrier(self) -> None:
        """Return when every rank has called this, whatever time they take."""
        ...

    def close(self) -> None:
        """Give up this engine, all that were made of it, and the memory that they share.

        All ranks call it together, when none of them uses any of it any more. A rank that ends has
        no need of it.
        """
        ...

    def shared(self, nbytes: int) -> list[np.ndarray]:
        """Memory that the ranks of one machine share, zero at first.

        Parameters
        ----------
        nbytes : int
            Of each rank's part, the same at all.

        Returns
        -------
        list of uint8 (nbytes,)
            Every rank's part, by rank.
        """
        ...

    def beat(self, rank: int) -> None:
        """Send another rank a sign of life, and expect some of it. Returns at once.

        Raises
        ------
        PeerLost
            What started the ranks has ended.
        """
        ...

    def heard(self) -> set[int]:
        """Who has sent a sign of life since the last call. Raises PeerLost as `beat`."""
        ...

    def abort(self, status: int) -> NoReturn:
        """End all ranks, everywhere, this one too."""
        ...
