"""Fully connected layers, embeddings, dropout, and changes of shape or scale."""

import math
import re
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytensor.tensor as pt
from pytensor.tensor.variable import TensorVariable

from tandem import ops
from tandem.keras.lowering.activations import activated
from tandem.keras.lowering.call import Call, by_element, number, pixels, planes
from tandem.keras.lowering.registry import lowers
from tandem.layers.training_pass import Training
from tandem.philox import Purpose, philox4x32
from tandem.validation import shown


def lengths(x: TensorVariable) -> tuple[int, ...]:
    """Lengths of a row."""
    return cast(tuple[int, ...], x.type.shape[1:])


def reshaped(x: TensorVariable, shape: tuple[int, ...]) -> TensorVariable:
    """Rows in another shape, of as many elements."""
    if math.prod(shape) != math.prod(lengths(x)):
        raise ValueError(f"found rows of shape {lengths(x)}, expected the elements of {shape}")
    if shape == lengths(x):
        return x
    y = x.reshape((x.shape[0], *shape))
    return cast(TensorVariable, pt.specify_shape(y, (x.type.shape[0], *shape)))


@lowers("Dense", keeps_mask=True)
def dense(layer: Call, x: TensorVariable) -> TensorVariable:
    units, inputs = layer.integer("units"), lengths(x)[-1]
    if layer.value("lora_rank") is not None:
        raise layer.fault("lora_rank", "none")
    weight = layer.parameter("kernel", (inputs, units))
    bias = layer.parameter("bias", (units,)) if layer.flag("use_bias") else None

    def product(rows: TensorVariable) -> TensorVariable:
        return pt.dot(rows, weight) if bias is None else pt.dot(rows, weight) + bias

    return activated(layer, rows_of(x, product, units))


def rows_of(
    x: TensorVariable, function: Callable[[TensorVariable], TensorVariable], units: int
) -> TensorVariable:
    """Apply a function of (row, feature) to (..., feature), for a result (..., unit)."""
    if x.type.ndim == 2:
        return function(x)
    middle = x.type.shape[1:-1]
    rows = x.reshape((-1, x.type.shape[-1]))
    y = function(rows).reshape((x.shape[0], *middle, units))
    return cast(TensorVariable, pt.specify_shape(y, (None, *middle, units)))


@lowers("EinsumDense")
def einsum_dense(layer: Call, x: TensorVariable) -> TensorVariable:
    """Products by Einstein's summation, such as ``abc,cd->abd``, where a is the batch."""
    equation = layer.value("equation")
    match = re.fullmatch(r"([a-z.]+),([a-z]+)->([a-z.]+)", str(equation).replace(" ", ""))
    if match is None or "." in str(equation):
        raise layer.fault(f"equation {shown(equation)}", "one of letters, such as abc,cd->abd")
    given, weighted, made = match.groups()
    if len(given) != x.type.ndim or given[0] != made[0] or given[0] in weighted:
        raise layer.fault(f"equation {shown(equation)}", "the batch as the first axis, of itself")
    outputs = layer.value("output_shape")
    shape = (*outputs,) if isinstance(outputs, list | tuple) else (outputs,)
    size = dict(zip(made[1:], shape, strict=True)) | dict(zip(given, x.type.shape, strict=True))
    if any(n != size[letter] for letter, n in zip(made[1:], shape, strict=True) if n is not None):
        raise layer.fault(f"output_shape {shown(outputs)}", "the lengths of the equation")
    weight = layer.parameter("kernel", [size[letter] for letter in weighted])
    y = pt.einsum(f"{given},{weighted}->{made}", x, weight)
    axes = layer.value("bias_axes")
    if axes is not None:  # lengths of 1 stand between them
        last = made[min(made.index(letter) for letter in axes) :]
        y = y + layer.parameter("bias", [size[c] if c in axes else 1 for c in last])
    return activated(layer, pt.specify_shape(y, (None, *(size[letter] for letter in made[1:]))))


@lowers("Embedding")
def embedding(layer: Call, x: TensorVariable) -> TensorVariable:
    size = layer.integer("input_dim"), layer.integer("output_dim")
    table = layer.parameter("embeddings", size)
    y = table[x.astype("int64")]
    if layer.flag("mask_zero"):
        layer.set_mask(y, pt.neq(x, 0))
    return cast(TensorVariable, y)


@lowers("Masking")
def masking(layer: Call, x: TensorVariable) -> TensorVariable:
    counts = pt.any(pt.neq(x, number(layer.number("mask_value"), x)), axis=-1)
    return layer.set_mask(x * pt.shape_padright(counts).astype(x.type.dtype), counts)


@lowers("Identity", "ops.Identity", keeps_mask=True)
def identity(layer: Call, x: TensorVariable) -> TensorVariable:
    return x


@lowers("ActivityRegularization", keeps_mask=True)
def activity_regularization(layer: Call, x: TensorVariable) -> TensorVariable:
    factors = {key: layer.number(key, 0) for key in ("l1", "l2")}
    layer.regularize(x, "activity_regularizer", {"class_name": "L1L2", "config": factors})
    return x


# Random masks


def drop(layer: Call, x: TensorVariable, rate: float, shape: tuple[int, ...]) -> TensorVariable:
    """Drop numbers of each row in training, by one mask for axes of length 1 in a shape."""
    if not rate or layer.training is None:
        return x
    if (steps := layer.rows_in_row) == 1:
        return _drop(layer, x, rate, shape)
    whole = x.reshape((-1, steps, *lengths(x)))  # a row is one of several steps
    whole = pt.specify_shape(whole, (None, steps, *lengths(x)))
    return _drop(layer, whole, rate, (steps, *shape)).reshape((-1, *lengths(x)))


def _drop(layer: Call, x: TensorVariable, rate: float, shape: tuple[int, ...]) -> TensorVariable:
    training = cast(Training, layer.training)
    keys = (training.seed, training.epoch, training.indices)
    place, factor = layer.next_random(), 1 / (1 - rate)
    if shape != lengths(x):
        units = math.prod(shape)
        mask = ops.dropout_mask(*keys, rate=rate, layer=place, units=units, dtype=x.type.dtype)
        return x * (mask * number(factor, x)).reshape((x.shape[0], *shape))
    if x.type.ndim == 4:
        y = ops.dropout(planes(x), *keys, rate=rate, layer=place, factor=factor)
        return pixels(y, 4)
    rows = reshaped(x, (math.prod(shape),))
    return reshaped(ops.dropout(rows, *keys, rate=rate, layer=place, factor=factor), shape)


def _rate(layer: Call, key: str = "rate") -> float:
    rate = layer.number(key, 0, 1)
    if rate == 1:
        raise layer.fault(f"{key} 1", "less than 1")
    return rate


@lowers("Dropout", keeps_mask=True)
def dropout(layer: Call, x: TensorVariable) -> TensorVariable:
    shape = layer.value("noise_shape")
    if shape is None:
        return drop(layer, x, _rate(layer), lengths(x))
    fits = isinstance(shape, list | tuple) and len(shape) == x.type.ndim and shape[0] is None
    if not fits or any(n not in (None, 1, m) for n, m in zip(shape, x.type.shape, strict=True)):
        raise layer.fault(f"noise_shape {shown(shape)}", "null, then lengths of rows or 1")
    mask = tuple(m if n is None else n for n, m in zip(shape[1:], lengths(x), strict=True))
    return drop(layer, x, _rate(layer), mask)


@lowers("SpatialDropout1D", "SpatialDropout2D", keeps_mask=True)
def spatial_dropout(layer: Call, x: TensorVariable) -> TensorVariable:
    ones = (1,) * (x.type.ndim - 2)
    if layer.value("data_format") == "channels_first":
        return drop(layer, x, _rate(layer), (lengths(x)[0], *ones))
    return drop(layer, x, _rate(layer), (*ones, lengths(x)[-1]))


def normals(layer: Call, x: TensorVariable) -> TensorVariable:
    """Normal random numbers of mean 0 and deviation 1 for each number of each row of x."""
    training, shape = cast(Training, layer.training), lengths(x)
    count = math.prod(shape) * layer.rows_in_row
    blocks = pt.arange(-(-count // 4)).dimshuffle("x", 0)
    purpose = np.int64(Purpose.DROPOUT + layer.next_random())
    counter = (blocks, training.indices.dimshuffle(0, "x"), training.epoch, purpose)
    words = [word.astype("float64") / 2.0**32 for word in philox4x32(counter, training.seed)]
    parts = []
    for u, v in (words[:2], words[2:]):  # Box and Muller's method
        radius, angle = pt.sqrt(-2 * pt.log(u + 2.0**-32)), 2 * math.pi * v
        parts += [radius * pt.cos(angle), radius * pt.sin(angle)]
    drawn = pt.concatenate(parts, axis=1)[:, :count].astype(layer.dtype)
    return cast(TensorVariable, pt.specify_shape(drawn.reshape((-1, *shape)), (None, *shape)))


@lowers("GaussianNoise", keeps_mask=True)
def gaussian_noise(layer: Call, x: TensorVariable) -> TensorVariable:
    deviation = number(layer.number("stddev", 0), x)
    return x if layer.training is None else x + deviation * normals(layer, x)


@lowers("GaussianDropout", keeps_mask=True)
def gaussian_dropout(layer: Call, x: TensorVariable) -> TensorVariable:
    rate = _rate(layer)
    deviation = number(math.sqrt(rate / (1 - rate)), x)
    return x if layer.training is None else x * (number(1, x) + deviation * normals(layer, x))


# Shapes and scales


@lowers("Flatten")
def flatten(layer: Call, x: TensorVariable) -> TensorVariable:
    if layer.value("data_format") == "channels_first" and x.type.ndim > 2:
        x = pt.moveaxis(x, 1, -1)
    return reshaped(x, (math.prod(lengths(x)),))


@lowers("Reshape")
def reshape(layer: Call, x: TensorVariable) -> TensorVariable:
    shape = layer.value("target_shape")
    if not isinstance(shape, list | tuple) or any(type(n) is not int for n in shape):
        raise layer.fault(f"target_shape {shown(shape)}", "whole numbers")
    return reshaped(x, filled(layer, tuple(shape), math.prod(lengths(x))))


def filled(layer: Call, shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    """A shape whose one length of -1 follows from the number of elements."""
    known = math.prod(n for n in shape if n != -1)
    if shape.count(-1) > 1 or any(n < 1 for n in shape if n != -1) or size % known:
        raise layer.fault(f"the shape {shape}", f"lengths of {size} elements, one perhaps -1")
    return tuple(size // known if n == -1 else n for n in shape)


@lowers("Permute")
def permute(layer: Call, x: TensorVariable) -> TensorVariable:
    order = layer.integers("dims", x.type.ndim - 1)
    return x.dimshuffle(0, *order)


@lowers("RepeatVector")
def repeat_vector(layer: Call, x: TensorVariable) -> TensorVariable:
    steps = layer.integer("n")
    return pt.repeat(x.dimshuffle(0, "x", 1), np.int64(steps), axis=1)


@lowers("Rescaling", keeps_mask=True)
def rescaling(layer: Call, x: TensorVariable) -> TensorVariable:
    scale, offset = (_numbers(layer, key, x) for key in ("scale", "offset"))
    if scale.ndim or offset.ndim:
        return x * scale + offset
    return by_element(lambda v: v * scale + offset if offset else v * scale, x)


def _numbers(layer: Call, key: str, like: TensorVariable) -> np.ndarray:
    """A number, or one for each channel, of a configuration."""
    found = np.asarray(layer.value(key, 0.0))
    if found.dtype.kind not in "if" or found.ndim > 1 or not np.isfinite(found).all():
        raise layer.fault(f"{key} {shown(layer.value(key))}", "a number or one for each channel")
    return found.astype(like.type.dtype)


def variables(inputs: Any) -> list[TensorVariable]:
    """The inputs of a layer that takes several, given as one list or apart."""
    return [*inputs[0]] if len(inputs) == 1 and isinstance(inputs[0], list | tuple) else [*inputs]
