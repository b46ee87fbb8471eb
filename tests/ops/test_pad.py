import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

from tandem.ops import Pad2d, pad2d
from tests.support.op_checks import check_gradient, check_shapes, evaluate

SIDES = [(0, 0, 0, 0), (1, 2, 3, 4), (0, 1, 0, 1), (2, 0, 0, 3)]


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("sides", SIDES)
def test_zeros_are_put_on_each_side(sides, static):
    x = np.random.default_rng(0).normal(size=(2, 3, 4, 5))
    top, bottom, left, right = sides
    expected = np.zeros((2, 3, top + 4 + bottom, left + 5 + right))
    for n, c, row, column in np.ndindex(x.shape):
        expected[n, c, top + row, left + column] = x[n, c, row, column]
    found, gradient = evaluate(
        lambda x: [y := pad2d(x, sides), pytensor.grad((y**3).sum(), x)], x, static=static
    )
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_allclose(gradient, 3 * x**2)
    check_shapes(Pad2d(sides), x)


def test_gradients_and_theirs_agree_with_finite_differences():
    x = np.random.default_rng(0).normal(size=(1, 2, 3, 2))
    check_gradient(lambda x: pad2d(x, (1, 0, 2, 1)), x)
    check_gradient(lambda x: pytensor.grad((pad2d(x, (1, 0, 2, 1)) ** 3).sum(), x), x)


@pytest.mark.parametrize(
    ("sides", "error", "message"),
    [
        ((1, 2), TypeError, r"sides must be \(top, bottom, left, right\), got \(1, 2\)"),
        (2, TypeError, r"sides must be \(top, bottom, left, right\), got 2"),
        ((1, -1, 0, 0), ValueError, "sides must be at least 0, got -1"),
        ((1, 0.5, 0, 0), TypeError, "sides must be an int, got 0.5"),
    ],
)
def test_sides_that_mean_nothing_are_refused(sides, error, message):
    with pytest.raises(error, match=f"Pad2d: {message}"):
        pad2d(pt.dtensor4(), sides)
