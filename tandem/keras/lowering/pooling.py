"""Pooling of images and sequences."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.gradient import zero_grad
from pytensor.tensor.variable import TensorVariable

from tandem import ops
from tandem.keras.lowering.call import Call, number, pixels, planes
from tandem.keras.lowering.convolution import Pair, pair, same_padding
from tandem.keras.lowering.core import lengths
from tandem.keras.lowering.registry import lowers


@lowers("MaxPooling1D", "MaxPooling2D", "AveragePooling1D", "AveragePooling2D")
def pooling(layer: Call, x: TensorVariable) -> TensorVariable:
    ndim, order = x.type.ndim, layer.value("data_format")
    size, images = pair(layer, "pool_size", ndim), planes(x, order)
    strides = size if layer.value("strides") is None else pair(layer, "strides", ndim)
    is_same = layer.word("padding", "valid", "same") == "same"
    if not is_same and any(n < s for n, s in zip(lengths(images)[1:], size, strict=True)):
        raise layer.fault(f"an input of shape {lengths(x)}", f"a window of {size} to fit into it")
    axes = [*zip(lengths(images)[1:], size, strides, strict=True)]
    sides = [same_padding(*axis) if is_same else (0, 0) for axis in axes]
    if layer.kind.startswith("Average"):
        is_even = all(before == behind for before, behind in sides)
        if not is_even:
            images, sides = _repeated_edges(images, sides), [(0, 0)] * 2
        pad = (sides[0][0], sides[1][0])
        y = ops.average_pool2d(images, size, strides, pad, count_pad=False)
        return pixels(y, ndim, order)
    sizes, pads, firsts = [], [], []
    for (length, reach, stride), (before, behind) in zip(axes, sides, strict=True):
        # An Op pads both ends alike. Windows that lack a pixel at the end are there by `ceil`; at
        # stride 1, where none is left over, the image is padded more and loses its first window.
        if is_same and length < reach and length <= stride:  # the only window has the whole axis
            reach, before, behind = length, 0, 0
        sizes.append(reach)
        pads.append(behind if stride == 1 else before)
        firsts.append(behind - before if stride == 1 else 0)
    window = ((sizes[0], sizes[1]), strides, (pads[0], pads[1]), is_same)
    y = ops.max_pool2d(images, *window)
    if any(firsts):
        y = y[:, :, firsts[0] :, firsts[1] :]
    return pixels(y, ndim, order)


def _repeated_edges(images: TensorVariable, sides: Sequence[Pair]) -> TensorVariable:
    """Images whose first and last rows and columns are repeated, as Keras does on PyTorch."""
    for axis, (before, behind) in enumerate(sides, 2):
        at = (slice(None),) * axis
        first, last = images[(*at, slice(1))], images[(*at, slice(-1, None))]
        images = pt.concatenate([first] * before + [images] + [last] * behind, axis=axis)
    return images


def extreme(reduce: Any, x: TensorVariable, axis: Any, keepdims: bool = False) -> TensorVariable:
    """The maximum or minimum over axes, whose gradient those that tie share, as on PyTorch."""
    top = zero_grad(reduce(x, axis=axis, keepdims=True))
    ties = pt.eq(x, top).astype(x.type.dtype)
    share = zero_grad(ties / ties.sum(axis=axis, keepdims=True))
    moved = (share * (x - zero_grad(x))).sum(axis=axis, keepdims=True)  # 0, with a gradient
    y: Any = top + moved
    return y if keepdims else pt.squeeze(y, axis=axis)


@lowers("GlobalAveragePooling1D", "GlobalAveragePooling2D")
@lowers("GlobalMaxPooling1D", "GlobalMaxPooling2D")
def global_pooling(layer: Call, x: TensorVariable) -> TensorVariable:
    images = planes(x, layer.value("data_format"))
    if layer.kind.startswith("GlobalMax"):
        y = extreme(pt.max, images, axis=(2, 3))
    elif x.type.ndim == 3 and layer.mask is not None:
        steps = layer.mask.astype(x.type.dtype)
        counts = pt.maximum(steps.sum(axis=1, keepdims=True), number(1, x))
        y = (x * steps.dimshuffle(0, 1, "x")).sum(axis=1) / counts
    else:
        rows, columns = lengths(images)[1:]
        y = images.sum(axis=(2, 3)) * np.asarray(1 / (rows * columns), x.type.dtype)
    if not layer.flag("keepdims"):
        return y
    return pixels(y.dimshuffle(0, 1, "x", "x"), x.type.ndim, layer.value("data_format"))
