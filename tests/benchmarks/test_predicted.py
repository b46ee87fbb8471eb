"""The benchmark of predicted steps, and how accurate they are on this machine."""

import pytest

from benchmarks.measure import Figure, row, table
from benchmarks.predicted import (
    LIMIT,
    RUNS,
    Case,
    compared,
    predicted_step,
    steps,
)
from tandem.cost.machine import Machine

TINY = Case("a tiny AlexNet", "alex_net:AlexNet", 2, 67, 0.05)


def machine(rate: float) -> Machine:
    speed = {"threads": 1, "bandwidth": 1e30, "rates": {"default": rate}}
    speeds = [{"trainers": 1, **speed}, {"trainers": 2, **speed, "call": 1.0}]
    return Machine.of({"speeds": speeds, "exchange": {"averaged": 0.0, "messages": 0.0}})


def test_a_step_is_predicted_for_the_trainers_of_a_run() -> None:
    """Twice the speed, half the time; here every line of two trainers takes a second more."""
    fast, slow = (predicted_step(machine(rate), TINY, 1, "average") for rate in (2e9, 1e9))
    assert slow == pytest.approx(2 * fast)
    assert predicted_step(machine(1e9), TINY, 2, "average") > 100 + slow


def test_a_prediction_is_compared_with_the_median() -> None:
    case = Case("AlexNet", "alex_net:AlexNet", 64)
    ratio, error = compared(case, 2, "gradients", 1.2, [0.9, 1.0, 2.0])
    assert row(ratio) | {"low": 0, "high": 0} == {
        "question": "a step of AlexNet, 64 images per trainer",
        "name": "2 trainers, exchange: gradients, predicted",
        "peer": "measured",
        "kind": "time",
        "ratio": 1.2,
        "low": 0,
        "high": 0,
        "target": None,
        "seconds": 1.2,
        "peer_seconds": 1.0,
        "rounds": 3,
        "reached": None,
    }
    assert isinstance(error, Figure)
    assert (error.value, error.target) == (pytest.approx(20), LIMIT)
    assert "20 %" in table([row(ratio), row(error)])
    _, low = compared(case, 1, "average", 0.9, [1.0])
    assert row(low)["value"] == pytest.approx(10)
    assert row(low)["reached"]


@pytest.mark.slow
@pytest.mark.parametrize(("trainers", "exchange"), RUNS)
def test_steps_of_a_run_are_measured(trainers: int, exchange: str) -> None:
    assert len(found := steps(TINY, trainers, exchange, 4)) == 4
    assert min(found) > 0
