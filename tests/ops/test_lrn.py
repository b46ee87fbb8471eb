import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

from tandem.ops import LRN, LRNGrad, lrn
from tests.support.op_checks import check_gradient, check_shapes, evaluate

# images, (size, alpha, beta, k); alpha is large where the sum is to matter
CASES = [
    pytest.param((1, 1, 1, 1), (1, 0.5, 0.75, 2.0), id="one-value"),
    pytest.param((1, 7, 2, 2), (5, 0.3, 0.75, 2.0), id="the-network's-window"),
    pytest.param((2, 6, 1, 2), (5, 1e-4, 0.75, 2.0), id="the-network's"),
    pytest.param((1, 4, 2, 2), (3, 0.5, 0.5, 1.0), id="square-root"),
    pytest.param((1, 2, 3, 1), (5, 0.5, 0.75, 2.0), id="window-wider-than-the-channels"),
]


def arrays(shape, count=2):
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape) for _ in range(count)]


def scale_by_loops(x, size, alpha, beta, k):
    scale = np.empty_like(x)
    for n, c, row, column in np.ndindex(x.shape):
        energy = 0.0
        for other in range(c - size // 2, c + size // 2 + 1):
            if 0 <= other < x.shape[1]:
                energy += x[n, other, row, column] ** 2
        scale[n, c, row, column] = k + alpha * energy
    return scale


def lrn_by_loops(x, *options):
    return x / scale_by_loops(x, *options) ** options[2]


def gradient_by_loops(x, g, size, alpha, beta, k):
    """Sum over outputs of g times the derivative of the output by the input, entry by entry."""
    scale = scale_by_loops(x, size, alpha, beta, k)
    gradient = np.zeros_like(x)
    for n, c, row, column in np.ndindex(x.shape):
        for out in range(max(0, c - size // 2), min(x.shape[1], c + size // 2 + 1)):
            at = n, out, row, column
            through_scale = -2 * alpha * beta * x[at] * x[n, c, row, column]
            derivative = through_scale * scale[at] ** (-beta - 1)
            if out == c:
                derivative += scale[at] ** -beta
            gradient[n, c, row, column] += g[at] * derivative
    return gradient


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize(("shape", "options"), CASES)
def test_normalised_values_are_what_loops_compute(shape, options, static):
    (x,) = arrays(shape, 1)
    y, scale = evaluate(LRN(*options), x, static=static)
    np.testing.assert_allclose(y, lrn_by_loops(x, *options), rtol=1e-13)
    np.testing.assert_allclose(scale, scale_by_loops(x, *options), rtol=1e-13)


def test_the_wrapper_has_the_paper_s_constants():
    (x,) = arrays((1, 8, 2, 2), 1)
    x *= 100
    np.testing.assert_allclose(evaluate(lrn, x), lrn_by_loops(x, 5, 1e-4, 0.75, 2.0), rtol=1e-13)


@pytest.mark.parametrize(("shape", "options"), CASES)
def test_gradient_is_what_loops_compute(shape, options):
    x, g = arrays(shape)
    found = evaluate(lambda x, g: pytensor.grad((g * lrn(x, *options)).sum(), x), x, g)
    np.testing.assert_allclose(found, gradient_by_loops(x, g, *options), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(("shape", "options"), CASES)
def test_gradients_agree_with_finite_differences(shape, options):
    x, g = arrays(shape)
    check_gradient(lambda x: lrn(x, *options), x)
    check_gradient(lambda x: LRN(*options)(x)[1], x)
    check_gradient(lambda x: pt.mul(*LRN(*options)(x)), x)
    check_gradient(LRNGrad(*options), x, scale_by_loops(x, *options), g)
    check_gradient(lambda x, g: pytensor.grad((g * lrn(x, *options)).sum(), x), x, g)


@pytest.mark.parametrize(("shape", "options"), CASES)
def test_shapes_are_known_without_computing(shape, options):
    x, g = arrays(shape)
    check_shapes(LRN(*options), x)
    check_shapes(LRNGrad(*options), x, scale_by_loops(x, *options), g)


def test_float32_stays_float32():
    x, g = (a.astype("float32") for a in arrays((1, 5, 2, 2)))
    values = evaluate(
        lambda x, g: [
            *LRN(5, 0.3, 0.75, 2.0)(x),
            gradient := pytensor.grad((g * lrn(x)).sum(), x),
            pytensor.grad(gradient.sum(), x),
        ],
        *(x, g),
    )
    assert {value.dtype for value in values} == {np.dtype("float32")}
    np.testing.assert_allclose(values[0], lrn_by_loops(x, 5, 0.3, 0.75, 2.0), rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 4}, "size must be odd"),
        ({"size": 0}, "size must be at least 1, got 0"),
        ({"alpha": -1.0}, "alpha must not be negative .* got -1.0"),
        ({"k": 0.0}, "k must be positive, got"),
    ],
)
def test_parameters_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        lrn(pt.dtensor4("x"), **options)
    with pytest.raises(TypeError, match=r"x must be a 4-dimensional tensor .* got"):
        lrn(pt.dmatrix("x"))
