"""The GPU of a rank: the stream on which all its work is, and how arrays go there."""

import logging
import math
import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tandem.distributed.gpu_kernel import Kernel, compile_average
from tandem.errors import InputError
from tandem.memory import HostBuffer
from tandem.memory.cuda import CudaArray, CudaDriver, Stream
from tandem.parallel.selection import Selection

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Gpu:
    """A GPU by its number, which can be sent to the process that will use it."""

    number: int

    @property
    def torch_device(self) -> str:
        """The GPU by PyTorch's name."""
        return f"cuda:{self.number}"

    def driver(self) -> CudaDriver:
        """Begin to use the GPU in this process."""
        return CudaDriver(self.number)

    def compile_average(self, driver: CudaDriver, dtype: np.dtype) -> Kernel:
        """Compile the kernel that averages vectors; InputError where that is not possible."""
        return compile_average(driver, dtype)

    def memory(self, array: CudaArray) -> Any:
        """Return an array as `tandem.backend.device_shared` takes it."""
        return array


def gpu_of(device: str) -> Gpu | None:
    """Return the GPU of a device's name; None for the CPU."""
    return None if device == "cpu" else Gpu(int(device.removeprefix("cuda:")))


class RankGpu:
    """A rank's GPU, in the rank's process, for the thread that makes it.

    Between `enter` and `leave` all work of that thread's PyTorch is on one stream. Rows of inputs
    go there from page-locked memory, and the host does not wait for their copies, but `wait` comes
    before anybody is told that a call has been done.
    """

    def __init__(self, gpu: Gpu) -> None:
        from tandem.backend import deterministic, use_device

        deterministic(False)
        self.gpu, self.device = gpu, gpu.torch_device
        # First the context that PyTorch is to share.
        self.driver = gpu.driver()
        use_device(self.device)
        self.stream: Stream = self.driver.stream()
        self._context: AbstractContextManager | None = None
        self._areas: list[_Area] = []
        self._process = os.getpid()
        self._locked: weakref.WeakKeyDictionary[HostBuffer, tuple[int, Callable[[], Any]]]
        self._locked = weakref.WeakKeyDictionary()

    def enter(self) -> None:
        """Put the work of this thread's PyTorch on the stream."""
        from tandem.backend import on_stream

        if self._context is None:
            self._context = on_stream(self.device, self.stream.handle)
            self._context.__enter__()

    def leave(self) -> None:
        """Wait for all work, and return to the stream of before; may be called twice."""
        context, self._context = self._context, None
        if context is not None:
            self.wait()
            context.__exit__(None, None, None)

    def wait(self) -> None:
        """Wait for all work so far."""
        self.stream.synchronize()

    # Inputs

    def lock(self, buffer: HostBuffer) -> None:
        """Page-lock a buffer, all of it as it is now, until it is dropped or has grown.

        Where the system refuses, the host will wait for copies from there.
        """
        size = buffer.nbytes
        known, unlock = self._locked.get(buffer, (0, None))
        if size <= known:
            return
        if unlock is not None:
            unlock()
        pages = buffer.array(size, np.uint8)
        try:
            self.driver.lock_pages(pages)
        except InputError as error:
            log.warning("copies to %s are slower: %s", self.device, error)
            self._locked[buffer] = size, _nothing
            return
        finalizer = weakref.finalize(buffer, self._unlock, pages)
        finalizer.atexit = False
        self._locked[buffer] = size, finalizer

    def upload(self, position: int, array: npt.NDArray[Any], dtype: npt.DTypeLike) -> Any:
        """Copy an input to the GPU, as a tensor of a dtype."""
        return self.upload_rows(position, array[None], Selection(1), (0, 1), dtype)[0]

    def upload_rows(
        self,
        position: int,
        array: npt.NDArray[Any],
        rows: Selection,
        part: tuple[int, int],
        dtype: npt.DTypeLike,
    ) -> Any:
        """Copy part of the rows of a function's input to the GPU, as a tensor of a dtype.

        Rows that lie side by side are read in place, others are gathered in page-locked memory,
        which is one for all inputs of this `position`.
        """
        from tandem.backend import upload

        selected, kind = rows.part(*part), np.dtype(dtype)
        if isinstance(selected, slice) and array.dtype == kind:
            found = array[selected]
            if found.flags.c_contiguous:
                return upload(found, self.device)
        while len(self._areas) <= position:
            self._areas.append(_Area(self.driver))
        area = self._areas[position]
        gathered = area.array((part[1] - part[0], *array.shape[1:]), kind)
        if array.dtype == kind:
            rows.take(array, *part, out=gathered)
        else:
            np.copyto(gathered, array[selected], casting="unsafe")
        tensor = upload(gathered, self.device)
        area.read.record(self.stream)
        return tensor

    def download(self, values: Sequence[Any]) -> list[Any]:
        """Return tensors as arrays in page-locked memory, and other values as they are."""
        from tandem.backend import download

        return download(values)

    def _unlock(self, pages: npt.NDArray[np.uint8]) -> None:
        # The last reference may go in any thread, or in a child of the user's own.
        if os.getpid() == self._process:
            with self.driver.borrowed():
                self.wait()
                self.driver.unlock_pages(pages)


class _Area:
    """Page-locked memory in which rows are gathered; `read` follows the copy of the last ones."""

    def __init__(self, driver: CudaDriver) -> None:
        self._driver, self.read = driver, driver.event()
        self._memory = np.empty(0, np.uint8)

    def array(self, shape: tuple[int, ...], dtype: np.dtype) -> npt.NDArray[Any]:
        """Return an array of any values, when the last one has been copied."""
        self.read.synchronize()
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes > self._memory.nbytes:
            self._memory = self._driver.page_locked(nbytes)
        return self._memory[:nbytes].view(dtype).reshape(shape)


def _nothing() -> None: ...
