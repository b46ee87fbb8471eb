import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

from tandem.ops import PoolNorm, PoolNormGrad, lrn, max_pool2d, relu
from tests.support.op_checks import MODE, check_shapes, evaluate

NORM = (5, 0.1, 0.75, 2.0)

# images, size, stride, norm
CASES = [
    pytest.param((2, 6, 7, 9), 3, 2, NORM, id="overlapping"),
    pytest.param((2, 3, 8, 6), 3, 2, (3, 0.2, 0.6, 1.0), id="pixels-left-over"),
    pytest.param((1, 2, 6, 6), 2, 2, None, id="without-norm"),
]


def arrays(shape):
    rng = np.random.default_rng(0)
    x, b = rng.normal(size=shape), rng.normal(size=shape[1])
    return np.round(x, 1), b  # with equal pixels


@pytest.mark.parametrize(("shape", "size", "stride", "norm"), CASES)
def test_it_computes_what_the_three_ops_do(shape, size, stride, norm):
    def separate(x, b):
        y = relu(max_pool2d(x + b[:, None, None], size, stride))
        return [y, *([lrn(y, *norm)] if norm else [])]

    x, b = arrays(shape)
    expected = evaluate(separate, x, b)
    y, places, *z = evaluate(PoolNorm(size, stride, norm), x, b)
    for found, value in zip([y, *z], expected, strict=True):
        np.testing.assert_allclose(found, value, 1e-13)
    for n, c, p, q in np.ndindex(y.shape):
        window = x[n, c, stride * p : stride * p + size, stride * q : stride * q + size]
        assert places[n, c, p, q] == window.argmax()
    check_shapes(PoolNorm(size, stride, norm), x, b)


@pytest.mark.parametrize(("shape", "size", "stride", "norm"), CASES)
def test_its_gradient_is_theirs(shape, size, stride, norm):
    x, b = pt.tensor4("x"), pt.vector("b")
    y = relu(max_pool2d(x + b[:, None, None], size, stride))
    z = lrn(y, *norm) if norm else y
    given = arrays(shape)
    found = evaluate(PoolNorm(size, stride, norm), *given)
    g = np.random.default_rng(1).normal(size=found[0].shape)
    expected = pytensor.function([x, b], pytensor.grad((z * g).sum(), [x, b]), mode=MODE)(*given)
    gradients = evaluate(PoolNormGrad(size, stride, norm, shape[2:]), *found[:2], g)
    for got, value in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(got, value, 1e-12, 1e-13)
