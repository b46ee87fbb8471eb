"""Kernels that compute many matrices, vectors ... at once, and Blockwise, which asks for that."""

from collections.abc import Callable
from dataclasses import replace
from functools import singledispatch
from typing import Any

import torch
from pytensor.compile.builders import OpFromGraph
from pytensor.graph.basic import Apply
from pytensor.graph.op import Op
from pytensor.graph.replace import vectorize_graph
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.math import Dot

from tandem.backend.lowering.linalg import product
from tandem.backend.lowering.registry import Lowering, lower, static_shape, unsupported

Tensor = torch.Tensor


@singledispatch
def core_lowering(op: Op, node: Apply, device: torch.device) -> Lowering:
    """Return the lowering of a core Op, whose call takes operands with any leading axes.

    `node` applies the Op or a Blockwise of it; its leading axes are equal, or of length 1.
    """
    raise unsupported(node, f"no batched PyTorch call for {op}")


def lowers_batched(*ops: type[Op]) -> Callable[[Callable[..., Lowering]], Callable[..., Lowering]]:
    """Register a function that lowers core Ops, as they are and in a Blockwise."""

    def register(lowering_of: Callable[..., Lowering]) -> Callable[..., Lowering]:
        for op in ops:
            core_lowering.register(op)(lowering_of)
            lower.register(op)(_lower_alone)
        return lowering_of

    return register


def _lower_alone(op: Op, node: Apply, device: torch.device, compiled: bool) -> Lowering:
    return core_lowering(op, node, device)


@lower.register(Blockwise)
def lower_blockwise(op: Blockwise, node: Apply, device: torch.device, compiled: bool) -> Lowering:
    if isinstance(op.core_op, Dot):
        return product(node, device, compiled)
    if op.batch_ndim(node) == 0:
        alone = op.core_op.make_node(*node.inputs)
        return lower(op.core_op, alone, device, compiled)
    if isinstance(op.core_op, OpFromGraph):
        whole = _vectorized(op.core_op, node)
        return lower(whole, whole.make_node(*node.inputs), device, compiled)
    lowering = core_lowering(op.core_op, node, device)
    return replace(lowering, call=_spread(op, node, lowering))


def _vectorized(op: OpFromGraph, node: Apply) -> Op:
    """Make an Op that computes all applications of an Op made from a graph at once."""
    inputs = [x.type() for x in node.inputs]
    given = dict(zip(op.inner_inputs, inputs, strict=True))
    return OpFromGraph(inputs, vectorize_graph(op.inner_outputs, given))


def _spread(op: Blockwise, node: Apply, lowering: Lowering) -> Callable[..., Any]:
    """Make a call that first repeats tensors along the leading axes where they have length 1.

    Operands that are Python numbers come last.
    """
    batch_ndim = op.batch_ndim(node)
    others = lowering.omit | lowering.host
    tensors = [x for place, x in enumerate(node.inputs) if place not in others]
    given = [x.type.shape[:batch_ndim] for x in tensors]
    call = lowering.call
    known = all(static_shape(x) is not None for x in tensors) and len(set(given)) == 1
    if known or len(tensors) == 1:
        return call
    count = len(tensors)

    def spread_and_call(*operands: Any) -> Any:
        batches = [operand.shape[:batch_ndim] for operand in operands[:count]]
        if any(batch != batches[0] for batch in batches):
            common = _common_batch(batches, given)
            spread = (x.expand(*common, *x.shape[batch_ndim:]) for x in operands[:count])
            operands = (*spread, *operands[count:])
        return call(*operands)

    return spread_and_call


def _common_batch(batches: list[torch.Size], given: list[tuple[int | None, ...]]) -> list[int]:
    """Return the common leading lengths; only lengths that are 1 by type are repeated."""
    common = []
    for axis, lengths in enumerate(zip(*batches, strict=True)):
        fixed = {n for n, types in zip(lengths, given, strict=True) if types[axis] != 1}
        if len(fixed) > 1:
            reason = "Runtime broadcasting not allowed: " if 1 in fixed else ""
            raise ValueError(
                f"{reason}leading axes of operands of Blockwise have lengths {list(lengths)}. If "
                "broadcasting was intended, use `specify_broadcastable` on the relevant input."
            )
        common.append(fixed.pop() if fixed else 1)
    return common
