"""Matrix products.

On a CPU PyTorch multiplies matrices by MKL, which leaves AVX-512 unused on AMD's processors. Large
products of float32 go by oneDNN, through an operator that PyTorch's compiler uses.
"""

from collections.abc import Callable
from functools import cache, partial

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

Tensor = torch.Tensor

_LEAST_PRODUCTS = 1 << 22  # multiplications; below, oneDNN's overhead outweighs its gain


@lower.register(Dot)
@lower.register(BatchedDot)
def lower_dot(op: Dot | BatchedDot, node: Apply, device: torch.device, compiled: bool) -> Lowering:
    return product(node, device, compiled)


def product(node: Apply, device: torch.device, compiled: bool) -> Lowering:
    """Lower a node that multiplies matrices, also many of them."""
    dtype = torch_dtype(node.outputs[0])
    if dtype in (torch.bool, torch.uint16, torch.uint32, torch.uint64):
        raise unsupported(node, f"PyTorch has no matrix product of {dtype}")
    lowering = partial(computed, certain=isinstance(node.op, Dot), factors=(0, 1))
    kernel = {2: torch.mm, 3: torch.bmm}.get(node.outputs[0].type.ndim, torch.matmul)
    if isinstance(node.op, Blockwise):
        kernel = torch.matmul
    if any(torch_dtype(x) != dtype for x in node.inputs):
        return lowering(lambda x, y: kernel(x.to(dtype), y.to(dtype)))
    onednn = _onednn() if device.type == "cpu" and not compiled else None
    if kernel is not torch.mm or dtype != torch.float32 or onednn is None:
        return lowering(kernel, into=lambda out, x, y: kernel(x, y, out=out))

    def large_by_onednn(x: Tensor, y: Tensor) -> Tensor:
        # Operands may be bfloat16, for which PyTorch has kernels of its own.
        large = len(x) > 1 and len(x) * y.numel() >= _LEAST_PRODUCTS
        if not large or x.dtype != torch.float32:
            return torch.mm(x, y)
        return onednn(x, y)

    # oneDNN can't write to `out`, and the copy would cost what it gains.
    return lowering(large_by_onednn, into=lambda out, x, y: torch.mm(x, y, out=out))


@cache
def _onednn() -> Callable[[Tensor, Tensor], Tensor] | None:
    """Find a matrix product by oneDNN; None if this PyTorch has none that works so."""
    try:
        linear = torch.ops.mkldnn._linear_pointwise

        def multiply(x: Tensor, y: Tensor) -> Tensor:
            # With other layouts, such as a part of a transposed matrix, it may take a thousand
            # times as long.
            if not y.is_contiguous() and not y.t().is_contiguous():
                y = y.contiguous()
            return linear(x.contiguous(), y.t(), None, "none", [], "")

        x = torch.arange(6, dtype=torch.float32).reshape(2, 3)
        works = torch.equal(multiply(x, x.t()), torch.mm(x, x.t()))
    except (AttributeError, RuntimeError, TypeError):
        return None
    return multiply if works else None
