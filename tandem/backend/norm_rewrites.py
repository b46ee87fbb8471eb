"""Rewrites of batch normalisation: into weights where statistics are given, and with ReLU."""

from typing import cast

from pytensor.compile.mode import optdb
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.rewriting.basic import dfs_rewriter, node_rewriter
from pytensor.graph.traversal import ancestors
from pytensor.scalar.basic import Add
from pytensor.tensor.elemwise import Elemwise

from tandem.ops import BatchNorm, BatchNormGrad, Relu, ReluGrad
from tandem.ops.batch_norm_folding import fold_batch_norm

Replacements = dict[Variable, Variable]


@node_rewriter([Relu])
def rectify_norm(fgraph: FunctionGraph, node: Apply) -> Replacements | None:
    """Normalise and rectify in one pass over memory, and add a shortcut in it if there is one."""
    (y,) = node.inputs
    found = _norm(fgraph, y)
    if found is not None:
        return _fused(node, found, ())
    add = y.owner
    is_sum = add is not None and isinstance(add.op, Elemwise) and len(add.inputs) == 2
    if not is_sum or not isinstance(add.op.scalar_op, Add) or len(fgraph.clients[y]) > 1:
        return None
    for part, other in (add.inputs, add.inputs[::-1]):
        found = _norm(fgraph, part)
        kinds = [(v.type.dtype, v.type.broadcastable) for v in (part, other)]
        if found is None or kinds[0] != kinds[1]:
            continue
        if not _depends(other, found):
            return _fused(node, found, (other,))
    return None


def _depends(variable: Variable, node: Apply) -> bool:
    """Return whether a variable is computed from outputs of a node, such as its statistics."""
    before = ancestors([variable], blockers=node.inputs)
    return any(each.owner is node for each in before)


def _norm(fgraph: FunctionGraph, y: Variable) -> Apply | None:
    """The normalisation of which y is the output, if nothing else reads y."""
    node = y.owner
    if node is None or not isinstance(node.op, BatchNorm) or y is not node.outputs[0]:
        return None
    if node.op.relu:
        return None
    return node if len(fgraph.clients[y]) == 1 else None


def _fused(relu: Apply, norm: Apply, others: tuple[Variable, ...]) -> Replacements:
    op = BatchNorm(norm.op.rows, norm.op.epsilon, relu=True, adds=bool(others))
    outputs = op(*norm.inputs[:3], *others, *norm.inputs[3:], return_list=True)
    return dict(zip([relu.outputs[0], *norm.outputs[1:]], outputs, strict=True))


@node_rewriter([BatchNormGrad])
def rectify_norm_gradient(fgraph: FunctionGraph, node: Apply) -> list[Variable] | None:
    """Gate the gradient of a normalisation with ReLU where it is computed."""
    if node.op.relu:
        return None
    x, scale, gated, means, *more = node.inputs
    gate, norm = gated.owner, means.owner
    if gate is None or not isinstance(gate.op, ReluGrad) or len(fgraph.clients[gated]) > 1:
        return None
    y, g = gate.inputs
    if norm is None or y is not norm.outputs[0]:
        return None
    if not isinstance(norm.op, BatchNorm) or not norm.op.relu or norm.op.adds:
        return None
    gradient = BatchNormGrad(node.op.rows, relu=True)
    return cast(
        list[Variable], gradient(x, scale, norm.inputs[2], g, means, *more, return_list=True)
    )


NORMALIZATION, BY_LOOPS = "batch_normalization", "normalization_by_loops"
"""Tags: rewrites for every device, and those to loops of a CPU.

They work in the graph that the general ones have left, and the latter in that which those of
pooling have left.
"""

for _position, _rewriter, _tag in (
    (39, fold_batch_norm, NORMALIZATION),
    (45, rectify_norm, BY_LOOPS),
    (46, rectify_norm_gradient, BY_LOOPS),
):
    optdb.register(str(_rewriter), dfs_rewriter(_rewriter), _tag, position=_position)
