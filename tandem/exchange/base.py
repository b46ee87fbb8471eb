"""The interface of an exchange strategy."""

from collections.abc import Sequence


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
