"""A step's update against NumPy, in several steps with a rate that changes."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

from tandem.ops import MomentumStep, momentum_step
from tests.support.op_checks import check_shapes


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_momentum_step_equals_numpy(nesterov: bool, decay: float) -> None:
    weight, velocity, gradient, rate = pt.dvector(), pt.dvector(), pt.dvector(), pt.dscalar()
    step = pytensor.function(
        [weight, velocity, gradient, rate],
        momentum_step(weight, velocity, gradient, rate, 0.9, decay, nesterov),
        mode="FAST_COMPILE",
    )
    rng = np.random.default_rng(0)
    w, v = rng.normal(size=(2, 5))
    expected_w, expected_v = w.copy(), v.copy()
    for lr in (0.1, 0.1, 0.01):
        g = rng.normal(size=5)
        w, v = step(w, v, g, lr)
        for i in range(5):
            slope = g[i] + decay * expected_w[i]
            expected_v[i] = 0.9 * expected_v[i] - lr * slope
            ahead = 0.9 * expected_v[i] - lr * slope if nesterov else expected_v[i]
            expected_w[i] += ahead
        np.testing.assert_allclose(w, expected_w, rtol=1e-12)
        np.testing.assert_allclose(v, expected_v, rtol=1e-12)


def test_nesterov_follows_the_look_ahead_form() -> None:
    """The weights are those of the look-ahead: w = u + m v, with u the classical position.

    Sutskever et al. 2013 take the gradient at u + m v; in terms of w that is where it is taken.
    """
    slope = 3.0
    position, speed, w, v = 1.0, 0.0, 1.0, 0.0
    step_inputs = [pt.dscalar() for _ in range(4)]
    step = pytensor.function(
        step_inputs,
        momentum_step(*step_inputs, 0.9, 0.0, True),
        mode="FAST_COMPILE",
    )
    for _ in range(6):
        gradient = slope * (position + 0.9 * speed)
        speed = 0.9 * speed - 0.05 * gradient
        position += speed
        w, v = step(w, v, slope * w, 0.05)
        assert w == pytest.approx(position + 0.9 * speed)
        assert v == pytest.approx(speed)


def test_shapes_are_known_without_computing() -> None:
    w = np.ones((2, 3))
    check_shapes(MomentumStep(0.9, 0.01, False), w, w, w, np.float64(0.1))


def test_inputs_that_do_not_fit_are_refused() -> None:
    w, short, rate = (pt.tensor(dtype="float32", shape=s) for s in ((3,), (2,), ()))
    with pytest.raises(ValueError, match="axis 0 of weight, velocity and gradient must be equal"):
        momentum_step(w, w, short, rate, 0.9, 0.0, False)
    with pytest.raises(TypeError, match="one dtype"):
        momentum_step(w, w, w, pt.dscalar(), 0.9, 0.0, False)
    with pytest.raises(TypeError, match="rate must be a 0-dimensional"):
        momentum_step(w, w, w, w, 0.9, 0.0, False)
