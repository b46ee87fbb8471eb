"""The interfaces of an exchange strategy, and of the place where trainers meet."""

from collections.abc import Sequence
from typing import Protocol, TypeVar

Message = TypeVar("Message")


class Gathering(Protocol):
    """One trainer's place among all; see `tandem.exchange.Meeting`, which is one."""

    @property
    def rank(self) -> int:
        """This trainer's number, from 0."""
        ...

    def meet(self) -> None:
        """Return when every trainer has called this. Raises PeerLost as `gather`."""
        ...

    def gather(self, message: Message) -> tuple[Message, ...]:
        """Pass a small message to every trainer; those of all trainers, by rank.

        Raises
        ------
        PeerLost
            Another trainer has ended.
        """
        ...

    def close(self) -> None:
        """Give up the place."""
        ...


class Exchange:
    """What trainers do together around the update. The base class does nothing: one trainer.

    A trainer calls both methods in every step, and a strategy overrides the one that it needs.
    """

    def before_update(self, shares: Sequence[float]) -> None:
        """Exchange gradients.

        Parameters
        ----------
        shares : sequence of float
            Each trainer's part of the global minibatch, by rank; they add up to 1.
        """

    def after_update(self, shares: Sequence[float]) -> None:
        """Exchange weights and momenta. Parameters as in `before_update`."""
