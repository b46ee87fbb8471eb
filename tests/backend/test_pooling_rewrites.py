"""Work that moves behind max pooling: where it may, and that it gives the same."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.tensor.math import Sum
from pytensor.tensor.variable import TensorVariable

from tandem.ops import MaxPool2d, MaxPool2dGrad, Relu, ReluGrad, max_pool2d, relu
from tests.support.check_function import DEVICE, PLAIN_DEVICE, PYTHON, compile_graph

SHAPE = (2, 3, 9, 9)
Values = tuple[np.ndarray, ...]


def variables() -> tuple[Any, Any, Any]:
    return (
        pt.tensor("x", dtype="float64", shape=SHAPE),
        pt.tensor("b", dtype="float64", shape=(3,)),
        pt.tensor("w", dtype="float64", shape=(2, 3, 4, 4)),
    )


def values() -> Values:
    """Many pixels are equal, and many windows have nothing above 0."""
    rng = np.random.default_rng(0)
    x, b, w = (rng.normal(size=v.type.shape) for v in variables())
    return np.round(x - 1), b * 0 + 0.25, w


def compare(inputs: list[Any], outputs: list[Any]) -> list[tuple[type, tuple[int, ...]]]:
    """Check the device against plain PyTensor; return the Ops of its graph with their sizes."""
    given = values()[: len(inputs)]
    with pytensor.config.change_flags(on_opt_error="raise"):
        fast: Any = compile_graph(inputs, outputs, DEVICE)
    for got, expected in zip(
        fast(*given), compile_graph(inputs, outputs, PYTHON)(*given), strict=True
    ):
        np.testing.assert_allclose(got, expected, 1e-14, 1e-14)
    return [(type(n.op), n.inputs[0].type.shape) for n in fast.maker.fgraph.toposort()]


def test_the_relu_of_pooled_images_is_computed_after_pooling() -> None:
    x, b, w = variables()
    z = x + b[None, :, None, None]
    cost = (max_pool2d(relu(z), 3, 2) * w).sum()
    found = compare([x, b, w], [cost, *pytensor.grad(cost, [x, b])])
    pooled = w.type.shape
    assert {size for op, size in found if op in (Relu, ReluGrad)} == {pooled}
    # The bias's gradient is the sum of what the pooling scatters.
    assert (Sum, pooled) in found
    assert (Sum, SHAPE) not in found
    assert [op for op, _ in found].count(MaxPool2d) == 1


def test_without_gradients_too() -> None:
    x, _, _ = variables()
    assert (Relu, (2, 3, 4, 4)) in compare([x], [max_pool2d(relu(x), 3, 2)])


def relu_is_read(x: TensorVariable, w: TensorVariable) -> list[TensorVariable]:
    return [relu(x), max_pool2d(relu(x), 3, 2)]


def places_are_read(x: TensorVariable, w: TensorVariable) -> list[TensorVariable]:
    return [*MaxPool2d(3, 2)(relu(x))]


def gradient_of_the_relu_is_read(x: TensorVariable, w: TensorVariable) -> list[TensorVariable]:
    y = relu(x)
    cost = (max_pool2d(y, 3, 2) * w).sum()
    return [*pytensor.grad(cost, [x, y])]


def relu_is_used_twice(x: TensorVariable, w: TensorVariable) -> list[TensorVariable]:
    y = relu(x)
    cost = (max_pool2d(y, 3, 2) * w).sum() + (y**2).sum()
    return [cost, pytensor.grad(cost, x)]


def gradient_is_of_the_relu_alone(x: TensorVariable, w: TensorVariable) -> list[TensorVariable]:
    y = relu(x)
    return [pt.exp(pytensor.grad((max_pool2d(y, 3, 2) * w).sum(), y))]


@pytest.mark.parametrize(
    "build",
    [
        relu_is_read,
        places_are_read,
        gradient_of_the_relu_is_read,
        relu_is_used_twice,
        gradient_is_of_the_relu_alone,
    ],
)
def test_a_relu_that_others_need_stays_before(build: Callable[..., list[Any]]) -> None:
    x, _, w = variables()
    found = compare([x, pt.vector("b"), w], build(x, w))
    assert {size for op, size in found if op is Relu} == {SHAPE}


def test_two_poolings_of_a_relu_stay_behind_it() -> None:
    x, _, w = variables()
    y = relu(x)
    cost = (max_pool2d(y, 3, 2) * w).sum() + max_pool2d(y, 2, 2).sum()
    assert (Relu, SHAPE) in compare([x, pt.vector("b"), w], [cost, pytensor.grad(cost, x)])


@pytest.mark.parametrize("shape", [SHAPE, (None,) * 4])
def test_values_and_gradients_keep_their_bits(shape: tuple[int | None, ...]) -> None:
    x = pt.tensor(dtype="float32", shape=shape)
    y = max_pool2d(relu(x), 3, 2)
    w = pt.tensor(dtype="float32", shape=y.type.shape)
    outputs = [y, pytensor.grad((y * w).sum(), x)]
    given, _, weights = (value.astype("float32") for value in values())
    given[0, 0, 4, 4] = np.nan
    fast, plain = (compile_graph([x, w], outputs, mode) for mode in (DEVICE, PLAIN_DEVICE))
    for one, other in zip(fast(given, weights), plain(given, weights), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("axis", [(0,), (0, 2), (0, 1, 3)])
def test_a_sum_over_a_part_of_an_image_stays(axis: tuple[int, ...]) -> None:
    x, w = (pt.tensor(name, dtype="float64", shape=(None,) * 4) for name in "xw")
    scattered = MaxPool2dGrad(3, 2)(x, MaxPool2d(3, 2)(x)[1], w)
    found = compare([x, pt.vector("b"), w], [scattered.sum(axis)])
    assert MaxPool2dGrad in [op for op, _ in found]


@pytest.mark.parametrize("axis", [None, (2, 3), (0, 2, 3), (0, 1, 2, 3)])
def test_a_sum_over_whole_images_is_that_of_what_is_scattered(axis: Any) -> None:
    x, _, w = variables()
    scattered = MaxPool2dGrad(3, 2)(x, MaxPool2d(3, 2)(x)[1], w)
    found = compare([x, pt.vector("b"), w], [scattered.sum(axis)])
    assert [op for op, _ in found] == [Sum]
