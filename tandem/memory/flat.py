"""All parameters of a network in one vector, so that an exchange is one operation."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tandem.memory import Buffer

ALIGNMENT = 256  # bytes; what CUDA's allocator and copy engines prefer


@dataclass(frozen=True)
class FlatLayout:
    """Where each named array lies in one flat vector, and each state of the optimizer behind it.

    The parameters of a trainer are one vector: weights, then each state that the optimizer
    declares. Arrays that are not trained lie last among the weights and have no such state.
    Gradients are laid out as weights are, in a vector of their own. Every array starts on a
    256-byte boundary. The padding between arrays stays zero, since every operation on the whole
    vector maps zeros to zero, and is never counted as a parameter.

    Parameters
    ----------
    shapes : tuple of (name, shape)
        In the order in which the arrays lie.
    dtype : str
        Of every array, "float32" or "float64".
    channels_last : bool
        Whether filters, the arrays of four axes, lie as (filter, row, column, channel), which is
        how a GPU's convolutions read them. Their views have the axes (filter, channel, row,
        column) either way.
    states : tuple of str
        Names of the optimizer's states, such as "momentum": one array for each trained weight.
    untrained : tuple of (name, shape)
        State of the network that no optimizer steps, such as running averages.
    """

    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    dtype: str
    channels_last: bool = False
    states: tuple[str, ...] = ()
    untrained: tuple[tuple[str, tuple[int, ...]], ...] = ()

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
    def _step(self) -> int:
        return ALIGNMENT // np.dtype(self.dtype).itemsize

    @property
    def offsets(self) -> dict[str, int]:
        """First element of each array, in elements."""
        offsets, end = {}, 0
        for name, shape in self._all:
            offsets[name] = end
            end += self._room(shape)
        return offsets

    @property
    def size(self) -> int:
        """Elements of the vector of weights, or of gradients, padding included."""
        return sum(self._room(shape) for _, shape in self._all)

    @property
    def nbytes(self) -> int:
        """Bytes of the vector of weights, or of gradients, padding included."""
        return self.size * np.dtype(self.dtype).itemsize

    @property
    def state_offsets(self) -> dict[str, int]:
        """First byte of each state, behind the weights."""
        itemsize, trained = np.dtype(self.dtype).itemsize, self._trained_size
        return {
            name: self.nbytes + number * trained * itemsize
            for number, name in enumerate(self.states)
        }

    @property
    def parameters_size(self) -> int:
        """Elements of weights and states together, padding included."""
        return self.size + len(self.states) * self._trained_size

    @property
    def parameters_nbytes(self) -> int:
        """Bytes of weights and states together, padding included."""
        return self.parameters_size * np.dtype(self.dtype).itemsize

    @property
    def _all(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        return self.shapes + self.untrained

    @property
    def _trained_size(self) -> int:
        return sum(self._room(shape) for _, shape in self.shapes)

    def _room(self, shape: tuple[int, ...]) -> int:
        """Elements that an array takes, padding included."""
        return -(-int(np.prod(shape)) // self._step) * self._step

    def views(self, vector: np.ndarray) -> dict[str, np.ndarray]:
        """Each array as a view of `vector`.

        Parameters
        ----------
        vector : dtype (size,)
            The flat vector.

        Returns
        -------
        dict of str to ndarray
            Writable views, in order.
        """
        if vector.shape != (self.size,) or vector.dtype != np.dtype(self.dtype):
            raise ValueError(
                f"the vector is {vector.dtype} {vector.shape}, "
                f"the layout needs {self.dtype} ({self.size},)"
            )
        offsets = self.offsets
        return {
            name: self._turned(
                vector[offsets[name] : offsets[name] + int(np.prod(shape))].reshape(
                    self._stored(shape)
                )
            )
            for name, shape in self._all
        }

    def on(self, buffer: "Buffer", offset: int = 0, trained: bool = False) -> dict[str, Any]:
        """Each array as a view of a buffer, on the host or on a device.

        Parameters
        ----------
        buffer : Buffer
            Where the vector lies.
        offset : int
            Byte at which it begins, a multiple of 256.
        trained : bool
            Whether only what is trained lies there, as in a state of the optimizer.

        Returns
        -------
        dict of str to array
            Of the kind that the buffer gives, in order.
        """
        if offset % ALIGNMENT:
            raise ValueError(f"a vector begins at a multiple of {ALIGNMENT} bytes, not at {offset}")
        itemsize, offsets = np.dtype(self.dtype).itemsize, self.offsets
        return {
            name: self._turned(
                buffer.array(self._stored(shape), self.dtype, offset + itemsize * offsets[name])
            )
            for name, shape in (self.shapes if trained else self._all)
        }

    def pieces(
        self, buffer: "Buffer", part: slice, offset: int = 0, trained: bool = False
    ) -> dict[str, Any]:
        """Each array's elements within a part of the vector, flattened, as views of a buffer.

        Parameters
        ----------
        buffer : Buffer
            Where the vector lies.
        part : slice
            Elements of the vector. An array may lie in it as a whole, cut, or not at all.
        offset : int
            Byte at which the vector begins.
        trained : bool
            Whether only what is trained lies there, as in a state of the optimizer.

        Returns
        -------
        dict of str to array (n,)
            In order; an array of which nothing lies there is left out.
        """
        itemsize, found = np.dtype(self.dtype).itemsize, {}
        offsets = self.offsets
        for name, shape in self.shapes if trained else self._all:
            start = offsets[name]
            begin, end = max(start, part.start), min(start + math.prod(shape), part.stop)
            if begin < end:
                found[name] = buffer.array((end - begin,), self.dtype, offset + begin * itemsize)
        return found

    def _is_turned(self, shape: tuple[int, ...]) -> bool:
        return self.channels_last and len(shape) == 4

    def _stored(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Lengths of the axes in the order in which they lie."""
        return (shape[0], *shape[2:], shape[1]) if self._is_turned(shape) else shape

    def _turned(self, stored: Any) -> Any:
        """The array with its axes in the logical order."""
        return stored.transpose(0, 3, 1, 2) if self._is_turned(stored.shape) else stored


@dataclass(frozen=True)
class Vectors:
    """The parameters of a trainer by name, as views of flat vectors.

    Attributes
    ----------
    weights, gradients : mapping of str to array
        NumPy arrays, or a device's.
    states : mapping of str to mapping of str to array
        For each state of the optimizer, one array for each trained weight.
    """

    weights: Mapping[str, Any]
    states: Mapping[str, Mapping[str, Any]]
    gradients: Mapping[str, Any]

    @classmethod
    def on(cls, layout: FlatLayout, parameters: "Buffer", gradients: "Buffer") -> "Vectors":
        """All weights, then each state, in one buffer, and all gradients in another."""
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
        cls, layout: FlatLayout, parameters: "Buffer", gradients: "Buffer", part: slice
    ) -> "Vectors":
        """Each array's elements within a part of the flat vectors, flattened."""
        return cls(
            layout.pieces(parameters, part),
            {
                name: layout.pieces(parameters, part, offset, trained=True)
                for name, offset in layout.state_offsets.items()
            },
            layout.pieces(gradients, part),
        )
