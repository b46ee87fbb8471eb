"""Scalar Ops with graphs inside, as calls on tensors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from pytensor.graph.basic import Apply, Constant
from pytensor.graph.traversal import ancestors
from pytensor.scalar.basic import Composite, ScalarOp
from pytensor.scalar.loop import ScalarLoop

Call = Callable[..., Any]


@dataclass(frozen=True)
class ScalarCall:
    """A scalar Op as a call on tensors."""

    call: Call
    omit: frozenset[int] = frozenset()  # operands that `call` already contains as constants
    into: Call | None = None  # as `call`, but with out=
    returns: tuple[int, ...] = ()  # operands that `call` may return as they are
    opaque: bool = False  # what it does depends on values: unknown to torch.compile


ScalarCallOf = Callable[[ScalarOp, Apply], ScalarCall]
"""Makes the call of an Op of the graph inside."""


def composite_call(op: Composite, scalar_call: ScalarCallOf) -> ScalarCall:
    """Make the call of a graph of scalar Ops, node by node."""
    run, opaque = _program(op.fgraph, scalar_call)
    # An output that does not depend on an operand has the shape of all operands nevertheless.
    graph = op.fgraph
    all_used = len(graph.outputs) == 1 and set(graph.inputs) <= set(ancestors(graph.outputs))

    def compute(*operands: torch.Tensor) -> Any:
        found = run(*operands)
        if any(x.shape != found[0].shape for x in found) or not all_used:
            shape = torch.broadcast_shapes(*(x.shape for x in operands))
            found = [x.expand(shape) for x in found]
        return found[0] if len(found) == 1 else tuple(found)

    return ScalarCall(compute, returns=tuple(range(len(graph.inputs))), opaque=opaque)


def loop_call(op: ScalarLoop, scalar_call: ScalarCallOf) -> ScalarCall:
    """Make the call of a loop over scalars: all elements at once, each until its own end."""
    step, _ = _program(op.fgraph, scalar_call)
    count = len(op.fgraph.outputs) - op.is_while

    def compute(steps: torch.Tensor, *operands: torch.Tensor) -> Any:
        shape = torch.broadcast_shapes(steps.shape, *(x.shape for x in operands))
        state = [x.expand(shape).clone() for x in operands[:count]]
        if not op.is_while and (steps < 0).any():
            raise ValueError("ScalarLoop does not have a termination condition.")
        active = (steps > 0).expand(shape)
        done = torch.zeros(shape, dtype=torch.bool, device=steps.device)
        taken = 0
        while active.any():
            found = step(*state, *operands[count:])
            state = [torch.where(active, new, old) for new, old in zip(found, state, strict=False)]
            taken += 1
            if op.is_while:
                done = torch.where(active, found[-1], done)
                active = active & ~done
            active = active & (steps > taken)
        results = [*state, done] if op.is_while else state
        return results[0] if len(results) == 1 else tuple(results)

    return ScalarCall(compute, opaque=True)


def _program(
    graph: Any, scalar_call: ScalarCallOf
) -> tuple[Callable[..., Sequence[torch.Tensor]], bool]:
    """Make a call of a graph, from tensors to a list of them, and whether it is opaque."""
    # A frozen graph may list a node once for each of its users.
    order = list(dict.fromkeys(graph.toposort()))
    used = [variable for node in order for variable in node.inputs] + list(graph.outputs)
    constants = list(dict.fromkeys(v for v in used if isinstance(v, Constant)))
    places = {variable: place for place, variable in enumerate([*graph.inputs, *constants])}
    steps: list[tuple[Call, list[int]]] = []
    opaque = False
    size = len(places)
    for node in order:
        prepared = scalar_call(node.op, node)
        kept = [places[v] for at, v in enumerate(node.inputs) if at not in prepared.omit]
        steps.append((prepared.call, kept))
        opaque |= prepared.opaque
        places.update((v, size + at) for at, v in enumerate(node.outputs))
        size += len(node.outputs)
    # A 0-d tensor on the host combines with tensors on any device.
    data = [torch.from_numpy(np.array(constant.data)) for constant in constants]
    results = [places[output] for output in graph.outputs]

    def run(*operands: torch.Tensor) -> Sequence[torch.Tensor]:
        values = [*operands, *data]
        for call, kept in steps:
            found = call(*[values[place] for place in kept])
            values += found if isinstance(found, tuple) else [found]
        return [values[place] for place in results]

    return run, opaque
