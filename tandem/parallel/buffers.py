"""Memory that all ranks of a pool see: host buffers, known by number in every process."""

import itertools
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tandem.memory import HostBuffer
from tandem.memory.flat import ALIGNMENT
from tandem.parallel.messages import ArrayLocation


class SharedBuffers:
    """The buffers that a master shares with its workers, who learn of them by messages.

    A buffer that nobody uses any more is dropped in the workers too, with the next message.
    """

    def __init__(self) -> None:
        self._numbers: weakref.WeakKeyDictionary[HostBuffer, int] = weakref.WeakKeyDictionary()
        self._count = itertools.count()
        self._buffers: weakref.WeakValueDictionary[int, HostBuffer] = weakref.WeakValueDictionary()
        self._new: set[int] = set()
        self._dropped: list[int] = []

    def number(self, buffer: HostBuffer) -> int:
        """Number a buffer, and have it sent with the next message if the workers lack it."""
        found = self._numbers.get(buffer)
        if found is None:
            found = self._numbers[buffer] = next(self._count)
            self._buffers[found] = buffer
            self._new.add(found)
            weakref.finalize(buffer, self._drop, found).atexit = False
        return found

    def place(self, buffer: HostBuffer, array: npt.NDArray[Any], offset: int = 0) -> ArrayLocation:
        """Describe an array at the beginning of a buffer, or at a byte of it."""
        return ArrayLocation(self.number(buffer), array.dtype.str, array.shape, offset)

    def array(self, place: ArrayLocation) -> npt.NDArray[Any]:
        """Return an array by its place; it lies there, and is not copied."""
        buffer = self._buffers[place.buffer]
        return buffer.array(place.shape, np.dtype(place.dtype), place.offset)

    def buffer(self, number: int) -> HostBuffer:
        """Return a buffer by its number."""
        return self._buffers[number]

    def changes(self) -> tuple[Mapping[int, HostBuffer], tuple[int, ...]]:
        """Take the buffers that are new since the last call, and the numbers of dropped ones."""
        numbers, self._new = self._new, set()
        new = {n: buffer for n in sorted(numbers) if (buffer := self._buffers.get(n))}
        dropped, self._dropped = tuple(self._dropped), []
        return new, dropped

    def _drop(self, number: int) -> None:
        # Of a buffer that no worker has heard of there is nothing to drop.
        if number in self._new:
            self._new.remove(number)
        else:
            self._dropped.append(number)


class ReceivedBuffers:
    """The buffers of the master, as a worker has them."""

    def __init__(self) -> None:
        self._buffers: dict[int, HostBuffer] = {}

    def add(self, number: int, buffer: HostBuffer) -> None:
        self._buffers[number] = buffer

    def drop(self, number: int) -> None:
        found = self._buffers.pop(number, None)
        if found is None:
            return  # it was dropped before it was sent
        found.close()

    def buffer(self, number: int) -> HostBuffer:
        """Return a buffer by its number."""
        return self._buffers[number]

    def array(self, place: ArrayLocation) -> npt.NDArray[Any]:
        """Return an array by its place; it lies there, and is not copied."""
        buffer = self._buffers[place.buffer]
        return buffer.array(place.shape, np.dtype(place.dtype), place.offset)


class ArrayWriter:
    """Arrays that the workers take over, in one buffer."""

    def __init__(self, buffers: SharedBuffers) -> None:
        self._buffers = buffers
        self._buffer = HostBuffer.create(0, "definitions")
        self._arrays: list[tuple[ArrayLocation, np.ndarray]] = []
        self._end = 0

    def place(self, array: np.ndarray) -> ArrayLocation:
        place = self._buffers.place(self._buffer, array, self._end)
        self._arrays.append((place, array))
        self._end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        return place

    def write(self) -> None:
        """Write the arrays."""
        self._buffer.resize(self._end)
        for place, array in self._arrays:
            self._buffers.array(place)[...] = array
