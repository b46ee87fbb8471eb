"""Ops by which the ranks of a run pass tensors to each other, as a part of their graphs.

Every rank has a graph of its own, with the same communicating Ops in the same order: each takes the
token that the one before it gives. A tensor that is divided along an axis has its parts at
`tandem.split.edges`, by rank; sums are added in rank order.
"""

import math
from collections.abc import Sequence
from typing import Any

import pytensor.tensor as pt
from pytensor.graph.basic import Apply
from pytensor.tensor.variable import TensorVariable

from tandem.ops.base import Values
from tandem.ops.communication import (
    Collective,
    Reduction,
    Shape,
    first_token,
    placeholder,
)
from tandem.split import part_of, part_shape

__all__ = [
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Broadcast",
    "Collective",
    "Gather",
    "Reduce",
    "ReduceScatter",
    "Reduction",
    "Scatter",
    "Slice",
    "Vary",
    "first_token",
    "placeholder",
]


class AllGather(Collective):
    """Each rank's part of a tensor -> the whole at all ranks."""

    __props__ = (*Collective.__props__, "axis")

    def __init__(self, number: int, ranks: int, rank: int, shape: Sequence[int], axis: int) -> None:
        super().__init__(number, ranks, rank, shape)
        self.axis = self._an_axis("axis", axis)

    def given(self, rank: int) -> Shape:
        return self._shard(self.axis, rank)

    def result(self, rank: int) -> Shape:
        return self.shape

    def received_elements(self) -> int:
        return self._size - math.prod(self.given(self.rank))

    def combine(self, parts: Sequence[TensorVariable]) -> list[TensorVariable]:
        return [pt.join(self.axis, *parts)] * self.ranks

    def backward(self, g: TensorVariable, token: TensorVariable) -> Sequence[TensorVariable]:
        return ReduceScatter(*self._where, self.axis, "sum")(g, token)


class AllReduce(Collective):
    """A tensor of each rank -> their sum, maximum or minimum at all ranks.

    The flattened tensor is divided by `tandem.split.edges`: each rank adds its part of all, and
    gives it to all.
    """

    __props__ = (*Collective.__props__, "op")

    def __init__(self, number: int, ranks: int, rank: int, shape: Sequence[int], op: str) -> None:
        super().__init__(number, ranks, rank, shape)
        self.op = self._a_reduction(op)

    def given(self, rank: int) -> Shape:
        return self.shape

    def result(self, rank: int) -> Shape:
        return self.shape

    def received_elements(self) -> int:
        return (self.ranks - 1) * self._own_part + self._size - self._own_part

    def combine(self, parts: Sequence[TensorVariable]) -> list[TensorVariable]:
        return [self._reduced(parts, self.op)] * self.ranks

    def backward(self, g: TensorVariable, token: TensorVariable) -> Sequence[TensorVariable]:
        self._linear(self.op)
        return g, token


class ReduceScatter(Collective):
    """A tensor of each rank -> each rank's part of their sum, maximum or minimum."""

    __props__ = (*Collective.__props__, "axis", "op")

    def __init__(
        self, number: int, ranks: int, rank: int, shape: Sequence[int], axis: int, op: str
    ) -> None:
        super().__init__(number, ranks, rank, shape)
        self.axis = self._an_axis("axis", axis)
        self.op = self._a_reduction(op)

    def given(self, rank: int) -> Shape:
        return self.shape

    def result(self, rank: int) -> Shape:
        return self._shard(self.axis, rank)

    def received_elements(self) -> int:
        return (self.ranks - 1) * math.prod(self.result(self.rank))

    def combine(self, parts: Sequence[TensorVariable]) -> list[TensorVariable]:
        return self._split(self._reduced(parts, self.op), self.axis)

    def backward(self, g: TensorVariable, token: TensorVariable) -> Sequence[TensorVariable]:
        self._linear(self.op)
        return AllGather(*self._where, self.axis)(g, token)


class AllToAll(Collective):
    """Each rank's part along one axis, `source` -> its part along another, `target`."""

    __props__ = (*Collective.__props__, "source", "target")

    def __init__(
        self, number: int, ranks: int, rank: int, shape: Sequence[int], source: int, target: int
    ) -> None:
        super().__init__(number, ranks, rank, shape)
        self.source = self._an_axis("source", source)
        self.target = self._an_axis("target", target)
        if self.source == self.target:
            raise ValueError(f"AllToAll: source and target must differ, both are {source}")

    def given(self, rank: int) -> Shape:
        return self._shard(self.source, rank)

    def result(self, rank: int) -> Shape:
        return self._shard(self.target, rank)

    def block(self, source: int, target: int) -> Shape:
        """Return the shape of what one rank has of another's result."""
        return part_shape(self.given(source), self.target, self.ranks, target)

    def received_elements(self) -> int:
        result = math.prod(self.result(self.rank))
        return result - math.prod(self.block(self.rank, self.rank))

    def combine(self, parts: Sequence[TensorVariable]) -> list[TensorVariable]:
        return self._split(pt.join(self.source, *parts), self.target)

    def backward(self, g: TensorVariable, token: TensorVariable) -> Sequence[TensorVariable]:
        return AllToAll(*self._where, self.target, self.source)(g, token)


class Broadcast(Collective):
    """A tensor of one rank, `root` -> the same at all ranks."""

    __props__ = (*Collective.__props__, "root")

    def __init__(self, number: int, ranks: int, rank: int, shape: Sequence[int], root: int) -> None:
        super().__init__(number, ranks, rank, shape)
        self.root = self._a_rank("root", root)

    def given(self, rank: int) -> Shape | None:
        return self.shape if rank == self.root else None

    def result(self, rank: int) -> Shape:
        return self.shape

    def received_elements(self) -> int:
        return 0 if self.rank == self.root else self._size

    def combine(self, parts: Sequence[TensorVariable]) -> list[TensorVariable]:
        return [parts[self.root]] * self.ranks

    def backward(self, g: TensorVariable, token: TensorVariable) -> Sequence[TensorVariable]:
        return Reduce(*self._where, "sum", self.root)(g, token)


class Scatter(Collective):
    """A tensor of one rank, `root` -> each rank's part of it."""

    __props__ = (*Collective.__props__, "axis", "root")

    def __init__(
        self, number: int, ranks: int, rank: int, shape: Sequence[int], axis: int, root: int
    ) -> None:
        super().__init__(number, ranks, rank, shape)
        self.axis = self._an_axis("axis", axis)
        self.root = self._a_rank("root", root)

    def given(self, rank: int) -> Shape | None:
        return self.shape if rank == self.root else None

    def result(self, rank: int) -> Shape:
        return self._shard(self.axis, rank)

    def received_elements(self) -> int:
        return 0 if self.rank == self.root else math.prod(self.result(self.rank))

    def combine(self, parts: Sequence[TensorVariable]) -> list[TensorVariable]:
        return self._split(parts[self.root], self.axis)

    def backward(self, g: TensorVariable, token: TensorVariable) -> Sequence[TensorVariable]:
        return Gather(*self._where, self.axis, self.root)(g, token)


class Gather(Collective):
    """Each rank's part of a tensor -> the whole at one rank, `root`."""

    __props__ = (*Collective.__props__, "axis", "root")

    def __init__(
        self, number: int, ranks: int, rank: int, shape: Sequence[int], axis: int, root: int
    ) -> None:
        super().__init__(number, ranks, rank, shape)
        self.axis = self._an_axis("axis", axis)
        self.root = self._a_rank("root", root)

    def given(self, rank: int) -> Shape:
        return self._shard(self.axis, rank)

    def result(self, rank: int) -> Shape | None:
        return self.shape if rank == self.root else None

    def received_elements(self) -> int:
        return self._size - math.prod(self.given(self.rank)) if self.rank == self.root else 0

    def combine(self, parts: Sequence[TensorVariable]) -> list[TensorVariable]:
        return self._at(self.root, pt.join(self.axis, *parts))

    def backward(self, g: TensorVariable, token: TensorVariable) -> Sequence[TensorVariable]:
        return Scatter(*self._where, self.axis, self.root)(g, token)


class Reduce(Collective):
    """A tensor of each rank -> their sum, maximum or minimum at one rank, `root`.

    Each rank adds its part of the flattened tensors, as in `AllReduce`.
    """

    __props__ = (*Collective.__props__, "op", "root")

    def __init__(
        self, number: int, ranks: int, rank: int, shape: Sequence[int], op: str, root: int
    ) -> None:
        super().__init__(number, ranks, rank, shape)
        self.op = self._a_reduction(op)
        self.root = self._a_rank("root", root)

    def given(self, rank: int) -> Shape:
        return self.shape

    def result(self, rank: int) -> Shape | None:
        return self.shape if rank == self.root else None

    def received_elements(self) -> int:
        added = (self.ranks - 1) * self._own_part
        return added + (self._size - self._own_part if self.rank == self.root else 0)

    def combine(self, parts: Sequence[TensorVariable]) -> list[TensorVariable]:
        return self._at(self.root, self._reduced(parts, self.op))

    def backward(self, g: TensorVariable, token: TensorVariable) -> Sequence[TensorVariable]:
        self._linear(self.op)
        return Broadcast(*self._where, self.root)(g, token)


class Vary(Collective):
    """A tensor that all ranks have, as each uses it in its own way: the same, without a message.

    Each rank's cotangent is then a term of the tensor's, which is their sum.
    """

    view_map = {0: [0], 1: [1]}  # noqa: RUF012 (as PyTensor declares it)

    def given(self, rank: int) -> Shape:
        return self.shape

    def result(self, rank: int) -> Shape:
        return self.shape

    def received_elements(self) -> int:
        return 0

    def combine(self, parts: Sequence[TensorVariable]) -> list[TensorVariable]:
        return list(parts)

    def perform(self, node: Apply, inputs: Values, output_storage: list[list[Any]]) -> None:
        output_storage[0][0], output_storage[1][0] = inputs

    def backward(self, g: TensorVariable, token: TensorVariable) -> Sequence[TensorVariable]:
        return AllReduce(*self._where, "sum")(g, token)


class Slice(Collective):
    """A tensor that all ranks have -> each rank's part of it, without a message."""

    __props__ = (*Collective.__props__, "axis")
    view_map = {0: [0], 1: [1]}  # noqa: RUF012 (as PyTensor declares it)

    def __init__(self, number: int, ranks: int, rank: int, shape: Sequence[int], axis: int) -> None:
        super().__init__(number, ranks, rank, shape)
        self.axis = self._an_axis("axis", axis)

    @property
    def index(self) -> tuple[slice, ...]:
        """The index of this rank's part."""
        return part_of(self.shape, self.axis, self.ranks, self.rank)

    def given(self, rank: int) -> Shape:
        return self.shape

    def result(self, rank: int) -> Shape:
        return self._shard(self.axis, rank)

    def received_elements(self) -> int:
        return 0

    def combine(self, parts: Sequence[TensorVariable]) -> list[TensorVariable]:
        return [
            part[part_of(self.shape, self.axis, self.ranks, rank)]
            for rank, part in enumerate(parts)
        ]

    def perform(self, node: Apply, inputs: Values, output_storage: list[list[Any]]) -> None:
        output_storage[0][0], output_storage[1][0] = inputs[0][self.index], inputs[1]

    def backward(self, g: TensorVariable, token: TensorVariable) -> Sequence[TensorVariable]:
        return AllGather(*self._where, self.axis)(g, token)
