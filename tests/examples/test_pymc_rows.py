"""A log-probability whose rows processes divide: against the same in one, and in PyMC's sampler."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import tandem.parallel as synk
from examples.pymc_rows import logistic, made_up, main
from tandem.backend import device_mode
from tests.support.pymc_models import pymc_or_skip


@pytest.fixture
def pool() -> Iterator[None]:
    synk.fork(2, use_gpu=False, threads=1)
    yield
    synk.close()


def test_sum_and_gradient_are_those_of_one_process(pool: None) -> None:
    x, y, _ = made_up(1001, 4)
    weights = pt.dvector("weights")
    outputs: Any = logistic(x, y)(weights)
    before = pt.dot(x, weights)
    expected = (y * before - pt.softplus(before)).sum()
    for mode in (device_mode("cpu"), "FAST_COMPILE"):
        # Twice the sum, so that what comes back to the Op is not one.
        totals = [2 * outputs[0], 2 * expected]
        results: Any = [(total, pytensor.grad(total, weights)) for total in totals]
        f = pytensor.function([weights], [*results[0], *results[1]], mode=mode)
        for point in np.random.default_rng(1).normal(size=(3, 4)):
            found = f(point)
            for value, exact in zip(found[:2], found[2:], strict=True):
                np.testing.assert_allclose(value, exact, rtol=1e-12)


def test_a_second_derivative_is_refused(pool: None) -> None:
    x, y, _ = made_up(20, 2)
    weights = pt.dvector("weights")
    outputs: Any = logistic(x, y)(weights)
    with pytest.raises(NotImplementedError, match="has no derivative"):
        pytensor.grad(outputs[0] + outputs[1].sum(), weights)


def test_without_draws_there_is_a_time_alone(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--rows", "1000", "--draws", "0"])
    assert len(capsys.readouterr().out.splitlines()) == 1


@pytest.mark.slow
def test_the_sampler_finds_the_weights(capsys: pytest.CaptureFixture[str]) -> None:
    pymc_or_skip()
    main(["--rows", "2000", "--columns", "3", "--draws", "100"])
    lines = capsys.readouterr().out.splitlines()
    found = [line.replace(",", "").split() for line in lines if line.startswith("weight")]
    assert len(found) == 3
    for _, _, mean, _, deviation, _, _, true in found:
        assert abs(float(mean) - float(true)) < 5 * float(deviation)
