"""Layers that join several inputs."""

from functools import reduce
from typing import Any

import pytensor.tensor as pt
from pytensor.tensor.variable import TensorVariable

from tandem.keras.lowering.call import Call, by_element, is_view, number, pixels, planes
from tandem.keras.lowering.core import variables
from tandem.keras.lowering.normalization import normalized
from tandem.keras.lowering.registry import lowers


def _merge_masks(layer: Call, inputs: list[TensorVariable]) -> TensorVariable | None:
    """The steps that count in any input; None if an input counts whole."""
    masks = [layer.mask_of(x) for x in inputs]
    if any(mask is None for mask in masks):
        return None
    return reduce(pt.or_, masks)


_FUNCTIONS = {
    "Add": pt.add,
    "Average": pt.add,
    "Maximum": pt.maximum,
    "Minimum": pt.minimum,
    "Multiply": pt.mul,
    "Subtract": pt.sub,
}


@lowers(*_FUNCTIONS)
def joined(layer: Call, *inputs: Any) -> TensorVariable:
    """Join inputs element by element, those with fewer axes behind the batch's."""
    xs = variables(inputs)
    if len(xs) < 2 or (layer.kind == "Subtract" and len(xs) > 2):
        raise layer.fault(f"{len(xs)} inputs", "two" if layer.kind == "Subtract" else "two or more")
    is_filled = layer.kind in ("Maximum", "Minimum", "Multiply")  # where a mask leaves steps out
    if is_filled and any(layer.mask_of(x) is not None for x in xs):
        raise layer.fault("inputs with masks", "inputs without them")
    mask = _merge_masks(layer, xs)
    ndim = max(x.type.ndim for x in xs)
    spread = [x.dimshuffle(0, *["x"] * (ndim - x.type.ndim), *range(1, x.type.ndim)) for x in xs]
    share = 1 / len(xs) if layer.kind == "Average" else 1

    def function(*parts: TensorVariable) -> TensorVariable:
        total = reduce(_FUNCTIONS[layer.kind], parts)
        return total if share == 1 else total * number(share, total)

    return layer.set_mask(by_element(function, *spread), mask)


@lowers("Concatenate")
def concatenate(layer: Call, *inputs: Any) -> TensorVariable:
    xs = variables(inputs)
    ndim = xs[0].type.ndim
    axis = layer.axis("axis", ndim)
    y = concatenated(xs, axis)
    masks = [layer.mask_of(x) for x in xs]
    if all(mask is None for mask in masks):
        return y
    known = [
        pt.ones(x.shape[:2], dtype="bool") if mask is None else mask
        for x, mask in zip(xs, masks, strict=True)
    ]
    if axis not in (1, ndim - 1):
        raise layer.fault("inputs with masks", "a concatenation of steps or features")
    return layer.set_mask(
        y, reduce(pt.or_, known) if axis == ndim - 1 else pt.concatenate(known, axis=1)
    )


def concatenated(xs: list[TensorVariable], axis: int) -> TensorVariable:
    """Join along an axis, of (batch, channel, row, column) where inputs are views of that."""
    ndim = xs[0].type.ndim
    if ndim in (3, 4) and any(map(is_view, xs)):
        place = (0, 2, 3, 1)[axis] if ndim == 4 else (0, 2, 1)[axis]
        return pixels(pt.concatenate([planes(x) for x in xs], axis=place), ndim)
    return pt.concatenate(xs, axis=axis)


@lowers("Dot")
def dot(layer: Call, *inputs: Any) -> TensorVariable:
    a, b = variables(inputs)
    axes = layer.value("axes")
    first, second = axes if isinstance(axes, list | tuple) else (axes, axes)
    first, second = layer.axis("axes", a.type.ndim, first), layer.axis("axes", b.type.ndim, second)
    if layer.flag("normalize"):
        a, b = normalized(a, [first]), normalized(b, [second])
    a, b = pt.moveaxis(a, first, -1), pt.moveaxis(b, second, -1)
    rest, others = a.type.shape[1:-1], b.type.shape[1:-1]
    a = a.reshape((a.shape[0], -1, a.type.shape[-1]))
    b = b.reshape((b.shape[0], -1, b.type.shape[-1])).dimshuffle(0, 2, 1)
    return pt.matmul(a, b).reshape((a.shape[0], *(rest + others or (1,))))
