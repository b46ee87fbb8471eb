"""Whole arrays for a checkpoint, from parts that lie at several trainers.

Importing this module imports PyTensor.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tandem.distributed import Group
from tandem.layers.parameter import Parameter
from tandem.training.division import Division, Shape

CHUNK_NBYTES = 4 << 20  # of an array; so much passes at a time, or a row of it if that is more

State = tuple[dict[str, Any], dict[str, dict[str, Any]]]
"""Weights by name, and each state of the optimizer."""


@dataclass(frozen=True)
class Gathering:
    """Gathers parameters and optimizer states at trainer 0, array by array.

    So it never has more than one whole array beside the checkpoint's copy.
    """

    division: Division
    declared: Mapping[str, Parameter]
    dtype: np.dtype
    group: Group

    def whole(self, state: State) -> State:
        """The state of a run at trainer 0, from its part, in the network's order.

        What others have parts of is gathered when it is converted to an array: each once, and in
        order, weights and then each state. Meanwhile the others `send` theirs.
        """
        weights, states = state

        def one(name: str, parts: Mapping[str, Any]) -> Any:
            if not self.division.is_elsewhere(name):
                return parts[name]
            return GatheredArray(self, name, parts.get(name))

        return (
            {name: one(name, weights) for name in self.declared},
            {
                state: {name: one(name, parts) for name in self._trained}
                for state, parts in states.items()
            },
        )

    def send(self, state: State) -> None:
        """Pass this trainer's part to trainer 0, in the order in which it is gathered."""
        weights, states = state
        pairs = [(name, weights) for name in self.declared]
        pairs += [(name, parts) for parts in states.values() for name in self._trained]
        for name, parts in pairs:
            if self.division.is_elsewhere(name):
                self.pass_on(name, parts.get(name))

    @property
    def _trained(self) -> list[str]:
        return [name for name, parameter in self.declared.items() if parameter.trainable]

    def pass_on(self, name: str, part: np.ndarray | None, whole: np.ndarray | None = None) -> None:
        """Pass the parts of an array to trainer 0, which has memory for the `whole`. Collective."""
        shape, ranks = self.declared[name].shape or (1,), range(self.division.ranks)
        shapes = [self.division.shape(name, shape, rank) or (0,) for rank in ranks]
        own = np.zeros(0, self.dtype) if part is None else part.reshape(shapes[self.division.rank])
        for rows in _chunks(shapes, self.dtype.itemsize):
            sizes = [_size(each, rows) if self.group.rank == 0 else 0 for each in shapes]
            ends = [0, *itertools.accumulate(sizes)]
            parts = [slice(a, b) for a, b in itertools.pairwise(ends)]
            sent, received = own[rows].reshape(-1), np.empty(ends[-1], self.dtype)
            sent_parts = [slice(0, sent.size), *[slice(sent.size, sent.size)] * (len(sizes) - 1)]
            self.group.all_to_all_parts(np.ascontiguousarray(sent), sent_parts, received, parts)
            if whole is None:
                continue
            for rank, arrived in enumerate(parts):
                index = self.division.index(name, shape, rank)
                if index is not None:
                    block = whole.reshape(shape)[index][rows]
                    block[...] = received[arrived].reshape(block.shape)


@dataclass(frozen=True)
class GatheredArray:
    """An array of which other trainers have parts; it is gathered when it is converted."""

    gathering: Gathering
    name: str
    part: np.ndarray | None

    @property
    def shape(self) -> Shape:
        return self.gathering.declared[self.name].shape

    @property
    def dtype(self) -> np.dtype:
        return self.gathering.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        whole = np.empty(self.shape, self.dtype)
        self.gathering.pass_on(self.name, self.part, whole)
        return whole if dtype is None else whole.astype(dtype, copy=False)


def _chunks(shapes: Sequence[Shape], itemsize: int) -> Iterator[slice]:
    """Rows of the parts of an array that pass together."""
    nbytes = sum(math.prod(shape[1:]) for shape in shapes if shape[0]) * itemsize
    step = max(1, CHUNK_NBYTES // max(1, nbytes))
    for start in range(0, max(shape[0] for shape in shapes), step):
        yield slice(start, start + step)


def _size(shape: Shape, rows: slice) -> int:
    """Elements of these rows of a part."""
    return len(range(*rows.indices(shape[0]))) * math.prod(shape[1:])
