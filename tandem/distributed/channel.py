"""The channels of a device mode: functions of several ranks pass each other tensors."""

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tandem.distributed.group import Group
from tandem.memory.slot import ALIGNMENT

if TYPE_CHECKING:
    from torch import Tensor

Label = tuple[str, int, tuple[int, ...], str]
"""Which conversion a call is for: its kind, its number, and shape and dtype of the whole."""

Shape = tuple[int, ...]


class OutOfStep(RuntimeError):
    """The ranks have made different calls: their functions are not of one program."""


class CheckedChannel(ABC):
    """Base of the channels over a group, whose ranks check that all make the same call.

    What `tandem.backend.channel.Channel` demands. The group is for this channel alone.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self.rank, self.size = group.rank, group.size
        self.received = 0  # bytes that have come from other ranks
        self.calls = 0  # collective ones that all ranks have made

    def all_gather(self, label: Label, block: "Tensor", shapes: Sequence[Shape]) -> "list[Tensor]":
        """Pass a block to every rank; return those of all, whose shapes are given, by rank.

        Raises
        ------
        PeerLost
            Another rank has ended.
        OutOfStep
            The ranks have made different calls.
        """
        found = self._gather(label, block, shapes)
        self._count(shapes, block)
        found[self.rank] = block
        return found

    def all_to_all(
        self, label: Label, blocks: "Sequence[Tensor]", shapes: Sequence[Shape]
    ) -> "list[Tensor]":
        """Pass each rank a block of its own; return those for this rank, by their senders.

        Blocks are by their receivers; `shapes` are of what each rank sends here. Any may be empty.
        Raises as `all_gather`.
        """
        found = self._swap(label, blocks, shapes)
        self._count(shapes, blocks[self.rank])
        found[self.rank] = blocks[self.rank]
        return found

    def close(self) -> None:
        """Give up the group and the memory that is shared. Collective."""
        self._group.close()

    @abstractmethod
    def _gather(self, label: Label, block: "Tensor", shapes: Sequence[Shape]) -> "list[Tensor]":
        """Do what `all_gather` does for the blocks of other ranks; this one's may be anything."""

    @abstractmethod
    def _swap(
        self, label: Label, blocks: "Sequence[Tensor]", shapes: Sequence[Shape]
    ) -> "list[Tensor]":
        """Do what `all_to_all` does for the blocks of other ranks; this one's may be anything."""

    def _barrier(self, label: Label, message: Any = None) -> list[Any]:
        """Wait for all ranks at a call; return their messages, by rank."""
        arrived = self._pass((self.calls, label, message))
        self._check([(call, other) for call, other, _ in arrived])
        self.calls += 1
        return [message for _, _, message in arrived]

    def _pass(self, message: Any) -> Sequence[Any]:
        """Wait for all ranks, and pass each a message; return those of all, by rank."""
        return self._group.all_gather_object(message)

    def _check(self, labels: Sequence[tuple[int, Label]]) -> None:
        """Raise OutOfStep unless all ranks make the same call."""
        if len(set(labels)) > 1:
            places = "; ".join(f"rank {rank}: {_place(*at)}" for rank, at in enumerate(labels))
            raise OutOfStep(f"the ranks have come to different conversions: {places}")

    def _count(self, shapes: Sequence[Shape], like: "Tensor") -> None:
        elements = [_size(shape) for rank, shape in enumerate(shapes) if rank != self.rank]
        self.received += sum(elements) * like.element_size()


class RegionChannel(CheckedChannel):
    """Base of the channels by memory that all ranks read.

    A rank writes its blocks to its part of a region, waits until all have, and reads the others'.
    Two regions take turns: one is written again two calls later, when all ranks have come to the
    barrier of the call between, which they do only after they have read. So a call has one barrier.
    A region that is too small for a rank is made again, larger, in that call.
    """

    def _gather(self, label: Label, block: "Tensor", shapes: Sequence[Shape]) -> "list[Tensor]":
        turn, _ = self._publish(label, [block])
        places = [(rank, 0) for rank in range(self.size)]
        return self._read_all(turn, places, shapes, block)

    def _swap(
        self, label: Label, blocks: "Sequence[Tensor]", shapes: Sequence[Shape]
    ) -> "list[Tensor]":
        own = blocks[self.rank]
        sent = [own.new_empty(0) if to == self.rank else b for to, b in enumerate(blocks)]
        turn, starts = self._publish(label, sent)
        places = [(rank, starts[rank][self.rank]) for rank in range(self.size)]
        return self._read_all(turn, places, shapes, own)

    def _publish(self, label: Label, blocks: "Sequence[Tensor]") -> tuple[int, list[Sequence[int]]]:
        """Show blocks to all ranks; return in which region, and by rank where blocks begin."""
        turn, starts = self.calls % 2, _starts(blocks)
        capacity = self._capacity(turn)
        if starts[-1] <= capacity:
            self._write_all(turn, starts, blocks)
        every = self._barrier(label, starts)
        needed = max(ends[-1] for ends in every)
        if needed > capacity:
            self._enlarge(turn, needed)
            self._write_all(turn, starts, blocks)
            self._pass(None)
        return turn, every

    def _write_all(self, turn: int, starts: Sequence[int], blocks: "Sequence[Tensor]") -> None:
        for start, block in zip(starts, blocks, strict=False):
            if block.numel():
                self._write(turn, start, block)

    def _read_all(
        self,
        turn: int,
        places: Sequence[tuple[int, int]],
        shapes: Sequence[Shape],
        like: "Tensor",
    ) -> "list[Tensor]":
        return [
            self._read(turn, rank, start, shape, like)
            if rank != self.rank and _size(shape)
            else like.new_empty(shape)
            for (rank, start), shape in zip(places, shapes, strict=True)
        ]

    @abstractmethod
    def _capacity(self, turn: int) -> int:
        """Return how many bytes each rank's part of a region has."""

    @abstractmethod
    def _enlarge(self, turn: int, nbytes: int) -> None:
        """Make a region again, of at least this size for each rank. Collective."""

    @abstractmethod
    def _write(self, turn: int, start: int, block: "Tensor") -> None:
        """Copy a block to this rank's part of a region, from byte `start` on."""

    @abstractmethod
    def _read(self, turn: int, rank: int, start: int, shape: Shape, like: "Tensor") -> "Tensor":
        """Return a block of another rank's part of a region, on the device of `like`."""


class HostChannel(RegionChannel):
    """Ranks of one machine, by shared memory of the host."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._regions: list[list[np.ndarray]] = [[], []]  # for each turn, uint8 (n,) by rank

    def close(self) -> None:
        self._regions = [[], []]
        super().close()

    def _capacity(self, turn: int) -> int:
        region = self._regions[turn]
        return region[0].nbytes if region else 0

    def _enlarge(self, turn: int, nbytes: int) -> None:
        self._regions[turn] = self._group.shared_memory(nbytes)

    def _write(self, turn: int, start: int, block: "Tensor") -> None:
        own = self._regions[turn][self.rank]
        _tensor(own, start, tuple(block.shape), block).copy_(block)

    def _read(self, turn: int, rank: int, start: int, shape: Shape, like: "Tensor") -> "Tensor":
        return _tensor(self._regions[turn][rank], start, shape, like).to(like.device)


class GroupChannel(CheckedChannel):
    """Ranks of any machines, by the messages of their group.

    Blocks pass by memory on the host, or where the group takes GPU memory at all ranks, which
    `is_direct` says, from where they lie.
    """

    def __init__(self, group: Group, is_direct: bool = False) -> None:
        super().__init__(group)
        self._is_direct = is_direct

    def _gather(self, label: Label, block: "Tensor", shapes: Sequence[Shape]) -> "list[Tensor]":
        self._barrier(label)
        parts = _parts(shapes, block)
        vector = self._vector(parts[-1].stop, block)
        _fill(vector, parts[self.rank], block)
        if vector.numel():
            self._group.all_gather(self._message(vector), parts)
        return self._blocks(vector, parts, shapes, block)

    def _swap(
        self, label: Label, blocks: "Sequence[Tensor]", shapes: Sequence[Shape]
    ) -> "list[Tensor]":
        self._barrier(label)
        like = blocks[self.rank]
        shapes = self._of_others(shapes)
        parts = _parts(shapes, like)
        sent_parts = _parts(self._of_others([tuple(block.shape) for block in blocks]), like)
        received = self._vector(parts[-1].stop, like)
        sent = self._vector(sent_parts[-1].stop, like)
        for rank, block in enumerate(blocks):
            if rank != self.rank:
                _fill(sent, sent_parts[rank], block)
        self._group.all_to_all_parts(
            self._message(sent), sent_parts, self._message(received), parts
        )
        return self._blocks(received, parts, shapes, like)

    def _of_others(self, shapes: Sequence[Shape]) -> list[Shape]:
        """The shapes by rank, without that of this rank's own block."""
        return [(0,) if rank == self.rank else shape for rank, shape in enumerate(shapes)]

    def _vector(self, nbytes: int, like: "Tensor") -> "Tensor":
        """Make memory for a message, uint8 (n,)."""
        import torch

        return torch.empty(
            nbytes, dtype=torch.uint8, device=like.device if self._is_direct else None
        )

    def _message(self, vector: "Tensor") -> Any:
        return vector if self._is_direct else vector.numpy()

    def _blocks(
        self, vector: "Tensor", parts: Sequence[slice], shapes: Sequence[Shape], like: "Tensor"
    ) -> "list[Tensor]":
        return [
            vector[part].view(like.dtype).view(shape).to(like.device)
            if _size(shape)
            else like.new_empty(shape)
            for part, shape in zip(parts, shapes, strict=True)
        ]


def _size(shape: Shape) -> int:
    return math.prod(shape)


def _place(call: int, label: Label) -> str:
    kind, number, shape, dtype = label
    return f"call {call}, {kind} {number} of {dtype} {shape}"


def _starts(blocks: "Sequence[Tensor]") -> list[int]:
    """Return where blocks begin in memory, in bytes, and the end of the last."""
    sizes = (-(-block.nbytes // ALIGNMENT) * ALIGNMENT for block in blocks)
    return [0, *itertools.accumulate(sizes)]


def _parts(shapes: Sequence[Shape], like: "Tensor") -> list[slice]:
    """The bytes of blocks of these shapes, one behind another."""
    sizes = (_size(shape) * like.element_size() for shape in shapes)
    return [slice(a, b) for a, b in itertools.pairwise([0, *itertools.accumulate(sizes)])]


def _tensor(memory: np.ndarray, start: int, shape: Shape, like: "Tensor") -> "Tensor":
    """Memory of the host, uint8 (n,), as a tensor of another's dtype."""
    import torch

    stop = start + _size(shape) * like.element_size()
    return torch.from_numpy(memory[start:stop]).view(like.dtype).view(shape)


def _fill(vector: "Tensor", part: slice, block: "Tensor") -> None:
    """Copy a block into bytes of a vector, uint8 (n,)."""
    if block.numel():
        vector[part].view(block.dtype).view(block.shape).copy_(block)
