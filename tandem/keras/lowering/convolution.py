"""Convolutions of images and sequences, and borders of zeros."""

from functools import partial
from typing import Any, cast

import numpy as np
import pytensor.tensor as pt
from pytensor.tensor.variable import TensorVariable

from tandem import ops
from tandem.keras.lowering.activations import activated
from tandem.keras.lowering.call import LARGEST, Call, pixels, planes
from tandem.keras.lowering.core import lengths, rows_of
from tandem.keras.lowering.registry import lowers

Pair = tuple[int, int]


def pair(layer: Call, key: str, ndim: int, least: int = 1, of_column: int = 1) -> Pair:
    """Numbers of rows and of columns; of a sequence, which is one column, that of columns."""
    found = layer.integers(key, ndim - 2, least)
    return (found[0], found[1]) if ndim == 4 else (found[0], of_column)


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
    weight = layer.parameter("kernel", (filters, channels // groups, *size))
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
    return layer.parameter(name, (lengths(x)[0] * multiplier, 1, *size), settings="depthwise")


@lowers("SeparableConv1D", "SeparableConv2D")
def separable(layer: Call, x: TensorVariable) -> TensorVariable:
    ndim, order = x.type.ndim, layer.value("data_format")
    images, filters = planes(x, order), layer.integer("filters")
    weight = _depthwise_weight(layer, images, ndim, "depthwise_kernel")
    y = convolved(layer, images, weight, None, ndim, lengths(images)[0])
    inner = lengths(y)[0]
    point = layer.parameter("pointwise_kernel", (filters, inner, 1, 1))
    y = ops.conv2d(y, point, _bias(layer, filters))
    return activated(layer, pixels(y, ndim, order))


@lowers("Conv1DTranspose", "Conv2DTranspose")
def transposed(layer: Call, x: TensorVariable) -> TensorVariable:
    """The gradient, with respect to its images, of a convolution of larger images."""
    ndim, order = x.type.ndim, layer.value("data_format")
    size, filters = pair(layer, "kernel_size", ndim), layer.integer("filters")
    strides = pair(layer, "strides", ndim)
    if max(pair(layer, "dilation_rate", ndim)) > 1:
        raise layer.fault("dilation_rate above 1", "1")
    g = planes(x, order)
    channels, *image = lengths(g)
    is_same = layer.word("padding", "valid", "same") == "same"
    full = [(n - 1) * s + t for n, s, t in zip(image, strides, size, strict=True)]
    odd = [t % 2 if is_same else t for t in size]  # as Keras counts from
    more = [s - t if is_same else max(0, s - t) for s, t in zip(strides, odd, strict=True)]
    if layer.value("output_padding") is not None:
        more = [*pair(layer, "output_padding", ndim, 0, 0)]
    kept = [(n - 1) * s + t + m for n, s, t, m in zip(image, strides, odd, more, strict=True)]
    firsts = [
        max(0, t - 1 - (t + o + m - 1) // 2) if is_same else 0
        for t, o, m in zip(size, odd, more, strict=True)
    ]
    weight = layer.parameter("kernel", (channels, filters, *size))
    ends = [max(f, first + n) for f, first, n in zip(full, firsts, kept, strict=True)]
    like = pt.zeros((g.shape[0], filters, *full), dtype=layer.dtype)
    y = ops.Conv2dInputGrad(strides)(pt.specify_shape(like, (None, filters, *full)), weight, g)
    behind = [end - f for end, f in zip(ends, full, strict=True)]
    if any(behind):
        y = ops.pad2d(y, (0, behind[0], 0, behind[1]))
    (top, left), (rows, columns) = firsts, kept
    y = y[:, :, top : top + rows, left : left + columns]
    if (bias := _bias(layer, filters)) is not None:
        y = y + bias.dimshuffle("x", 0, "x", "x")
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
    both = [layer.integers(key, 2, 0, side) for side in found]
    top, bottom = both[0]
    left, right = both[1] if axes == 2 else (0, 0)
    return top, bottom, left, right


@lowers("UpSampling1D", "UpSampling2D")
def upsampling(layer: Call, x: TensorVariable) -> TensorVariable:
    ndim, order = x.type.ndim, layer.value("data_format")
    size, images = pair(layer, "size", ndim), planes(x, order)
    way = layer.word("interpolation", "nearest", "bilinear") if ndim == 4 else "nearest"
    rows, columns = (n * times for n, times in zip(lengths(images)[1:], size, strict=True))
    return pixels(resized(images, (rows, columns), way), ndim, order)


@lowers("Resizing")
def resizing(layer: Call, x: TensorVariable) -> TensorVariable:
    order = layer.value("data_format")
    way = layer.word("interpolation", "nearest", "bilinear")
    size = layer.integer("height"), layer.integer("width")
    for key in ("crop_to_aspect_ratio", "pad_to_aspect_ratio", "antialias"):
        if layer.flag(key, False):
            raise layer.fault(f"{key} true", "false")
    layer.value("fill_mode")
    return pixels(resized(planes(x, order), size, way), 4, order)


def resized(x: TensorVariable, size: Pair, way: str) -> TensorVariable:
    """(batch, channel, row, column) of another number of rows and columns.

    Pixels have their centres at halves, as in Keras.
    """
    for axis, (length, count) in enumerate(zip(lengths(x)[1:], size, strict=True), 2):
        if length == count:
            continue
        if length * count > LARGEST:
            raise ValueError(f"found {length} pixels to be {count}, expected fewer")
        places = (np.arange(count) + 0.5) * (length / count)
        if way == "nearest":
            x = pt.take(x, pt.constant(places.astype(np.int64)), axis=axis)
            continue
        places = np.clip(places - 0.5, 0, length - 1)
        shares = np.maximum(0, 1 - abs(places[:, np.newaxis] - np.arange(length)))
        weights = pt.constant(shares.astype(x.type.dtype))
        moved = x if axis == 3 else x.dimshuffle(0, 1, 3, 2)
        moved = rows_of(moved, partial(_times, weights.T), count)
        x = moved if axis == 3 else moved.dimshuffle(0, 1, 3, 2)
    return x


def _times(weights: TensorVariable, rows: TensorVariable) -> TensorVariable:
    return pt.dot(rows, weights)
