"""Creation, joining, shapes, checks and copies of tensors."""

import math
from typing import Any

import torch
from pytensor.compile.ops import DeepCopyOp, TypeCastingOp
from pytensor.graph.basic import Apply
from pytensor.raise_op import CheckAndRaise
from pytensor.tensor.basic import (
    Alloc,
    AllocEmpty,
    ARange,
    ExtractDiag,
    Eye,
    Join,
    MakeVector,
    Nonzero,
    Split,
)
from pytensor.tensor.extra_ops import CpuContiguous
from pytensor.tensor.reshape import JoinDims, SplitDims
from pytensor.tensor.shape import Reshape, Shape, Shape_i, SpecifyShape
from pytensor.tensor.type_other import NoneTypeT

from tandem.backend.lowering.registry import (
    Lowering,
    constant_integers,
    constant_number,
    is_tensor,
    lower,
    static_shape,
    torch_dtype,
    unsupported,
)

Tensor = torch.Tensor


def _all_but(first: int, node: Apply) -> frozenset[int]:
    return frozenset(range(first, len(node.inputs)))


@lower.register(Alloc)
def lower_alloc(op: Alloc, node: Apply, device: torch.device, compiled: bool) -> Lowering:
    value = node.inputs[0]
    dtype = torch_dtype(value)
    number = constant_number(value)
    shape = static_shape(node.outputs[0])
    sizes = _all_but(1, node)
    if number is not None:
        if shape is not None:
            return Lowering(
                lambda: torch.full(shape, number, dtype=dtype, device=device),
                omit=frozenset(range(len(node.inputs))),
                certain=True,
            )
        return Lowering(
            lambda *sizes: torch.full(sizes, number, dtype=dtype, device=device),
            host=sizes,
            omit=frozenset((0,)),
        )
    # Repeated, not copied: a user that needs memory of its own copies it.
    if shape is not None and static_shape(value) is not None:
        return Lowering(
            lambda value: value.expand(shape),
            omit=sizes,
            views={0: (0,)},
            repeats=True,
            certain=True,
        )
    return Lowering(_repeater(value.type.shape), host=sizes, views={0: (0,)}, repeats=True)


def _repeater(given: tuple[int | None, ...]) -> Any:
    def repeat(value: Tensor, *sizes: int) -> Tensor:
        for known, length, size in zip(
            reversed(given), reversed(value.shape), reversed(sizes), strict=False
        ):
            if known is None and length == 1 and size != 1:
                raise ValueError(Alloc._runtime_broadcast_error_msg)
        return value.expand(sizes)

    return repeat


@lower.register(AllocEmpty)
def lower_alloc_empty(
    op: AllocEmpty, node: Apply, device: torch.device, compiled: bool
) -> Lowering:
    dtype = torch_dtype(node.outputs[0])
    return Lowering(
        lambda *sizes: torch.empty(sizes, dtype=dtype, device=device), host=_all_but(0, node)
    )


@lower.register(ARange)
def lower_arange(op: ARange, node: Apply, device: torch.device, compiled: bool) -> Lowering:
    dtype = torch_dtype(node.outputs[0])
    if dtype == torch.uint64:
        raise unsupported(node, "PyTorch counts no further than 2**63")

    # As NumPy: the step is the difference of the first two elements, in their dtype.
    def integers(start: float, stop: float, step: float) -> Tensor:
        counted = torch.arange(_count(start, stop, step), device=device)
        return counted.mul_(int(start + step) - int(start)).add_(int(start)).to(dtype)

    def floats(start: float, stop: float, step: float) -> Tensor:
        wide = torch.float32 if dtype == torch.float16 else dtype
        first, second = (
            torch.full((), number, dtype=dtype, device=device).to(wide)
            for number in (start, start + step)
        )
        counted = torch.arange(_count(start, stop, step), dtype=wide, device=device)
        return counted.mul_(second - first).add_(first).to(dtype)

    return Lowering(floats if dtype.is_floating_point else integers, host=frozenset((0, 1, 2)))


def _count(start: float, stop: float, step: float) -> int:
    """Return the number of steps from `start` that lie before `stop`, with NumPy's rounding."""
    return max(0, math.ceil((stop - start) / step))


@lower.register(Eye)
def lower_eye(op: Eye, node: Apply, device: torch.device, compiled: bool) -> Lowering:
    dtype = torch_dtype(node.outputs[0])

    def eye(rows: int, columns: int, offset: int) -> Tensor:
        row = torch.arange(rows, device=device).unsqueeze(1)
        return (row + offset == torch.arange(columns, device=device)).to(dtype)

    return Lowering(eye, host=frozenset((0, 1, 2)))


@lower.register(Join)
def lower_join(op: Join, node: Apply, device: torch.device, compiled: bool) -> Lowering:
    dtype = torch_dtype(node.outputs[0])
    mixed = any(torch_dtype(x) != dtype for x in node.inputs[1:])

    def join(axis: int, *tensors: Tensor) -> Tensor:
        return torch.cat([x.to(dtype) for x in tensors] if mixed else tensors, axis)

    return Lowering(join, host=frozenset((0,)))


@lower.register(Split)
def lower_split(op: Split, node: Apply, device: torch.device, compiled: bool) -> Lowering:
    count = op.len_splits

    def split(x: Tensor, axis: int, sizes: tuple[int, ...]) -> Any:
        if len(sizes) != count:
            raise ValueError(f"Length of splits is {len(sizes)}, expected {count}")
        if min(sizes) < 0:
            raise ValueError(f"Split sizes cannot be negative, got {sizes}")
        if sum(sizes) != x.shape[axis]:
            raise ValueError(f"Split sizes sum to {sum(sizes)}; expected {x.shape[axis]}")
        parts = torch.split(x, list(sizes), axis)
        return parts[0] if count == 1 else parts

    return Lowering(split, host=frozenset((1, 2)), certain=_fits_split(op, node))


def _fits_split(op: Split, node: Apply) -> bool:
    """Return whether axis and sizes are constants that divide the operand."""
    shape, sizes = static_shape(node.inputs[0]), constant_integers(node.inputs[2])
    axis = constant_number(node.inputs[1])
    if shape is None or sizes is None or axis is None or len(sizes) != op.len_splits:
        return False
    return min(sizes) >= 0 and -len(shape) <= axis < len(shape) and sum(sizes) == shape[int(axis)]


@lower.register(MakeVector)
def lower_make_vector(
    op: MakeVector, node: Apply, device: torch.device, compiled: bool
) -> Lowering:
    dtype = torch_dtype(node.outputs[0])
    if not node.inputs:
        return Lowering(lambda: torch.empty(0, dtype=dtype, device=device))
    return Lowering(lambda *scalars: torch.stack(scalars), certain=True)


@lower.register(Shape)
def lower_shape(op: Shape, node: Apply, device: torch.device, compiled: bool) -> Lowering:
    return Lowering(lambda x: tuple(x.shape), numbers=True)


@lower.register(Shape_i)
def lower_shape_i(op: Shape_i, node: Apply, device: torch.device, compiled: bool) -> Lowering:
    axis = op.i
    return Lowering(lambda x: x.shape[axis], numbers=True)


@lower.register(Reshape)
def lower_reshape(op: Reshape, node: Apply, device: torch.device, compiled: bool) -> Lowering:
    shape = static_shape(node.outputs[0]) or constant_integers(node.inputs[1])
    if shape is not None:
        fits = static_shape(node.inputs[0])
        certain = fits is not None and -1 not in shape and math.prod(fits) == math.prod(shape)
        return Lowering(lambda x: x.reshape(shape), omit=frozenset((1,)), certain=certain)
    return Lowering(lambda x, shape: x.reshape(shape), host=frozenset((1,)))


@lower.register(JoinDims)
def lower_join_dims(op: JoinDims, node: Apply, device: torch.device, compiled: bool) -> Lowering:
    start, stop = op.start_axis, op.start_axis + op.n_axes

    def join_dims(x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:start], math.prod(x.shape[start:stop]), *x.shape[stop:])

    return Lowering(join_dims, views={0: (0,)})


@lower.register(SplitDims)
def lower_split_dims(op: SplitDims, node: Apply, device: torch.device, compiled: bool) -> Lowering:
    axis = op.axis

    def split_dims(x: Tensor, shape: tuple[int, ...]) -> Tensor:
        return x.reshape(*x.shape[:axis], *shape, *x.shape[axis + 1 :])

    return Lowering(split_dims, host=frozenset((1,)))


@lower.register(SpecifyShape)
def lower_specify_shape(
    op: SpecifyShape, node: Apply, device: torch.device, compiled: bool
) -> Lowering:
    lengths = node.inputs[1:]
    given = [axis for axis, v in enumerate(lengths) if not isinstance(v.type, NoneTypeT)]

    def specify_shape(x: Tensor, *lengths: int) -> Tensor:
        specified = dict(zip(given, lengths, strict=True))
        if any(x.shape[axis] != length for axis, length in specified.items()):
            expected = tuple(specified.get(axis) for axis in range(x.ndim))
            raise AssertionError(f"SpecifyShape: Got shape {tuple(x.shape)}, expected {expected}.")
        return x

    host = frozenset(axis + 1 for axis in given)
    return Lowering(specify_shape, host=host, omit=_all_but(1, node) - host)


@lower.register(CheckAndRaise)
def lower_check(op: CheckAndRaise, node: Apply, device: torch.device, compiled: bool) -> Lowering:
    error, message = op.exc_type, op.msg

    def check(x: Tensor, *conditions: bool) -> Tensor:
        for condition in conditions:
            if not condition:
                raise error(message)
        return x

    return Lowering(check, host=_all_but(1, node))


@lower.register(ExtractDiag)
def lower_diagonal(op: ExtractDiag, node: Apply, device: torch.device, compiled: bool) -> Lowering:
    return Lowering(lambda x: torch.diagonal(x, op.offset, op.axis1, op.axis2), views={0: (0,)})


@lower.register(Nonzero)
def lower_nonzero(op: Nonzero, node: Apply, device: torch.device, compiled: bool) -> Lowering:
    if node.inputs[0].type.ndim == 1:
        return Lowering(lambda x: torch.nonzero(x.to(torch.bool), as_tuple=True)[0], counts=True)
    return Lowering(lambda x: torch.nonzero(x.to(torch.bool), as_tuple=True), counts=True)


@lower.register(CpuContiguous)
def lower_contiguous(
    op: CpuContiguous, node: Apply, device: torch.device, compiled: bool
) -> Lowering:
    return Lowering(lambda x: x.contiguous(), views={0: (0,)})


@lower.register(DeepCopyOp)
def lower_deep_copy(op: DeepCopyOp, node: Apply, device: torch.device, compiled: bool) -> Lowering:
    if not is_tensor(node.inputs[0]):
        raise unsupported(node, "the value is no tensor")
    return Lowering(lambda x: x.clone())


@lower.register(TypeCastingOp)
def lower_type_cast(
    op: TypeCastingOp, node: Apply, device: torch.device, compiled: bool
) -> Lowering:
    return Lowering(lambda x: x, views={0: (0,)})
