"""All parameters of a network in one vector, so that an exchange is one operation."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

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
    """

    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    dtype: str

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[int, ...]], dtype: str) -> "FlatLayout":
        """Lay out `shapes` in their order."""
        return cls(tuple((name, tuple(shape)) for name, shape in shapes.items()), dtype)

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
            name: vector[offsets[name] : offsets[name] + int(np.prod(shape))].reshape(shape)
            for name, shape in self.shapes
        }
