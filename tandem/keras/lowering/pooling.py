"""Pooling of images and sequences."""

from typing import cast

import numpy as np
import pytensor.tensor as pt
from pytensor.tensor.variable import TensorVariable

from tandem import ops
from tandem.keras.lowering.call import Call, number, pixels, planes
from tandem.keras.lowering.convolution import pair, same_padding
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
    sizes, pads, firsts = [], [], []
    for length, reach, stride in zip(lengths(images)[1:], size, strides, strict=True):
        # An Op pads both ends alike. Windows that lack a pixel at the end are there by `ceil`; at
        # stride 1, where none is left over, the image is padded more and loses its first window.
        before, behind = same_padding(length, reach, stride) if is_same else (0, 0)
        if is_same and length < reach and length <= stride:  # the only window has the whole axis
            reach, before, behind = length, 0, 0
        sizes.append(reach)
        pads.append(behind if stride == 1 else before)
        firsts.append(behind - before if stride == 1 else 0)
    window = ((sizes[0], sizes[1]), strides, (pads[0], pads[1]), is_same)
    if layer.kind.startswith("Max"):
        y = ops.max_pool2d(images, *window)
    else:
        y = ops.average_pool2d(images, *window, count_pad=False)
    if any(firsts):
        y = y[:, :, firsts[0] :, firsts[1] :]
    return pixels(y, ndim, order)


@lowers("GlobalAveragePooling1D", "GlobalAveragePooling2D")
@lowers("GlobalMaxPooling1D", "GlobalMaxPooling2D")
def global_pooling(layer: Call, x: TensorVariable) -> TensorVariable:
    images = planes(x, layer.value("data_format"))
    if layer.kind.startswith("GlobalMax"):
        y = pt.max(images, axis=(2, 3))
    elif x.type.ndim == 3 and layer.mask is not None:
        steps = layer.mask.astype(x.type.dtype)
        counts = pt.maximum(steps.sum(axis=1, keepdims=True), number(1, x))
        y = (x * steps.dimshuffle(0, 1, "x")).sum(axis=1) / counts
    else:
        rows, columns = lengths(images)[1:]
        y = images.sum(axis=(2, 3)) * np.asarray(1 / (rows * columns), x.type.dtype)
    if not layer.flag("keepdims"):
        return cast(TensorVariable, y)
    return pixels(y.dimshuffle(0, 1, "x", "x"), x.type.ndim, layer.value("data_format"))
