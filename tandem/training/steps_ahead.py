"""Steps of a trainer alone on a GPU, which the host need not wait for."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tandem.memory import Slot
from tandem.training.not_finite import Position, Refusals

if TYPE_CHECKING:
    from tandem.training.compiled_network import CompiledNetwork


@dataclass(frozen=True)
class _Started:
    """A step that was started."""

    at: Position
    rate: float
    pictures: np.ndarray  # dataset indices of its minibatch
    is_finite: Callable[[], bool]  # waits for it


class StepsAhead:
    """Starts each step before it is known whether the last was finite.

    A step that is not finite updates nothing, so the next may begin: it is what `on_nan: skip`
    asks for, and otherwise the run ends. Whoever reads or keeps the state completes it first.
    """

    def __init__(self, model: "CompiledNetwork", refusals: Refusals) -> None:
        self._model, self._refusals = model, refusals
        self._last: _Started | None = None

    def start(self, slot: Slot, at: Position, rate: float, pictures: np.ndarray) -> int:
        """Start a step; complete the one before, while the device computes, and return its updates.

        The optimizer must have no `Optimizer.numbers`: they follow from the updates, of which the
        last is not known yet.
        """
        is_finite = self._model.step(slot, at.epoch, rate, len(pictures))
        completed = self.complete()
        self._last = _Started(at, rate, pictures, is_finite)
        return completed

    def complete(self) -> int:
        """Wait for the last step; refuse it if it was not finite. Return how many updates it made.

        Exceptions are those of `Refusals.refuse`, which does what `on_nan` says.
        """
        last, self._last = self._last, None
        if last is None:
            return 0
        if last.is_finite():
            self._refusals.in_a_row = 0
            return 1
        self._refusals.refuse(last.at, last.rate, last.pictures.tolist())
        return 0
