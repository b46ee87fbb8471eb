"""Checks of rules: a node computed by parts, as each choice says, against the whole node."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Constant
from pytensor.graph.fg import FunctionGraph
from pytensor.link.basic import PerformLinker
from pytensor.tensor.type import TensorType

from tandem.placement.placements import Partial, Placement, Shard, local_index, local_shape
from tandem.placement.rules.registry import OpStrategy, Part, rule

TOLERANCE = {"rtol": 1e-10, "atol": 1e-12}


def node_of(op: Any, arrays: Sequence[np.ndarray]) -> Apply:
    """The node of an Op over variables of the shapes of arrays."""
    return op.make_node(*(pt.tensor(dtype=a.dtype, shape=a.shape) for a in arrays))


def compute(inputs: Sequence[Any], outputs: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
    """Compute a graph in Python, as it is; constants and None are no inputs of it."""
    is_input = [x is not None and not isinstance(x, Constant) for x in inputs]
    arrays = [*itertools.compress(arrays, is_input)]
    fgraph = FunctionGraph([*itertools.compress(inputs, is_input)], list(outputs), clone=True)
    run, cells, results = PerformLinker().accept(fgraph).make_thunk()
    for cell, array in zip(cells, arrays, strict=True):
        cell.value = array
    run()
    return [result.value for result in results]


def cut(array: np.ndarray, placement: Placement | None, ranks: int) -> list[Any]:
    """What each rank has of an array; the terms of a sum are random."""
    if placement is None:
        return [None] * ranks
    if isinstance(placement, Partial):
        rng = np.random.default_rng(1)
        if placement.op != "sum":  # each element is at one rank, and something beside it elsewhere
            owner = rng.integers(ranks, size=array.shape)
            beside = array + (1 if placement.op == "min" else -1)
            return [np.where(owner == rank, array, beside) for rank in range(ranks)]
        terms = [rng.normal(size=array.shape).astype(array.dtype) for _ in range(ranks - 1)]
        return [*terms, array - sum(terms)]
    return [array[local_index(array.shape, placement, ranks, rank)] for rank in range(ranks)]


def joined(parts: Sequence[np.ndarray], placement: Placement) -> list[np.ndarray]:
    """The whole of an output, once or as each rank has it."""
    if isinstance(placement, Shard):
        return [np.concatenate(parts, placement.axis)]
    if isinstance(placement, Partial):
        combine = {"sum": np.add, "max": np.maximum, "min": np.minimum}[placement.op]
        return [combine.reduce(parts)]
    return list(parts)


def computed_by_parts(
    node: Apply, choice: OpStrategy, ranks: int, arrays: Sequence[np.ndarray]
) -> Iterator[list[np.ndarray]]:
    """The whole of each output of a node, from the outputs of all ranks."""
    pairs = zip(arrays, choice.inputs, node.inputs, strict=True)
    parts = [
        cut(array, placement, ranks) if isinstance(x.type, TensorType) else [array] * ranks
        for array, placement, x in pairs
    ]
    found = []
    for rank in range(ranks):
        values = [own[rank] for own in parts]
        inputs = [own_input(*pair) for pair in zip(node.inputs, values, strict=True)]
        outputs = choice.local(node, inputs, Part(ranks, rank))
        for whole, output, placement in zip(node.outputs, outputs, choice.outputs, strict=True):
            assert output.type.dtype == whole.type.dtype
            assert output.type.shape == local_shape(whole.type.shape, placement, ranks, rank)
        found.append(compute(inputs, outputs, values))
    for placement, *own in zip(choice.outputs, *found, strict=True):
        yield joined(own, placement)


def own_input(whole: Any, value: Any) -> Any:
    """A rank's variable of a node's input, whose value is a constant where the node's is."""
    if value is None or not isinstance(whole.type, TensorType):
        return None if value is None else whole
    if isinstance(whole, Constant):
        return pt.constant(value)
    return pt.tensor(dtype=value.dtype, shape=value.shape)


def check_rule(op: Any, *arrays: np.ndarray, ranks: int) -> list[str]:
    """Compare every choice of an Op with the whole; return the placements of its outputs."""
    return check_choices(node_of(op, arrays), arrays, ranks)


def check_choices(node: Apply, arrays: Sequence[Any], ranks: int) -> list[str]:
    """Compare every choice of a node with the whole; return the placements of its outputs."""
    expected = compute(node.inputs, node.outputs, arrays)
    names = []
    for choice in rule(node.op, node, ranks):
        for whole, results in zip(
            expected, computed_by_parts(node, choice, ranks, arrays), strict=True
        ):
            for result in results:
                np.testing.assert_allclose(result, whole, **TOLERANCE, err_msg=str(choice))
        names.append(" ".join(map(str, choice.outputs)))
    return names
