"""Operations of `keras.ops` that stand in a Functional model.

Rows are independent of each other: what reduces, moves or cuts the batch's axis is refused.
"""

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import numpy as np
import pytensor.tensor as pt
from pytensor.gradient import zero_grad
from pytensor.graph.basic import Variable
from pytensor.tensor.variable import TensorVariable

from tandem.keras.lowering.activations import ALONG_AXIS, FUNCTIONS
from tandem.keras.lowering.call import Call, by_element, number
from tandem.keras.lowering.core import filled, lengths, reshaped, rows_of
from tandem.keras.lowering.merging import concatenated
from tandem.keras.lowering.normalization import normalized
from tandem.keras.lowering.pooling import extreme
from tandem.keras.lowering.registry import lowers
from tandem.validation import shown

_MOST_PARTS = 10_000

_ONE_INPUT: Mapping[str, Callable[..., Any]] = {
    name: getattr(pt, name.lower())
    for name in (
        *("Arccos", "Arccosh", "Arcsin", "Arcsinh", "Arctan", "Arctanh", "Ceil", "Cos", "Cosh"),
        *("Erf", "Exp", "Exp2", "Expm1", "Floor", "Isinf", "Isnan", "Log", "Log10", "Log1p"),
        *("Log2", "Round", "Sign", "Sin", "Sinh", "Sqrt", "Tan", "Trunc"),
    )
} | {
    "Abs": abs,
    "Absolute": abs,
    "Cbrt": lambda x: pt.sign(x) * abs(x) ** number(1 / 3, x),
    "Copy": lambda x: x,
    "Isfinite": lambda x: ~(pt.isnan(x) | pt.isinf(x)),
    "LogicalNot": lambda x: pt.eq(x, 0),
    "Negative": lambda x: -x,
    "OnesLike": pt.ones_like,
    "Reciprocal": lambda x: number(1, x) / x,
    "Rsqrt": lambda x: number(1, x) / pt.sqrt(x),
    "Square": pt.sqr,
    "StopGradient": zero_grad,
    "ZerosLike": pt.zeros_like,
}

_TWO_INPUTS: Mapping[str, Callable[..., Any]] = {
    "Add": pt.add,
    "Arctan2": pt.arctan2,
    "Divide": pt.true_div,
    "DivideNoNan": lambda x, y: pt.switch(pt.eq(y, 0), number(0, x), x / pt.switch(y, y, 1)),
    "Equal": pt.eq,
    "FloorDivide": pt.floor_div,
    "Greater": pt.gt,
    "GreaterEqual": pt.ge,
    "Hypot": lambda x, y: pt.sqrt(pt.sqr(x) + pt.sqr(y)),
    "Less": pt.lt,
    "LessEqual": pt.le,
    "Logaddexp": pt.logaddexp,
    "LogicalAnd": lambda x, y: pt.neq(x, 0) & pt.neq(y, 0),
    "LogicalOr": lambda x, y: pt.neq(x, 0) | pt.neq(y, 0),
    "LogicalXor": lambda x, y: pt.neq(pt.neq(x, 0), pt.neq(y, 0)),
    "Maximum": pt.maximum,
    "Minimum": pt.minimum,
    "Mod": pt.mod,
    "Multiply": pt.mul,
    "NotEqual": pt.neq,
    "Power": pt.pow,
    "Subtract": pt.sub,
    "TrueDivide": pt.true_div,
}


def _operand(layer: Call, value: Any, other: Any = None) -> Any:
    """A variable, or a number or array as a constant of the other operand's type."""
    if isinstance(value, Variable):
        return value
    found = np.asarray(value)
    if found.dtype.kind not in "biuf":
        raise layer.fault(f"{shown(str(value))} as an operand", "numbers")
    is_float = found.dtype.kind == "f" or "float" in str(getattr(other, "dtype", ""))
    return pt.constant(found.astype(layer.dtype if is_float else "int64"))


@lowers(*(f"ops.{name}" for name in _ONE_INPUT))
def of_one(layer: Call, x: TensorVariable) -> TensorVariable:
    layer.value("dtype")
    return by_element(_ONE_INPUT[layer.kind.removeprefix("ops.")], x)


@lowers(*(f"ops.{name}" for name in _TWO_INPUTS))
def of_two(layer: Call, x: Any, y: Any) -> TensorVariable:
    x, y = _operand(layer, x, y), _operand(layer, y, x)
    if x.type.ndim == 0 and isinstance(y, Variable):
        return by_element(lambda v: _TWO_INPUTS[layer.kind[4:]](x, v), y)
    return by_element(_TWO_INPUTS[layer.kind[4:]], x, y)


_ACTIVATIONS = {
    "".join(word.capitalize() for word in name.split("_")): name
    for name in (*FUNCTIONS, *ALONG_AXIS)
    if name not in ("linear", "exponential")
}


@lowers(*(f"ops.{name}" for name in _ACTIVATIONS))
def activation(layer: Call, x: TensorVariable) -> TensorVariable:
    name = _ACTIVATIONS[layer.kind.removeprefix("ops.")]
    if name in ALONG_AXIS:
        return ALONG_AXIS[name](x, axis=layer.axis("axis", x.type.ndim))
    settings = {key: layer.value(key) for key in layer.config if key not in ("name", "dtype")}
    for key, value in settings.items():
        if not isinstance(value, bool):
            settings[key] = layer.number(key)
    return by_element(lambda v: FUNCTIONS[name](v, **settings), x)


# Reductions


def _mean(x: TensorVariable, **where: Any) -> TensorVariable:
    count = x.size / pt.sum(x, **where).size
    return cast(TensorVariable, pt.sum(x, **where) / count.astype(x.dtype))


def _variance(x: TensorVariable, axis: Any, keepdims: bool) -> TensorVariable:
    centred = x - _mean(x, axis=axis, keepdims=True)
    return _mean(pt.sqr(centred), axis=axis, keepdims=keepdims)


def _logsumexp(x: TensorVariable, axis: Any, keepdims: bool) -> TensorVariable:
    most = zero_grad(pt.max(x, axis=axis, keepdims=True))
    total = pt.log(pt.exp(x - most).sum(axis=axis, keepdims=True)) + most
    return cast(TensorVariable, total if keepdims else pt.squeeze(total, axis=axis))


_REDUCTIONS: Mapping[str, Callable[..., Any]] = {
    "All": pt.all,
    "Amax": partial(extreme, pt.max),
    "Amin": partial(extreme, pt.min),
    "Any": pt.any,
    "Argmax": pt.argmax,
    "Argmin": pt.argmin,
    "Logsumexp": _logsumexp,
    "Max": partial(extreme, pt.max),
    "Mean": _mean,
    "Min": partial(extreme, pt.min),
    "Prod": pt.prod,
    "Std": lambda x, axis, keepdims: pt.sqrt(_variance(x, axis, keepdims)),
    "Sum": pt.sum,
    "Var": _variance,
}


@lowers(*(f"ops.{name}" for name in _REDUCTIONS))
def reduction(layer: Call, x: TensorVariable) -> TensorVariable:
    axes = tuple(sorted(layer.axes("axis", x.type.ndim)))
    name = layer.kind.removeprefix("ops.")
    if name not in ("Any", "All") and "float" not in x.dtype:
        x = x.astype(layer.dtype)
    where: Any = axes[0] if name.startswith("Arg") else axes
    if layer.value("initial") is not None:
        raise layer.fault("initial", "none")
    return cast(
        TensorVariable, _REDUCTIONS[name](x, axis=where, keepdims=layer.flag("keepdims", False))
    )


@lowers("ops.Average")
def average(layer: Call, x: TensorVariable) -> TensorVariable:
    axis, ndim = layer.axis("axis", x.type.ndim), x.type.ndim
    if (weights := layer.keywords.pop("weights", None)) is None:
        return _mean(x, axis=axis)
    w = _operand(layer, weights, x)
    w = w.dimshuffle(*(0 if n == axis else "x" for n in range(ndim))) if w.type.ndim == 1 else w
    return (x * w).sum(axis=axis) / w.sum(axis=axis)


@lowers("ops.Norm")
def norm(layer: Call, x: TensorVariable) -> TensorVariable:
    axes, order = layer.axes("axis", x.type.ndim), layer.value("ord")
    where: Any = {"axis": axes, "keepdims": layer.flag("keepdims")}
    if order == 1 and len(axes) == 1:
        return abs(x).sum(**where)
    if order not in (None, "fro") and (order != 2 or len(axes) > 1):
        raise layer.fault(f"ord {shown(order)}", "null, or 1 or 2 of one axis")
    squares = pt.sqr(x).sum(**where)
    is_zero = pt.eq(squares, 0)  # there the gradient is 0, as PyTorch has it
    zero, one = number(0, x), number(1, x)
    return pt.switch(is_zero, zero, pt.sqrt(pt.switch(is_zero, one, squares)))


@lowers("ops.Cumsum", "ops.Cumprod")
def cumulative(layer: Call, x: TensorVariable) -> TensorVariable:
    function = pt.cumsum if layer.kind == "ops.Cumsum" else pt.cumprod
    return cast(TensorVariable, function(x, axis=layer.axis("axis", x.type.ndim)))


@lowers("ops.Normalize")
def normalize(layer: Call, x: TensorVariable) -> TensorVariable:
    if layer.number("order") != 2:
        raise layer.fault(f"order {layer.value('order')}", "2")
    axis = layer.axis("axis", x.type.ndim)
    given = {} if layer.value("epsilon") is None else {"epsilon": layer.number("epsilon", 0)}
    return normalized(x, [axis], **given)


# Products


@lowers("ops.Matmul", "ops.Dot")
def product(layer: Call, x: Any, y: Any) -> TensorVariable:
    x, y = _operand(layer, x, y), _operand(layer, y, x)
    if y.type.ndim == 2 and x.type.ndim > 2:
        return rows_of(x, lambda rows: pt.dot(rows, y), cast(int, y.type.shape[1]))
    if layer.kind == "ops.Dot" and max(x.type.ndim, y.type.ndim) > 2:
        raise layer.fault(f"{x.type.ndim} and {y.type.ndim} axes", "a product with a matrix")
    return cast(TensorVariable, pt.matmul(x, y))


@lowers("ops.Einsum")
def einsum(layer: Call, *operands: Any) -> TensorVariable:
    subscripts = layer.value("subscripts")
    if not isinstance(subscripts, str) or len(subscripts) > 100:
        raise layer.fault(f"subscripts {shown(subscripts)}", "text")
    return pt.einsum(subscripts, *(_operand(layer, x) for x in operands))


# Shapes


def _shape_of_rows(layer: Call, key: str, x: TensorVariable) -> tuple[int, ...]:
    """A shape whose first length is the batch's."""
    shape = layer.value(key)
    if not isinstance(shape, list | tuple) or not shape or shape[0] not in (-1, None):
        raise layer.fault(f"{key} {shown(shape)}", "-1, for the batch, and the lengths of rows")
    return tuple(-1 if n is None else n for n in shape[1:])


@lowers("ops.Reshape")
def reshape(layer: Call, x: TensorVariable) -> TensorVariable:
    size = int(np.prod(lengths(x), dtype=np.int64))
    return reshaped(x, filled(layer, _shape_of_rows(layer, "newshape", x), size))


@lowers("ops.BroadcastTo")
def broadcast_to(layer: Call, x: TensorVariable) -> TensorVariable:
    shape = _shape_of_rows(layer, "shape", x)
    return pt.broadcast_to(x, (x.shape[0], *shape))


@lowers("ops.Transpose")
def transpose(layer: Call, x: TensorVariable) -> TensorVariable:
    axes = layer.integers("axes", x.type.ndim, 0)
    if axes[0] != 0:
        raise layer.fault(f"axes {axes}", "the batch's to stay the first")
    return x.dimshuffle(*axes)


@lowers("ops.Swapaxes")
def swapaxes(layer: Call, x: TensorVariable) -> TensorVariable:
    first, second = (layer.axis(key, x.type.ndim) for key in ("axis1", "axis2"))
    return pt.swapaxes(x, first, second)


@lowers("ops.Moveaxis")
def moveaxis(layer: Call, x: TensorVariable) -> TensorVariable:
    return pt.moveaxis(x, *(layer.axes(key, x.type.ndim) for key in ("source", "destination")))


@lowers("ops.ExpandDims")
def expand_dims(layer: Call, x: TensorVariable) -> TensorVariable:
    return pt.expand_dims(x, layer.axis("axis", x.type.ndim + 1))


@lowers("ops.Squeeze")
def squeeze(layer: Call, x: TensorVariable) -> TensorVariable:
    if layer.value("axis") is None:
        return reshaped(x, tuple(n for n in lengths(x) if n != 1))
    axes = tuple(layer.axes("axis", x.type.ndim))
    return cast(TensorVariable, pt.squeeze(x, axis=axes))


@lowers("ops.Concatenate")
def concatenate(layer: Call, xs: Any) -> TensorVariable:
    return concatenated([*xs], layer.axis("axis", xs[0].type.ndim))


@lowers("ops.Stack")
def stack(layer: Call, xs: Any) -> TensorVariable:
    axis = layer.axis("axis", xs[0].type.ndim + 1)
    return cast(TensorVariable, pt.stack([*xs], axis=axis))


@lowers("ops.Split")
def split(layer: Call, x: TensorVariable) -> list[TensorVariable]:
    axis = layer.axis("axis", x.type.ndim)
    length, given = lengths(x)[axis - 1], layer.value("indices_or_sections")
    if type(given) is int:
        count = layer.integer("indices_or_sections", 1, length)
        if length % count:
            raise layer.fault(f"{count} parts of {length}", "equal ones")
        given = [*range(length // count, length, length // count)]
    ends = [0, *given, length]
    before = (slice(None),) * axis
    return [x[(*before, slice(a, b))] for a, b in itertools.pairwise(ends)]


@lowers("ops.Unstack")
def unstack(layer: Call, x: TensorVariable) -> list[TensorVariable]:
    axis = layer.axis("axis", x.type.ndim)
    layer.value("num")
    if (count := lengths(x)[axis - 1]) > _MOST_PARTS:
        raise layer.fault(f"{count} parts", f"at most {_MOST_PARTS}")
    return [x[(*(slice(None),) * axis, place)] for place in range(count)]


@lowers("ops.Tile")
def tile(layer: Call, x: TensorVariable) -> TensorVariable:
    repeats = layer.integers("repeats", x.type.ndim)
    if repeats[0] != 1 or max(repeats) > _MOST_PARTS:
        raise layer.fault(f"repeats {repeats}", f"1 of the batch, and at most {_MOST_PARTS}")
    for axis, times in enumerate(repeats):
        x = pt.concatenate([x] * times, axis=axis) if times > 1 else x
    return x


@lowers("ops.Repeat")
def repeat(layer: Call, x: TensorVariable) -> TensorVariable:
    times = layer.integer("repeats")
    return pt.repeat(x, times, axis=layer.axis("axis", x.type.ndim))


@lowers("ops.Flip")
def flip(layer: Call, x: TensorVariable) -> TensorVariable:
    axes = tuple(layer.axes("axis", x.type.ndim))
    whole, back = slice(None), slice(None, None, -1)
    return x[tuple(back if axis in axes else whole for axis in range(x.type.ndim))]


@lowers("ops.Pad")
def pad(layer: Call, x: TensorVariable, constant_values: Any = None) -> TensorVariable:
    widths, ndim = layer.value("pad_width"), x.type.ndim
    if layer.value("mode") != "constant" or constant_values not in (None, 0):
        raise layer.fault(f"mode {layer.value('mode')}", "constant, of zeros")
    if not isinstance(widths, list | tuple) or len(widths) != ndim or any(widths[0]):
        raise layer.fault(f"pad_width {shown(widths)}", "none of the batch, and two of each axis")
    for axis, sides in enumerate(widths[1:], 1):
        before, behind = layer.integers("pad_width", 2, 0, sides)
        shape = [*x.type.shape]
        parts = [x]
        for place, width in ((0, before), (2, behind)):
            if width:
                shape[axis] = width
                zeros = pt.zeros((x.shape[0], *shape[1:]), dtype=x.dtype)
                parts.insert(place, pt.specify_shape(zeros, (None, *shape[1:])))
        x = pt.concatenate(parts, axis=axis) if len(parts) > 1 else x
    return x


@lowers("ops.GetItem")
def get_item(layer: Call, x: TensorVariable, key: Any) -> TensorVariable:
    parts = key if isinstance(key, list | tuple) else [key]
    first = parts[0] if parts else slice(None)
    if first is not Ellipsis and first != slice(None):
        raise layer.fault(f"an index of {shown(str(first))} of the batch", "all of its rows")
    for part in parts:
        is_index = part is None or part is Ellipsis or type(part) in (int, slice)
        if not is_index:
            raise layer.fault(f"the index {shown(str(part))}", "numbers and slices")
    return x[tuple(parts)]


# Choices and types


@lowers("ops.Hstack")
def hstack(layer: Call, xs: Any) -> TensorVariable:
    return concatenated([*xs], layer.axis("axis", xs[0].type.ndim, 1))


@lowers("ops.Roll")
def roll(layer: Call, x: TensorVariable) -> TensorVariable:
    shift = layer.value("shift")
    if type(shift) is not int:
        raise layer.fault(f"shift {shown(shift)}", "a whole number")
    axis = layer.axis("axis", x.type.ndim)
    before, place = (slice(None),) * axis, -shift % lengths(x)[axis - 1]
    return concatenated([x[(*before, slice(place, None))], x[(*before, slice(place))]], axis)


@lowers("ops.Tril", "ops.Triu")
def triangle(layer: Call, x: TensorVariable) -> TensorVariable:
    diagonal, ndim = layer.value("k"), x.type.ndim
    if type(diagonal) is not int or ndim < 3:
        raise layer.fault(f"k {shown(diagonal)} and {ndim} axes", "a whole number, and matrices")
    function = np.tril if layer.kind == "ops.Tril" else np.triu
    kept = function(np.ones(lengths(x)[-2:], bool), diagonal)
    return cast(TensorVariable, pt.switch(kept, x, pt.zeros_like(x)))


@lowers("ops.FullLike")
def full_like(layer: Call, x: TensorVariable, fill_value: Any) -> TensorVariable:
    filled = pt.zeros_like(x) + _operand(layer, fill_value, x)
    return cast_(layer, filled) if layer.value("dtype") else filled.astype(x.dtype)


@lowers("ops.Where")
def where(layer: Call, condition: Any, x: Any, y: Any) -> TensorVariable:
    x, y = _operand(layer, x, y), _operand(layer, y, x)
    return by_element(pt.switch, _operand(layer, condition), x, y)


@lowers("ops.Clip")
def clip(layer: Call, x: TensorVariable) -> TensorVariable:
    low, high = (number(layer.number(key), x) for key in ("x_min", "x_max"))
    return by_element(lambda v: pt.clip(v, low, high), x)


@lowers("ops.Cast")
def cast_(layer: Call, x: TensorVariable) -> TensorVariable:
    dtype = str(layer.config.get("dtype"))
    if dtype == "bool":
        return cast(TensorVariable, pt.neq(x, 0))
    is_float = dtype.startswith(("float", "bfloat"))
    return x.astype(layer.dtype if is_float else "int64")


@lowers("ops.ConvertToTensor")
def convert_to_tensor(layer: Call, x: Any) -> TensorVariable:
    for key in ("dtype", "sparse", "ragged"):
        layer.value(key)
    return cast(TensorVariable, _operand(layer, x))


@lowers("ops.BinaryCrossentropy", "ops.CategoricalCrossentropy")
def crossentropy(layer: Call, target: TensorVariable, output: TensorVariable) -> TensorVariable:
    is_logits = layer.flag("from_logits")
    low, high, one = (number(value, output) for value in (1e-7, 1 - 1e-7, 1))
    if layer.kind == "ops.BinaryCrossentropy":
        if is_logits:
            return pt.softplus(output) - target * output
        found = pt.clip(output, low, high)
        return -(target * pt.log(found) + (one - target) * pt.log(one - found))
    axis = layer.axis("axis", output.type.ndim)
    if is_logits:
        logs = pt.special.log_softmax(output, axis=axis)
    else:
        logs = pt.log(pt.clip(output / output.sum(axis=axis, keepdims=True), low, high))
    return -(target * logs).sum(axis=axis)


@lowers("ops.OneHot")
def one_hot(layer: Call, x: TensorVariable) -> TensorVariable:
    classes = layer.integer("num_classes")
    if layer.value("axis") not in (-1, x.type.ndim) or layer.value("sparse"):
        raise layer.fault(f"axis {layer.value('axis')}", "-1")
    places = pt.constant(np.arange(classes))
    return pt.eq(pt.shape_padright(x.astype("int64")), places).astype(layer.dtype)


@lowers("ops.Take")
def take(layer: Call, x: Any, indices: Any) -> TensorVariable:
    if not isinstance(x, Variable):
        if layer.value("axis") not in (0, None) or np.ndim(x) != 1 + (layer.value("axis") == 0):
            raise layer.fault("axis of a table", "0")
        return _operand(layer, x, indices)[indices.astype("int64")]
    axis = layer.axis("axis", x.type.ndim)
    places = np.asarray(indices)
    if isinstance(indices, Variable) or places.dtype.kind not in "iu":
        raise layer.fault("indices of rows", "constant whole numbers")
    return cast(TensorVariable, pt.take(x, pt.constant(places), axis=axis))
