"""Pooling with pads, windows of two lengths and windows over the edge, and averages."""

import itertools

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
import torch
import torch.nn.functional as F

from tandem.ops import (
    AveragePool2d,
    AveragePool2dGrad,
    MaxPool2d,
    MaxPool2dGrad,
    average_pool2d,
    max_pool2d,
)
from tests.support.op_checks import check_gradient, check_shapes, evaluate

# images, size, stride, pad, ceil
CASES = [
    pytest.param((1, 1, 1, 1), 1, 1, 0, False, id="one-pixel"),
    pytest.param((2, 3, 7, 5), 3, 2, 0, False, id="plain"),
    pytest.param((1, 2, 8, 6), 3, 2, 0, False, id="pixels-left-over"),
    pytest.param((2, 2, 6, 6), 2, 2, 0, False, id="side-by-side"),
    pytest.param((1, 2, 7, 8), 2, 3, 0, False, id="pixels-between"),
    pytest.param((2, 2, 8, 7), 3, 2, 1, False, id="pad"),
    pytest.param((1, 2, 8, 6), 3, 2, 0, True, id="over-the-edge"),
    pytest.param((1, 2, 6, 7), 3, 2, 1, True, id="pad-over-the-edge"),
    pytest.param((1, 1, 5, 5), 2, 3, 1, True, id="a-window-behind-the-image-is-left-out"),
    pytest.param((1, 2, 5, 9), (3, 4), (1, 3), (1, 2), True, id="of-two-lengths"),
    pytest.param((1, 2, 4, 4), 3, 1, 1, False, id="dense"),
    pytest.param((1, 1, 2, 2), 4, 4, 2, True, id="larger-than-the-image"),
]


def pair(value):
    return value if isinstance(value, tuple) else (value, value)


def windows(x, size, stride, pad, ceil):
    """Index of each window, its pixels, and the number of its pixels and of those of the pad."""
    starts = []
    for n, k, s, p in zip(x.shape[2:], pair(size), pair(stride), pair(pad), strict=True):
        own = [first for first in range(-p, n + p, s) if first + k <= n + p]
        over = (own[-1] if own else -p - s) + s
        if ceil and over - s + k < n + p and over < n:
            own.append(over)
        starts.append([(f, f + k, n, p) for f in own])
    for (i, row), (j, column) in itertools.product(*map(enumerate, starts)):
        spans = [range(max(f, 0), min(end, n)) for f, end, n, _ in (row, column)]
        counted = np.prod([min(end, n + p) - f for f, end, n, p in (row, column)])
        yield (i, j), list(itertools.product(*spans)), counted


def pooled_by_loops(x, options, kind):
    """Maxima, or means over pixels or over the pad too."""
    found = {}
    for n, c in np.ndindex(x.shape[:2]):
        for place, pixels, counted in windows(x, *options):
            values = [x[n, c, row, column] for row, column in pixels]
            found[n, c, *place] = {
                "max": lambda values=values: max(values),
                "pixels": lambda values=values: sum(values) / len(values),
                "counted": lambda values=values, counted=counted: sum(values) / counted,
            }[kind]()
    y = np.empty(tuple(np.max(list(found), axis=0) + 1))
    for place, value in found.items():
        y[place] = value
    return y


def distinct(shape):
    """Values far enough from each other for finite differences, of both signs."""
    return (np.random.default_rng(0).permutation(np.prod(shape)).reshape(shape) - 9) / 10.0


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize(("shape", "size", "stride", "pad", "ceil"), CASES)
def test_values_are_what_loops_compute(shape, size, stride, pad, ceil, static):
    x, options = distinct(shape), (size, stride, pad, ceil)
    found = evaluate(
        lambda x: [
            max_pool2d(x, *options),
            average_pool2d(x, *options, count_pad=False),
            average_pool2d(x, *options),
        ],
        x,
        static=static,
    )
    for one, kind in zip(found, ("max", "pixels", "counted"), strict=True):
        np.testing.assert_allclose(one, pooled_by_loops(x, options, kind), rtol=1e-12)


@pytest.mark.parametrize(("shape", "size", "stride", "pad", "ceil"), CASES)
def test_values_and_gradients_are_those_of_pytorch(shape, size, stride, pad, ceil):
    x, options = distinct(shape), (size, stride, pad)
    image = torch.from_numpy(x).requires_grad_()
    ours = [
        lambda x: max_pool2d(x, *options, ceil),
        lambda x: average_pool2d(x, *options, ceil, False),
        lambda x: average_pool2d(x, *options, ceil, True),
    ]
    theirs = [
        F.max_pool2d(image, *options, ceil_mode=ceil),
        F.avg_pool2d(image, *options, ceil, False),
        F.avg_pool2d(image, *options, ceil, True),
    ]
    for build, expected in zip(ours, theirs, strict=True):
        g = np.random.default_rng(1).normal(size=tuple(expected.shape))
        y, gradient = evaluate(
            lambda x, g, build=build: [y := build(x), pytensor.grad((g * y).sum(), x)], x, g
        )
        np.testing.assert_allclose(y, expected.detach(), rtol=1e-12)
        (slope,) = torch.autograd.grad(expected, image, torch.from_numpy(g))
        np.testing.assert_allclose(gradient, slope, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("shape", "size", "stride", "pad", "ceil"), CASES)
def test_gradients_and_shapes_agree_with_finite_differences_and_values(
    shape, size, stride, pad, ceil
):
    x, options = distinct(shape), (size, stride, pad, ceil)
    y, argmax = evaluate(MaxPool2d(*options), x)
    check_gradient(lambda x: max_pool2d(x, *options), x)
    check_gradient(lambda g: MaxPool2dGrad(*options)(x, argmax, g), y)
    check_shapes(MaxPool2d(*options), x)
    check_shapes(MaxPool2dGrad(*options), x, argmax, y)
    for count_pad in (False, True):
        check_gradient(AveragePool2d(*options, count_pad), x)
        check_gradient(AveragePool2dGrad(*options, count_pad), x, y)
        check_shapes(AveragePool2d(*options, count_pad), x)
        check_shapes(AveragePool2dGrad(*options, count_pad), x, y)


def test_a_pad_is_no_maximum():
    x = np.full((1, 1, 3, 3), -np.inf)
    y, argmax = evaluate(MaxPool2d(3, 2, 1), x)
    np.testing.assert_array_equal(y, np.full((1, 1, 2, 2), -np.inf))
    assert argmax.ravel().tolist() == [0, 1, 3, 4]


@pytest.mark.parametrize("op", [MaxPool2d, AveragePool2d])
def test_a_window_that_lies_outside_is_refused(op):
    with pytest.raises(ValueError, match=r"pad must be at most half of size, .* got 2 and 3"):
        op(3, 1, 2)
    with pytest.raises(ValueError, match="does not fit into an axis of 1 padded by 0"):
        op((1, 2), 1)(pt.tensor(dtype="float64", shape=(1, 1, 1, 1)))
