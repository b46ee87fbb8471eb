"""Memory that several processes see: the only way in which pixels and parameters cross.

A `Buffer` is a run of bytes with no meaning of its own. What lies in it is said by a layout
(`tandem.memory.slot.SlotLayout`, `tandem.memory.flat.FlatLayout`) that every process computes
alike, so no addresses travel.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from tandem.memory.host import HostBuffer
from tandem.memory.slot import HostSlots, Slot, SlotLayout

__all__ = ["Buffer", "HostBuffer", "HostSlots", "Slot", "SlotLayout"]


class Buffer(Protocol):
    """Bytes that several processes see, on the host or on a device.

    How it travels. A buffer is an argument of a `multiprocessing` process that is being started
    with the "spawn" method, and arrives there as the same memory, mapped once more. Pickling it at
    any other time raises TypeError. What is pickled is a handle, never the contents: on the host
    a file descriptor, on a CUDA device the IPC handle of the allocation, which can be opened in any
    process but the one that made it, on a device with the same number.

    Closing. On the host the order is free: memory lasts until nobody maps it and nobody holds its
    descriptor. CUDA memory belongs to the process that allocated it, and is gone with it; so the
    others close first, then meet, then the owner closes. Code that is to run on both keeps that
    order. A process that is killed needs no closing: the system takes its mappings back.

    Ordering. A buffer doesn't synchronise. Whoever writes sends a message, or meets the others,
    once the write has completed; on a device, after an event that follows it.
    """

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        ...

    def array(self, shape: int | Sequence[int], dtype: Any, offset: int = 0) -> Any:
        """A writable view, in C order, that starts `offset` bytes into the buffer.

        On the host a NumPy array; on a device an object with ``__cuda_array_interface__``.
        New memory holds zeros.
        """
        ...

    def close(self) -> None:
        """Give up this process's share. May be called twice."""
        ...
