"""The interfaces of an exchange strategy, and of the place where trainers meet."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeVar

Message = TypeVar("Message")


class Group(Protocol):
    """One trainer's place among all; see `tandem.distributed.LocalGroup`, which is one."""

    @property
    def rank(self) -> int:
        """This trainer's number, from 0."""
        ...

    def barrier(self) -> None:
        """Return when every trainer has called this. Raises PeerLost as `gather`."""
        ...

    def all_gather_object(self, message: Message) -> tuple[Message, ...]:
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

    A trainer calls these methods in every step, in this order, and a strategy overrides those that
    it needs. After gradients that are not finite there is no update.

    Attributes
    ----------
    is_synchronous : bool
        Whether all trainers hold the same weights after a step, and so make each together.
    """

    is_synchronous = True

    def before_gradients(self, shares: Sequence[float]) -> None:
        """Get ready: the gradients of a step are about to be computed.

        Parameters
        ----------
        shares : sequence of float
            Each trainer's part of the global minibatch, by rank; they add up to 1.
        """

    def on_gradient_ready(self, name: str) -> None:
        """Hear that the gradient of a parameter is there, while others are being computed."""

    def before_update(self, shares: Sequence[float]) -> None:
        """Exchange gradients. Parameters as in `before_gradients`."""

    def after_update(self, shares: Sequence[float]) -> None:
        """Exchange weights and momenta. Parameters as in `before_gradients`."""

    def consensus_weights(self) -> AbstractContextManager[None]:
        """A context in which the weights are those that the run is about. All enter together."""
        return nullcontext()

    def leave(self) -> None:
        """Exchange no more. All trainers do so together, when all has gone well."""
