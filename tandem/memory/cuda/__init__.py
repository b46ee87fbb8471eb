"""CUDA memory that two processes see, and the streams and events that order work on it.

PyCUDA is imported when a `CudaDriver` is made, so a machine without a GPU can import this package.
All work goes through the driver, which tests replace by one that computes on the host.

Memory belongs to the process that allocates it. Another process opens it by a `BufferHandle`, a few
bytes that may go through a pipe. The process that opened it closes it first and reports that to the
owner (by a barrier, or by ending), and then the owner closes. A process that ends, for any reason,
needs no closing: the driver reclaims what it had allocated and opened. The death of an owner takes
the memory along, and work of others on it fails.

Nothing here waits for a device unless its docstring says so.
"""

from tandem.memory.cuda.buffer import BufferHandle, CudaArray, CudaBuffer
from tandem.memory.cuda.driver import (
    INSTALL,
    CudaDriver,
    Event,
    Stream,
    at_thread_end,
    gpu_identity,
    import_pycuda,
    sharing_refused,
)
from tandem.memory.cuda.slots import CudaSlot, CudaSlots, SlotHandle, SlotUploader

__all__ = [
    "INSTALL",
    "BufferHandle",
    "CudaArray",
    "CudaBuffer",
    "CudaDriver",
    "CudaSlot",
    "CudaSlots",
    "Event",
    "SlotHandle",
    "SlotUploader",
    "Stream",
    "at_thread_end",
    "gpu_identity",
    "import_pycuda",
    "sharing_refused",
]
