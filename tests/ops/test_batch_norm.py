import math

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
import torch
import torch.nn.functional as F

from tandem.ops import BatchNorm, BatchNormGrad, BatchNormInference, batch_norm, relu
from tandem.ops.batch_norm import batch_norm_inference
from tests.support.norm_oracles import (
    EPSILON,
    batch_norm_by_loops,
    gradients_by_loops,
    norm_arrays,
)
from tests.support.op_checks import check_gradient, check_shapes, evaluate

SHAPES = [(6, 3, 2, 4), (6, 3), (7, 2, 1, 1), (5, 1), (1, 2, 3, 3), (1, 2)]


def normalized(x, scale, shift, rows, valid=None):
    """The three outputs, with `valid` as a symbolic input."""
    inputs = [x, scale, shift] if valid is None else [x, scale, shift, np.int64(valid)]
    return evaluate(lambda x, a, b, *v: batch_norm(x, a, b, rows, *(v or [None]), EPSILON), *inputs)


@pytest.mark.parametrize("rows", [1, 2, 3, 6, 32])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_are_what_loops_compute(shape, rows):
    x, scale, shift, _ = norm_arrays(shape)
    for valid in (None, *range(len(x) + 1)):
        found = normalized(x, scale, shift, rows, valid)
        expected = batch_norm_by_loops(x, scale, shift, rows, len(x) if valid is None else valid)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("rows", [1, 2, 6, 32])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_are_what_loops_compute(shape, rows):
    x, scale, shift, g = norm_arrays(shape)

    def gradients(x, a, b, g, *valid):
        return pytensor.grad(
            (g * batch_norm(x, a, b, rows, *(valid or [None]), EPSILON)[0]).sum(), [x, a, b]
        )

    for valid in (None, *range(len(x) + 1)):
        inputs = [x, scale, shift, g] if valid is None else [x, scale, shift, g, np.int64(valid)]
        count = len(x) if valid is None else valid
        expected = gradients_by_loops(x, scale, g, rows, count)
        for one, other in zip(evaluate(gradients, *inputs), expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("shape", [(6, 3, 2, 4), (6, 3)])
@pytest.mark.parametrize("rows", [2, 4, 6])
def test_gradients_agree_with_finite_differences(shape, rows):
    x, scale, shift, _ = norm_arrays(shape)
    check_gradient(lambda x, a, b: batch_norm(x, a, b, rows, epsilon=EPSILON)[0], x, scale, shift)
    valid = pt.constant(np.int64(5))

    def only_valid(x, a, b):
        return batch_norm(x, a, b, rows, valid, EPSILON)[0][:5]

    check_gradient(only_valid, x, scale, shift)


@pytest.mark.parametrize("shape", [(8, 3, 5, 4), (8, 3)])
def test_one_group_is_what_pytorch_computes(shape):
    values = norm_arrays(shape)
    x, scale, shift, g = (torch.from_numpy(v).requires_grad_() for v in values)
    mean, variance = torch.zeros(3, dtype=x.dtype), torch.zeros(3, dtype=x.dtype)
    y = F.batch_norm(x, mean, variance, scale, shift, True, 1.0, EPSILON)
    gradients = torch.autograd.grad(y, [x, scale, shift], g)
    found = evaluate(
        lambda x, a, b, g: [
            *(outputs := batch_norm(x, a, b, 8, epsilon=EPSILON)),
            *pytensor.grad((outputs[0] * g).sum(), [x, a, b]),
        ],
        *values,
    )
    for one, other in zip(found, (y, mean, variance, *gradients), strict=True):
        np.testing.assert_allclose(one, other.detach(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("stale", [np.nan, np.inf, -np.inf, 1e300])
def test_rows_that_are_not_valid_may_hold_anything(stale):
    x, scale, shift, g = norm_arrays((6, 3, 2, 2))
    clean = evaluate(gradients_and_outputs, x, scale, shift, g, np.int64(4))
    x[4:] = g[4:] = stale
    y, mean, variance, dx, dscale, dshift = evaluate(
        gradients_and_outputs, x, scale, shift, g, np.int64(4)
    )
    assert np.isfinite(y).all()
    assert not dx[4:].any()
    for one, other in zip(
        (y[:4], mean, variance, dx[:4], dscale, dshift),
        (clean[0][:4], clean[1], clean[2], clean[3][:4], *clean[4:]),
        strict=True,
    ):
        np.testing.assert_array_equal(one, other)


def gradients_and_outputs(x, scale, shift, g, valid):
    y, mean, variance, *saved = BatchNorm(4, EPSILON)(x, scale, shift, valid)
    return [y, mean, variance, *BatchNormGrad(4)(x, scale, g, *saved, valid)]


def test_a_group_of_one_value_has_no_variance():
    x, scale, shift, g = norm_arrays((3, 2))
    y, mean, variance = normalized(x, scale, shift, 1)
    np.testing.assert_array_equal(y, np.tile(shift, (3, 1)))
    np.testing.assert_allclose(mean, x.mean(0))
    assert not variance.any()
    dx, _, dshift = evaluate(
        lambda x, a, b, g: pytensor.grad((g * batch_norm(x, a, b, 1)[0]).sum(), [x, a, b]),
        *(x, scale, shift, g),
    )
    assert not dx.any()
    np.testing.assert_allclose(dshift, g.sum(0))


@pytest.mark.parametrize("parts", [(4, 4), (2, 2, 4), (2, 6)])
def test_parts_of_a_minibatch_report_what_the_whole_does(parts):
    """Weighted by their valid rows, as trainers that share it are."""
    x, scale, shift, _ = norm_arrays((8, 3, 2, 2))
    for valid in range(9):
        y, mean, variance = normalized(x, scale, shift, 2, valid)
        first, total = 0, np.zeros((2, 3))
        for count in parts:
            own = min(max(valid - first, 0), count)
            part_y, *found = normalized(x[first : first + count], scale, shift, 2, own)
            np.testing.assert_allclose(part_y[:own], y[first : first + own], rtol=1e-12)
            total += own * np.array(found)
            first += count
        np.testing.assert_allclose(total / max(1, valid), [mean, variance], rtol=1e-12)


def test_statistics_have_no_gradient():
    x, scale, shift = pt.dmatrix("x"), pt.dvector("scale"), pt.dvector("shift")
    _, mean, _ = batch_norm(x, scale, shift, 2)
    with pytest.raises(pytensor.gradient.DisconnectedInputError):
        pytensor.grad(mean.sum(), x)


@pytest.mark.parametrize("shape", [(6, 3, 2, 4), (6, 3)])
def test_shapes_are_known_without_computing(shape):
    x, scale, shift, g = norm_arrays(shape)
    check_shapes(BatchNorm(4), x, scale, shift)
    check_shapes(BatchNorm(4), x, scale, shift, np.int64(3))
    saved = evaluate(lambda *inputs: BatchNorm(4)(*inputs)[3:], x, scale, shift)
    check_shapes(BatchNormGrad(4), x, scale, g, *saved)
    check_shapes(BatchNormInference(), x, scale, shift, shift, shift**2)


@pytest.mark.parametrize("shape", [(4, 3, 2, 5), (4, 3)])
def test_normalisation_by_given_statistics(shape):
    x, scale, shift, g = norm_arrays(shape)
    mean, variance = shift[::-1].copy(), scale**2
    tensors = [torch.from_numpy(v).requires_grad_() for v in (x, scale, shift)]
    y = F.batch_norm(
        tensors[0], torch.from_numpy(mean), torch.from_numpy(variance), *tensors[1:], eps=EPSILON
    )
    expected = [y, *torch.autograd.grad(y, tensors, torch.from_numpy(g))]
    found = evaluate(
        lambda x, a, b, m, v, g: [
            y := batch_norm_inference(x, a, b, m, v, EPSILON),
            *pytensor.grad((y * g).sum(), [x, a, b]),
        ],
        *(x, scale, shift, mean, variance, g),
    )
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other.detach(), rtol=1e-10, atol=1e-10)
    check_gradient(BatchNormInference(EPSILON), x, scale, shift, mean, variance)


def test_float32_stays_float32():
    arrays = [v.astype("float32") for v in norm_arrays((4, 3, 2, 2))[:3]]
    found = evaluate(
        lambda x, a, b: [
            *(outputs := batch_norm(x, a, b, 2)),
            *pytensor.grad(outputs[0].sum(), [x, a, b]),
            batch_norm_inference(x, a, b, b, a * a),
        ],
        *arrays,
    )
    assert {a.dtype for a in found} == {np.dtype("float32")}


def variable(*shape, dtype="float64"):
    return pt.tensor(dtype=dtype, shape=shape)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": variable(4, 3, 2)}, TypeError, "x must be a 2- or 4-dimensional .* got"),
        ({"scale": variable(3, dtype="float32")}, TypeError, "must have one dtype, got"),
        ({"shift": variable(4)}, ValueError, "scale and shift must be equal, got 3 and 4"),
        ({"valid": pt.iscalar()}, TypeError, "valid must be a 0-dim.* int64, got .*int32"),
        ({"rows": 0}, ValueError, "rows must be at least 1, got 0"),
        ({"rows": 1.5}, TypeError, "rows must be an int, got 1.5"),
        ({"epsilon": 0.0}, ValueError, "epsilon must be positive, got 0"),
        ({"epsilon": math.nan}, ValueError, "epsilon must be positive, got nan"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(changes, error, message):
    inputs = {"x": variable(4, 3), "scale": variable(3), "shift": variable(3), "rows": 2}
    with pytest.raises(error, match=message):
        batch_norm(**inputs | changes)


@pytest.mark.parametrize("adds", [False, True])
def test_relu_and_a_sum_are_those_of_other_ops(adds):
    x, scale, shift, g = norm_arrays((5, 3, 2, 4))
    valid = np.int64(4)

    def together(x, a, b, other, g, valid):
        y = BatchNorm(2, EPSILON, True, adds)(x, a, b, *([other] if adds else []), valid)[0]
        return [y, *pytensor.grad((g * y).sum(), [x, a, b, other], disconnected_inputs="ignore")]

    def apart(x, a, b, other, g, valid):
        y = batch_norm(x, a, b, 2, valid, EPSILON)[0]
        y = relu(y + other if adds else y)
        return [y, *pytensor.grad((g * y).sum(), [x, a, b, other], disconnected_inputs="ignore")]

    arrays = x, scale, shift, x[::-1].copy(), g, valid
    for one, other in zip(evaluate(together, *arrays), evaluate(apart, *arrays), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


def test_a_sum_without_relu_is_refused():
    with pytest.raises(ValueError, match="adds is for a ReLU that follows"):
        BatchNorm(2, EPSILON, adds=True)
