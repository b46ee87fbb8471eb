"""Conversions between placements: which there are, and how many bytes they move."""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Constant, Variable
from pytensor.tensor.elemwise import Elemwise

from tandem.ops import collective
from tandem.placement.placements import (
    Partial,
    Placement,
    Replicate,
    Shape,
    Shard,
    Single,
    local_index,
)
from tandem.placement.rules.registry import Part


@dataclass(frozen=True)
class Kind:
    """A way from one placement to another."""

    name: str  # such as "all-gather"; of what moves no bytes, such as "slice"
    weight: Callable[[int], float]  # bytes that all ranks together receive, of each of the tensor
    # Makes the Op of a conversion that moves bytes, from number, part and global shape:
    op: Callable[[int, Part, Shape], Any] | None = None

    @property
    def moves(self) -> bool:
        """Return whether bytes pass between ranks."""
        return self.op is not None


def _nothing(ranks: int) -> float:
    return 0.0


def find_kind(source: Placement, target: Placement) -> Kind | None:
    """The conversion from one placement to another; None if it takes two, by way of `Replicate`."""
    match source, target:
        case Shard(a), Replicate():
            return _moving("all-gather", lambda n: n - 1, collective.AllGather, a)
        case Partial(op), Replicate():
            return _moving("all-reduce", lambda n: 2 * (n - 1), collective.AllReduce, op)
        case Partial(op), Shard(a):
            return _moving("reduce-scatter", lambda n: n - 1, collective.ReduceScatter, a, op)
        case Shard(a), Shard(b):
            return _moving("all-to-all", lambda n: (n - 1) / n, collective.AllToAll, a, b)
        case Single(root), Replicate():
            return _moving("broadcast", lambda n: n - 1, collective.Broadcast, root)
        case Single(root), Shard(a):
            return _moving("scatter", lambda n: (n - 1) / n, collective.Scatter, a, root)
        case Shard(a), Single(root):
            return _moving("gather", lambda n: (n - 1) / n, collective.Gather, a, root)
        case Partial(op), Single(root):
            return _moving("reduce", lambda n: (n - 1) * (1 + 1 / n), collective.Reduce, op, root)
        case Replicate(), _:
            return Kind("slice" if isinstance(target, Shard) else "keep", _nothing)
        case ((Shard() | Single()), Partial("sum")):
            return Kind("pad", _nothing)
        case _:
            return None


def _moving(
    name: str, weight: Callable[[int], float], op: Callable[..., Any], *arguments: Any
) -> Kind:
    def make(number: int, part: Part, shape: Shape) -> Any:
        return op(number, part.ranks, part.rank, shape, *arguments)

    return Kind(name, weight, make)


def nbytes(variable: Variable) -> int:
    """Bytes of a whole tensor.

    Raises ValueError if its shape is not known.
    """
    shape = known_shape(variable)
    return math.prod(shape) * np.dtype(variable.type.dtype).itemsize


def known_shape(variable: Variable) -> Shape:
    """The static shape of a variable. Raises ValueError if it is not known."""
    shape = getattr(variable.type, "shape", None)
    if shape is None or None in shape:
        raise ValueError(
            f"{describe(variable)}: what is split over ranks needs a shape that is known when the "
            f"graph is built, and its type is {variable.type}; state those of inputs, as in "
            "pt.tensor(name, shape=(4, 6)) or pytensor.shared(value, shape=value.shape)"
        )
    return tuple(shape)


def describe(variable: Variable) -> str:
    """A variable in a few words: its name, or the Op that computes it and from what."""
    if variable.name:
        return str(variable.name)
    if variable.owner is None:
        return str(variable)
    op = variable.owner.op
    inner = op.scalar_op if isinstance(op, Elemwise) else None
    name, layer = type(op if inner is None else inner).__name__, _nearest_layer(variable)
    return f"{name} of {layer}" if layer else name


def _nearest_layer(variable: Variable) -> str:
    """The layer whose parameter is the fewest Ops before; without layers, the nearest input."""
    seen, queue, nearest = {variable}, deque([variable]), ""
    while queue:
        at = queue.popleft()
        if at.name and at.owner is None and not isinstance(at, Constant):
            layer, dot, _ = at.name.rpartition(".")
            if dot:
                return layer
            nearest = nearest or str(at.name)
        inputs = [] if at.owner is None else at.owner.inputs
        queue.extend(v for v in dict.fromkeys(inputs) if v not in seen)
        seen.update(inputs)
    return nearest


def convert_here(
    variable: Variable, local: Any, source: Placement, target: Placement, part: Part
) -> Variable | None:
    """Convert a rank's part of a tensor without the other ranks.

    Parameters
    ----------
    variable : Variable
        The whole tensor, of the graph that is partitioned.
    local : Variable or None
        The rank's part of it; None where it has nothing.
    """
    if isinstance(source, Replicate):
        return _of_whole(variable, local, target, part)
    shape = known_shape(variable)  # a term of a sum, with zeros for what other ranks have
    zeros = pt.zeros(shape, dtype=variable.type.dtype)
    if local is None:
        return zeros
    index = local_index(shape, source, part.ranks, part.rank)
    return local if isinstance(source, Single) else pt.set_subtensor(zeros[index], local)


def _of_whole(variable: Variable, local: Any, target: Placement, part: Part) -> Variable | None:
    match target:
        case Partial("sum") if part.rank > 0:
            return pt.zeros(known_shape(variable), dtype=variable.type.dtype)
        case Shard():
            index = local_index(known_shape(variable), target, part.ranks, part.rank)
            assert index is not None
            if isinstance(local, Constant):
                return pt.constant(local.data[index], dtype=local.type.dtype)
            return local[index]
        case Single(rank) if rank != part.rank:
            return None
        case _:
            return local
