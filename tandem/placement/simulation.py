"""All ranks of a partitioned graph in one process."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytensor
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.traversal import io_toposort

from tandem.ops.collective import Collective
from tandem.placement.conversions import describe
from tandem.placement.partitioned import Partitioned, Partitioning
from tandem.placement.placements import Partial, Placement, Replicate, local_index


def simulate(
    outputs: Sequence[Variable],
    given: Mapping[Variable, Placement],
    wanted: Mapping[Variable, Placement],
    ranks: int,
    values: Mapping[Variable, Any],
    *,
    strict: bool = False,
    mode: Any = "FAST_COMPILE",
) -> list[list[np.ndarray | None]]:
    """Compute a partitioned graph for all ranks, which here pass tensors as parts of one graph.

    Parameters
    ----------
    outputs, given, wanted, ranks, strict
        As of `tandem.placement.partition`.
    values : mapping of Variable to array
        The whole value of each input; a shared variable has its own where it is left out. Of a
        partial one rank 0 gets all, and the others terms that change nothing.
    mode : str or Mode
        PyTensor's, without a channel.

    Returns
    -------
    list of list of array or None
        By rank, its part of each output.

    Raises
    ------
    ValueError
        An input has no value, or one of another shape; and what `partition` refuses.
    """
    partitioning = Partitioning.of(outputs, given=given, wanted=wanted, ranks=ranks, strict=strict)
    parts = [partitioning.part(rank) for rank in range(ranks)]
    feeds: dict[Variable, Any] = {}
    graphs = []
    for rank, part in enumerate(parts):
        # Inputs that are replicated are one variable in the graphs of all ranks.
        own = {variable: variable.type() for variable in part.inputs.values()}
        for whole, variable in part.inputs.items():
            placement = given.get(whole, Replicate())
            feeds[own[variable]] = _cut(_value(whole, values), placement, ranks, rank)
        graphs.append((part, own))
    results = iter(_function(feeds, graphs, mode)(*feeds.values()))
    return [[None if v is None else next(results) for v in part.outputs] for part in parts]


def _function(
    feeds: Mapping[Variable, Any],
    graphs: Sequence[tuple[Partitioned, Mapping[Variable, Variable]]],
    mode: Any,
) -> Any:
    """Compile the graphs of all ranks as one."""
    known: dict[tuple[int, Variable], Any] = {}
    conversions: list[list[Apply]] = []
    ends = []
    for rank, (part, own) in enumerate(graphs):
        known |= {(rank, variable): fresh for variable, fresh in own.items()}
        ends.append([v for v in (*part.outputs, part.token) if v is not None])
        nodes = [n for n in io_toposort([], ends[-1]) if isinstance(n.op, Collective)]
        conversions.append(sorted(nodes, key=lambda node: node.op.number))
    for nodes in zip(*conversions, strict=True):
        for rank, node in enumerate(nodes):
            _build(node.inputs, rank, known)
        parts = [known[rank, node.inputs[0]] for rank, node in enumerate(nodes)]
        for rank, (node, result) in enumerate(zip(nodes, nodes[0].op.combine(parts), strict=True)):
            known[rank, node.outputs[0]] = result
            known[rank, node.outputs[1]] = node.inputs[1]
    for rank, variables in enumerate(ends):
        _build(variables, rank, known)
    outputs = [
        known[rank, v]
        for rank, (part, _) in enumerate(graphs)
        for v in part.outputs
        if v is not None
    ]
    return pytensor.function(list(feeds), outputs, mode=mode, on_unused_input="ignore")


def _build(
    variables: Sequence[Variable], rank: int, known: dict[tuple[int, Variable], Any]
) -> None:
    """Build what leads to variables of a rank's graph, in the graph of all ranks."""
    made = [v for at, v in known if at == rank]
    for node in io_toposort(made, variables):
        inputs = [known.get((rank, v), v) for v in node.inputs]
        outputs = node.outputs if inputs == node.inputs else node.op.make_node(*inputs).outputs
        known |= {(rank, v): new for v, new in zip(node.outputs, outputs, strict=True)}
    known |= {(rank, v): v for v in variables if (rank, v) not in known}  # constants


def _value(variable: Variable, values: Mapping[Variable, Any]) -> Any:
    """The whole value of an input."""
    if variable not in values:
        if isinstance(variable, SharedVariable):
            return variable.get_value()
        raise ValueError(f"{describe(variable)} has no value among `values`")
    value, shape = values[variable], getattr(variable.type, "shape", (None,))
    if None not in shape and np.shape(value) != shape:
        raise ValueError(
            f"{describe(variable)}: its value has shape {np.shape(value)}, expected {shape}"
        )
    return value


def _cut(value: Any, placement: Placement, ranks: int, rank: int) -> Any:
    """A rank's part of an input."""
    if isinstance(placement, Replicate):
        return value
    value = np.asarray(value)
    index = local_index(value.shape, placement, ranks, rank)
    if isinstance(placement, Partial) and placement.op == "sum" and rank > 0:
        return np.zeros_like(value)
    return value if index is None or not index else value[index]
