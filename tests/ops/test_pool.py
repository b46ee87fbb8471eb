import itertools

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

from tandem.ops import MaxPool2d, MaxPool2dGrad, max_pool2d
from tests.support.op_checks import evaluate

# images, size, stride
CASES = [
    pytest.param((1, 1, 1, 1), 1, 1, id="one-pixel"),
    pytest.param((2, 3, 7, 5), 3, 2, id="overlapping"),
    pytest.param((1, 2, 8, 6), 3, 2, id="pixels-left-over"),
    pytest.param((2, 2, 6, 6), 2, 2, id="side-by-side"),
    pytest.param((1, 2, 7, 8), 2, 3, id="pixels-between"),
    pytest.param((2, 1, 4, 5), 3, 1, id="dense"),
]


def distinct(shape):
    """Values far enough from each other for finite differences."""
    return np.random.default_rng(0).permutation(np.prod(shape)).reshape(shape) / 10.0


def pool_by_loops(x, size, stride):
    rows, columns = ((n - size) // stride + 1 for n in x.shape[2:])
    y = np.empty((*x.shape[:2], rows, columns))
    argmax = np.empty(y.shape, np.int64)
    for n, c, p, q in np.ndindex(y.shape):
        best = None
        for i, j in itertools.product(range(size), repeat=2):
            row, column = stride * p + i, stride * q + j
            if best is None or x[n, c, row, column] > best:
                best = y[n, c, p, q] = x[n, c, row, column]
                argmax[n, c, p, q] = row * x.shape[3] + column
    return y, argmax


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("shape", "size", "stride"), CASES)
def test_maxima_and_their_places_are_what_loops_find(shape, size, stride, ties, static):
    x = distinct(shape)
    x = np.floor(x) % 3 if ties else x
    y, argmax = evaluate(MaxPool2d(size, stride), x, static=static)
    expected_y, expected_argmax = pool_by_loops(x, size, stride)
    np.testing.assert_array_equal(y, expected_y)
    np.testing.assert_array_equal(argmax, expected_argmax)
    np.testing.assert_array_equal(evaluate(lambda x: max_pool2d(x, size, stride), x), expected_y)


def test_float32_stays_float32():
    x = distinct((1, 2, 5, 5)).astype("float32")
    y, gradient = evaluate(lambda x: [y := max_pool2d(x, 3, 2), pytensor.grad(y.sum(), x)], x)
    assert y.dtype == gradient.dtype == np.dtype("float32")


def test_where_a_maximum_was_does_not_depend_on_it_smoothly():
    x = pt.dtensor4("x")
    _, argmax = MaxPool2d(2, 2)(x)
    with pytest.raises(pytensor.gradient.DisconnectedInputError):
        pytensor.grad(argmax.astype("float64").sum(), x)


@pytest.mark.parametrize(
    ("shape", "dtype", "error", "message"),
    [
        ((2, 3, 4), "float64", TypeError, "x must be a 4-dimensional tensor .* got"),
        ((2, 3, 4, 4), "uint8", TypeError, "x must be .* got .*uint8"),
        ((2, 3, 4, 2), "float64", ValueError, "a window of 3 does not fit into an axis of 2"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(shape, dtype, error, message):
    with pytest.raises(error, match=message):
        max_pool2d(pt.tensor(dtype=dtype, shape=shape), 3, 2)


def test_a_gradient_of_another_shape_is_refused():
    x = pt.tensor(dtype="float64", shape=(1, 1, 5, 5))
    argmax = pt.tensor(dtype="int64", shape=(1, 1, 2, 2))
    g = pt.tensor(dtype="float64", shape=(1, 1, 3, 2))
    with pytest.raises(ValueError, match="must be equal, got 2 and 3"):
        MaxPool2dGrad(3, 2)(x, argmax, g)
