"""Matrix products."""

from functools import partial

import torch
from pytensor.graph.basic import Apply
from pytensor.tensor.blas import BatchedDot
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.math import Dot

from tandem.backend.lowering.registry import (
    Lowering,
    computed,
    lower,
    torch_dtype,
    unsupported,
)


@lower.register(Dot)
@lower.register(BatchedDot)
def lower_dot(op: Dot | BatchedDot, node: Apply, device: torch.device, compiled: bool) -> Lowering:
    return product(node)


def product(node: Apply) -> Lowering:
    """Lower a node that multiplies matrices, also many of them."""
    dtype = torch_dtype(node.outputs[0])
    if dtype in (torch.bool, torch.uint16, torch.uint32, torch.uint64):
        raise unsupported(node, f"PyTorch has no matrix product of {dtype}")
    lowering = partial(computed, certain=isinstance(node.op, Dot), factors=2)
    kernel = {2: torch.mm, 3: torch.bmm}.get(node.outputs[0].type.ndim, torch.matmul)
    if isinstance(node.op, Blockwise):
        kernel = torch.matmul
    if all(torch_dtype(x) == dtype for x in node.inputs):
        return lowering(kernel, into=lambda out, x, y: kernel(x, y, out=out))
    return lowering(lambda x, y: kernel(x.to(dtype), y.to(dtype)))
