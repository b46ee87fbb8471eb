"""Placements: where the parts of a tensor lie, over the ranks of a group."""

from dataclasses import dataclass
from typing import Literal, get_args

from tandem.split import part_of, part_shape

Reduction = Literal["sum", "max", "min"]


@dataclass(frozen=True)
class Replicate:
    """Every rank has the whole tensor."""

    def __str__(self) -> str:
        return "replicate"


@dataclass(frozen=True)
class Shard:
    """Every rank has a slice along an axis, in rank order.

    Rank r has the elements from ``edges(length, ranks)[r]`` to ``[r + 1]``, see
    `tandem.split.edges`: where the ranks do not divide the length, slices differ by one element.
    """

    axis: int

    def __post_init__(self) -> None:
        if isinstance(self.axis, bool) or not isinstance(self.axis, int) or self.axis < 0:
            raise ValueError(f"Shard: axis must be an int of at least 0, got {self.axis!r}")

    def __str__(self) -> str:
        return f"shard({self.axis})"


@dataclass(frozen=True)
class Partial:
    """Every rank has a term of the whole shape; the tensor is their sum, maximum or minimum."""

    op: Reduction = "sum"

    def __post_init__(self) -> None:
        if self.op not in get_args(Reduction):
            allowed = ", ".join(get_args(Reduction))
            raise ValueError(f"Partial: op must be one of {allowed}, got {self.op!r}")

    def __str__(self) -> str:
        return f"partial({self.op})"


@dataclass(frozen=True)
class Single:
    """One rank has the whole tensor, the others have nothing of it."""

    rank: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 0:
            raise ValueError(f"Single: rank must be an int of at least 0, got {self.rank!r}")

    def __str__(self) -> str:
        return f"single({self.rank})"


Placement = Replicate | Shard | Partial | Single

Shape = tuple[int, ...]


def check_placement(placement: Placement, ndim: int, ranks: int | None = None) -> None:
    """Raise unless a tensor of `ndim` axes can have a placement over `ranks`.

    ValueError: the axis or the rank does not exist. TypeError: it is no placement.
    """
    if not isinstance(placement, Placement):
        raise TypeError(
            f"{placement!r} is no placement, expected Replicate(), Shard(axis), Partial(op) or "
            "Single(rank)"
        )
    if isinstance(placement, Shard) and placement.axis >= ndim:
        raise ValueError(f"{placement}: a tensor of {ndim} axes has no axis {placement.axis}")
    if isinstance(placement, Single) and ranks is not None and placement.rank >= ranks:
        raise ValueError(f"{placement}: there are {ranks} ranks, from 0 on")


def local_index(
    shape: Shape, placement: Placement, ranks: int, rank: int
) -> tuple[slice, ...] | None:
    """Return which elements of a tensor a rank has.

    Parameters
    ----------
    shape : tuple of int
        Of the whole tensor.

    Returns
    -------
    tuple of slice, or None
        An index of the whole tensor, with one slice for each axis; of a `Partial`, that of the
        whole. None where the rank has nothing: of a `Single` elsewhere.
    """
    if isinstance(placement, Single) and placement.rank != rank:
        return None
    if isinstance(placement, Shard):
        return part_of(shape, placement.axis, ranks, rank)
    return (slice(None),) * len(shape)


def local_shape(shape: Shape, placement: Placement, ranks: int, rank: int) -> Shape | None:
    """The shape of what a rank has of a tensor; None where it has nothing."""
    if isinstance(placement, Single) and placement.rank != rank:
        return None
    if isinstance(placement, Shard):
        return part_shape(shape, placement.axis, ranks, rank)
    return shape
