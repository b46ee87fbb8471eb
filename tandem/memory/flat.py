"""All parameters of a network in one vector, so that an exchange is one operation."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tandem.memory.buffer import Buffer

Shapes = tuple[tuple[str, tuple[int, ...]], ...]

ALIGNMENT = 256  # bytes; preferred by CUDA's allocator and copy engines


@dataclass(frozen=True)
class FlatLayout:
    """The layout of named arrays in one flat vector, with each state of the optimizer behind them.

    The parameters of a trainer are one vector: weights, then each state that the optimizer
    declares. Untrained arrays lie last among the weights and have no such state. Gradients are laid
    out like weights, in a vector of their own. Every array starts on a 256-byte boundary. The
    padding between arrays stays zero, since every operation on the whole vector maps zeros to zero,
    and is never counted as a parameter.

    With `channels_last`, filters, the arrays of four axes, are stored as (filter, row, column,
    channel), as a GPU's convolutions read them. Their views always have the axes (filter, channel,
    row, column).
    """

    shapes: Shapes
    dtype: str  # "float32" or "float64"
    channels_last: bool = False
    states: tuple[str, ...] = ()  # one array for each trained weight, such as "momentum"
    untrained: Shapes = ()  # state of the network that no optimizer steps

    @classmethod
    def of(
        cls,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: str,
        channels_last: bool = False,
        states: Sequence[str] = (),
        untrained: Mapping[str, tuple[int, ...]] | None = None,
    ) -> "FlatLayout":
        """Lay out `shapes` in their order, then `untrained` in theirs."""
        trained, rest = (
            tuple((name, tuple(shape)) for name, shape in given.items())
            for given in (shapes, untrained or {})
        )
        return cls(trained, dtype, channels_last, tuple(states), rest)

    @property
    def offsets(self) -> dict[str, int]:
        """First element of each array, in elements."""
        offsets, end = {}, 0
        for name, shape in self._all:
            offsets[name] = end
            end += self._padded_size([(name, shape)])
        return offsets

    @property
    def size(self) -> int:
        """Elements of the vector of weights, or of gradients, padding included."""
        return self._padded_size(self._all)

    @property
    def nbytes(self) -> int:
        """Bytes of the vector of weights, or of gradients, padding included."""
        return self.size * self._itemsize

    @property
    def untrained_extent(self) -> slice:
        """Elements of the untrained arrays, in the vector of weights and in that of gradients."""
        return slice(self._padded_size(self.shapes), self.size)

    @property
    def state_offsets(self) -> dict[str, int]:
        """First byte of each state, behind the weights."""
        step = self._padded_size(self.shapes) * self._itemsize
        return {name: self.nbytes + number * step for number, name in enumerate(self.states)}

    @property
    def parameters_size(self) -> int:
        """Elements of weights and states together, padding included."""
        return self.size + len(self.states) * self._padded_size(self.shapes)

    @property
    def parameters_nbytes(self) -> int:
        """Bytes of weights and states together, padding included."""
        return self.parameters_size * self._itemsize

    @property
    def _all(self) -> Shapes:
        return self.shapes + self.untrained

    @property
    def _itemsize(self) -> int:
        return np.dtype(self.dtype).itemsize

    def _padded_size(self, arrays: Iterable[tuple[str, tuple[int, ...]]]) -> int:
        step = ALIGNMENT // self._itemsize
        return sum(-(-math.prod(shape) // step) * step for _, shape in arrays)

    def views(self, vector: np.ndarray) -> dict[str, np.ndarray]:
        """Return each array as a writable view of a flat vector, dtype (size,), in order."""
        if vector.shape != (self.size,) or vector.dtype != np.dtype(self.dtype):
            raise ValueError(
                f"the vector is {vector.dtype} {vector.shape}, "
                f"the layout needs {self.dtype} ({self.size},)"
            )
        offsets = self.offsets
        return {
            name: self._turned(
                vector[offsets[name] : offsets[name] + math.prod(shape)].reshape(
                    self._stored(shape)
                )
            )
            for name, shape in self._all
        }

    def on(self, buffer: Buffer, offset: int = 0, trained: bool = False) -> dict[str, Any]:
        """Return each array as a view of a buffer, on the host or on a device.

        The vector begins at byte `offset`, a multiple of 256. With `trained` it holds trained
        arrays only, as a state of the optimizer does.
        """
        if offset % ALIGNMENT:
            raise ValueError(f"a vector begins at a multiple of {ALIGNMENT} bytes, not at {offset}")
        offsets = self.offsets
        return {
            name: self._turned(
                buffer.array(
                    self._stored(shape), self.dtype, offset + self._itemsize * offsets[name]
                )
            )
            for name, shape in (self.shapes if trained else self._all)
        }

    def pieces(
        self, buffer: Buffer, part: slice, offset: int = 0, trained: bool = False
    ) -> dict[str, Any]:
        """Return flattened views (n,) of the pieces of arrays that lie in a part of the vector.

        `part` is in elements of the vector, which begins at byte `offset`. With `trained` it holds
        trained arrays only. An array without elements in the part is left out.
        """
        found, offsets = {}, self.offsets
        for name, shape in self.shapes if trained else self._all:
            start = offsets[name]
            begin, end = max(start, part.start), min(start + math.prod(shape), part.stop)
            if begin < end:
                found[name] = buffer.array(
                    (end - begin,), self.dtype, offset + begin * self._itemsize
                )
        return found

    def _is_turned(self, shape: tuple[int, ...]) -> bool:
        return self.channels_last and len(shape) == 4

    def _stored(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Lengths of the axes in the order in which they are stored."""
        return (shape[0], *shape[2:], shape[1]) if self._is_turned(shape) else shape

    def _turned(self, stored: Any) -> Any:
        """Return the array with its axes in the logical order."""
        return stored.transpose(0, 3, 1, 2) if self._is_turned(stored.shape) else stored


@dataclass(frozen=True)
class Vectors:
    """The parameters of a trainer by name, as views of flat vectors on the host or on a device."""

    weights: Mapping[str, Any]
    states: Mapping[str, Mapping[str, Any]]  # by state, then by trained weight
    gradients: Mapping[str, Any]

    @classmethod
    def on(cls, layout: FlatLayout, parameters: Buffer, gradients: Buffer) -> "Vectors":
        """Take weights, then each state, from one buffer, and gradients from another."""
        return cls(
            layout.on(parameters),
            {
                name: layout.on(parameters, offset, trained=True)
                for name, offset in layout.state_offsets.items()
            },
            layout.on(gradients),
        )

    @classmethod
    def within(
        cls, layout: FlatLayout, parameters: Buffer, gradients: Buffer, part: slice
    ) -> "Vectors":
        """Take the flattened pieces of arrays in a part of the flat vectors."""
        return cls(
            layout.pieces(parameters, part),
            {
                name: layout.pieces(parameters, part, offset, trained=True)
                for name, offset in layout.state_offsets.items()
            },
            layout.pieces(gradients, part),
        )
