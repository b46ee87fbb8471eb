"""Elements repeated, chosen, permuted, searched for, and written to diagonals."""

from typing import Any

import numpy as np
import torch
from pytensor.graph.basic import Apply
from pytensor.tensor.basic import AllocDiag, Choose, PermuteRowElements
from pytensor.tensor.extra_ops import (
    FillDiagonal,
    FillDiagonalOffset,
    Repeat,
    SearchsortedOp,
    Unique,
)
from pytensor.tensor.type import TensorType

from tandem.backend.lowering.registry import TORCH_DTYPES, Lowering, lower, on_a_copy, unsupported

Tensor = torch.Tensor

# PyTorch stores these, but neither orders, gathers nor repeats them.
_STORED_ONLY = ("uint16", "uint32", "uint64")


def _require(node: Apply, *refused: str) -> None:
    """Refuse a node with operands of dtypes that begin with `refused`."""
    for x in node.inputs:
        if x.type.dtype.startswith(refused):
            raise unsupported(node, f"PyTorch has no such call for {x.type.dtype}")


def _require_gpu(node: Apply, device: torch.device) -> None:
    if device.type == "cpu":
        raise unsupported(node, "on a CPU, PyTorch's call is slower than NumPy's")


@lower.register(Repeat)
def lower_repeat(op: Repeat, node: Apply, device: torch.device, compiled: bool) -> Lowering:
    _require_gpu(node, device)
    _require(node, *_STORED_ONLY)
    axis = op.axis
    if node.inputs[1].type.shape == (1,):

        def repeat(x: Tensor, count: tuple[int]) -> Tensor:
            if count[0] < 0:
                raise ValueError("repeats may not contain negative values.")
            return x.repeat_interleave(count[0], axis)

        return Lowering(repeat, host=frozenset((1,)))

    def repeat_each(x: Tensor, counts: Tensor) -> Tensor:
        if (counts < 0).any():
            raise ValueError("repeats may not contain negative values.")
        if len(counts) not in (1, x.shape[axis]):
            raise ValueError(f"{len(counts)} repeats for {x.shape[axis]} elements of axis {axis}")
        return x.repeat_interleave(counts.to(torch.int64), axis)

    return Lowering(repeat_each, opaque=True)


@lower.register(Unique)
def lower_unique(op: Unique, node: Apply, device: torch.device, compiled: bool) -> Lowering:
    _require_gpu(node, device)
    # PyTorch takes each NaN for another value, NumPy all of them for one.
    _require(node, *_STORED_ONLY, "complex", "float" if op.axis is not None else "none")
    wanted = (True, op.return_index, op.return_inverse, op.return_counts)

    def unique(x: Tensor) -> Any:
        values, inverse, counts = _unique(x, op.axis)
        places = torch.arange(len(inverse), device=x.device)
        first = places.new_full(counts.shape, len(inverse))
        first.scatter_reduce_(0, inverse, places, "amin")
        found = zip((values, first, inverse, counts), wanted, strict=True)
        results = tuple(result for result, is_wanted in found if is_wanted)
        return results if len(results) > 1 else results[0]

    return Lowering(unique, opaque=True)


def _unique(x: Tensor, axis: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sorted values, for each element its value's place, and each value's count."""
    if axis is not None:
        return torch.unique(x, return_inverse=True, return_counts=True, dim=axis)
    values, inverse, counts = torch.unique(x.flatten(), return_inverse=True, return_counts=True)
    if x.is_floating_point() and len(values) and values[-1].isnan():
        kept = int((~values.isnan()).sum())
        values, inverse = values[: kept + 1], inverse.clamp_max(kept)
        counts = torch.cat([counts[:kept], counts[kept:].sum(0, keepdim=True)])
    return values, inverse, counts


@lower.register(SearchsortedOp)
def lower_searchsorted(
    op: SearchsortedOp, node: Apply, device: torch.device, compiled: bool
) -> Lowering:
    _require(node, "uint64", "complex")
    x_dtype, v_dtype = (x.type.dtype for x in node.inputs[:2])
    common = np.promote_types(x_dtype, v_dtype).name
    dtype = torch.int64 if common in ("bool", *_STORED_ONLY) else TORCH_DTYPES[common]
    right = op.side == "right"

    def search(x: Tensor, v: Tensor, sorter: Tensor | None = None) -> Tensor:
        if sorter is not None:
            if len(sorter) != len(x):
                raise ValueError("sorter.size must equal x.size")
            x = x[sorter.to(torch.int64)]
        x, v = x.to(dtype).contiguous(), v.to(dtype).contiguous()
        total = len(x)
        if dtype.is_floating_point and total and x[-1].isnan():
            # PyTorch's comparisons miss where NaNs begin, which NumPy takes for the largest.
            x = x[: int((~x.isnan()).sum())]
        found = torch.searchsorted(x, v, right=right)
        return torch.where(v.isnan(), total, found) if right and len(x) < total else found

    return Lowering(search, opaque=dtype.is_floating_point)


@lower.register(AllocDiag)
def lower_alloc_diagonal(
    op: AllocDiag, node: Apply, device: torch.device, compiled: bool
) -> Lowering:
    return Lowering(lambda x: torch.diag_embed(x, op.offset, op.axis1, op.axis2), certain=True)


def _diagonal(x: Tensor) -> Tensor:
    """Return a view of the elements whose indices are all equal."""
    if x.ndim == 2:
        return torch.diagonal(x)
    if len(set(x.shape)) > 1:
        raise ValueError("All dimensions of input must be of equal length")
    return torch.as_strided(x, x.shape[:1], (sum(x.stride()),), x.storage_offset())


@lower.register(FillDiagonal)
def lower_fill_diagonal(
    op: FillDiagonal, node: Apply, device: torch.device, compiled: bool
) -> Lowering:
    def fill(x: Tensor, value: Tensor) -> Tensor:
        _diagonal(x).copy_(value)
        return x

    return Lowering(on_a_copy(fill), reuse={0: fill})


@lower.register(FillDiagonalOffset)
def lower_fill_diagonal_offset(
    op: FillDiagonalOffset, node: Apply, device: torch.device, compiled: bool
) -> Lowering:
    def fill(x: Tensor, value: Tensor, offset: int) -> Tensor:
        torch.diagonal(x, offset).copy_(value)
        return x

    return Lowering(on_a_copy(fill), host=frozenset((2,)), reuse={0: fill})


@lower.register(Choose)
def lower_choose(op: Choose, node: Apply, device: torch.device, compiled: bool) -> Lowering:
    if not isinstance(node.inputs[1].type, TensorType):
        raise unsupported(node, "the choices are a list")
    _require(node, *_STORED_ONLY)
    mode = op.mode

    def choose(which: Tensor, choices: Tensor) -> Tensor:
        which, count = which.to(torch.int64), len(choices)
        if mode == "wrap":
            which = which.remainder(count)
        elif mode == "clip":
            which = which.clamp(0, count - 1)
        elif ((which < 0) | (which >= count)).any():
            raise ValueError("invalid entry in choice array")
        shape = torch.broadcast_shapes(which.shape, choices.shape[1:])
        spread = choices.reshape(
            count, *[1] * (len(shape) - choices.ndim + 1), *choices.shape[1:]
        ).expand(count, *shape)
        return spread.gather(0, which.expand(shape).unsqueeze(0)).squeeze(0)

    return Lowering(choose, opaque=mode == "raise")


@lower.register(PermuteRowElements)
def lower_permute_row_elements(
    op: PermuteRowElements, node: Apply, device: torch.device, compiled: bool
) -> Lowering:
    _require(node, *_STORED_ONLY)
    ones = [[axis for axis, n in enumerate(x.type.shape) if n == 1] for x in node.inputs]

    def permute(x: Tensor, order: Tensor) -> Tensor:
        shape = tuple(order.shape[axis] if axis in ones[0] else n for axis, n in enumerate(x.shape))
        if any(n != shape[axis] and axis not in ones[1] for axis, n in enumerate(order.shape)):
            raise ValueError(f"Dimension mismatch: {tuple(x.shape)}, {tuple(order.shape)}")
        length = x.shape[-1]
        order = order.to(torch.int64)
        if ((order < -length) | (order >= length)).any():
            raise IndexError(f"an index is out of bounds for axis with size {length}")
        order = torch.where(order < 0, order + length, order).expand(shape)
        x = x.expand(shape)
        if op.inverse:
            return torch.empty_like(x, memory_format=torch.contiguous_format).scatter_(-1, order, x)
        return x.gather(-1, order)

    return Lowering(permute, opaque=True)
