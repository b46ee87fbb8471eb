"""Rewrites for GPUs: that they compute the same, and act only where they may."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.tensor.math import Sum
from pytensor.tensor.variable import TensorVariable

from tandem.backend import device_mode
from tandem.backend.gpu_rewrites import GPU, TRITON
from tandem.ops import (
    LRN,
    Conv2d,
    Conv2dBiasGrad,
    Conv2dWeightGrad,
    CropMirror,
    LRNGrad,
    MaxPool2d,
    MaxPool2dGrad,
    PoolNorm,
    PoolNormGrad,
    Relu,
    conv2d,
    crop_mirror,
    lrn,
    max_pool2d,
    relu,
)

PLAIN = device_mode()
# On the host Ops that have kernels on GPUs alone are computed by their `perform`.
REWRITTEN = PLAIN.including(GPU, TRITON)
BATCH, SIDE, CROP = 2, 14, 11


def compare(
    outputs: list[TensorVariable], values: dict[Any, np.ndarray], tolerance: float = 2e-5
) -> list[Any]:
    """Check rewritten functions against plain ones; return the nodes of the rewritten graph."""
    with pytensor.config.change_flags(on_opt_error="raise"):
        functions = [
            pytensor.function([*values], outputs, mode=mode, on_unused_input="ignore")
            for mode in (PLAIN, REWRITTEN)
        ]
    expected, found = (function(*values.values()) for function in functions)
    for got, value in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, value, tolerance, tolerance)
    return functions[1].maker.fgraph.toposort()


def kinds(nodes: list[Any]) -> list[type]:
    return [type(node.op) for node in nodes]


def variable(name: str, *shape: int) -> tuple[TensorVariable, np.ndarray]:
    rng = np.random.default_rng(sum(map(ord, name)))
    return pt.tensor(name, dtype="float32", shape=shape), rng.normal(size=shape).astype("float32")


class Layer:
    """A convolution of variables, whose result has 6 channels and 9 x 9 pixels."""

    def __init__(self) -> None:
        self.x, x = variable("x", BATCH, 4, 11, 11)
        self.w, w = variable("w", 6, 4, 3, 3)
        self.b, b = variable("b", 6)
        self.values = {self.x: x, self.w: w, self.b: b}
        self.y = conv2d(self.x, self.w, self.b)

    def gradients(self, z: TensorVariable) -> list[TensorVariable]:
        weights = np.random.default_rng(3).normal(size=z.type.shape).astype("float32")
        return [z, *pytensor.grad((z * weights).sum(), [self.x, self.w, self.b])]


@pytest.mark.parametrize("norm", [None, (5, 0.1, 0.75, 2.0), (3, 0.2, 0.6, 1.0)])
def test_a_layer_is_pooled_rectified_and_normalised_at_once(norm: Any) -> None:
    layer = Layer()
    z = relu(max_pool2d(layer.y, 3, 2))
    z = lrn(z, *norm) if norm else z
    nodes = compare(layer.gradients(z), layer.values)
    found = kinds(nodes)
    assert found.count(PoolNorm) == found.count(PoolNormGrad) == 1
    assert not {MaxPool2d, MaxPool2dGrad, Relu, LRN, LRNGrad, Conv2dBiasGrad} & set(found)
    # The bias's gradient comes with the images', and the convolution adds no bias.
    assert not [n for n in nodes if isinstance(n.op, Sum) and n.inputs[0].type.ndim == 4]
    (conv,) = (node for node in nodes if isinstance(node.op, Conv2d))
    assert not np.any(conv.inputs[2].data)


def test_the_networks_order_and_no_gradients_too() -> None:
    layer = Layer()
    nodes = compare([lrn(max_pool2d(relu(layer.y), 3, 2))], layer.values)
    assert PoolNorm in kinds(nodes)


def test_images_that_are_no_convolution_get_no_bias() -> None:
    layer = Layer()
    z = lrn(relu(max_pool2d(layer.x, 3, 2)))
    nodes = compare([z, pytensor.grad(z.sum(), layer.x)], layer.values)
    assert {PoolNorm, PoolNormGrad} == set(kinds(nodes))


def test_a_convolution_that_others_read_keeps_its_bias() -> None:
    layer = Layer()
    nodes = compare([lrn(relu(max_pool2d(layer.y, 3, 2))), layer.y * 2], layer.values)
    assert kinds(nodes).count(Conv2d) == 1
    assert PoolNorm in kinds(nodes)


def read(z: TensorVariable, kind: type, index: int) -> TensorVariable:
    """An output of the one node of a kind among the ancestors of z."""
    found = [v for v in pytensor.graph.traversal.ancestors([z]) if v.owner]
    (node,) = {v.owner for v in found if isinstance(v.owner.op, kind)}
    return node.outputs[index]


@pytest.mark.parametrize(
    "extra",
    [
        pytest.param(lambda z, g: read(z, MaxPool2d, 0) * 2, id="the pooled images"),
        pytest.param(lambda z, g: read(z, MaxPool2d, 1) * 2, id="their places"),
        pytest.param(lambda z, g: read(z, Relu, 0) * 2, id="the rectified images"),
        pytest.param(lambda z, g: read(z, LRN, 1) * 2, id="the scale"),
        pytest.param(lambda z, g: read(g, LRNGrad, 0) * 2, id="the gradient after normalisation"),
        pytest.param(lambda z, g: read(g, MaxPool2dGrad, 0).owner.inputs[2] * 2, id="after ReLU"),
    ],
)
def test_what_others_read_is_computed_by_itself(extra: Callable[..., TensorVariable]) -> None:
    layer = Layer()
    z = lrn(relu(max_pool2d(layer.y, 3, 2)))
    outputs = layer.gradients(z)
    found = kinds(compare([*outputs, extra(z, outputs[1])], layer.values))
    assert PoolNorm not in found
    assert LRN in found


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(lambda y: lrn(max_pool2d(y, 3, 2)), id="no ReLU"),
        pytest.param(lambda y: max_pool2d(lrn(relu(y)), 3, 2), id="normalised before"),
        pytest.param(lambda y: relu(max_pool2d(y, 3, 1)), id="dense windows"),
        pytest.param(
            lambda y: relu(max_pool2d(y, 3, 2)) + lrn(relu(max_pool2d(y, 3, 2))), id="two ends"
        ),
    ],
)
def test_other_chains_stay(build: Callable[..., TensorVariable]) -> None:
    layer = Layer()
    outputs = layer.gradients(build(layer.y))
    assert PoolNorm not in kinds(compare(outputs, layer.values))


def test_float64_stays() -> None:
    x = pt.tensor("x", dtype="float64", shape=(1, 4, 9, 9))
    found = kinds(compare([relu(max_pool2d(x, 3, 2))], {x: np.random.normal(size=(1, 4, 9, 9))}))
    assert PoolNorm not in found


def test_a_biass_gradient_is_summed_over_what_the_filters_gradient_reads() -> None:
    layer = Layer()
    nodes = compare(layer.gradients(relu(layer.y)), layer.values)
    (total,) = (node for node in nodes if isinstance(node.op, Conv2dBiasGrad))
    (filters,) = (node for node in nodes if isinstance(node.op, Conv2dWeightGrad))
    assert total.inputs[0] is filters.inputs[2]
    # Without a gradient of filters there is none to share.
    alone = kinds(compare([pytensor.grad((relu(layer.y) ** 2).sum(), layer.b)], layer.values))
    assert Conv2dBiasGrad not in alone


class FirstLayer:
    """A convolution of crops."""

    def __init__(self, crop: int = CROP, cropped: bool = False, size: int = 5) -> None:
        rng = np.random.default_rng(0)
        side = crop if cropped else SIDE
        self.values: dict[Any, np.ndarray] = {}

        def given(value: np.ndarray) -> TensorVariable:
            found = pt.tensor(dtype=value.dtype, shape=value.shape)
            self.values[found] = value
            return found

        pictures = given(rng.integers(0, 256, (BATCH, side, side, 3), np.uint8))
        mean = given(rng.normal(120, 30, (3, SIDE, SIDE)).astype("float32"))
        origins = given(rng.integers(0, SIDE - crop + 1, (BATCH, 2)))
        mirrored = given(np.array([0, 1], np.uint8))
        self.w = given(rng.normal(size=(4, 3, size, size)).astype("float32"))
        self.b = given(rng.normal(size=4).astype("float32"))
        self.crops = crop_mirror(pictures, mean, origins, mirrored, crop_size=crop, cropped=cropped)

    def gradients(self, y: TensorVariable) -> list[TensorVariable]:
        weights = np.random.default_rng(3).normal(size=y.type.shape).astype("float32")
        return [y, *pytensor.grad((y * weights).sum(), [self.w, self.b])]


@pytest.mark.parametrize("cropped", [False, True])
@pytest.mark.parametrize(
    ("crop", "size", "stride"), [(11, 5, 2), (12, 4, 4), (11, 3, 4), (14, 5, 3), (11, 7, 4)]
)
def test_a_stride_over_crops_becomes_channels(
    crop: int, size: int, stride: int, cropped: bool
) -> None:
    layer = FirstLayer(crop, cropped, size)
    y = conv2d(layer.crops, layer.w, layer.b, stride=stride)
    nodes = compare(layer.gradients(y), layer.values, 1e-4)
    (crop_node,) = (node for node in nodes if isinstance(node.op, CropMirror))
    assert crop_node.op.block == stride
    (conv,) = (node for node in nodes if isinstance(node.op, Conv2d))
    assert conv.op.stride == 1
    assert conv.inputs[0].type.shape[1] == 3 * stride**2


@pytest.mark.parametrize(
    ("crop", "size", "settings"),
    [
        pytest.param(11, 5, {}, id="no stride"),
        pytest.param(11, 5, {"stride": 2, "pad": 1}, id="padding"),
        pytest.param(13, 3, {"stride": 4}, id="pixels that no window reads"),
    ],
)
def test_other_convolutions_of_crops_stay(crop: int, size: int, settings: dict[str, int]) -> None:
    layer = FirstLayer(crop, size=size)
    nodes = compare(
        layer.gradients(conv2d(layer.crops, layer.w, layer.b, **settings)), layer.values
    )
    assert [node.op.block for node in nodes if isinstance(node.op, CropMirror)] == [1]
