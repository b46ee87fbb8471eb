"""Activations, as functions that layers name and as layers."""

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import pytensor.tensor as pt
from pytensor.tensor.variable import TensorVariable

from tandem.keras.lowering.call import Call, by_element, number
from tandem.keras.lowering.registry import lowers
from tandem.layers import activations
from tandem.validation import shown, suggestion

_SELU_SCALE, _SELU_ALPHA = 1.0507009873554805, 1.6732632423543772  # Klambauer et al. 2017


def _clip(x: TensorVariable, low: float, high: float) -> TensorVariable:
    return cast(TensorVariable, pt.clip(x, number(low, x), number(high, x)))


def _gelu(x: TensorVariable, approximate: bool = False) -> TensorVariable:
    half, one = number(0.5, x), number(1, x)
    if not approximate:
        return half * x * (one + pt.erf(x * number(math.sqrt(0.5), x)))
    inner = number(math.sqrt(2 / math.pi), x) * (x + number(0.044715, x) * x * x * x)
    return half * x * (one + pt.tanh(inner))


def _celu(x: TensorVariable, alpha: float = 1.0) -> TensorVariable:
    negative = pt.minimum(x, number(0, x)) / number(alpha, x)
    return activations.relu(x) + number(alpha, x) * pt.expm1(negative)


def _softmax(x: TensorVariable, axis: int = -1) -> TensorVariable:
    return cast(TensorVariable, pt.special.softmax(x, axis=axis % x.type.ndim))


def _log_softmax(x: TensorVariable, axis: int = -1) -> TensorVariable:
    return cast(TensorVariable, pt.special.log_softmax(x, axis=axis % x.type.ndim))


def _glu(x: TensorVariable, axis: int = -1) -> TensorVariable:
    axis %= x.type.ndim
    half = cast(int, x.type.shape[axis]) // 2
    before = (slice(None),) * axis
    return x[(*before, slice(half))] * pt.sigmoid(x[(*before, slice(half, None))])


def _sparsemax(x: TensorVariable, axis: int = -1) -> TensorVariable:
    """Martins, Astudillo 2016, with the threshold of Keras, which adds up sums of the largest."""
    one, zero = number(1, x), number(0, x)
    moved = pt.moveaxis(x, axis, -1)
    ranked = -pt.sort(-moved, axis=-1)
    sums = pt.cumsum(ranked, axis=-1)
    counts = pt.arange(1, moved.shape[-1] + 1).astype(x.type.dtype)
    chosen = pt.gt(ranked - (sums - one) / counts, zero)
    total = pt.switch(chosen, sums, zero).sum(axis=-1, keepdims=True) - one
    size = chosen.sum(axis=-1, keepdims=True).astype(x.type.dtype)
    return pt.moveaxis(pt.maximum(moved - total / size, zero), -1, axis)


def _relu(
    x: TensorVariable,
    negative_slope: float = 0.0,
    max_value: float | None = None,
    threshold: float = 0.0,
) -> TensorVariable:
    y = (
        pt.switch(pt.gt(x, number(threshold, x)), x, number(0, x))
        if threshold
        else activations.relu(x)
    )
    if max_value is not None:
        y = pt.minimum(y, number(max_value, x))
    if negative_slope:
        below = x - number(threshold, x) if threshold else x
        y = y + number(negative_slope, x) * pt.minimum(below, number(0, x))
    return cast(TensorVariable, y)


def _hard_sigmoid(x: TensorVariable) -> TensorVariable:
    return _clip(x + number(3, x), 0, 6) * number(1 / 6, x)


def _sparse_plus(x: TensorVariable) -> TensorVariable:
    inside = number(0.25, x) * pt.sqr(x + number(1, x))
    above = pt.switch(pt.lt(x, number(1, x)), inside, x)
    return cast(TensorVariable, pt.switch(pt.le(x, number(-1, x)), number(0, x), above))


def _beyond(x: TensorVariable, threshold: float, y: TensorVariable) -> TensorVariable:
    """Return y where x is further from 0 than a threshold, else 0."""
    return cast(TensorVariable, pt.switch(pt.gt(abs(x), number(threshold, x)), y, number(0, x)))


FUNCTIONS: Mapping[str, Callable[..., TensorVariable]] = {
    "linear": lambda x: x,
    "relu": _relu,
    "relu6": activations.relu6,
    "leaky_relu": lambda x, negative_slope=0.2: activations.leaky_relu(x, negative_slope),
    "elu": activations.elu,
    "selu": lambda x: number(_SELU_SCALE, x) * activations.elu(x, _SELU_ALPHA),
    "celu": _celu,
    "gelu": _gelu,
    "silu": lambda x: x * pt.sigmoid(x),
    "mish": lambda x: x * pt.tanh(pt.softplus(x)),
    "softplus": activations.softplus,
    "squareplus": lambda x, b=4: (x + pt.sqrt(x * x + number(b, x))) * number(0.5, x),
    "sparse_plus": _sparse_plus,
    "softsign": lambda x: x / (number(1, x) + abs(x)),
    "tanh": activations.tanh,
    "tanh_shrink": lambda x: x - pt.tanh(x),
    "hard_tanh": lambda x: _clip(x, -1, 1),
    "hard_shrink": lambda x, threshold=0.5: _beyond(x, threshold, x),
    "soft_shrink": lambda x, threshold=0.5: _beyond(
        x, threshold, x - number(threshold, x) * pt.sign(x)
    ),
    "threshold": lambda x, threshold, default_value: pt.switch(
        pt.gt(x, number(threshold, x)), x, number(default_value, x)
    ),
    "sigmoid": activations.sigmoid,
    "log_sigmoid": activations.log_sigmoid,
    "hard_sigmoid": _hard_sigmoid,
    "sparse_sigmoid": lambda x: _clip(number(0.5, x) * (x + number(1, x)), 0, 1),
    "hard_silu": lambda x: x * _hard_sigmoid(x),
    "exponential": pt.exp,
}
"""Functions of each element, by Keras's names."""

ALONG_AXIS: Mapping[str, Callable[..., TensorVariable]] = {
    "softmax": _softmax,
    "log_softmax": _log_softmax,
    "glu": _glu,
    "sparsemax": _sparsemax,
}
"""Functions along an axis, by default the last."""


def activated(
    layer: Call, x: TensorVariable, key: str = "activation", default: Any = None
) -> TensorVariable:
    """Apply the activation that a layer's configuration names, if any."""
    given = layer.value(key, default)
    if given is None:
        return x
    if isinstance(given, dict) and given.get("module") == "keras.layers":
        inner = layer.inner(key)
        return layer.apply(inner, inner.name, x)[0]
    name = given.get("config") if isinstance(given, dict) else given
    if isinstance(name, str) and name in ALONG_AXIS:
        return ALONG_AXIS[name](x)
    if not isinstance(name, str) or name not in FUNCTIONS:
        hint = suggestion(name, [*FUNCTIONS, *ALONG_AXIS]) if isinstance(name, str) else ""
        raise layer.fault(f"{key} {shown(given)}", f"an activation of keras.activations{hint}")
    return by_element(FUNCTIONS[name], x)


@lowers("Activation", keeps_mask=True)
def activation(layer: Call, x: TensorVariable) -> TensorVariable:
    return activated(layer, x)


@lowers("ReLU", keeps_mask=True)
def relu(layer: Call, x: TensorVariable) -> TensorVariable:
    slope, threshold = layer.number("negative_slope", 0), layer.number("threshold", 0)
    largest = None if layer.value("max_value") is None else layer.number("max_value", 0)
    return by_element(lambda v: _relu(v, slope, largest, threshold), x)


@lowers("LeakyReLU", keeps_mask=True)
def leaky_relu(layer: Call, x: TensorVariable) -> TensorVariable:
    slope = layer.number("negative_slope")
    return by_element(lambda v: activations.leaky_relu(v, slope), x)


@lowers("ELU", keeps_mask=True)
def elu(layer: Call, x: TensorVariable) -> TensorVariable:
    alpha = layer.number("alpha")
    return by_element(lambda v: activations.elu(v, alpha), x)


@lowers("PReLU", keeps_mask=True)
def prelu(layer: Call, x: TensorVariable) -> TensorVariable:
    shared = layer.value("shared_axes") or []
    ndim = x.type.ndim
    shape = [1 if axis in shared else n for axis, n in enumerate(x.type.shape) if axis]
    alpha = layer.parameter("alpha", shape).reshape((1, *shape))
    alpha = pt.specify_broadcastable(
        alpha, *(a for a in range(ndim) if a == 0 or shape[a - 1] == 1)
    )
    return activations.relu(x) + alpha * pt.minimum(x, number(0, x))


@lowers("Softmax", keeps_mask=True)
def softmax(layer: Call, x: TensorVariable, mask: Any = None) -> TensorVariable:
    axis, mask = layer.axis("axis", x.type.ndim), layer.mask if mask is None else mask
    if mask is None:
        return _softmax(x, axis)
    if mask.ndim != x.type.ndim:
        raise layer.fault(f"a mask of {mask.ndim} axes", f"{x.type.ndim}, as of the input")
    counts = pt.gt(mask, 0.5)
    y = _softmax(pt.switch(counts, x, number(-1e9, x)), axis)
    return cast(TensorVariable, pt.switch(counts, y, number(0, x)))
