import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

from tandem.ops import Relu, ReluGrad, relu
from tests.support.op_checks import check_gradient, check_shapes, evaluate

SHAPES = [(), (5,), (3, 4), (2, 3, 2, 2)]


def away_from_zero(shape):
    x = np.random.default_rng(0).normal(size=shape)
    return x + np.where(x < 0, -0.1, 0.1)


@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradient_are_what_loops_compute(shape):
    x = away_from_zero(shape)
    y, gradient = evaluate(lambda x: [y := relu(x), pytensor.grad((3 * y).sum(), x)], x)
    for at in np.ndindex(shape):
        assert y[at] == (x[at] if x[at] > 0 else 0)
        assert gradient[at] == (3 if x[at] > 0 else 0)


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_and_shapes_agree_with_finite_differences_and_values(shape):
    x = away_from_zero(shape)
    check_gradient(relu, x)
    check_gradient(ReluGrad(), x, x + 1)
    check_shapes(Relu(), x)
    check_shapes(ReluGrad(), x, x)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_special_values(dtype):
    x = np.array([0.0, -0.0, np.inf, -np.inf, np.nan], dtype)
    y, gradient = evaluate(lambda x: [y := relu(x), pytensor.grad((2 * y).sum(), x)], x)
    np.testing.assert_array_equal(y, np.array([0, 0, np.inf, 0, np.nan], dtype))
    np.testing.assert_array_equal(gradient, np.array([0, 0, 2, 0, 2], dtype))
    assert y.dtype == gradient.dtype == np.dtype(dtype)


def test_inputs_that_do_not_fit_are_refused():
    with pytest.raises(TypeError, match="x must be a tensor of float32 or float64, got"):
        relu(pt.imatrix("x"))
    with pytest.raises(ValueError, match="axis 0 of y and g must be equal, got 2 and 3"):
        ReluGrad()(pt.tensor(dtype="float64", shape=(2,)), pt.tensor(dtype="float64", shape=(3,)))
    with pytest.raises(TypeError, match="one dtype"):
        ReluGrad()(pt.dvector(), pt.fvector())
