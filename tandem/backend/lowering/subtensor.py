"""Indexing, and setting or incrementing what is indexed.

An index tuple is applied in two parts. Slices and integers make a view (PyTorch has no negative
steps: such an axis is flipped first, which copies). Index tensors are then applied to that view.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from pytensor.graph.basic import Apply
from pytensor.tensor.subtensor import (
    AdvancedIncSubtensor,
    AdvancedIncSubtensor1,
    AdvancedSubtensor,
    AdvancedSubtensor1,
    IncSubtensor,
    Subtensor,
    unflatten_index_variables,
)
from pytensor.tensor.type_other import NoneTypeT

from tandem.backend.lowering.registry import (
    AS_SIGNED,
    Lowering,
    constant_number,
    lower,
    static_shape,
    torch_dtype,
)
from tandem.backend.lowering.scatter import add, add_once, put

Tensor = torch.Tensor
Index = Sequence[Any]


def _forward(index: Index, shape: Sequence[int]) -> tuple[tuple[Any, ...], list[int]]:
    """Replace slices of negative step by forward slices of flipped axes; return these axes too."""
    forward, flipped = [], []
    for axis, entry in enumerate(index):
        if isinstance(entry, slice) and entry.step is not None and entry.step < 0:
            start, stop, step = entry.indices(shape[axis])
            last = shape[axis] - 1
            forward.append(slice(last - start, last - stop, -step))
            flipped.append(axis)
        else:
            forward.append(entry)
    return tuple(forward), flipped


def _view(x: Tensor, index: Index) -> Tensor:
    forward, flipped = _forward(index, x.shape)
    return (x.flip(flipped) if flipped else x)[forward]


def _write(x: Tensor, index: Index, write: Callable[[Tensor], Any], own: bool) -> Tensor:
    """Call `write` on the part of a copy of `x` that `index` selects; return the copy.

    With `own`, `x` itself may be written instead of a copy.
    """
    forward, flipped = _forward(index, x.shape)
    if flipped:
        # Written in the flipped order, and flipped back.
        out = x.flip(flipped)
        write(out[forward])
        return out.flip(flipped)
    out = x if own else x.clone(memory_format=torch.contiguous_format)
    write(out[forward])
    return out


def _maybe_backwards(index: Index) -> bool:
    """Return whether an index of variables may have a slice with a negative step."""
    steps = [entry.step for entry in index if isinstance(entry, slice) and entry.step is not None]
    numbers = [constant_number(step) for step in steps]
    return any(number is None or number < 0 for number in numbers)


def _signed(call: Callable[..., Tensor], node: Apply, operands: int) -> Callable[..., Tensor]:
    """Let a call see its first operands, which have the result's dtype, as signed integers."""
    dtype = torch_dtype(node.outputs[0])
    if dtype not in AS_SIGNED:
        return call
    signed = AS_SIGNED[dtype]

    def seen(*inputs: Any) -> Tensor:
        views = [x.to(dtype).view(signed) for x in inputs[:operands]]
        return call(*views, *inputs[operands:]).view(dtype)

    return seen


def _indices(op: Any, values: Sequence[Any]) -> tuple[Any, ...]:
    return unflatten_index_variables(values, op.idx_list)


def _known_index(op: Any, variables: Sequence[Any]) -> tuple[Any, ...] | None:
    """Return the index as Python numbers if every entry is constant."""
    numbers = [constant_number(variable) for variable in variables]
    known = [int(number) for number in numbers if number is not None]
    return _indices(op, known) if len(known) == len(numbers) else None


@lower.register(Subtensor)
def lower_subtensor(op: Subtensor, node: Apply, device: torch.device, compiled: bool) -> Lowering:
    variables = node.inputs[1:]
    places = frozenset(range(1, len(node.inputs)))
    known = _known_index(op, variables)
    if known is None:
        select = _signed(lambda x, *flat: _view(x, _indices(op, flat)), node, operands=1)
        return Lowering(select, host=places)
    if _maybe_backwards(_indices(op, variables)):
        return Lowering(_signed(lambda x: _view(x, known), node, operands=1), omit=places)
    # A slice selects what there is; an integer may be out of range.
    certain = all(isinstance(entry, slice) for entry in known)
    return Lowering(lambda x: x[known], omit=places, certain=certain)


@lower.register(IncSubtensor)
def lower_inc_subtensor(
    op: IncSubtensor, node: Apply, device: torch.device, compiled: bool
) -> Lowering:
    setting = op.set_instead_of_inc

    def written(own: bool) -> Callable[..., Tensor]:
        def call(x: Tensor, y: Tensor, *flat: int) -> Tensor:
            y = y.to(x.dtype)
            return _write(
                x,
                _indices(op, flat),
                lambda part: part.copy_(y) if setting else part.add_(y),
                own,
            )

        return _signed(call, node, operands=2)

    return Lowering(
        written(own=False),
        host=frozenset(range(2, len(node.inputs))),
        reuse={0: written(own=True)},
        certain=_fits_slices(op, node),
    )


def _fits_slices(op: IncSubtensor, node: Apply) -> bool:
    """Return whether the index is of constant slices, of which the second operand has the shape."""
    shape, given = (static_shape(variable) for variable in node.inputs[:2])
    known = _known_index(op, node.inputs[2:])
    if shape is None or given is None or known is None:
        return False
    part = np.broadcast_to(np.uint8(0), shape)[known]
    return all(isinstance(entry, slice) for entry in known) and part.shape == given


def _index_places(op: Any, node: Apply, first: int) -> tuple[frozenset[int], frozenset[int]]:
    """Find the inputs that are bounds of slices, and those among them that are None."""
    bounds = set()
    for entry in op.idx_list:
        if isinstance(entry, slice):
            numbers = (entry.start, entry.stop, entry.step)
            bounds |= {first + number for number in numbers if number is not None}
    absent = frozenset(p for p in bounds if isinstance(node.inputs[p].type, NoneTypeT))
    return frozenset(bounds) - absent, absent


def _split_index(index: Index, dims: Sequence[int]) -> tuple[list[Any], list[Tensor | None]]:
    """Separate an index into its slices, one per axis of the operand, and its index tensors.

    `dims` gives the number of axes that each entry of `index` covers.
    """
    slices: list[Any] = []
    tensors: list[Tensor | None] = []
    for entry, count in zip(index, dims, strict=True):
        if isinstance(entry, slice):
            slices.append(entry)
            tensors.append(None)
        else:
            slices += [slice(None)] * count
            tensors.append(entry)
    return slices, tensors


def _index_tensors(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Convert index tensors from NumPy's meaning to PyTorch's.

    A uint8 index is no mask, and a 0-d index beside an array is an array itself: like any other, it
    determines the position of the indexed axes.
    """
    given = [x for x in tensors if x is not None]
    widen = any(x.ndim for x in given)
    ready: list[Tensor | None] = []
    for x in tensors:
        if x is None:
            ready.append(None)
            continue
        x = x if x.dtype == torch.bool else x.to(torch.int64)
        ready.append(x.unsqueeze(0) if widen and x.ndim == 0 else x)
    return ready


class _AdvancedIndex:
    """Rebuilds the index of an advanced indexing node from its inputs."""

    def __init__(self, op: Any, node: Apply, first: int) -> None:
        self.idx_list = op.idx_list
        self.host, self.absent = _index_places(op, node, first)
        self.absent_flat = sorted(place - first for place in self.absent)
        variables = unflatten_index_variables(node.inputs[first:], op.idx_list)
        self.dims = [
            1 if isinstance(v, slice) or v.type.dtype != "bool" else v.type.ndim for v in variables
        ]
        self.masks = any(not isinstance(v, slice) and v.type.dtype == "bool" for v in variables)
        # Without index tensors, or with 0-d ones only, the selection is a view.
        self.copies = any(not isinstance(v, slice) and v.type.ndim for v in variables)
        self.plain = all(
            not isinstance(entry, slice) or entry == slice(None) for entry in self.idx_list
        )

    def split(self, flat: Sequence[Any]) -> tuple[list[Any], list[Tensor | None]]:
        values = list(flat)
        for place in self.absent_flat:
            values.insert(place, None)
        slices, tensors = _split_index(unflatten_index_variables(values, self.idx_list), self.dims)
        return ([] if self.plain else slices), _index_tensors(tensors)


def _select(x: Tensor, tensors: Sequence[Tensor | None]) -> Tensor:
    return x[tuple(slice(None) if index is None else index for index in tensors)]


@lower.register(AdvancedSubtensor1)
@lower.register(AdvancedSubtensor)
def lower_advanced_subtensor(
    op: AdvancedSubtensor, node: Apply, device: torch.device, compiled: bool
) -> Lowering:
    index = _AdvancedIndex(op, node, first=1)

    def select(x: Tensor, *flat: Any) -> Tensor:
        slices, tensors = index.split(flat)
        return _select(_view(x, slices) if slices else x, tensors)

    views = {} if index.copies else {0: (0,)}
    select = _signed(select, node, operands=1)
    return Lowering(select, host=index.host, omit=index.absent, views=views, counts=index.masks)


@lower.register(AdvancedIncSubtensor1)
@lower.register(AdvancedIncSubtensor)
def lower_advanced_inc_subtensor(
    op: AdvancedIncSubtensor, node: Apply, device: torch.device, compiled: bool
) -> Lowering:
    index = _AdvancedIndex(op, node, first=2)
    setting = op.set_instead_of_inc
    accumulate = not getattr(op, "ignore_duplicates", False)
    # Of one Op PyTensor promises that it repeats nothing whose type does not say so.
    check = getattr(op, "_check_runtime_broadcasting", None)

    def write(part: Tensor, tensors: Sequence[Tensor | None], y: Tensor) -> None:
        if setting:
            put(part, tensors, y, compiled)
        elif accumulate:
            add(part, tensors, y, compiled)
        else:
            add_once(part, tensors, y, compiled)

    def written(own: bool) -> Callable[..., Tensor]:
        def call(x: Tensor, y: Tensor, *flat: Any) -> Tensor:
            slices, tensors = index.split(flat)
            if check is not None:
                check(node, x, y, tensors[0])
            y = y.to(x.dtype)
            return _write(x, slices, lambda part: write(part, tensors, y), own)

        return _signed(call, node, operands=2)

    return Lowering(
        written(own=False),
        host=index.host,
        omit=index.absent,
        counts=index.masks,
        reuse={0: written(own=True)},
    )
