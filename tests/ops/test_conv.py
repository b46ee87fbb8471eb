import itertools

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

from tandem.ops import Conv2d, Conv2dInputGrad, Conv2dWeightGrad, conv2d
from tests.support.op_checks import MODE, check_gradient, check_shapes, evaluate

# images, filters, (stride, pad, groups)
CASES = [
    pytest.param((1, 1, 1, 1), (1, 1, 1, 1), (1, 0, 1), id="one-pixel"),
    pytest.param((2, 3, 6, 5), (4, 3, 3, 2), (1, 0, 1), id="plain"),
    pytest.param((2, 3, 8, 9), (2, 3, 4, 3), (3, 0, 1), id="stride-with-pixels-left-over"),
    pytest.param((1, 2, 4, 5), (3, 2, 3, 3), (1, 1, 1), id="pad"),
    pytest.param((1, 2, 2, 1), (3, 2, 5, 5), (1, 2, 1), id="filter-larger-than-image"),
    pytest.param((2, 4, 5, 4), (6, 2, 3, 3), (1, 1, 2), id="groups"),
    pytest.param((1, 3, 4, 4), (3, 1, 2, 2), (1, 0, 3), id="a-group-to-each-channel"),
    pytest.param((2, 4, 7, 6), (4, 2, 3, 2), (2, 1, 2), id="stride-pad-groups"),
    pytest.param((1, 2, 7, 6), (3, 2, 3, 2), ((2, 1), (0, 2), 1), id="pairs"),
    pytest.param((1, 2, 8, 7), (2, 2, 3, 3), (1, 2, 1, 2), id="dilation"),
    pytest.param((1, 4, 9, 8), (4, 1, 2, 3), ((1, 2), (1, 0), 4, (3, 2)), id="depthwise-pairs"),
]


def parts(options):
    """Stride, pad and dilation as pairs, and the number of groups."""
    stride, pad, groups, dilation = (*options, 1)[:4]
    pairs = (v if isinstance(v, tuple) else (v, v) for v in (stride, pad, dilation))
    return *pairs, groups


def arrays(x_shape, w_shape, dtype="float64"):
    rng = np.random.default_rng(0)
    return tuple(rng.normal(size=s).astype(dtype) for s in (x_shape, w_shape, w_shape[:1]))


def output_shape(x, w, options):
    sides = (
        (n + 2 * pad - dilation * (k - 1) - 1) // stride + 1
        for n, k, stride, pad, dilation in zip(
            x.shape[2:], w.shape[2:], *parts(options)[:3], strict=True
        )
    )
    return (x.shape[0], w.shape[0], *sides)


def taps(x, w, options):
    """Every product in a convolution: the indices of its output, its input and its weight."""
    (down, right), (above, before), (below, beside), groups = parts(options)
    for n, o, p, q in itertools.product(*map(range, output_shape(x, w, options))):
        first_channel = o // (w.shape[0] // groups) * w.shape[1]
        for c, i, j in itertools.product(*map(range, w.shape[1:])):
            row = down * p + below * i - above
            column = right * q + beside * j - before
            if 0 <= row < x.shape[2] and 0 <= column < x.shape[3]:
                yield (n, o, p, q), (n, first_channel + c, row, column), (o, c, i, j)


def conv2d_by_loops(x, w, b, options):
    y = np.zeros(output_shape(x, w, options)) + b[:, np.newaxis, np.newaxis]
    for out, image, weight in taps(x, w, options):
        y[out] += x[image] * w[weight]
    return y


def gradients_by_loops(x, w, g, options):
    gx, gw, gb = np.zeros_like(x), np.zeros_like(w), np.zeros(len(w))
    for out, image, weight in taps(x, w, options):
        gx[image] += g[out] * w[weight]
        gw[weight] += g[out] * x[image]
    for out in np.ndindex(g.shape):
        gb[out[1]] += g[out]
    return gx, gw, gb


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize(("x_shape", "w_shape", "options"), CASES)
def test_convolution_is_what_loops_compute(x_shape, w_shape, options, static):
    x, w, b = arrays(x_shape, w_shape)
    y = evaluate(lambda x, w, b: conv2d(x, w, b, *options), x, w, b, static=static)
    np.testing.assert_allclose(y, conv2d_by_loops(x, w, b, options), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("x_shape", "w_shape", "options"), CASES)
def test_gradients_are_what_loops_compute(x_shape, w_shape, options):
    x, w, b = arrays(x_shape, w_shape)
    g = np.random.default_rng(1).normal(size=output_shape(x, w, options))
    found = evaluate(
        lambda x, w, b, g: pytensor.grad((g * conv2d(x, w, b, *options)).sum(), [x, w, b]),
        *(x, w, b, g),
    )
    for one, expected in zip(found, gradients_by_loops(x, w, g, options), strict=True):
        np.testing.assert_allclose(one, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("x_shape", "w_shape", "options"), CASES)
def test_gradients_and_theirs_agree_with_finite_differences(x_shape, w_shape, options):
    x, w, b = arrays(x_shape, w_shape)
    g = np.random.default_rng(1).normal(size=output_shape(x, w, options))
    check_gradient(lambda x, w, b: conv2d(x, w, b, *options), x, w, b)
    check_gradient(lambda w, g: Conv2dInputGrad(*options)(x, w, g), w, g)
    check_gradient(lambda x, g: Conv2dWeightGrad(*options)(x, w, g), x, g)


def test_second_derivative_of_a_cost():
    x, w, b = arrays((2, 4, 5, 4), (4, 2, 3, 3))

    def slopes(x, w):
        cost = (conv2d(x, w, b, stride=2, pad=1, groups=2) ** 3).sum()
        return pt.concatenate([g.flatten() for g in pytensor.grad(cost, [x, w])])

    check_gradient(slopes, x, w)


@pytest.mark.parametrize(("x_shape", "w_shape", "options"), CASES)
def test_shapes_are_known_without_computing(x_shape, w_shape, options):
    x, w, b = arrays(x_shape, w_shape)
    g = np.zeros(output_shape(x, w, options))
    check_shapes(Conv2d(*options), x, w, b)
    check_shapes(Conv2dInputGrad(*options), x, w, g)
    check_shapes(Conv2dWeightGrad(*options), x, w, g)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Numba will use object mode:UserWarning")
def test_float32_stays_float32_also_in_the_default_mode_of_pytensor():
    options = (2, 1, 2)
    values = arrays((2, 4, 7, 6), (4, 2, 3, 2), "float32")
    inputs = [pt.ftensor4("x"), pt.ftensor4("w"), pt.fvector("b")]
    y = conv2d(*inputs, *options)
    expected = conv2d_by_loops(*values, options)
    for mode in (MODE, None):
        found = pytensor.function(inputs, [y, *pytensor.grad(y.sum(), inputs)], mode=mode)(*values)
        assert {a.dtype for a in found} == {np.dtype("float32")}
        np.testing.assert_allclose(found[0], expected, rtol=1e-4, atol=1e-5)


def test_a_gradient_that_nobody_asks_for_is_not_computed():
    x, w, b = pt.dtensor4("x"), pt.dtensor4("w"), pt.dvector("b")
    gradients = pytensor.grad(conv2d(x, w, b).sum(), [w, b])
    step = pytensor.function([x, w, b], gradients, mode=MODE, on_unused_input="ignore")
    found = {type(node.op) for node in step.maker.fgraph.apply_nodes}
    assert Conv2dWeightGrad in found
    assert Conv2dInputGrad not in found


@pytest.mark.parametrize("static", [True, False])
def test_without_a_bias_nothing_is_added(static):
    x, w, _ = arrays((2, 3, 5, 5), (4, 3, 3, 3))
    found, gradient = evaluate(
        lambda x, w: [y := conv2d(x, w, pad=1), pytensor.grad((y**2).sum(), w)], x, w, static=static
    )
    zeros = np.zeros(4)
    expected = conv2d_by_loops(x, w, zeros, (1, 1, 1))
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)
    expected = gradients_by_loops(x, w, 2 * expected, (1, 1, 1))[1]
    np.testing.assert_allclose(gradient, expected, rtol=1e-12, atol=1e-12)


def test_a_graph_without_a_bias_has_no_gradient_of_one():
    x, w = pt.tensor("x", shape=(2, 3, 5, 5)), pt.tensor("w", shape=(4, 3, 3, 3))
    y = conv2d(x, w)
    gradient = pytensor.grad((y**2).sum(), w)
    step = pytensor.function([x, w], gradient, mode=MODE)
    names = [type(node.op).__name__ for node in step.maker.fgraph.apply_nodes]
    assert "Sum" not in names


def test_an_empty_batch_passes():
    x, w, b = arrays((0, 2, 4, 4), (3, 2, 3, 3))
    y, gw = evaluate(
        lambda x, w, b: [y := conv2d(x, w, b), pytensor.grad(y.sum(), w)], x, w, b, static=False
    )
    assert y.shape == (0, 3, 2, 2)
    assert not gw.any()


def test_ops_are_equal_by_their_properties():
    assert Conv2d(2, 1, 2) == Conv2d(stride=2, pad=1, groups=2)
    assert Conv2d(2, 1, 2) == Conv2d((2, 2), (1, 1), 2, (1, 1))
    assert Conv2d(2, 1, 2) != Conv2d(2, 1, 1)
    assert Conv2d(2, 1, 2) != Conv2d((2, 1), 1, 2)
    assert Conv2d() != Conv2d(dilation=2)
    assert hash(Conv2d(2, 1, 2)) == hash(Conv2d(2, 1, 2))


def variable(*shape, dtype="float64"):
    return pt.tensor(dtype=dtype, shape=shape)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": variable(2, 3, 4)}, TypeError, "x must be a 4-dim.*got"),
        (
            {"x": variable(2, 3, 4, 4, dtype="int64")},
            TypeError,
            "float32 or float64, got .*int64",
        ),
        (
            {"x": variable(2, 3, 4, 4, dtype="float32")},
            TypeError,
            "'x': 'float32', 'w': 'float64'",
        ),
        ({"x": variable(2, 5, 4, 4)}, ValueError, "channels of x and .* equal, got 3 and 5"),
        ({"b": variable(5)}, ValueError, "length of b must be equal, got 4 and 5"),
        ({"x": variable(2, 3, 2, 4)}, ValueError, "a window of 3 does not fit into an axis of 2"),
        ({"groups": 3, "x": variable(2, 9, 4, 4)}, ValueError, "into 3 groups, got 4"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(changes, error, message):
    inputs = {"x": variable(2, 3, 4, 4), "w": variable(4, 3, 3, 3), "b": variable(4)}
    with pytest.raises(error, match=message):
        conv2d(**inputs | changes)


def test_a_gradient_of_another_shape_than_the_output_is_refused():
    x, w, g = variable(2, 3, 4, 4), variable(5, 3, 3, 3), variable(2, 5, 3, 2)
    with pytest.raises(ValueError, match=r"axis 2 of g .* must be equal, got 2 and 3"):
        Conv2dWeightGrad()(x, w, g)


def test_a_bias_of_another_length_is_refused_when_it_runs():
    x, w, _ = arrays((1, 2, 3, 3), (4, 2, 2, 2))
    with pytest.raises(ValueError, match="w has 4 filters, b has 1"):
        evaluate(conv2d, x, w, np.zeros(1), static=False)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"stride": 0}, ValueError),
        ({"pad": -1}, ValueError),
        ({"groups": 0}, ValueError),
        ({"dilation": (1, 0)}, ValueError),
        ({"stride": 1.5}, TypeError),
        ({"stride": (1, 1, 1)}, TypeError),
    ],
)
def test_properties_out_of_range_are_refused(options, error):
    with pytest.raises(error, match=f"Conv2d: {next(iter(options))} must be .* got"):
        Conv2d(**options)
