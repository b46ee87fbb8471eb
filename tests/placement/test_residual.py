"""A residual network placed as neon would: 20 steps over ranks are those of one process."""

import json

import numpy as np
import pytensor
import pytest

from tandem.backend import device_mode
from tests.support.placed_residual import STEPS, network, stepped
from tests.support.ranks import run_ranks

TOLERANCE = 1e-9  # of a loss


def alone(factors: tuple[float, ...] = (1, 1, 1)) -> np.ndarray:
    """Losses of one process, by a graph that is not placed."""
    params, _, loss = network()
    updates = list(zip(params, stepped(params, loss, factors), strict=True))
    step = pytensor.function([], loss, updates=updates, mode=device_mode("cpu"))
    return np.array([float(step()) for _ in range(STEPS)])


@pytest.mark.slow
@pytest.mark.parametrize("parameter", range(3))
def test_a_wrong_factor_of_a_gradient_would_show(parameter: int) -> None:
    """One that counts a gradient once for each of two ranks, or divides it by their number."""
    right = alone()
    assert np.isfinite(right).all()
    assert (np.diff(right) < 0).all()
    assert right[-1] < right[0] / 2
    for factor in (2, 1 / 2):
        factors = tuple(factor if i == parameter else 1.0 for i in range(3))
        wrong = alone(factors)
        assert wrong[0] == right[0]
        assert abs(wrong[1] / right[1] - 1) > 1e4 * TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_learn_what_one_process_does(ranks: int) -> None:
    ended = run_ranks(ranks, "-m", ["tests.support.placed_residual"], timeout=170, by="torchrun")
    assert ended.returncode == 0, ended.stderr
    losses = json.loads(ended.stdout.splitlines()[-1])
    np.testing.assert_allclose(losses, alone(), rtol=TOLERANCE)
