"""Normalisations."""

import math
from typing import Any, cast

import numpy as np
import pytensor.tensor as pt
from pytensor.tensor.variable import TensorVariable

from tandem import ops
from tandem.keras.lowering.call import Call, number, pixels, planes
from tandem.keras.lowering.core import lengths
from tandem.keras.lowering.registry import lowers
from tandem.layers.training_pass import Training


@lowers("BatchNormalization", keeps_mask=True)
def batch_normalization(layer: Call, x: TensorVariable) -> TensorVariable:
    """Statistics of the groups of rows of `Training`, and Keras's biased running variance."""
    axis, ndim = layer.axis("axis", x.type.ndim), x.type.ndim
    is_last = axis == ndim - 1
    order = [a for a in range(ndim) if a not in (0, axis)]
    if is_last and ndim in (3, 4):
        images = planes(x)
    else:
        images = x.dimshuffle(0, axis, *order, *["x"] * (ndim == 3))
    y = _batch_norm(layer, images)
    if is_last and ndim in (3, 4):
        return pixels(y, ndim)
    back = [order.index(a) + 2 if a not in (0, axis) else int(a != 0) for a in range(ndim)]
    return y.dimshuffle(*back)


def _batch_norm(layer: Call, x: TensorVariable) -> TensorVariable:
    shape = (cast(int, x.type.shape[1]),)
    keep, epsilon = layer.number("momentum", 0, 1), layer.number("epsilon", 1e-30, 1e30)
    if layer.value("renorm"):
        raise layer.fault("renorm true", "false")
    layer.value("renorm_momentum")
    scale = (
        layer.parameter("gamma", shape)
        if layer.flag("scale")
        else pt.ones(shape, dtype=layer.dtype)
    )
    shift = (
        layer.parameter("beta", shape)
        if layer.flag("center")
        else pt.zeros(shape, dtype=layer.dtype)
    )
    mean = layer.parameter("moving_mean", shape, keep=keep, settings="moving_mean")
    variance = layer.parameter("moving_variance", shape, keep=keep, settings="moving_variance")
    layer.flag("synchronized", False)
    training = layer.training
    if training is None or layer.frozen:
        return ops.batch_norm_inference(x, scale, shift, mean, variance, epsilon)
    if layer.mask is not None:
        raise layer.fault("an input with a mask", "one without: statistics are of all steps")
    if layer.rows_in_row > 1:
        raise layer.fault("a normalisation of minibatches in TimeDistributed", "trainable=False")
    y, *statistics = _by_rows(x, scale, shift, mean, training, epsilon)
    names = (f"{layer.name}.running_mean", f"{layer.name}.running_var")
    training.statistics.update(zip(names, statistics, strict=True))
    return y


def _by_rows(
    x: TensorVariable, scale: Any, shift: Any, pivot: Any, training: Training, epsilon: float
) -> tuple[TensorVariable, TensorVariable, TensorVariable]:
    """Outputs, mean and biased variance of the minibatch's valid rows, weighted by group."""
    valid = x.shape[0] if training.valid is None else training.valid
    places = math.prod(cast(tuple[int, ...], x.type.shape[2:]))
    if training.rows is None:
        y, mean, unbiased = ops.global_batch_norm(x, scale, shift, pivot, training.valid, epsilon)
        count = pt.maximum((valid * places).astype(x.type.dtype), number(1, x))
        return y, mean, unbiased * ((count - number(1, x)) / count)
    last = () if training.valid is None else (training.valid,)
    op = ops.BatchNorm(training.rows, epsilon)
    y, mean, _, _, inverses = op(x, scale, shift, *last)
    # The Op's own variance is the unbiased one of each group.
    firsts = pt.arange(inverses.shape[0]) * training.rows
    rows = pt.clip(valid - firsts, 0, training.rows).astype(x.type.dtype)
    weights = rows / pt.maximum(rows.sum(), number(1, x))
    counted = pt.switch(pt.gt(rows, number(0, x)).dimshuffle(0, "x"), inverses, number(1, x))
    variances = pt.maximum(pt.sqr(number(1, x) / counted) - number(epsilon, x), number(0, x))
    return y, mean, pt.dot(weights, variances)


@lowers("Normalization", keeps_mask=True)
def normalization(layer: Call, x: TensorVariable) -> TensorVariable:
    axes = layer.value("axis")
    axes = [] if axes is None else axes if isinstance(axes, list | tuple) else [axes]
    kept = sorted(axis % x.type.ndim for axis in axes)
    shape = tuple(n if axis in kept else 1 for axis, n in enumerate(x.type.shape))
    mean, variance = (_given(layer, key, shape, kept, x) for key in ("mean", "variance"))
    std = pt.maximum(pt.sqrt(variance), number(1e-7, x))
    return x * std + mean if layer.flag("invert", False) else (x - mean) / std


def _given(
    layer: Call, key: str, shape: tuple[Any, ...], kept: list[int], x: TensorVariable
) -> TensorVariable:
    """A statistic of the configuration, or else the parameter that `adapt` sets."""
    given = layer.value(key)
    if given is None:
        lengths_kept = [shape[axis] for axis in kept]
        found = layer.parameter(key, lengths_kept, trainable=False)
        return found.dimshuffle(
            *(kept.index(axis) if axis in kept else "x" for axis in range(len(shape)))
        )
    numbers = np.asarray(given, layer.dtype)  # of the last of the axes
    own = dict(zip(kept[len(kept) - numbers.ndim :], numbers.shape, strict=True))
    return pt.constant(numbers.reshape([own.get(axis, 1) for axis in range(len(shape))]))


@lowers("LayerNormalization", keeps_mask=True)
def layer_normalization(layer: Call, x: TensorVariable) -> TensorVariable:
    axes = sorted(layer.axes("axis", x.type.ndim))
    shape = [x.type.shape[axis] for axis in axes]
    order = [axes.index(a) if a in axes else "x" for a in range(x.type.ndim)]
    if layer.value("rms_scaling"):
        raise layer.fault("rms_scaling true", "false")
    y = standardized(x, axes, layer.number("epsilon", 0, 1e30))
    if layer.flag("scale"):
        y = y * layer.parameter("gamma", shape).dimshuffle(*order)
    if layer.flag("center"):
        y = y + layer.parameter("beta", shape).dimshuffle(*order)
    return y


@lowers("RMSNormalization")
@lowers("UnitNormalization", keeps_mask=True)
def length_normalization(layer: Call, x: TensorVariable) -> TensorVariable:
    """Numbers divided by their root mean square, or by the root of the sum of their squares."""
    places = layer.axes("axis", x.type.ndim)
    if layer.kind == "UnitNormalization":
        return normalized(x, places, 1e-12)
    shape = [x.type.shape[axis] for axis in places]
    squares = pt.sqr(x).sum(axis=places, keepdims=True)
    mean = squares * number(1 / math.prod(cast(list[int], shape)), x)
    order = [places.index(a) if a in places else "x" for a in range(x.type.ndim)]
    scale = layer.parameter("scale", shape, settings="gamma").dimshuffle(*order)
    return x / pt.sqrt(mean + number(layer.number("epsilon", 0), x)) * scale


def normalized(x: TensorVariable, axes: list[int], epsilon: float = 1e-7) -> TensorVariable:
    """Numbers divided by their norm over axes, or by epsilon where that is more."""
    squares = pt.sqr(x).sum(axis=axes, keepdims=True)
    return cast(TensorVariable, x / pt.sqrt(pt.maximum(squares, number(epsilon**2, x))))


def standardized(x: TensorVariable, axes: list[int], epsilon: float) -> TensorVariable:
    """Numbers minus their mean over axes, divided by their standard deviation."""
    count = math.prod(cast(int, x.type.shape[axis]) for axis in axes)
    share = number(1 / count, x)
    centred = x - x.sum(axis=axes, keepdims=True) * share
    variance = pt.sqr(centred).sum(axis=axes, keepdims=True) * share
    return cast(TensorVariable, centred / pt.sqrt(variance + number(epsilon, x)))


@lowers("GroupNormalization", keeps_mask=True)
def group_normalization(layer: Call, x: TensorVariable) -> TensorVariable:
    axis, ndim = layer.axis("axis", x.type.ndim), x.type.ndim
    channels = lengths(x)[axis - 1]
    groups = layer.integer("groups", -1)
    groups = channels if groups == -1 else groups
    if not groups or channels % groups:
        raise layer.fault(f"groups {groups}", f"a divisor of {channels} channels")
    before, behind = x.type.shape[1:axis], x.type.shape[axis + 1 :]
    parts = x.reshape((x.shape[0], *before, groups, channels // groups, *behind))
    axes = [a for a in range(1, ndim + 1) if a != axis]
    y = standardized(parts, axes, layer.number("epsilon", 0, 1e30))
    y = y.reshape((x.shape[0], *lengths(x)))
    order = [0 if a == axis else "x" for a in range(ndim)]
    if layer.flag("scale"):
        y = y * layer.parameter("gamma", (channels,)).dimshuffle(*order)
    if layer.flag("center"):
        y = y + layer.parameter("beta", (channels,)).dimshuffle(*order)
    return cast(TensorVariable, y)
