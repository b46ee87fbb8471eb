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
    """A small message by which another process opens a `CudaBuffer`.

    Attributes
    ----------
    device : int
        Number of the device that holds the memory.
    nbytes : int
        Size of the buffer.
    process : int
        Number of the process that made it.
    name : str
        For messages.
    data : bytes
        The driver's handle.
    """

    device: int
    nbytes: int
    process: int
    name: str
    data: bytes


@dataclass(frozen=True)
class CudaArray:
    """An array in device memory, which PyTorch and others take without a copy.

    Attributes
    ----------
    buffer : CudaBuffer
        The memory. The array keeps the object alive, but not the memory of a closed buffer.
    address : int
        Of the first element.
    shape : tuple of int
    dtype : numpy dtype
    strides : tuple of int or None
        Bytes from one element to the next along each axis; None in C order.
    """

    buffer: "CudaBuffer"
    address: int
    shape: tuple[int, ...]
    dtype: np.dtype
    strides: tuple[int, ...] | None = None

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
        """Allocate a buffer of zeros on the driver's device.

        Parameters
        ----------
        driver : CudaDriver
            The device.
        nbytes : int
            Size in bytes.
        name : str
            For messages.

        Raises
        ------
        InputError
            The device has too little memory.
        """
        return cls(driver, driver.allocate(nbytes), nbytes, name, driver.device, driver.free)

    @classmethod
    def open(cls, driver: CudaDriver, handle: BufferHandle) -> "CudaBuffer":
        """Open a buffer of another process, on this device or on one that it can reach.

        Parameters
        ----------
        driver : CudaDriver
            The device that will use the memory.
        handle : BufferHandle
            Of a buffer that its owner has not closed.

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
