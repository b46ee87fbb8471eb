"""The interface of memory that several processes see."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt


class Buffer(ABC):
    """Bytes that several processes see, on the host or on a device; `name` is for messages.

    Transfer. A buffer is made in one process and opened in others, as the same memory mapped once
    more; its contents are never pickled. On the host a file descriptor travels, as an argument of a
    `multiprocessing` process that is being started with the "spawn" method; on a CUDA device the
    IPC handle of the allocation, which any process but its maker can open, on a device with the
    same number.

    Closing. On the host the order is free: memory lasts until no process maps it or holds its
    descriptor. CUDA memory belongs to the process that allocated it, and ends with it; so the
    others close first, then all pass a barrier, then the owner closes. Code that runs on both keeps
    that order. A process that is killed needs no closing: the system removes its mappings.

    Ordering. A buffer doesn't synchronise. A writer sends a message, or passes a barrier, once the
    write has completed; on a device, after an event that follows it.
    """

    name: str

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Size in bytes."""

    def array(self, shape: int | Sequence[int], dtype: npt.DTypeLike, offset: int = 0) -> Any:
        """Return a writable view of the memory, in C order. New memory holds zeros.

        On a device it is an object with ``__cuda_array_interface__``. `offset` is in bytes from the
        start of the buffer, which lies on a boundary of at least 256 bytes.

        Raises
        ------
        ValueError
            The array would reach past the buffer's end, or the buffer is closed.
        """
        self._check_open()
        kind = np.dtype(dtype)
        lengths = (shape,) if isinstance(shape, int) else tuple(shape)
        end = offset + math.prod(lengths) * kind.itemsize
        if offset < 0 or not self._reaches(end):
            raise ValueError(
                f"an array of {kind} {lengths} at byte {offset} of {self.name!r} ends at byte "
                f"{end}, and the buffer has {self.nbytes}"
            )
        return self._view(lengths, kind, offset)

    def _reaches(self, end: int) -> bool:
        """Return whether the buffer has so many bytes."""
        return end <= self.nbytes

    @abstractmethod
    def close(self) -> None:
        """Release this process's share of the memory; may be called twice."""

    @abstractmethod
    def _view(self, shape: tuple[int, ...], dtype: np.dtype, offset: int) -> Any:
        """Return an array that is known to fit."""

    @abstractmethod
    def _check_open(self) -> None:
        """Raise ValueError if the buffer is closed."""
