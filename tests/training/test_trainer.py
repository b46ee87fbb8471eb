"""Steps of a trainer alone on a GPU: when they are waited for, and where their time goes."""

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tandem.artifacts.checkpoint import RunState
from tandem.artifacts.metrics import Seconds
from tandem.training.messages import StepVote
from tandem.training.step_timer import StepTimer
from tandem.training.steps_ahead import StepsAhead
from tandem.training.trainer import StopAgreed, Trainer

STEPS = 6  # of an epoch
LAST = ("refused 6", "reported 6")


class Alone(Trainer):
    """A trainer whose device takes `seconds` for a step; it writes down what happens."""

    def __init__(
        self,
        settings: dict[str, int],
        votes: Callable[[int], StepVote] = lambda step: StepVote(),
        bad: tuple[int, ...] = (),
        seconds: float = 0.0,
    ) -> None:
        self.seen: list[str] = []
        quiet: Any = SimpleNamespace(show=lambda activity: None, progress=lambda *_: None)
        self.config: Any = SimpleNamespace(
            **{"check_every": 0, "print_freq": 100, "reports_epochs": False} | settings
        )
        self.timer, self.reports, self.rank, self.steps = StepTimer(quiet), quiet, 0, STEPS
        self.memory: Any = SimpleNamespace(slots=["slot"], wait=lambda: None)
        self.pipeline: Any = Pipeline()
        self.exchange: Any = None
        self.agreement: Any = SimpleNamespace(vote=lambda: [votes(self.state.step + 1)])
        self.state, self._seconds = RunState(), Seconds()
        refusals: Any = SimpleNamespace(in_a_row=0, refuse=self._refuse)
        self.model: Any = SimpleNamespace(step=self._step)
        self.ahead = StepsAhead(self.model, refusals)
        self._bad, self._device, self._ends = bad, seconds, 0.0

    def _step(self, *_: Any) -> Callable[[], bool]:
        number = self.state.step + 1
        self._ends = max(self._ends, time.perf_counter()) + self._device
        ends = self._ends

        def is_finite() -> bool:
            time.sleep(max(0.0, ends - time.perf_counter()))
            return number not in self._bad

        return is_finite

    def _refuse(self, at: Any, *_: Any) -> None:
        self.seen.append(f"refused {at.step + 1}")

    def _rate(self, epoch: int, step: int) -> float:
        return 0.1

    def _check_equal(self) -> None:
        self.seen.append(f"checked {self.state.step}")

    def _report_training(self, epoch: int, rate: float) -> None:
        self.seen.append(f"reported {self.state.step}")

    def _save(self) -> None:
        self.seen.append(f"saved {self.state.step}")

    def _stop(self) -> Any:
        raise StopAgreed


class Pipeline:
    """Minibatches without end."""

    indices = np.arange(2)

    def __next__(self) -> int:
        return 0


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"print_freq": 2}, ["refused 2", "reported 2", "reported 4", "refused 6", "reported 6"]),
        ({"print_freq": 4, "reports_epochs": True}, ["refused 2", "reported 4", *LAST]),
        ({"print_freq": 3, "reports_epochs": True}, ["refused 2", "reported 3", *LAST]),
        ({"check_every": 3}, ["refused 2", "checked 3", "refused 6", "checked 6"]),
        # The last step of an epoch is completed before the validation.
        ({}, ["refused 2", "refused 6"]),
    ],
)
def test_what_reads_the_state_comes_after_a_refusal(
    settings: dict[str, int], expected: list[str]
) -> None:
    trainer = Alone(settings, bad=(2, 6))
    for step in range(STEPS):
        trainer._train_step(0, step)
    assert trainer.seen == expected
    # Steps that were skipped are no updates of the optimizer.
    assert (trainer.state.step, trainer.state.updates) == (STEPS, STEPS - 2)


@pytest.mark.parametrize("vote", [StepVote(snapshot=True), StepVote(stop=True)])
def test_a_checkpoint_is_written_after_a_refusal(vote: StepVote) -> None:
    trainer = Alone({}, lambda step: vote if step == 3 else StepVote(), bad=(3,))
    trainer._train_step(0, 0)
    trainer._train_step(0, 1)
    if vote.stop:
        with pytest.raises(StopAgreed):
            trainer._train_step(0, 2)
    else:
        trainer._train_step(0, 2)
    assert trainer.seen == ["refused 3", "saved 3"]


@pytest.mark.parametrize("every", [1, 2, 3])
def test_the_devices_time_is_counted_before_a_report(every: int) -> None:
    trainer = Alone({"print_freq": every}, seconds=0.03)
    begun = time.perf_counter()
    for step in range(STEPS):
        trainer._train_step(0, step)
    passed = time.perf_counter() - begun
    assert passed >= STEPS * 0.03
    assert 0.9 * passed <= trainer._seconds.steps <= passed
    assert trainer._seconds.compute == pytest.approx(trainer._seconds.steps, rel=0.1)
