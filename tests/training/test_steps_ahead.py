"""Steps that are started before the one before is known to be finite."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from tandem.training.not_finite import Position
from tandem.training.steps_ahead import StepsAhead

PICTURES = np.array([4, 2])


class Events:
    """A model and refusals that write down what is asked of them."""

    def __init__(self, finite: list[bool]) -> None:
        self.finite, self.seen = iter(finite), [""][:0]
        model: Any = SimpleNamespace(step=self._step)
        self.refusals: Any = SimpleNamespace(in_a_row=3, refuse=self._refuse)
        self.steps = StepsAhead(model, self.refusals)

    def start(self, number: int) -> int:
        slot: Any = f"slot {number}"
        return self.steps.start(slot, Position(1, number, number), 0.5, PICTURES + number)

    def _step(self, slot: str, epoch: int, rate: float, rows: int) -> Any:
        assert rows == len(PICTURES)
        self.seen.append(f"start {slot} {epoch} {rate}")

        def is_finite() -> bool:
            self.seen.append(f"wait {slot}")
            return next(self.finite)

        return is_finite

    def _refuse(self, at: Position, rate: float, pictures: list[int]) -> None:
        self.seen.append(f"refuse {at.minibatch} {rate} {pictures}")


def test_a_step_is_waited_for_when_the_next_has_started() -> None:
    events = Events([True, False, True])
    assert events.steps.complete() == 0
    assert events.seen == []
    assert events.start(0) == 0
    assert events.seen == ["start slot 0 1 0.5"]
    assert events.refusals.in_a_row == 3
    assert events.start(1) == 1
    assert events.seen[1:] == ["start slot 1 1 0.5", "wait slot 0"]
    assert events.refusals.in_a_row == 0
    assert events.start(2) == 0
    assert events.seen[3:] == ["start slot 2 1 0.5", "wait slot 1", "refuse 1 0.5 [5, 3]"]
    assert events.steps.complete() == 1
    assert events.seen[6:] == ["wait slot 2"]
    assert events.steps.complete() == 0
    assert len(events.seen) == 7
