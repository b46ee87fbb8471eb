"""A rewrite that puts a batch normalisation into the weights of the layer before it."""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.rewriting.basic import dfs_rewriter, node_rewriter
from pytensor.scalar.basic import Add
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.math import Dot
from pytensor.tensor.variable import TensorVariable

from tandem.ops.batch_norm import BatchNormInference
from tandem.ops.conv import Conv2d


@node_rewriter([BatchNormInference])
def fold_batch_norm(fgraph: FunctionGraph, node: Apply) -> list[Variable] | None:
    """Scale the weights and move the bias of a layer whose output only the normalisation reads.

    The layer is a convolution, or a product with a matrix with or without a bias.
    """
    product, bias = _product_and_bias(fgraph, node.inputs[0])
    if product is None:
        return None
    scale, shift, mean, variance = cast(list[TensorVariable], node.inputs[1:])
    factor = scale * node.op.inverse(variance)
    offset = shift - mean * factor
    if bias is not None:
        offset = bias * factor + offset
    x, w = product.inputs[:2]
    if isinstance(product.op, Conv2d):
        return [cast(Variable, product.op(x, w * factor.dimshuffle(0, "x", "x", "x"), offset))]
    y = cast(TensorVariable, product.op(x, w * factor.dimshuffle("x", 0)))
    return [y + offset.dimshuffle("x", 0)]


def _product_and_bias(
    fgraph: FunctionGraph, y: Variable
) -> tuple[Apply | None, TensorVariable | None]:
    """The convolution or product of which y is the result, and its bias if it has one."""
    none = None, None
    node = y.owner
    if node is None or len(fgraph.clients[y]) != 1:
        return none
    if isinstance(node.op, Conv2d):
        bias = node.inputs[2]
        is_zero = isinstance(bias, Constant) and not np.any(bias.data)
        return node, None if is_zero else cast(TensorVariable, bias)
    if isinstance(node.op, Dot):
        return node, None
    if not (isinstance(node.op, Elemwise) and isinstance(node.op.scalar_op, Add)):
        return none
    if len(node.inputs) != 2:
        return none
    for product, bias in (node.inputs, node.inputs[::-1]):
        is_product = product.owner is not None and isinstance(product.owner.op, Dot)
        if is_product and len(fgraph.clients[product]) == 1 and _is_row(bias):
            return product.owner, cast(TensorVariable, bias.owner.inputs[0])
    return none


def _is_row(variable: Any) -> bool:
    """Return whether a variable is a vector that is added to each row of a matrix."""
    node = variable.owner
    return node is not None and isinstance(node.op, DimShuffle) and node.op.new_order == ("x", 0)


def fold_batch_norms(outputs: Sequence[Variable]) -> list[Variable]:
    """Fold the batch normalisations of a graph wherever possible; return its outputs.

    The graph is changed: nothing else may use its nodes.
    """
    fgraph = FunctionGraph(outputs=list(outputs), clone=False)
    dfs_rewriter(fold_batch_norm).rewrite(fgraph)
    return list(fgraph.outputs)
