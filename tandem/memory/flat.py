"""All parameters of a network in one vector, so that an exchange is one operation."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tandem.memory import Buffer

ALIGNMENT = 256  # bytes; what CUDA's allocator and copy engines prefer


@dataclass(frozen=True)
class FlatLayout:
    """Where each named array lies in one flat vector.

    Every array starts on a 256-byte boundary. The padding between arrays stays zero, since every
    operation on the whole vector maps zeros to zero, and is never counted as a parameter.

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
    """

    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    dtype: str
    channels_last: bool = False

    @classmethod
    def of(
        cls, shapes: Mapping[str, tuple[int, ...]], dtype: str, channels_last: bool = False
    ) -> "FlatLayout":
        """Lay out `shapes` in their order."""
        return cls(
            tuple((name, tuple(shape)) for name, shape in shapes.items()), dtype, channels_last
        )

    @property
    def _step(self) -> int:
        return ALIGNMENT // np.dtype(self.dtype).itemsize

    @property
    def offsets(self) -> dict[str, int]:
        """First element of each array, in elements."""
        offsets, end = {}, 0
        for name, shape in self.shapes:
            offsets[name] = end
            end += -(-int(np.prod(shape)) // self._step) * self._step
        return offsets

    @property
    def size(self) -> int:
        """Elements of the vector, padding included."""
        return sum(-(-int(np.prod(s)) // self._step) * self._step for _, s in self.shapes)

    @property
    def nbytes(self) -> int:
        """Bytes of the vector, padding included."""
        return self.size * np.dtype(self.dtype).itemsize

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
            for name, shape in self.shapes
        }

    def on(self, buffer: "Buffer", offset: int = 0) -> dict[str, Any]:
        """Each array as a view of a buffer, on the host or on a device.

        Parameters
        ----------
        buffer : Buffer
            Where the vector lies.
        offset : int
            Byte at which it begins, a multiple of 256.

        Returns
        -------
        dict of str to array
            Of the kind that the buffer gives, in order.
        """
        if offset % ALIGNMENT:
            raise ValueError(f"a vector begins at a multiple of {ALIGNMENT} bytes, not at {offset}")
        itemsize = np.dtype(self.dtype).itemsize
        starts = {name: offset + itemsize * start for name, start in self.offsets.items()}
        return {
            name: self._turned(buffer.array(self._stored(shape), self.dtype, starts[name]))
            for name, shape in self.shapes
        }

    def pieces(self, buffer: "Buffer", part: slice, offset: int = 0) -> dict[str, Any]:
        """What lies in a part of the vector, array by array, flattened, as views of a buffer.

        Parameters
        ----------
        buffer : Buffer
            Where the vector lies.
        part : slice
            Elements of the vector. An array may lie in it as a whole, cut, or not at all.
        offset : int
            Byte at which the vector begins.

        Returns
        -------
        dict of str to array (n,)
            In order; an array of which nothing lies there is left out.
        """
        itemsize, found = np.dtype(self.dtype).itemsize, {}
        for (name, shape), start in zip(self.shapes, self.offsets.values(), strict=True):
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
    weights, momenta, gradients : mapping of str to array
        NumPy arrays, or a device's.
    """

    weights: Mapping[str, Any]
    momenta: Mapping[str, Any]
    gradients: Mapping[str, Any]

    @classmethod
    def on(cls, layout: FlatLayout, parameters: "Buffer", gradients: "Buffer") -> "Vectors":
        """All weights, then all momenta, in one buffer, and all gradients in another."""
        return cls(
            layout.on(parameters), layout.on(parameters, layout.nbytes), layout.on(gradients)
        )

    @classmethod
    def within(
        cls, layout: FlatLayout, parameters: "Buffer", gradients: "Buffer", part: slice
    ) -> "Vectors":
        """What of each parameter lies in a part of the flat vectors, flattened."""
        return cls(
            layout.pieces(parameters, part),
            layout.pieces(parameters, part, layout.nbytes),
            layout.pieces(gradients, part),
        )
