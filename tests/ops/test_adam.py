"""A step's update against a loop, and what its Op refuses."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

from tandem.ops.adam import AdamStep, adam_step
from tests.support.op_checks import check_shapes

NUMBERS = (np.float64(0.1), np.float64(0.5), np.float64(1e-3))


@pytest.mark.parametrize("is_decoupled", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.2])
def test_adam_step_equals_a_loop(is_decoupled: bool, decay: float) -> None:
    w, m, v, g = np.random.default_rng(0).random((4, 5))
    inputs = [pt.dvector() for _ in range(4)]
    step = pytensor.function(
        inputs,
        adam_step(
            inputs[0],
            (inputs[1], inputs[2]),
            inputs[3],
            *NUMBERS,
            betas=(0.9, 0.99),
            decay=decay,
            is_decoupled=is_decoupled,
        ),
        mode="FAST_COMPILE",
    )
    found = step(w, m, v, g)
    for i in range(5):
        slope = g[i] if is_decoupled else g[i] + decay * w[i]
        first = 0.9 * m[i] + 0.1 * slope
        second = 0.99 * v[i] + 0.01 * slope**2
        weight = w[i] * (1 - 0.1 * decay) if is_decoupled else w[i]
        weight -= 0.1 * 0.5 * first / (second**0.5 + 1e-3)
        np.testing.assert_allclose([each[i] for each in found], (weight, first, second), rtol=1e-12)


def test_shapes_are_known_without_computing() -> None:
    check_shapes(AdamStep(0.9, 0.99, 0.1, True), *(np.ones((2, 3)) for _ in range(4)), *NUMBERS)


def test_inputs_that_do_not_fit_are_refused() -> None:
    op = AdamStep(0.9, 0.99, 0.1, True)
    w, short, rate = (pt.tensor(dtype="float32", shape=s) for s in ((3,), (2,), ()))
    with pytest.raises(ValueError, match="axis 0 of weight, moments and gradient must be equal"):
        op(w, w, short, w, rate, rate, rate)
    with pytest.raises(TypeError, match="one dtype"):
        op(w, w, w, w, rate, rate, pt.dscalar())
    with pytest.raises(TypeError, match="epsilon must be a 0-dimensional"):
        op(w, w, w, w, rate, rate, w)
