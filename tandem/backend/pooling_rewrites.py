"""Rewrites that move ReLU and sums behind max pooling, where there are fewer elements."""

from typing import Any, cast

from pytensor.compile.mode import optdb
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.rewriting.basic import dfs_rewriter, node_rewriter
from pytensor.tensor.math import Sum

from tandem.ops import MaxPool2d, MaxPool2dGrad, Relu, ReluGrad

Replacements = dict[Variable, Variable]


@node_rewriter([MaxPool2d])
def pool_before_relu(fgraph: FunctionGraph, node: Apply) -> Replacements | None:
    """Replace the maximum of ReLUs by the ReLU of the maximum, which has fewer elements.

    The gradient of a window goes to its maximum if that is above 0, so it can be gated before it is
    scattered. Values and gradients are the same; argmax differs in windows where nothing is above
    0.
    """
    (relu,) = node.inputs
    if relu.owner is None or not isinstance(relu.owner.op, Relu):
        return None
    scatters = {client for client, _ in fgraph.clients[node.outputs[1]]}
    gates: dict[Apply, Apply] = {}
    for scatter in scatters:
        if not _is_scatter(scatter, node):
            return None
        clients = [client for client, _ in fgraph.clients[scatter.outputs[0]]]
        if len(clients) != 1 or not _is_gate(clients[0], relu):
            return None
        gates[scatter] = clients[0]
    known = {node, *scatters, *gates.values()}
    if any(client not in known for client, _ in fgraph.clients[relu]):
        return None
    (before,) = relu.owner.inputs
    pooled, argmax = cast(list[Variable], node.op(before, return_list=True))
    y = cast(Variable, Relu()(pooled))
    found = {node.outputs[0]: y}
    for scatter, gate in gates.items():
        g = ReluGrad()(y, scatter.inputs[2])
        found[gate.outputs[0]] = cast(Variable, scatter.op(before, argmax, g))
    return found


def _is_scatter(node: Any, pool: Apply) -> bool:
    """Return whether a node is the gradient of `pool`, and takes its argmax as such."""
    return isinstance(node.op, MaxPool2dGrad) and node.inputs[1] is pool.outputs[1]


def _is_gate(node: Any, relu: Variable) -> bool:
    """Return whether a node is the gradient of the ReLU of which `relu` is the output."""
    return isinstance(node.op, ReluGrad) and node.inputs[0] is relu


@node_rewriter([Sum])
def sum_before_scatter(fgraph: FunctionGraph, node: Apply) -> Replacements | None:
    """Replace the sum over whole images of a pooling's gradient by the sum of what it scatters."""
    (x,) = node.inputs
    axes = node.op.axis
    if x.owner is None or not isinstance(x.owner.op, MaxPool2dGrad):
        return None
    if axes is not None and not {2, 3} <= set(axes):
        return None
    return {node.outputs[0]: cast(Variable, node.op(x.owner.inputs[2]))}


POOLING = "work_after_pooling"
"""Tag of these rewrites, which work in the graph that the general ones have left."""

for _position, _rewriter in enumerate((pool_before_relu, sum_before_scatter), start=40):
    optdb.register(str(_rewriter), dfs_rewriter(_rewriter), POOLING, position=_position)
