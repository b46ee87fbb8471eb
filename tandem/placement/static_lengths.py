"""Lengths of axes as constants: a graph whose shapes are static before it is partitioned."""

from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import pytensor.tensor as pt
from pytensor.compile.builders import OpFromGraph
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import io_toposort
from pytensor.tensor.basic import Alloc, ARange
from pytensor.tensor.elemwise import DimShuffle
from pytensor.tensor.shape import Shape, Shape_i
from pytensor.tensor.type import TensorType

from tandem.placement.rules import has_rule

_MOST_ELEMENTS = 1 << 20  # of a range that becomes a constant


def with_static_lengths(outputs: Sequence[Variable]) -> list[Variable]:
    """Replace arithmetic on lengths of axes by its results, which then show in static shapes.

    A part of a tensor has other lengths than the whole: what is computed from them, such as the
    divisor of a mean, has to be found before it is divided. Ranges with known ends become
    constants. Nodes that do not change are kept, but for those that stand for a graph and have no
    rule, such as products by Einstein's summation: their graphs take their places.
    """
    known: dict[Variable, Variable] = {}
    for node in io_toposort([], outputs):
        inputs = [known.get(v, v) for v in node.inputs]
        found = _constants(node, inputs)
        if found is None and isinstance(node.op, OpFromGraph) and not has_rule(node.op):
            given = dict(zip(node.op.inner_inputs, inputs, strict=True))
            inner = clone_replace(node.op.inner_outputs, given, rebuild_strict=False)
            found = with_static_lengths(inner)
        if found is None:
            if inputs == node.inputs:
                continue
            found = node.op.make_node(*inputs).outputs
        for before, after in zip(node.outputs, found, strict=True):
            if after.name is None:
                after.name = before.name
            known[before] = after
    return [known.get(v, v) for v in outputs]


def _constants(node: Apply, inputs: Sequence[Variable]) -> Sequence[Variable] | None:
    """The results of a node if they are small integers that are known, else None."""
    if isinstance(node.op, Shape | Shape_i):
        shape = inputs[0].type.shape
        length = shape if isinstance(node.op, Shape) else shape[node.op.i]
        unknown = length is None or (isinstance(length, tuple) and None in length)
        return None if unknown else [pt.constant(np.asarray(length, np.int64))]
    if not all(isinstance(v, Constant) for v in inputs) or not _are_lengths(node, inputs):
        return None
    return [_constant(v, value) for v, value in zip(node.outputs, _computed(node, inputs))]  # noqa: B905


def _are_lengths(node: Apply, inputs: Sequence[Variable]) -> bool:
    if isinstance(node.op, ARange):
        start, stop, step = (np.asarray(cast(Constant, v).data).item() for v in inputs)
        return bool(abs((stop - start) / (step or 1)) <= _MOST_ELEMENTS)
    types = [v.type for v in node.outputs]
    # A literal with other axes stays a node: rewrites treat it as the literal, in its precision.
    return not isinstance(node.op, Alloc | DimShuffle) and all(
        getattr(t, "ndim", 0) <= 1 and getattr(t, "dtype", "").startswith(("int", "uint", "bool"))
        for t in types
    )


def _computed(node: Apply, inputs: Sequence[Variable]) -> Iterator[Any]:
    """Compute a node of constants by Python alone."""
    fresh = node.op.make_node(*inputs)
    storage: dict[Variable, list[Any]] = {v: [cast(Constant, v).data] for v in fresh.inputs}
    storage |= {v: [None] for v in fresh.outputs}
    compute = {v: [v in fresh.inputs] for v in storage}
    node.op.make_thunk(fresh, storage, compute, no_recycling=[], impl="py")()
    return (storage[v][0] for v in fresh.outputs)


def _constant(variable: Variable, value: Any) -> Variable:
    if isinstance(variable.type, TensorType):
        return pt.constant(np.asarray(value, variable.type.dtype))
    return variable.type.constant_type(type=variable.type, data=value)
