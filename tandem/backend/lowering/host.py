"""Arithmetic on shapes and indices, in Python numbers.

Values computed from shapes alone (lengths, strides, conditions) stay on the host: a GPU never waits
for them, and ``torch.compile`` sees constants. A 0-d variable is a Python number here and a vector
is a tuple.
"""

import math
import operator
from collections.abc import Callable, Sequence
from functools import singledispatch
from typing import Any

import numpy as np
import pytensor.scalar as ps
from pytensor.compile.ops import DeepCopyOp, TypeCastingOp
from pytensor.graph.basic import Apply
from pytensor.graph.op import Op
from pytensor.raise_op import CheckAndRaise
from pytensor.scalar.basic import ScalarOp, ScalarType
from pytensor.tensor.basic import Join, MakeVector, ScalarFromTensor, TensorFromScalar
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.shape import SpecifyShape
from pytensor.tensor.subtensor import Subtensor, unflatten_index_variables
from pytensor.tensor.type import TensorType

Rule = Callable[..., Any]

# Only results in the widest type, which seldom wrap around, are computed here.
_EXACT = ("bool", "int64")
_LIMIT = 1 << 63


def _invert(x: int) -> int:
    return not x if isinstance(x, bool) else ~x


def _clip(x: int, low: int, high: int) -> int:
    return low if x < low else min(x, high)


_SCALAR_RULES: dict[type, Rule] = {
    ps.Add: lambda *xs: sum(xs),
    ps.Mul: lambda *xs: math.prod(xs),
    ps.Sub: operator.sub,
    # As NumPy, which gives 0 for an integer divided by 0.
    ps.IntDiv: lambda x, y: x // y if y else 0,
    ps.Mod: lambda x, y: x % y if y else 0,
    ps.ScalarMaximum: max,
    ps.ScalarMinimum: min,
    ps.EQ: operator.eq,
    ps.NEQ: operator.ne,
    ps.LT: operator.lt,
    ps.GT: operator.gt,
    ps.LE: operator.le,
    ps.GE: operator.ge,
    ps.AND: operator.and_,
    ps.OR: operator.or_,
    ps.XOR: operator.xor,
    ps.Invert: _invert,
    ps.Neg: operator.neg,
    ps.Abs: abs,
    ps.Sign: lambda x: (x > 0) - (x < 0),
    ps.Sqr: lambda x: x * x,
    ps.Switch: lambda condition, yes, no: yes if condition else no,
    ps.Clip: _clip,
    ps.Second: lambda x, y: y,
    ps.Identity: lambda x: x,
    ps.Cast: lambda x: x,
}

_REDUCE_RULES: dict[type, Rule] = {
    ps.Add: sum,
    ps.Mul: math.prod,
    ps.ScalarMaximum: max,
    ps.ScalarMinimum: min,
    ps.AND: all,
    ps.OR: any,
}


def _is_exact(node: Apply) -> bool:
    """Return whether Python's integers give the node's results as they are."""
    variables = [*node.inputs, *node.outputs]
    return (
        all(isinstance(v.type, TensorType | ScalarType) for v in variables)
        and all(getattr(v.type, "ndim", 0) <= 1 for v in variables)
        and all(np.dtype(v.type.dtype).kind in "biu" for v in node.inputs)
        and all(v.type.dtype in _EXACT for v in node.outputs)
    )


@singledispatch
def host_rule(op: Op, node: Apply) -> Rule | None:
    """Return a function that computes `node` from Python numbers and tuples, or None."""
    return None


def _register_exact(*ops: type[Op]) -> Callable[[Callable[..., Rule | None]], None]:
    """Register a rule that holds where Python's integers are exact."""

    def register(rule_of: Callable[..., Rule | None]) -> None:
        def exact_rule(op: Op, node: Apply) -> Rule | None:
            return rule_of(op, node) if _is_exact(node) else None

        for op in ops:
            host_rule.register(op)(exact_rule)

    return register


@host_rule.register(ScalarOp)
def _(op: ScalarOp, node: Apply) -> Rule | None:
    rule = _SCALAR_RULES.get(type(op)) if _is_exact(node) else None
    return _typed(rule, node) if rule is not None else _by_numpy(op, node)


def _typed(rule: Rule, node: Apply) -> Rule:
    """Make the result what its dtype says: a bool, or an int of 64 bits that wraps around."""
    if node.outputs[0].type.dtype == "bool":
        return lambda *numbers: bool(rule(*numbers))

    def compute(*numbers: Any) -> int:
        value = int(rule(*numbers))
        return value if -_LIMIT <= value < _LIMIT else (value + _LIMIT) % (2 * _LIMIT) - _LIMIT

    return compute


def _by_numpy(op: ScalarOp, node: Apply) -> Rule:
    """Compute scalars of any dtype as PyTensor's own backend does."""
    kinds = [np.dtype(x.type.dtype).type for x in node.inputs]
    result = np.dtype(node.outputs[0].type.dtype).type

    def compute(*numbers: float) -> Any:
        values = [kind(number) for kind, number in zip(kinds, numbers, strict=True)]
        return result(op.impl(*values)).item()

    return compute


@_register_exact(Elemwise)
def _(op: Elemwise, node: Apply) -> Rule | None:
    if type(op.scalar_op) not in _SCALAR_RULES:
        return None
    rule = _typed(_SCALAR_RULES[type(op.scalar_op)], node)
    return rule if node.outputs[0].type.ndim == 0 else _over_vectors(rule, node)


def _over_vectors(rule: Rule, node: Apply) -> Rule:
    repeated = [x.type.shape == (1,) for x in node.inputs]  # no others, whatever their length

    def compute(*vectors: Sequence[int]) -> tuple[int, ...]:
        lengths = {len(v) for v, is_one in zip(vectors, repeated, strict=True) if not is_one}
        length = lengths.pop() if lengths else 1
        if lengths:
            raise ValueError(f"vectors of lengths {[len(v) for v in vectors]} cannot be combined")
        spread = [vector if len(vector) == length else tuple(vector) * length for vector in vectors]
        return tuple(rule(*numbers) for numbers in zip(*spread, strict=True))

    return compute


@_register_exact(CAReduce)
def _(op: CAReduce, node: Apply) -> Rule | None:
    rule = _REDUCE_RULES.get(type(op.scalar_op))
    if rule is None or node.inputs[0].type.ndim != 1:
        return None
    if node.outputs[0].type.ndim == 1 or (
        type(op.scalar_op) in (ps.AND, ps.OR) and (node.inputs[0].type.dtype != "bool")
    ):
        return None
    return _typed(rule, node)


@_register_exact(DimShuffle)
def _(op: DimShuffle, node: Apply) -> Rule | None:
    given, wanted = node.inputs[0].type.ndim, node.outputs[0].type.ndim
    if given == wanted:
        return lambda x: x
    return (lambda x: (x,)) if wanted else (lambda x: x[0])


@_register_exact(MakeVector)
def _(op: MakeVector, node: Apply) -> Rule | None:
    return lambda *numbers: numbers


@_register_exact(Join)
def _(op: Join, node: Apply) -> Rule | None:
    return lambda axis, *vectors: tuple(number for vector in vectors for number in vector)


@_register_exact(Subtensor)
def _(op: Subtensor, node: Apply) -> Rule | None:
    if not op.idx_list:
        return lambda x: x
    return lambda x, *flat: x[unflatten_index_variables(flat, op.idx_list)[0]]


@host_rule.register(ScalarFromTensor)
@host_rule.register(TensorFromScalar)
def _(op: Op, node: Apply) -> Rule | None:
    return lambda x: x


@_register_exact(DeepCopyOp, TypeCastingOp)
def _(op: Op, node: Apply) -> Rule | None:
    return lambda x: x


@_register_exact(CheckAndRaise)
def _(op: CheckAndRaise, node: Apply) -> Rule | None:
    def check(x: Any, *conditions: bool) -> Any:
        if not all(conditions):
            raise op.exc_type(op.msg)
        return x

    return check


@_register_exact(SpecifyShape)
def _(op: SpecifyShape, node: Apply) -> Rule | None:
    if node.inputs[0].type.ndim != 1:
        return None

    def check(x: Sequence[int], length: int) -> Sequence[int]:
        if len(x) != length:
            raise AssertionError(f"SpecifyShape: Got shape {(len(x),)}, expected {(length,)}.")
        return x

    return check
