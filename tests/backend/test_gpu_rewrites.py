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
    ReluGrad,
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


SETTINGS = (5, 0.1, 0.75, 2.0)


POOL, NORM, TOTAL = MaxPool2dGrad(3, 2), LRNGrad(*SETTINGS), Sum((0, 2, 3))


def chain(
    pool: Any = POOL,
    norm: Any = NORM,
    total: Any = TOTAL,
    gated_by: int = 0,
    scale_of: int = 0,
    norm_of: int = 0,
    rectified: bool = True,
    onto: int = 9,
) -> tuple[list[Any], dict[Any, np.ndarray]]:
    """A chain built by hand, of which one part is other than a gradient would be."""
    layer = Layer()
    pooled, argmax = MaxPool2d(3, 2)(layer.y)
    y = relu(pooled)
    z, scale = LRN(*SETTINGS)(y)
    other, other_value = variable("other", *y.type.shape)
    others = [other**2, other**2]
    h = norm((y, others[0])[norm_of], (scale, 2 + others[1])[scale_of], z * 2)
    t = ReluGrad()((y, others[0])[gated_by], h) if rectified else h
    images, zeros = variable("images", BATCH, 6, onto, onto)
    dx = pool(layer.y if onto == 9 else images, argmax, t)
    values = layer.values | {other: other_value, images: zeros}
    return [z, dx, total(t)], values


def test_a_chain_built_by_hand_is_fused_too() -> None:
    outputs, values = chain()
    assert kinds(compare(outputs, values)).count(PoolNormGrad) == 1


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"pool": MaxPool2dGrad(2, 2)}, id="another window"),
        pytest.param({"norm": LRNGrad(5, 0.7, 0.75, 2.0)}, id="another alpha"),
        pytest.param({"norm": LRNGrad(3, 0.1, 0.75, 2.0)}, id="fewer channels"),
        pytest.param({"norm_of": 1}, id="another normalised"),
        pytest.param({"scale_of": 1}, id="another scale"),
        pytest.param({"gated_by": 1}, id="another gate"),
        pytest.param({"rectified": False}, id="no gate"),
        pytest.param({"onto": 10}, id="other images"),
        pytest.param({"norm": lambda y, scale, g: g}, id="past the normalisation"),
        pytest.param({"norm": lambda y, scale, g: NORM(y, g**2 + 1, scale)}, id="the scale's"),
        pytest.param({"total": Sum((2, 3))}, id="a sum over images"),
        pytest.param(
            {"total": Sum((0, 2, 3), dtype="float64", acc_dtype="float64")}, id="a wide sum"
        ),
    ],
)
def test_a_chain_with_another_part_stays(change: dict[str, Any]) -> None:
    outputs, values = chain(**change)
    assert PoolNormGrad not in kinds(compare(outputs, values))


def test_a_gradient_that_no_relu_gates_stays() -> None:
    layer = Layer()
    pooled, argmax = MaxPool2d(3, 2)(layer.y)
    y = relu(pooled)
    outputs = [y, MaxPool2dGrad(3, 2)(layer.y, argmax, pt.tanh(y))]
    assert PoolNormGrad not in kinds(compare(outputs, layer.values))


def test_two_normalisations_of_one_layer_stay() -> None:
    layer = Layer()
    y = relu(max_pool2d(layer.y, 3, 2))
    nodes = compare(layer.gradients(lrn(y, *SETTINGS) + lrn(y, 3, 0.1, 0.75, 2.0)), layer.values)
    assert [node.op.norm for node in nodes if isinstance(node.op, PoolNorm)] == [None]
    assert kinds(nodes).count(LRN) == 2


def test_places_that_another_pooling_scatters_to_stay() -> None:
    layer = Layer()
    pooled, argmax = MaxPool2d(3, 2)(layer.y)
    y = relu(pooled)
    g = ReluGrad()(y, y * 3)
    outputs = [y, MaxPool2dGrad(3, 2)(layer.y, argmax, g), MaxPool2dGrad(3, 2)(layer.y, argmax, y)]
    assert PoolNorm not in kinds(compare(outputs, layer.values))


@pytest.mark.parametrize(
    "total", [Sum((2, 3)), Sum((0, 2, 3), dtype="float64", acc_dtype="float64"), Sum()], ids=str
)
def test_other_sums_over_a_gradient_stay(total: Sum) -> None:
    layer = Layer()
    y, g = relu(layer.y), variable("g", BATCH, 6, 9, 9)
    slope = ReluGrad()(y, g[0])
    outputs = [Conv2dWeightGrad()(layer.x, layer.w, slope), total(slope)]
    assert Conv2dBiasGrad not in kinds(compare(outputs, layer.values | {g[0]: g[1]}))


def test_a_sum_over_images_that_a_filters_gradient_reads_stays() -> None:
    layer = Layer()
    g = variable("g", BATCH, 6, 9, 9)
    outputs = [Conv2dWeightGrad()(layer.x, layer.w, g[0]), layer.x.sum(axis=(0, 2, 3))]
    assert Conv2dBiasGrad not in kinds(compare(outputs, layer.values | {g[0]: g[1]}))


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

    def __init__(
        self,
        crop: int = CROP,
        cropped: bool = False,
        size: int = 5,
        dtype: str = "float32",
        columns: int | None = None,
    ) -> None:
        rng = np.random.default_rng(0)
        side = crop if cropped else SIDE
        self.values: dict[Any, np.ndarray] = {}

        def given(value: np.ndarray) -> TensorVariable:
            found = pt.tensor(dtype=value.dtype, shape=value.shape)
            self.values[found] = value
            return found

        pictures = given(rng.integers(0, 256, (BATCH, side, side, 3), np.uint8))
        mean = given(rng.normal(120, 30, (3, SIDE, SIDE)).astype(dtype))
        origins = given(rng.integers(0, SIDE - crop + 1, (BATCH, 2)))
        mirrored = given(np.array([0, 1], np.uint8))
        self.w = given(rng.normal(size=(4, 3, size, columns or size)).astype(dtype))
        self.b = given(rng.normal(size=4).astype(dtype))
        self.crops = crop_mirror(
            pictures, mean, origins, mirrored, crop_size=crop, cropped=cropped, dtype=dtype
        )

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
    assert conv.op.stride == (1, 1)
    assert conv.inputs[0].type.shape[1] == 3 * stride**2


def test_crops_with_colour_noise_become_channels_too() -> None:
    layer = FirstLayer(11)
    colours, values = variable("colours", BATCH, 3)
    crops = CropMirror(11)(*layer.crops.owner.inputs, colours)
    y = conv2d(crops, layer.w, layer.b, stride=2)
    nodes = compare(layer.gradients(y), layer.values | {colours: 9 * values}, 1e-4)
    (crop_node,) = (node for node in nodes if isinstance(node.op, CropMirror))
    assert crop_node.op.block == 2
    assert crop_node.inputs[4] is not None


def test_float64_becomes_channels_too() -> None:
    layer = FirstLayer(dtype="float64")
    y = conv2d(layer.crops, layer.w, layer.b, stride=2)
    nodes = compare(layer.gradients(y), layer.values, 1e-11)
    assert [node.op.block for node in nodes if isinstance(node.op, CropMirror)] == [2]


def test_what_is_space_to_depth_already_keeps_its_stride() -> None:
    layer = FirstLayer(12)
    crops = CropMirror(12, block=2)(*layer.crops.owner.inputs)
    w, values = variable("w", 4, 12, 2, 2)
    nodes = compare([conv2d(crops, w, layer.b, stride=2)], layer.values | {w: values})
    assert [node.op.block for node in nodes if isinstance(node.op, CropMirror)] == [2]


def test_filters_that_are_not_square_keep_their_stride() -> None:
    layer = FirstLayer(columns=3)
    nodes = compare(layer.gradients(conv2d(layer.crops, layer.w, layer.b, stride=2)), layer.values)
    assert [node.op.block for node in nodes if isinstance(node.op, CropMirror)] == [1]


def test_filters_of_single_colours_keep_their_stride() -> None:
    layer = FirstLayer()
    w, values = variable("w", 6, 1, 5, 5)
    b, more = variable("b", 6)
    y = conv2d(layer.crops, w, b, stride=2, groups=3)
    nodes = compare([y], layer.values | {w: values, b: more})
    assert [node.op.block for node in nodes if isinstance(node.op, CropMirror)] == [1]


def test_filters_of_unknown_number_keep_their_stride() -> None:
    layer = FirstLayer()
    w = pt.tensor4("w", dtype="float32")
    y = conv2d(layer.crops, w, layer.b, stride=2)
    values = {v: x for v, x in layer.values.items() if v is not layer.w}
    nodes = compare([y], values | {w: layer.values[layer.w]})
    assert [node.op.block for node in nodes if isinstance(node.op, CropMirror)] == [1]


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
