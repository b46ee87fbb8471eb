"""Ops that all ranks of a run compute together, by the mode's channel."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import torch
from pytensor.graph.basic import Apply

from tandem.backend.channel import Channel
from tandem.backend.lowering.registry import AS_SIGNED, Lowering, lower
from tandem.distributed.channel import Label
from tandem.ops.collective import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    Gather,
    Reduce,
    ReduceScatter,
    Scatter,
    Slice,
    Vary,
)
from tandem.split import edges, part_of

Tensor = torch.Tensor
Communicate = Callable[[Channel, Label, Tensor], Tensor]

_NOTHING = (0,)  # the shape of what is not sent
_ELEMENTWISE: Mapping[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


@lower.register(Vary)
def lower_vary(op: Vary, node: Apply, device: torch.device, compiled: bool) -> Lowering:
    return Lowering(lambda x, token: (x, token), certain=True)


@lower.register(Slice)
def lower_slice(op: Slice, node: Apply, device: torch.device, compiled: bool) -> Lowering:
    index = op.index
    return Lowering(lambda x, token: (x[index], token), certain=True)


@lower.register(AllGather)
def lower_all_gather(op: AllGather, node: Apply, device: torch.device, compiled: bool) -> Lowering:
    shapes = [op.given(rank) for rank in range(op.ranks)]

    def communicate(channel: Channel, label: Label, x: Tensor) -> Tensor:
        return torch.cat(channel.all_gather(label, x, shapes), op.axis)

    return _lowering(op, node, communicate)


@lower.register(AllReduce)
def lower_all_reduce(op: AllReduce, node: Apply, device: torch.device, compiled: bool) -> Lowering:
    lengths = _lengths(op)
    shapes = [(length,) for length in lengths]

    def communicate(channel: Channel, label: Label, x: Tensor) -> Tensor:
        own = _reduced_part(channel, label, x, op.op, lengths)
        return torch.cat(channel.all_gather(label, own, shapes)).view(op.shape)

    return _lowering(op, node, communicate)


@lower.register(ReduceScatter)
def lower_reduce_scatter(
    op: ReduceScatter, node: Apply, device: torch.device, compiled: bool
) -> Lowering:
    shapes = [op.result(op.rank)] * op.ranks
    indices = [part_of(op.shape, op.axis, op.ranks, rank) for rank in range(op.ranks)]

    def communicate(channel: Channel, label: Label, x: Tensor) -> Tensor:
        blocks = [x[index] for index in indices]
        return _reduced(channel.all_to_all(label, blocks, shapes), op.op)

    return _lowering(op, node, communicate)


@lower.register(AllToAll)
def lower_all_to_all(op: AllToAll, node: Apply, device: torch.device, compiled: bool) -> Lowering:
    ranks = range(op.ranks)
    shapes = [op.block(rank, op.rank) for rank in ranks]
    indices = [part_of(op.given(op.rank), op.target, op.ranks, rank) for rank in ranks]

    def communicate(channel: Channel, label: Label, x: Tensor) -> Tensor:
        blocks = [x[index] for index in indices]
        return torch.cat(channel.all_to_all(label, blocks, shapes), op.source)

    return _lowering(op, node, communicate)


@lower.register(Broadcast)
def lower_broadcast(op: Broadcast, node: Apply, device: torch.device, compiled: bool) -> Lowering:
    is_root = op.rank == op.root
    shapes = [op.shape if rank == op.root else _NOTHING for rank in range(op.ranks)]

    def communicate(channel: Channel, label: Label, x: Tensor) -> Tensor:
        block = x if is_root else x.new_empty(_NOTHING)
        found = channel.all_gather(label, block, shapes)[op.root]
        return x if is_root else found.clone()

    return _lowering(op, node, communicate, is_view=is_root)


@lower.register(Scatter)
def lower_scatter(op: Scatter, node: Apply, device: torch.device, compiled: bool) -> Lowering:
    ranks, is_root = range(op.ranks), op.rank == op.root
    shapes = [op.result(op.rank) if rank == op.root else _NOTHING for rank in ranks]
    indices = [part_of(op.shape, op.axis, op.ranks, rank) for rank in ranks]

    def communicate(channel: Channel, label: Label, x: Tensor) -> Tensor:
        blocks = [x[index] if is_root else x.new_empty(_NOTHING) for index in indices]
        found = channel.all_to_all(label, blocks, shapes)[op.root]
        return blocks[op.rank] if is_root else found.clone()

    return _lowering(op, node, communicate, is_view=is_root)


@lower.register(Gather)
def lower_gather(op: Gather, node: Apply, device: torch.device, compiled: bool) -> Lowering:
    shapes = [op.given(rank) for rank in range(op.ranks)]

    def communicate(channel: Channel, label: Label, x: Tensor) -> Tensor:
        found = _at_root(channel, label, x, op.root, shapes)
        return x.new_empty((0,) * x.ndim) if found is None else torch.cat(found, op.axis)

    return _lowering(op, node, communicate)


@lower.register(Reduce)
def lower_reduce(op: Reduce, node: Apply, device: torch.device, compiled: bool) -> Lowering:
    lengths = _lengths(op)
    shapes = [(length,) for length in lengths]

    def communicate(channel: Channel, label: Label, x: Tensor) -> Tensor:
        own = _reduced_part(channel, label, x, op.op, lengths)
        found = _at_root(channel, label, own, op.root, shapes)
        if found is None:
            return x.new_zeros((0,) * x.ndim)
        return torch.cat(found).view(op.shape)

    return _lowering(op, node, communicate)


def _lowering(
    op: Collective, node: Apply, communicate: Communicate, is_view: bool = False
) -> Lowering:
    """Make the lowering of an Op, given how a rank comes to its result, which may be of `x`."""
    label = (type(op).__name__, op.number, op.shape, node.inputs[0].type.dtype)
    expected = op.input_shape

    def over(channel: Channel | None) -> Callable[..., tuple[Tensor, Tensor]]:
        found = _checked(channel, op)

        def call(x: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
            if x.shape != expected:
                raise ValueError(
                    f"{op.describe()} takes {expected} at rank {op.rank}, got {tuple(x.shape)}"
                )
            return communicate(found, label, x), token.clone()

        return call

    views: dict[int, tuple[int, ...]] = {0: (0,)} if is_view else {}
    return Lowering(_alone, over=over, views=views, opaque=True, computes=not is_view)


def _alone(x: Tensor, token: Tensor) -> NoReturn:
    raise RuntimeError("a conversion needs the mode's channel")


def _checked(channel: Channel | None, op: Collective) -> Channel:
    """Return the mode's channel if it is to the ranks that an Op names."""
    if channel is None:
        raise NotImplementedError(
            f"{op.describe()} needs the other ranks: make the function with "
            "device_mode(..., channel=...)"
        )
    if (channel.rank, channel.size) != (op.rank, op.ranks):
        raise ValueError(
            f"{op.describe()} is for rank {op.rank} of {op.ranks}, and the mode's channel is of "
            f"rank {channel.rank} of {channel.size}"
        )
    return channel


def _lengths(op: Collective) -> list[int]:
    """Return how many elements of the flattened tensor each rank adds."""
    ends = edges(math.prod(op.shape), op.ranks)
    return [stop - start for start, stop in itertools.pairwise(ends)]


def _reduced_part(
    channel: Channel, label: Label, x: Tensor, op: str, lengths: Sequence[int]
) -> Tensor:
    """Return this rank's part of the reduced flattened tensor."""
    blocks = torch.split(x.reshape(-1), list(lengths))
    shapes = [(lengths[channel.rank],)] * channel.size
    return _reduced(channel.all_to_all(label, blocks, shapes), op)


def _reduced(blocks: Sequence[Tensor], op: str) -> Tensor:
    """Add blocks in rank order, or take the largest or smallest elements, into new memory."""
    if len(blocks) == 1:
        return blocks[0].clone()
    if (dtype := blocks[0].dtype) in AS_SIGNED:
        # Their sums have the same bits, and with the first one flipped they have the same order.
        signed = AS_SIGNED[dtype]
        flip = 0 if op == "sum" else torch.iinfo(signed).min
        return (_reduced([block.view(signed) ^ flip for block in blocks], op) ^ flip).view(dtype)
    combine = _ELEMENTWISE[op]
    total = combine(blocks[0], blocks[1])
    for block in blocks[2:]:
        combine(total, block, out=total)
    return total


def _at_root(
    channel: Channel, label: Label, block: Tensor, root: int, shapes: Sequence[tuple[int, ...]]
) -> list[Tensor] | None:
    """Pass each rank's block to one rank, and return them there."""
    nothing = block.new_empty(_NOTHING)
    blocks = [block if rank == root else nothing for rank in range(channel.size)]
    is_root = channel.rank == root
    found = channel.all_to_all(label, blocks, shapes if is_root else [_NOTHING] * channel.size)
    return found if is_root else None
