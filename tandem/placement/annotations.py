"""Annotations of a graph by its author: placements of tensors."""

# A make_node names its inputs, in place of the *inputs of PyTensor's Op.
# mypy: disable-error-code=override

from typing import Any, ClassVar

import pytensor.tensor as pt
from pytensor.graph.basic import Apply
from pytensor.graph.rewriting.basic import node_rewriter
from pytensor.tensor.rewriting.basic import register_canonicalize
from pytensor.tensor.variable import TensorVariable

from tandem.ops.base import SameShapeOp, Values
from tandem.placement.placements import Partial, Placement, check_placement
from tandem.placement.rules.registry import OpStrategy, rule


class Place(SameShapeOp):
    """The identity, whose result has a placement wherever its graph is partitioned."""

    __props__ = ("placement",)
    view_map: ClassVar[dict[int, list[int]]] = {0: [0]}  # type: ignore[misc]

    def __init__(self, placement: Placement) -> None:
        self.placement = placement

    def make_node(self, x: Any) -> Apply:
        x = pt.as_tensor_variable(x)
        check_placement(self.placement, x.type.ndim)
        return Apply(self, [x], [x.type()])

    def perform(self, node: Apply, inputs: Values, output_storage: list[list[Any]]) -> None:
        output_storage[0][0] = inputs[0]

    def pullback(self, inputs: Values, outputs: Values, cotangents: Values) -> list[Any]:
        return [cotangents[0]]


@register_canonicalize
@node_rewriter([Place])
def local_remove_place(fgraph: Any, node: Apply) -> list[Any]:
    """Leave a placement out of a graph that is not partitioned."""
    return [node.inputs[0]]


@rule.register(Place)
def _(op: Place, node: Apply, ranks: int) -> list[OpStrategy]:
    check_placement(op.placement, node.inputs[0].type.ndim, ranks)
    if op.placement == Partial("sum") and node.inputs[0].type.dtype == "bool":
        raise ValueError(f"{op.placement}: a sum needs numbers, and its type is bool")

    def local(node: Apply, inputs: Any, part: Any) -> list[Any]:
        return [inputs[0]]

    return [OpStrategy((op.placement,), (op.placement,), local)]


def place(x: Any, placement: Placement) -> TensorVariable:
    """Annotate a tensor with its placement where a graph is partitioned; elsewhere it is x.

    Parameters
    ----------
    x : tensor
    placement : Placement

    Returns
    -------
    tensor, of the type of x
        Its gradient passes as it is, and has the placement that is cheapest for it.

    Raises
    ------
    ValueError
        x has no such axis.
    TypeError
        It is no placement.
    """
    return Place(placement)(x)
