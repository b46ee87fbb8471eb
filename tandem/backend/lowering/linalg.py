"""Matrix products.

On a CPU PyTorch multiplies matrices by MKL. On AMD's processors it leaves AVX-512 unused, so large
products of float32 go by oneDNN, through an operator that PyTorch's compiler uses; and it is slow
where a result has few columns, as that of a layer of ten classes, whose transpose is computed then.
Few rows times a large matrix, as in inference, are left to a loop (one row only where MKL takes one
of several threads). A matrix that is a constant is kept beside its own order in a faster one: that
of another loop, or for more rows oneDNN's.
"""

from collections.abc import Callable
from functools import cache, partial

import torch
from pytensor.graph.basic import Apply, Constant
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
from tandem.processor import describe_processor

Tensor = torch.Tensor

_LEAST_PRODUCTS = 1 << 22  # multiplications; below, oneDNN's overhead outweighs its gain
_FEW_COLUMNS = range(2, 13)
_FEW_ROWS, _MANY_COLUMNS = range(1, 9), 512
_LEAST_ROWS_KEPT, _MOST_ROWS_OF_PANELS = 4, 16
_ROWS_KEPT = 64  # for which oneDNN chooses the order of weights that are kept
_LEAST_ROWS, _LEAST_NARROW_PRODUCTS = 64, 1 << 14


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
    kernels: dict[int, Callable[..., Tensor]] = {2: torch.mm, 3: torch.bmm}
    kernel = kernels.get(node.outputs[0].type.ndim, torch.matmul)
    if isinstance(node.op, Blockwise):
        kernel = torch.matmul
    if any(torch_dtype(x) != dtype for x in node.inputs):
        return lowering(lambda x, y: kernel(x.to(dtype), y.to(dtype)))
    on_cpu = device.type == "cpu" and not compiled
    if kernel is torch.mm and on_cpu and _is_slow_for_few_columns():
        kernel = _by_mkl
    onednn = _onednn() if on_cpu else None
    if kernel not in (torch.mm, _by_mkl) or dtype != torch.float32 or onednn is None:
        return lowering(kernel, into=lambda out, x, y: kernel(x, y, out=out))

    kept = _Kept() if isinstance(node.inputs[1], Constant) else None

    def by_size(x: Tensor, y: Tensor) -> Tensor:
        # Operands may be bfloat16, for which PyTorch has kernels of its own.
        large = len(x) * y.numel() >= _LEAST_PRODUCTS
        # Of one row MKL copies nothing, but takes one thread on AMD's processors.
        alone = torch.get_num_threads() == 1 or not y.is_contiguous()
        single = len(x) == 1 and (alone or not _is_slow_for_few_columns())
        # A transposed one would be copied.
        narrow = kernel is _by_mkl and y.shape[1] in _FEW_COLUMNS and not x.is_contiguous()
        fits = x.shape[1] == len(y)  # else PyTorch says what does not
        if not (large and fits) or single or narrow or x.dtype != torch.float32:
            return kernel(x, y)
        if kept is not None and len(x) >= _LEAST_ROWS_KEPT:
            return kept.multiply(x, y)
        if len(x) in _FEW_ROWS and y.shape[1] >= _MANY_COLUMNS and y.is_contiguous():
            from tandem.backend.product_loops import multiply  # imports numba

            return multiply(x, y)
        return onednn(x, y)

    # oneDNN can't write to `out`, and the copy would cost what it gains.
    return lowering(by_size, into=lambda out, x, y: kernel(x, y, out=out))


class _Kept:
    """Products with a matrix that is always the same, in the orders that were needed so far."""

    panels: Tensor | None = None
    reordered: Tensor | None = None

    def multiply(self, x: Tensor, y: Tensor) -> Tensor:
        if len(x) <= _MOST_ROWS_OF_PANELS:
            from tandem.backend.product_loops import multiply_panels, to_panels  # imports numba

            self.panels = to_panels(y) if self.panels is None else self.panels
            return multiply_panels(x, self.panels, y.shape[1])
        if self.reordered is None:
            self.reordered = torch.ops.mkldnn._reorder_linear_weight(y.t(), _ROWS_KEPT)
        linear = torch.ops.mkldnn._linear_pointwise
        return linear(x.contiguous(), self.reordered, None, "none", [], "")


@cache
def _is_slow_for_few_columns() -> bool:
    """Return whether MKL takes two to twenty times as long for a result as for its transpose."""
    return "AMD" in describe_processor().split()


def _is_narrow(x: Tensor, y: Tensor) -> bool:
    rows, columns = len(x), y.shape[1]
    return (
        columns in _FEW_COLUMNS
        and rows >= _LEAST_ROWS
        and x.dtype in (torch.float32, torch.float64)
        and rows * y.numel() >= _LEAST_NARROW_PRODUCTS
    )


def _by_mkl(x: Tensor, y: Tensor, out: Tensor | None = None) -> Tensor:
    """Multiply as `torch.mm`; a result of few columns has the strides of a transposed matrix."""
    if not _is_narrow(x, y):
        return torch.mm(x, y) if out is None else torch.mm(x, y, out=out)
    product = torch.mm(y.t(), x.t()).t()
    return product if out is None else out.copy_(product)


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
