"""Reductions, positions of maxima, cumulative sums, softmax and sorting."""

from collections.abc import Callable

import pytensor.scalar as ps
import torch
from pytensor.graph.basic import Apply
from pytensor.tensor.elemwise import CAReduce
from pytensor.tensor.extra_ops import CumOp
from pytensor.tensor.math import Argmax, MulWithoutZeros
from pytensor.tensor.sort import ArgSortOp, SortOp
from pytensor.tensor.special import LogSoftmax, Softmax

from tandem.backend.lowering.registry import (
    SIGNED_ONLY,
    TORCH_DTYPES,
    Lowering,
    computed,
    lower,
    torch_dtype,
    unsupported,
)

Tensor = torch.Tensor

# Up to this many elements, a float32 sum is accumulated in float64.
_SMALL_SUM = 1 << 16
_SHORT_ROW, _MANY_ROWS = 12, 64  # elements of a row within which PyTorch's softmax has no vectors

_UNSIGNED = {torch.uint16: torch.int64, torch.uint32: torch.int64, torch.uint64: torch.int64}


@lower.register(CAReduce)
def lower_reduce(op: CAReduce, node: Apply, device: torch.device, compiled: bool) -> Lowering:
    x, out = node.inputs[0], node.outputs[0]
    result = torch_dtype(out)
    accumulator = TORCH_DTYPES[op.acc_dtype] if op.acc_dtype is not None else result
    wraps = accumulator if accumulator in _UNSIGNED and result.is_floating_point else None
    accumulator = _UNSIGNED.get(accumulator, accumulator)
    axes = tuple(range(x.type.ndim)) if op.axis is None else tuple(op.axis)
    if not axes:
        return computed(lambda x: x.to(result), views={0: (0,)})
    kind = type(op.scalar_op)
    if x.type.dtype == "uint64" and kind in (ps.ScalarMaximum, ps.ScalarMinimum):
        raise unsupported(node, SIGNED_ONLY)
    reducers: dict[type, Callable[[], Callable[[Tensor], Tensor]]] = {
        # On a CPU torch.compile adds one after another; on CUDA a tree of threads, as PyTorch does,
        # and float64 is slow there.
        ps.Add: lambda: _sum(
            axes, (torch_dtype(x), accumulator, result), compiled and device.type == "cpu"
        ),
        ps.Mul: lambda: _product(axes, accumulator),
        MulWithoutZeros: lambda: _product_without_zeros(axes, accumulator),
        ps.ScalarMaximum: lambda: _extreme(torch.amax, axes, compiled),
        ps.ScalarMinimum: lambda: _extreme(torch.amin, axes, compiled),
    }
    if x.type.dtype == "bool":
        reducers[ps.AND] = lambda: lambda x: torch.all(x, axes)
        reducers[ps.OR] = lambda: lambda x: torch.any(x, axes)
        reducers[ps.XOR] = lambda: lambda x: torch.sum(x, axes) % 2
    orders = kind in (ps.ScalarMaximum, ps.ScalarMinimum)
    if kind not in reducers or (orders and result.is_complex):
        raise unsupported(node, f"no PyTorch reduction for {op.scalar_op} of {x.type.dtype}")
    reducer = reducers[kind]()
    if wraps is not None:
        return computed(lambda x: reducer(x).to(wraps).to(result))
    return computed(lambda x: reducer(x).to(result))


def _computable(x: Tensor, accumulator: torch.dtype = torch.int64) -> Tensor:
    if x.dtype in _UNSIGNED:
        return x.to(accumulator if accumulator.is_floating_point else _UNSIGNED[x.dtype])
    return x


def _extreme(
    kernel: Callable[..., Tensor], axes: tuple[int, ...], compiled: bool
) -> Callable[[Tensor], Tensor]:
    def reduce(x: Tensor) -> Tensor:
        return kernel(_computable(x), axes)

    return reduce if compiled else _nonempty(reduce)


def _nonempty(call: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Raise NumPy's ValueError where there is nothing to choose from."""

    def raising(x: Tensor) -> Tensor:
        try:
            return call(x)
        except IndexError as error:
            raise ValueError(str(error)) from error

    return raising


def _sum(
    axes: tuple[int, ...], dtypes: tuple[torch.dtype, torch.dtype, torch.dtype], in_turn: bool
) -> Callable[[Tensor], Tensor]:
    """Sum over `axes`; `dtypes` are those of the operand, the accumulator and the result.

    With `in_turn`, a sum in the operand's dtype would add one element after another.
    """
    _, accumulator, _ = dtypes

    def exactly(x: Tensor) -> Tensor:
        return torch.sum(_computable(x, accumulator), axes, dtype=accumulator)

    if dtypes != (torch.float32, torch.float64, torch.float32) or in_turn:
        return exactly

    def cascade(x: Tensor) -> Tensor:
        # PyTorch would first copy all of `x` to float64. Its float32 sum adds in pairs, so that
        # the error grows with the logarithm of the count only.
        return exactly(x) if x.numel() <= _SMALL_SUM else torch.sum(x, axes)

    return cascade


def _flattened(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Bring the reduced axes to the end, as one."""
    kept = [axis for axis in range(x.ndim) if axis not in axes]
    moved = x.permute((*kept, *axes))
    return (
        moved.reshape(*(x.shape[axis] for axis in kept), -1)
        if x.numel()
        else moved.flatten(len(kept))
    )


def _product(axes: tuple[int, ...], accumulator: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.prod(
        _flattened(_computable(x, accumulator), axes), -1, dtype=accumulator
    )


def _product_without_zeros(
    axes: tuple[int, ...], accumulator: torch.dtype
) -> Callable[[Tensor], Tensor]:
    product = _product(axes, accumulator)

    def multiply(x: Tensor) -> Tensor:
        x = _computable(x, accumulator)
        return product(torch.where(x == 0, 1, x).to(x.dtype))

    return multiply


def _refuse_complex(node: Apply) -> None:
    if torch_dtype(node.inputs[0]).is_complex:
        raise unsupported(node, "PyTorch does not order complex numbers")


@lower.register(Argmax)
def lower_argmax(op: Argmax, node: Apply, device: torch.device, compiled: bool) -> Lowering:
    _refuse_complex(node)
    axes = tuple(range(node.inputs[0].type.ndim)) if op.axis is None else tuple(op.axis)
    if node.inputs[0].type.dtype == "uint64":
        raise unsupported(node, SIGNED_ONLY)

    def argmax(x: Tensor) -> Tensor:
        x = x.to(torch.uint8) if x.dtype == torch.bool else _computable(x)
        return torch.argmax(_flattened(x, axes), -1)

    return Lowering(argmax if compiled else _nonempty(argmax))


@lower.register(Softmax)
@lower.register(LogSoftmax)
def lower_softmax(
    op: Softmax | LogSoftmax, node: Apply, device: torch.device, compiled: bool
) -> Lowering:
    kernel = torch.softmax if isinstance(op, Softmax) else torch.log_softmax
    ndim = node.inputs[0].type.ndim
    dtype = torch_dtype(node.outputs[0])
    axes = tuple(range(ndim)) if op.axis is None else tuple(op.axis)
    on_cpu = device.type == "cpu" and not compiled
    if len(axes) == 1 and on_cpu and ndim == 2 and axes[0] in (1, -1):
        return Lowering(lambda x: _over_rows(kernel, x.to(dtype)), certain=True)
    if len(axes) == 1:
        return Lowering(lambda x: kernel(x.to(dtype), axes[0]), certain=True)
    kept = [axis for axis in range(ndim) if axis not in axes]
    order = [*kept, *axes]
    back = [order.index(axis) for axis in range(ndim)]

    def over_several_axes(x: Tensor) -> Tensor:
        moved = x.to(dtype).permute(order)
        flat = kernel(moved.flatten(len(kept)), -1)
        return flat.reshape(moved.shape).permute(back)

    return Lowering(over_several_axes, certain=True)


def _over_rows(kernel: Callable[..., Tensor], x: Tensor) -> Tensor:
    """Compute a softmax of each row; of short ones in many rows at a time, which is vectorised."""
    if x.shape[1] > _SHORT_ROW or len(x) < _MANY_ROWS:
        return kernel(x, 1)
    return kernel(x.t().contiguous(), 0).t()


@lower.register(CumOp)
def lower_cumulative(op: CumOp, node: Apply, device: torch.device, compiled: bool) -> Lowering:
    dtype = torch_dtype(node.outputs[0])
    kernel = torch.cumsum if op.mode == "add" else torch.cumprod
    return Lowering(lambda x: kernel(_computable(x), op.axis).to(dtype))


@lower.register(SortOp)
@lower.register(ArgSortOp)
def lower_sort(
    op: SortOp | ArgSortOp, node: Apply, device: torch.device, compiled: bool
) -> Lowering:
    _refuse_complex(node)
    which = int(isinstance(op, ArgSortOp))
    if node.inputs[0].type.dtype in ("uint16", "uint32", "uint64"):
        raise unsupported(node, "PyTorch does not sort this dtype")
    return Lowering(
        lambda x, axis: torch.sort(x, dim=axis, stable=True)[which], host=frozenset((1,))
    )
