"""Convolutions of images and sequences, and borders of zeros."""

from typing import Any, cast

import pytensor.tensor as pt
from pytensor.tensor.variable import TensorVariable

from tandem import ops
from tandem.keras.lowering.activations import activated
from tandem.keras.lowering.call import Call, pixels, planes
from tandem.keras.lowering.core import lengths
from tandem.keras.lowering.registry import lowers

Pair = tuple[int, int]


def pair(layer: Call, key: str, ndim: int, least: int = 1) -> Pair:
    """Numbers of rows and of columns; of a sequence, which is one column, 1 of columns."""
    found = layer.integers(key, ndim - 2, least)
    return (found[0], found[1]) if ndim == 4 else (found[0], 1)


def same_padding(length: int, reach: int, stride: int) -> Pair:
    """Zeros on both sides that leave ``ceil(length / stride)`` windows; more of them behind."""
    total = max(0, (-(-length // stride) - 1) * stride + reach - length)
    return total // 2, total - total // 2


def convolved(
    layer: Call,
    x: TensorVariable,
    weight: TensorVariable,
    bias: TensorVariable | None,
    ndim: int,
    groups: int = 1,
    strides: Pair | None = None,
) -> TensorVariable:
    """Convolve (batch, channel, row, column) with the windows of a layer's configuration."""
    strides = strides or pair(layer, "strides", ndim)
    dilation = pair(layer, "dilation_rate", ndim)
    padding = layer.word("padding", "valid", "same", *["causal"] * (ndim == 3))
    rows = (n for n in x.type.shape[2:])
    taps = zip(rows, weight.type.shape[2:], strides, dilation, strict=True)
    sides = [(0, 0), (0, 0)]
    if padding == "same":
        sides = [same_padding(n, (t - 1) * d + 1, s) for n, t, s, d in cast(Any, taps)]
    elif padding == "causal":
        sides[0] = ((cast(int, weight.type.shape[2]) - 1) * dilation[0], 0)
    (top, bottom), (left, right) = sides
    pad = (top, left)
    if top != bottom or left != right:
        x, pad = ops.pad2d(x, (top, bottom, left, right)), (0, 0)
    return ops.conv2d(x, weight, bias, strides, pad, groups, dilation)


def _bias(layer: Call, filters: int) -> TensorVariable | None:
    return layer.parameter("bias", (filters,)) if layer.flag("use_bias") else None


@lowers("Conv1D", "Conv2D")
def convolution(layer: Call, x: TensorVariable) -> TensorVariable:
    ndim, order = x.type.ndim, layer.value("data_format")
    size, filters = pair(layer, "kernel_size", ndim), layer.integer("filters")
    groups, images = layer.integer("groups"), planes(x, order)
    channels = lengths(images)[0]
    if channels % groups or filters % groups:
        raise layer.fault(f"{channels} channels and {filters} filters", f"multiples of {groups}")
    shape, window = (filters, channels // groups, *size), size[0] * size[1]
    fans = (channels // groups * window, filters * window)
    weight = layer.parameter("kernel", shape, fans)
    y = convolved(layer, images, weight, _bias(layer, filters), ndim, groups)
    return activated(layer, pixels(y, ndim, order))


@lowers("DepthwiseConv1D", "DepthwiseConv2D")
def depthwise(layer: Call, x: TensorVariable) -> TensorVariable:
    ndim, order = x.type.ndim, layer.value("data_format")
    images = planes(x, order)
    weight = _depthwise_weight(layer, images, ndim, "kernel")
    bias = _bias(layer, cast(int, weight.type.shape[0]))
    y = convolved(layer, images, weight, bias, ndim, lengths(images)[0])
    return activated(layer, pixels(y, ndim, order))


def _depthwise_weight(layer: Call, x: TensorVariable, ndim: int, name: str) -> TensorVariable:
    """Filters (channel x multiplier, 1, row, column), the multiplier running fastest."""
    size, multiplier = pair(layer, "kernel_size", ndim), layer.integer("depth_multiplier")
    channels, window = lengths(x)[0], size[0] * size[1]
    fans = (channels * window, multiplier * window)
    return layer.parameter(name, (channels * multiplier, 1, *size), fans, settings="depthwise")


@lowers("SeparableConv1D", "SeparableConv2D")
def separable(layer: Call, x: TensorVariable) -> TensorVariable:
    ndim, order = x.type.ndim, layer.value("data_format")
    images, filters = planes(x, order), layer.integer("filters")
    weight = _depthwise_weight(layer, images, ndim, "depthwise_kernel")
    y = convolved(layer, images, weight, None, ndim, lengths(images)[0])
    inner = lengths(y)[0]
    point = layer.parameter("pointwise_kernel", (filters, inner, 1, 1), (inner, filters))
    y = ops.conv2d(y, point, _bias(layer, filters))
    return activated(layer, pixels(y, ndim, order))


@lowers("ZeroPadding1D", "ZeroPadding2D")
def zero_padding(layer: Call, x: TensorVariable) -> TensorVariable:
    sides = sides_of(layer, "padding", x.type.ndim)
    order = layer.value("data_format")
    return pixels(ops.pad2d(planes(x, order), sides), x.type.ndim, order)


@lowers("Cropping1D", "Cropping2D")
def cropping(layer: Call, x: TensorVariable) -> TensorVariable:
    ndim, order = x.type.ndim, layer.value("data_format")
    top, bottom, left, right = sides_of(layer, "cropping", ndim)
    images = planes(x, order)
    rows, columns = lengths(images)[1:]
    if top + bottom >= rows or left + right >= columns:
        raise layer.fault(f"an input of shape {lengths(x)}", "more than is cropped")
    return pixels(images[:, :, top : rows - bottom, left : columns - right], ndim, order)


def sides_of(layer: Call, key: str, ndim: int) -> tuple[int, int, int, int]:
    """Pixels of (top, bottom, left, right): one number, one for each axis, or two for each."""
    found: Any = layer.value(key)
    axes = ndim - 2
    if type(found) is int:
        found = [found] * axes
    if axes == 1 and isinstance(found, list | tuple) and len(found) == 2:
        found = [found]
    if not isinstance(found, list | tuple) or len(found) != axes:
        raise layer.fault(f"{key} {found}", "numbers for each side")
    both = [layer.with_config(side=side).integers("side", 2, 0) for side in found]
    top, bottom = both[0]
    left, right = both[1] if axes == 2 else (0, 0)
    return top, bottom, left, right


@lowers("UpSampling1D", "UpSampling2D")
def upsampling(layer: Call, x: TensorVariable) -> TensorVariable:
    ndim, order = x.type.ndim, layer.value("data_format")
    rows, columns = pair(layer, "size", ndim)
    if ndim == 4 and layer.word("interpolation", "nearest", "bilinear") == "bilinear":
        raise layer.fault("interpolation bilinear", "nearest")
    y = planes(x, order)
    for axis, times in ((2, rows), (3, columns)):
        if times > 1:
            y = pt.repeat(y, times, axis=axis)
    return pixels(y, ndim, order)
