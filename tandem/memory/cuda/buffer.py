"""Device memory that other processes may open."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tandem.memory.buffer import Buffer
from tandem.memory.cuda.driver import CudaDriver


@dataclass(frozen=True)
class BufferHandle:
    """A small message by which another process opens a `CudaBuffer`."""

    device: int
    nbytes: int
    process: int  # that made it
    name: str
    data: bytes  # the driver's handle


@dataclass(frozen=True)
class CudaArray:
    """An array in device memory, which PyTorch and others take without a copy.

    It keeps the object `buffer` alive, but not the memory of a closed buffer.
    """

    buffer: "CudaBuffer"
    address: int  # of the first element
    shape: tuple[int, ...]
    dtype: np.dtype
    strides: tuple[int, ...] | None = None  # bytes; None: C order

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self.dtype.itemsize

    def transpose(self, *axes: int) -> "CudaArray":
        """Return the same memory with its axes in another order, as NumPy's method."""
        strides = self.strides or _c_strides(self.shape, self.dtype.itemsize)
        return replace(
            self,
            shape=tuple(self.shape[axis] for axis in axes),
            strides=tuple(strides[axis] for axis in axes),
        )

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.address if self.size else 0, False),
            "version": 3,
            "strides": self.strides,
        }


def _c_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) * itemsize for axis in range(len(shape)))


class CudaBuffer(Buffer):
    """Device memory that other processes may open.

    Made by `create`, or by `open` over one that another process has made. `close` returns memory to
    the device, or unmaps it if another process owns it; arrays over it must not be used afterwards.
    """

    def __init__(
        self,
        driver: CudaDriver,
        address: int,
        nbytes: int,
        name: str,
        device: int,
        release: Callable[[int], None],
    ) -> None:
        self.address, self.name, self.device = address, name, device
        self._driver, self._nbytes = driver, nbytes
        self._release: Callable[[int], None] | None = release

    @property
    def nbytes(self) -> int:
        return self._nbytes

    @classmethod
    def create(cls, driver: CudaDriver, nbytes: int, name: str = "tandem") -> "CudaBuffer":
        """Allocate zeros on the driver's device, or raise InputError if it is full."""
        return cls(driver, driver.allocate(nbytes), nbytes, name, driver.device, driver.free)

    @classmethod
    def open(cls, driver: CudaDriver, handle: BufferHandle) -> "CudaBuffer":
        """Open a buffer of another process, on this device or on one that it can reach.

        Raises
        ------
        InputError
            The system does not permit it, or the owner has ended.
        ValueError
            This process made the buffer: CUDA opens a handle in other processes only.
        """
        if handle.process == driver.process:
            raise ValueError(
                f"the buffer {handle.name!r} was made by this process, which can't open it by its "
                "handle; use the object itself"
            )
        address = driver.open(handle.data)
        return cls(driver, address, handle.nbytes, handle.name, handle.device, driver.unmap)

    def handle(self) -> BufferHandle:
        """Return a message by which another process opens the buffer.

        Raises
        ------
        InputError
            The system does not permit it.
        ValueError
            The buffer is closed.
        """
        self._check_open()
        data = self._driver.export(self.address)
        return BufferHandle(self.device, self.nbytes, self._driver.process, self.name, data)

    def _view(self, shape: tuple[int, ...], dtype: np.dtype, offset: int) -> CudaArray:
        return CudaArray(self, self.address + offset, shape, dtype)

    def close(self) -> None:
        release, self._release = self._release, None
        if release is not None:
            release(self.address)

    def _check_open(self) -> None:
        if self._release is None:
            raise ValueError(f"the buffer {self.name!r} is closed")
