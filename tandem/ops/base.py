"""The base class of our Ops, and checks of inputs when a graph is built.

Every message names the Op, the expected value and the actual one.
"""

from collections.abc import Sequence
from typing import Any

import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.op import Op
from pytensor.tensor.variable import TensorVariable

FLOATS = ("float32", "float64")

Length = int | None
"""The length of an axis if it is known when the graph is built, else None."""

Values = Sequence[Any]

Pair = int | tuple[int, int]
"""A number for rows and columns alike, or one for each."""


class TensorOp(Op):
    """An Op whose inputs and outputs are tensors."""

    def __call__(self, *inputs: Any, **keywords: Any) -> Any:
        """Apply the Op; return a tensor variable, or a list where it has several outputs."""
        return super().__call__(*inputs, **keywords)

    def pullback(self, inputs: Values, outputs: Values, cotangents: Values) -> list[Any]:
        raise NotImplementedError(f"{type(self).__name__} has no gradient")


class SameShapeOp(TensorOp):
    """An Op whose outputs are shaped like its first input."""

    def infer_shape(self, fgraph: Any, node: Apply, shapes: list[tuple]) -> list[tuple]:
        return [shapes[0]] * len(node.outputs)


def positive_int(owner: str, name: str, value: Any, least: int = 1) -> int:
    """Return `value` as an int of at least `least`, or raise TypeError or ValueError."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{owner}: {name} must be an int, got {value!r}")
    if value < least:
        raise ValueError(f"{owner}: {name} must be at least {least}, got {value}")
    return int(value)


def positive_float(owner: str, name: str, value: float) -> float:
    """Return `value` as a float above 0 and finite, or raise ValueError."""
    if not 0 < value < float("inf"):
        raise ValueError(f"{owner}: {name} must be positive, got {value}")
    return float(value)


def int_pair(owner: str, name: str, value: Any, least: int = 1) -> tuple[int, int]:
    """Return an int, for rows and columns alike, or a pair as a pair; see `positive_int`."""
    pair = value if isinstance(value, tuple | list) else (value, value)
    if len(pair) != 2:
        raise TypeError(f"{owner}: {name} must be an int or two, got {value!r}")
    rows, columns = (positive_int(owner, name, number, least) for number in pair)
    return rows, columns


def float_dtype(owner: str, dtype: Any) -> str:
    """Return `dtype` as the name of a floating-point type, or raise TypeError."""
    if str(dtype) not in FLOATS:
        raise TypeError(f"{owner}: dtype must be {' or '.join(FLOATS)}, got {dtype!r}")
    return str(dtype)


def tensor_input(
    op: Op, name: str, value: Any, ndim: int | None, dtypes: tuple[str, ...] = FLOATS
) -> TensorVariable:
    """Return `value` as a tensor variable of one of `dtypes`, or raise TypeError.

    With `ndim` None, any number of axes is accepted.
    """
    variable = pt.as_tensor_variable(value)
    if ndim not in (None, variable.type.ndim) or variable.type.dtype not in dtypes:
        axes = "" if ndim is None else f"{ndim}-dimensional "
        raise TypeError(
            f"{op}: {name} must be a {axes}tensor of {' or '.join(dtypes)}, got {variable.type}"
        )
    return variable


def same_dtype(op: Op, **variables: TensorVariable) -> str:
    """Return the dtype that all `variables` have, or raise TypeError."""
    dtypes = {name: variable.type.dtype for name, variable in variables.items()}
    if len(set(dtypes.values())) > 1:
        raise TypeError(f"{op}: inputs must have one dtype, got {dtypes}")
    return next(iter(dtypes.values()))


def same_length(op: Op, what: str, *lengths: Length) -> Length:
    """Return the length on which all known `lengths` agree, or raise ValueError."""
    known = sorted({length for length in lengths if length is not None})
    if len(known) > 1:
        raise ValueError(f"{op}: {what} must be equal, got {' and '.join(map(str, known))}")
    return known[0] if known else None


def same_shape(op: Op, what: str, *shapes: tuple[Length, ...]) -> tuple[Length, ...]:
    """Return the static shape on which `shapes` agree, axis by axis, or raise ValueError."""
    return tuple(
        same_length(op, f"lengths of axis {axis} of {what}", *lengths)
        for axis, lengths in enumerate(zip(*shapes, strict=True))
    )


def window_count(
    op: Op, length: Length, window: Length, stride: int, pad: int = 0, ceil: bool = False
) -> Length:
    """Return the number of windows on an axis, or raise ValueError if none fits."""
    if length is None or window is None:
        return None
    if length + 2 * pad < window:
        raise ValueError(
            f"{op}: a window of {window} does not fit into an axis of {length} padded by {pad}"
        )
    return int(count_windows(length, window, stride, pad, ceil))


def count_windows(length: Any, window: Any, stride: int, pad: int = 0, ceil: bool = False) -> Any:
    """Number of windows on an axis, of ints or symbolic: whole ones, or with `ceil` all.

    With `ceil` a window may reach over the far edge, but begins in the axis or in the pad before
    it, as PyTorch counts.
    """
    if not ceil:
        return (length + 2 * pad - window) // stride + 1
    touching = (length + 2 * pad - window + stride - 1) // stride + 1
    inside = (length + pad - 1) // stride + 1
    smaller = pt.minimum if isinstance(length, Variable) else min
    return smaller(touching, inside)
