import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

from tandem.ops import (
    BatchNormBySums,
    BatchNormBySumsGrad,
    ChannelGradientSums,
    ChannelSums,
    batch_norm,
    global_batch_norm,
)
from tests.support.norm_oracles import (
    EPSILON,
    batch_norm_by_loops,
    gradients_by_loops,
    norm_arrays,
)
from tests.support.op_checks import check_shapes, evaluate

SHAPES = [(6, 3, 2, 4), (6, 3), (7, 2, 1, 1), (5, 1), (1, 2, 3, 3), (1, 2)]


def arguments(shape):
    """Images and vectors, a gradient, and each number of valid rows; None: all."""
    x, scale, shift, g = norm_arrays(shape)
    pivot = np.linspace(-2, 3, shape[1])
    return (x, scale, shift, pivot), g, (None, *range(len(x) + 1))


def normalized(x, a, b, p, *valid):
    return global_batch_norm(x, a, b, p, *(valid or [None]), EPSILON)


def computed(build, arrays, valid, **options):
    return evaluate(build, *arrays, *([] if valid is None else [np.int64(valid)]), **options)


@pytest.mark.parametrize("shape", SHAPES)
def test_values_are_what_loops_compute(shape):
    arrays, _, valids = arguments(shape)
    for valid in valids:
        count = len(arrays[0]) if valid is None else valid
        expected = batch_norm_by_loops(*arrays[:3], len(arrays[0]), count)
        for static in (True, False):
            found = computed(normalized, arrays, valid, static=static)
            for one, other in zip(found, expected, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_are_what_loops_compute(shape):
    arrays, g, valids = arguments(shape)

    def gradients(x, a, b, p, g, *valid):
        return pytensor.grad((g * normalized(x, a, b, p, *valid)[0]).sum(), [x, a, b])

    for valid in valids:
        count = len(g) if valid is None else valid
        expected = gradients_by_loops(arrays[0], arrays[1], g, len(g), count)
        for one, other in zip(computed(gradients, [*arrays, g], valid), expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("shape", [(40, 3, 5, 6), (50, 7)])
def test_it_is_the_normalisation_of_one_group_of_all_rows(shape):
    arrays, g, _ = arguments(shape)

    def results(normalize):
        def build(x, a, b, p, g, *valid):
            y, *statistics = normalize(x, a, b, p, *valid)
            return [y, *statistics, *pytensor.grad((g * y).sum(), [x, a, b])]

        return build

    def by_group(x, a, b, p, *valid):
        return batch_norm(x, a, b, shape[0], *(valid or [None]), EPSILON)

    for valid in (None, 0, 1, shape[0] - 3):
        found = computed(results(normalized), [*arrays, g], valid)
        expected = computed(results(by_group), [*arrays, g], valid)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


def test_rows_that_are_not_valid_may_hold_anything():
    (x, a, b, p), g, _ = arguments((6, 3, 2, 4))

    def build(x, a, b, p, g, valid):
        y, *statistics = normalized(x, a, b, p, valid)
        return [y, *statistics, *pytensor.grad((g * y).sum(), [x, a, b])]

    expected = evaluate(build, x, a, b, p, g, np.int64(4))
    x[4:], g[4:] = np.nan, np.inf
    found = evaluate(build, x, a, b, p, g, np.int64(4))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(found[3][4:], 0)


def test_a_pivot_changes_only_the_rounding_also_far_from_the_mean():
    (x, a, b, _), _, _ = arguments((20, 3, 4, 4))
    near, far = (evaluate(normalized, x + 1e4, a, b, np.full(3, p)) for p in (1e4, 0.0))
    for one, other in zip(near, far, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_only_y_has_a_gradient():
    x, *vectors = (pt.tensor(shape=shape) for shape in ((6, 3), (3,), (3,), (3,)))
    y, mean, variance = global_batch_norm(x, *vectors)
    with pytest.raises(pytensor.gradient.DisconnectedInputError):
        pytensor.grad(mean.sum() + variance.sum(), x)
    with pytest.raises(pytensor.gradient.DisconnectedInputError):
        pytensor.grad(y.sum(), vectors[2])


@pytest.mark.parametrize("shape", [(6, 3, 2, 4), (6, 3)])
@pytest.mark.parametrize("valid", [(), (np.int64(4),)])
def test_shapes_are_known_without_computing(shape, valid):
    (x, a, b, p), g, _ = arguments(shape)
    sums, count = np.ones((2, shape[1])), np.float64(30)
    check_shapes(ChannelSums(), x, p, *valid)
    check_shapes(BatchNormBySums(), x, a, b, p, sums, count, *valid)
    check_shapes(ChannelGradientSums(), x, g, a, b, *valid)
    check_shapes(BatchNormBySumsGrad(), x, g, a, b, p, sums, count, *valid)


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: ChannelSums()(pt.tensor3(), pt.vector()), TypeError, "2- or 4-dimensional .* got"),
        (lambda: ChannelSums()(pt.fmatrix(), pt.dvector()), TypeError, "one dtype, got"),
        (
            lambda: ChannelSums()(pt.tensor(shape=(2, 3)), pt.tensor(shape=(4,))),
            ValueError,
            "channels of x and lengths of pivot must be equal, got 3 and 4",
        ),
        (lambda: BatchNormBySums(0), ValueError, "epsilon must be positive, got 0"),
        (
            lambda: BatchNormBySums()(
                pt.dmatrix(), *[pt.dvector()] * 3, pt.tensor(shape=(3, None)), pt.dscalar()
            ),
            ValueError,
            r"lengths of axis 0 of sums and \(2, channel\) must be equal, got 2 and 3",
        ),
        (
            lambda: ChannelGradientSums()(
                pt.tensor(shape=(2, 3)), pt.tensor(shape=(4, 3)), *[pt.dvector()] * 2
            ),
            ValueError,
            "lengths of axis 0 of x and g must be equal, got 2 and 4",
        ),
    ],
)
def test_inputs_that_do_not_fit_are_refused(build, error, message):
    with pytest.raises(error, match=message):
        build()
