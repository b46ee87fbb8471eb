"""Rules for PyTensor's own Ops."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import pytensor.scalar as ps
import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.tensor.basic import Alloc, Join, MakeVector, Split
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.extra_ops import CumOp
from pytensor.tensor.math import Argmax, Dot
from pytensor.tensor.shape import Reshape, SpecifyShape
from pytensor.tensor.special import LogSoftmax, Softmax
from pytensor.tensor.subtensor import (
    AdvancedIncSubtensor,
    AdvancedSubtensor,
    IncSubtensor,
    Subtensor,
)

from tandem.placement.placements import (
    Partial,
    Placement,
    Reduction,
    Replicate,
    Shape,
    Shard,
    local_shape,
)
from tandem.placement.rules.registry import Locals, OpStrategy, Part, partial_sums, rule, same_op
from tandem.split import edges

_WHOLE = slice(None)

# Element by element


def _is_float(variable: Variable) -> bool:
    return bool(np.dtype(variable.type.dtype).kind in "fc")


def _linear_inputs(node: Apply) -> list[tuple[int, ...]]:
    """Positions of inputs in which a scalar Op is linear, together."""
    match node.op.scalar_op:
        case ps.Add() | ps.Sub():
            return [tuple(range(len(node.inputs)))]
        case ps.Mul():
            return [(at,) for at in range(len(node.inputs))]
        case ps.TrueDiv() | ps.Neg() | ps.Identity():
            return [(0,)]
        case ps.Cast():
            return [(0,)] if _is_float(node.outputs[0]) else []
        case ps.Switch():
            return [(1, 2)]
        case _:
            return []


@rule.register(Elemwise)
def _(op: Elemwise, node: Apply, ranks: int) -> list[OpStrategy]:
    if isinstance(op.scalar_op, ps.Second) and None not in node.outputs[0].type.shape:
        return _filled(node)
    choices = _along_broadcast(node, range(node.outputs[0].type.ndim))
    return choices + partial_sums(node, _linear_inputs(node))


def _along_broadcast(node: Apply, axes: Iterable[int]) -> list[OpStrategy]:
    """Shard one of the axes of all inputs and outputs, but of inputs that are repeated along it."""
    choices = []
    for axis in axes:
        if node.outputs[0].type.shape[axis] == 1:
            continue
        inputs = tuple(Replicate() if v.type.shape[axis] == 1 else Shard(axis) for v in node.inputs)
        choices.append(OpStrategy(inputs, (Shard(axis),) * len(node.outputs)))
    return choices


def _filled(node: Apply) -> list[OpStrategy]:
    """Choices of what repeats its second input in the shape of the first, which is not needed."""
    (_, value), (y,) = node.inputs, node.outputs

    def choice(source: Placement, target: Placement) -> OpStrategy:
        def local(node: Apply, inputs: Locals, part: Part) -> list[Variable]:
            own = local_shape(y.type.shape, target, part.ranks, part.rank) or ()
            return [cast(Variable, pt.alloc(inputs[1], *own))]

        return OpStrategy((None, source), (target,), local)

    lengths = enumerate(zip(value.type.shape, y.type.shape, strict=True))
    sharded = [
        choice(Replicate() if n == 1 else Shard(axis), Shard(axis))
        for axis, (n, length) in lengths
        if length != 1
    ]
    return [*sharded, choice(Replicate(), Replicate()), choice(Partial(), Partial())]


# Sums and products

_REDUCTIONS: dict[type, Reduction] = {
    ps.Add: "sum",
    ps.ScalarMaximum: "max",
    ps.ScalarMinimum: "min",
}


@rule.register(CAReduce)
def _(op: CAReduce, node: Apply, ranks: int) -> list[OpStrategy]:
    (x,) = node.inputs
    reduced = range(x.type.ndim) if op.axis is None else op.axis
    kept = [axis for axis in range(x.type.ndim) if axis not in reduced]
    kind = _REDUCTIONS.get(type(op.scalar_op))
    choices = [OpStrategy((Shard(a),), (Shard(kept.index(a)),)) for a in kept]
    if kind is None or (kind == "sum" and _is_float(x) and not _is_float(node.outputs[0])):
        return choices  # a sum that is rounded once
    for axis in reduced:
        # There is no largest element of none.
        if kind == "sum" or (x.type.shape[axis] or 0) >= ranks:
            choices.append(OpStrategy((Shard(axis),), (Partial(kind),)))
    return [*choices, OpStrategy((Partial(kind),), (Partial(kind),))]


@rule.register(Argmax)
def _(op: Argmax, node: Apply, ranks: int) -> list[OpStrategy]:
    (x,) = node.inputs
    reduced = range(x.type.ndim) if op.axis is None else op.axis
    kept = [axis for axis in range(x.type.ndim) if axis not in reduced]
    return [OpStrategy((Shard(a),), (Shard(kept.index(a)),)) for a in kept]


@rule.register(Dot)
def _(op: Dot, node: Apply, ranks: int) -> list[OpStrategy]:
    choices = [
        OpStrategy((Shard(0), Replicate()), (Shard(0),)),
        OpStrategy((Replicate(), Shard(1)), (Shard(1),)),
        OpStrategy((Shard(1), Shard(0)), (Partial(),)),
    ]
    return choices + partial_sums(node, [(0,), (1,)])


@rule.register(Blockwise)
def _(op: Blockwise, node: Apply, ranks: int) -> list[OpStrategy]:
    batch = op.batch_ndim(node)
    choices = _along_broadcast(node, range(batch))
    if not isinstance(op.core_op, Dot):
        return choices
    rows, columns = Shard(batch), Shard(batch + 1)  # `x @ y` is this, also of two matrices
    choices.append(OpStrategy((rows, Replicate()), (rows,)))
    choices.append(OpStrategy((Replicate(), columns), (columns,)))
    choices.append(OpStrategy((columns, rows), (Partial(),)))
    return choices + partial_sums(node, [(0,), (1,)])


# Along other axes than the Op's own


def _along_others(node: Apply, taken: Sequence[int], local: Any = same_op) -> list[OpStrategy]:
    """Shard any axis of an input and a result of one shape but those that are `taken`."""
    axes = [a for a in range(node.outputs[0].type.ndim) if a not in taken]
    return [OpStrategy((Shard(a),), (Shard(a),), local) for a in axes]


@rule.register(Softmax)
@rule.register(LogSoftmax)
def _(op: Any, node: Apply, ranks: int) -> list[OpStrategy]:
    def local(node: Apply, inputs: Locals, part: Part) -> list[Variable]:
        return [type(op)(axis=op.axis)(*inputs)]  # one that is made has the graph of its shape

    ndim = node.outputs[0].type.ndim
    taken = range(ndim) if op.axis is None else np.atleast_1d(op.axis).tolist()
    return _along_others(node, [axis % ndim for axis in taken], local)


@rule.register(CumOp)
def _(op: CumOp, node: Apply, ranks: int) -> list[OpStrategy]:
    return _along_others(node, [op.axis])


@rule.register(Join)
def _(op: Join, node: Apply, ranks: int) -> list[OpStrategy]:
    axis, *parts = node.inputs
    choices = []
    if isinstance(axis, Constant):
        taken = int(axis.data) % parts[0].type.ndim
        for a in (a for a in range(parts[0].type.ndim) if a != taken):
            choices.append(OpStrategy((Replicate(), *[Shard(a)] * len(parts)), (Shard(a),)))
    return choices + partial_sums(node, [range(1, len(node.inputs))])


@rule.register(Split)
def _(op: Split, node: Apply, ranks: int) -> list[OpStrategy]:
    x, axis, _ = node.inputs
    choices = []
    if isinstance(axis, Constant):
        taken = int(axis.data) % x.type.ndim
        for a in (a for a in range(x.type.ndim) if a != taken):
            inputs = (Shard(a), Replicate(), Replicate())
            choices.append(OpStrategy(inputs, (Shard(a),) * len(node.outputs)))
    return choices + partial_sums(node, [(0,)])


# Axes in another order, of another number or length


@rule.register(DimShuffle)
def _(op: DimShuffle, node: Apply, ranks: int) -> list[OpStrategy]:
    order = list(op.new_order)
    axes = [axis for axis in range(node.inputs[0].type.ndim) if axis in order]
    choices = [OpStrategy((Shard(a),), (Shard(order.index(a)),)) for a in axes]
    return [*choices, OpStrategy((Partial(),), (Partial(),))]


def _same_parts(before: Shape, after: Shape, ranks: int) -> Iterator[tuple[int, int]]:
    """Pairs of axes of two shapes, shards of which have the same elements.

    They begin at the same element, and the ranks' shards do.
    """
    for a, length in enumerate(before):
        for b, other in enumerate(after):
            if length > 1 < other and math.prod(before[:a]) == math.prod(after[:b]):
                sizes = math.prod(before[a + 1 :]), math.prod(after[b + 1 :])
                cuts = zip(edges(length, ranks), edges(other, ranks), strict=True)
                if all(cut * sizes[0] == end * sizes[1] for cut, end in cuts):
                    yield a, b


@rule.register(Reshape)
def _(op: Reshape, node: Apply, ranks: int) -> list[OpStrategy]:
    (x, _), (y,) = node.inputs, node.outputs

    def choice(source: Placement, target: Placement) -> OpStrategy:
        def local(node: Apply, inputs: Locals, part: Part) -> list[Variable]:
            own = local_shape(y.type.shape, target, part.ranks, part.rank) or ()
            return [pt.reshape(inputs[0], own, ndim=y.type.ndim)]

        return OpStrategy((source, None), (target,), local)

    if None in x.type.shape or None in y.type.shape:
        return []
    pairs = _same_parts(x.type.shape, y.type.shape, ranks)
    return [*(choice(Shard(a), Shard(b)) for a, b in pairs), choice(Partial(), Partial())]


@rule.register(Alloc)
def _(op: Alloc, node: Apply, ranks: int) -> list[OpStrategy]:
    value, *lengths = node.inputs
    (y,) = node.outputs
    shape = y.type.shape
    first = len(shape) - value.type.ndim

    def source(axis: int) -> Placement:
        within = axis >= first and value.type.shape[axis - first] != 1
        return Shard(axis - first) if within else Replicate()

    def sharded(axis: int) -> OpStrategy:
        def local(node: Apply, inputs: Locals, part: Part) -> list[Variable]:
            own = local_shape(shape, Shard(axis), part.ranks, part.rank)
            return [cast(Variable, pt.alloc(inputs[0], *(own or ())))]

        return OpStrategy((source(axis), *[None] * len(lengths)), (Shard(axis),), local)

    choices = [] if None in shape else [sharded(axis) for axis in range(len(shape))]
    return choices + partial_sums(node, [(0,)])


@rule.register(MakeVector)
def _(op: MakeVector, node: Apply, ranks: int) -> list[OpStrategy]:
    return partial_sums(node, [range(len(node.inputs))])


@rule.register(SpecifyShape)
def _(op: SpecifyShape, node: Apply, ranks: int) -> list[OpStrategy]:
    def local(node: Apply, inputs: Locals, part: Part) -> list[Variable]:
        return [inputs[0]]

    x, *lengths = node.inputs
    unused = [None] * len(lengths)
    choices = [OpStrategy((Shard(a), *unused), (Shard(a),), local) for a in range(x.type.ndim)]
    return [*choices, OpStrategy((Partial(), *unused), (Partial(),), local)]


# Indexing


def _whole_axes(index: Sequence[int | slice]) -> Iterator[tuple[int, int]]:
    """Axes of x that a basic index takes whole, each with its axis of the result."""
    result = 0
    for axis, entry in enumerate(index):
        if entry == _WHOLE:
            yield axis, result
        result += isinstance(entry, slice)


def _padded(index: Sequence[int | slice], ndim: int) -> list[int | slice]:
    return [*index, *[_WHOLE] * (ndim - len(index))]


@rule.register(Subtensor)
def _(op: Subtensor, node: Apply, ranks: int) -> list[OpStrategy]:
    x, *indices = node.inputs
    rest = [Replicate()] * len(indices)
    pairs = _whole_axes(_padded(op.idx_list, x.type.ndim))
    choices = [OpStrategy((Shard(a), *rest), (Shard(b),)) for a, b in pairs]
    return choices + partial_sums(node, [(0,)])


@rule.register(IncSubtensor)
def _(op: IncSubtensor, node: Apply, ranks: int) -> list[OpStrategy]:
    x, y, *indices = node.inputs
    rest = [Replicate()] * len(indices)
    choices = []
    for a, b in _whole_axes(_padded(op.idx_list, x.type.ndim)):
        missing = sum(isinstance(i, slice) for i in _padded(op.idx_list, x.type.ndim))
        own = b - (missing - y.type.ndim)  # y may have fewer axes, or one of length 1
        is_spread = own < 0 or y.type.shape[own] == 1
        choices.append(
            OpStrategy((Shard(a), Replicate() if is_spread else Shard(own), *rest), (Shard(a),))
        )
    return choices + partial_sums(node, [(0, 1)])


def _is_range(variable: Variable, length: int | None) -> bool:
    """Test if a variable is ``arange(length)``, which the partitioner has made a constant."""
    if not isinstance(variable, Constant) or variable.type.dtype == "bool":
        return False
    return np.array_equal(variable.data, np.arange(length or 0))


def _counted(x: Variable) -> Variable:
    """The numbers of the rows that a rank has."""
    return pt.constant(np.arange(x.type.shape[0], dtype=np.int64))


def _by_row(node: Apply, position: int) -> bool:
    """Test if an advanced index takes one element of each row, as ``x[arange(n), labels]``."""
    index, rows = node.inputs[position:], node.inputs[0].type.shape[:1]
    is_pair = len(index) == 2 and tuple(node.op.idx_list) == (0, 1)
    return is_pair and _is_range(index[0], rows[0]) and index[1].type.shape == rows


@rule.register(AdvancedSubtensor)
def _(op: AdvancedSubtensor, node: Apply, ranks: int) -> list[OpStrategy]:
    def local(node: Apply, inputs: Locals, part: Part) -> list[Variable]:
        x, _, columns = inputs
        return op.make_node(x, _counted(x), columns).outputs

    if _by_row(node, 1):
        choices = [OpStrategy((Shard(0), None, Shard(0)), (Shard(0),), local)]
    else:
        choices = _by_vector(node, 1)
    return choices + partial_sums(node, [(0,)])


@rule.register(AdvancedIncSubtensor)
def _(op: AdvancedIncSubtensor, node: Apply, ranks: int) -> list[OpStrategy]:
    def local(node: Apply, inputs: Locals, part: Part) -> list[Variable]:
        x, y, _, columns = inputs
        return op.make_node(x, y, _counted(x), columns).outputs

    x, y = node.inputs[:2]
    choices: list[OpStrategy] = []
    if _by_row(node, 2):
        by_rows = y.type.ndim == x.type.ndim - 1 and y.type.shape[0] != 1  # else it is repeated
        own = Shard(0) if by_rows else Replicate()
        choices = [OpStrategy((Shard(0), own, None, Shard(0)), (Shard(0),), local)]
    elif _is_rows(node) and y.type.ndim == x.type.ndim:
        choices = [
            OpStrategy((Shard(a), Shard(a), Replicate()), (Shard(a),))
            for a in range(1, x.type.ndim)
            if y.type.shape[a] == x.type.shape[a]
        ]
        if not op.set_instead_of_inc and y.type.shape[0] != 1:
            choices.append(OpStrategy((Partial(), Shard(0), Shard(0)), (Partial(),)))
    return choices + partial_sums(node, [(0, 1)])


def _is_rows(node: Apply) -> bool:
    """Return whether an advanced index is one vector, of rows."""
    return (
        tuple(node.op.idx_list[:1]) == (0,)
        and all(entry == _WHOLE for entry in node.op.idx_list[1:])
        and node.inputs[-1].type.ndim == 1
        and node.inputs[-1].type.dtype != "bool"
    )


def _by_vector(node: Apply, position: int) -> list[OpStrategy]:
    """Choices of ``x[rows]``: by rows of the result, or by another axis of x."""
    x = node.inputs[0]
    if len(node.inputs) != position + 1 or not _is_rows(node):
        return []
    choices = [OpStrategy((Replicate(), Shard(0)), (Shard(0),))]
    others = range(1, x.type.ndim)
    return choices + [OpStrategy((Shard(a), Replicate()), (Shard(a),)) for a in others]
