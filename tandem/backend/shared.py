"""Shared variables whose values stay on the device, at an address that never changes."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from pytensor.graph.basic import Variable
from pytensor.link.basic import Container
from pytensor.tensor.sharedvar import TensorSharedVariable
from pytensor.tensor.type import TensorType

from tandem.backend.lowering.registry import TORCH_DTYPES
from tandem.backend.runtime import as_device


class DeviceContainer(Container):
    """The tensor of a variable on the device, into which new values are written."""

    def __get__(self) -> Any:
        return self.storage[0]

    def __set__(self, value: Any) -> None:
        if value is not self.storage[0]:
            write(self.storage[0], value, self.type, self.name)

    def __deepcopy__(self, memo: dict[int, Any]) -> "DeviceContainer":
        """Copy the value into memory of its own."""
        buffer = self.storage[0]
        if id(buffer) not in memo:
            memo[id(buffer)] = buffer.clone()
        storage = copy.deepcopy(self.storage, memo)
        return type(self)(copy.deepcopy(self.type, memo), storage, name=self.name)

    data = property(__get__, __set__)
    value = property(__get__, __set__)


def write(buffer: torch.Tensor, value: Any, kind: TensorType, name: str | None) -> None:
    """Copy a value into a tensor on the device, or raise TypeError if shape or dtype do not fit."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    label = name or "a device shared variable"
    try:
        array = kind.filter(value)
    except TypeError as error:
        shape, dtype = np.shape(value), getattr(value, "dtype", type(value).__name__)
        raise TypeError(
            f"{label} holds {kind.dtype} of shape {kind.shape}; got {dtype} of shape {shape}: "
            f"{error}"
        ) from error
    on_host = buffer.device.type == "cpu"
    if on_host and np.may_share_memory(array, buffer.numpy()):
        array = array.copy()
    if array.ndim or on_host:
        buffer.copy_(tensor_over(array))
    else:
        # A fill, unlike a copy from the host, makes nothing wait.
        buffer.fill_(array.item())


class _WritableView:
    """A read-only array that claims to be writable, for a library that only reads it."""

    def __init__(self, array: np.ndarray) -> None:
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface
        self.array = array


def tensor_over(array: np.ndarray) -> torch.Tensor:
    """Return a host tensor over an array's memory, or over a copy if PyTorch has no such layout.

    The tensor must not be written: the array may be read-only, which PyTorch cannot express (and
    about which it would warn).
    """
    if not array.flags.writeable:
        array = np.asarray(_WritableView(array))
    try:
        return torch.from_numpy(array)
    except ValueError:  # of a negative stride, or another byte order
        native = array.dtype.newbyteorder("=")
        return torch.from_numpy(np.array(array, dtype=native, order="C"))


class DeviceSharedVariable(TensorSharedVariable):
    """A shared variable that lives on a device, in memory of its own or in a part of a buffer.

    Functions of a `device_mode` read it without a copy and update it in place. Create one with
    `device_shared`.
    """

    writes = 0  # how often `set_value` or `zero` has written it

    @property
    def buffer(self) -> torch.Tensor:
        """The tensor that holds the value, at a fixed address."""
        return self.container.storage[0]

    def get_value(self, borrow: bool = False, return_internal_type: bool = False) -> Any:
        """Return the value as a NumPy array.

        Parameters
        ----------
        borrow : bool
            Permit an array that shares the variable's memory, as it does on a CPU.
        return_internal_type : bool
            Return the tensor on the device; a copy of it, unless `borrow`.
        """
        if return_internal_type:
            return self.buffer if borrow else self.buffer.clone()
        if self.buffer.device.type != "cpu":
            return self.buffer.cpu().numpy()
        return self.buffer.numpy() if borrow else self.buffer.clone().numpy()

    def read_later(self) -> Callable[[], np.ndarray]:
        """Copy the value that all work so far leaves; the result waits for it and returns it."""
        if self.buffer.device.type == "cpu":
            value = self.get_value()
            return lambda: value
        copy = torch.empty_like(self.buffer, device="cpu", pin_memory=True)
        copy.copy_(self.buffer, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()

        def read() -> np.ndarray:
            copied.synchronize()
            return copy.numpy()

        return read

    def set_value(self, new_value: ArrayLike | torch.Tensor, borrow: bool = False) -> None:
        """Copy a value into the variable's memory, whose address is fixed; `borrow` has no effect.

        Raises
        ------
        TypeError
            Shape or dtype do not fit; the value is then unchanged.
        """
        write(self.buffer, new_value, self.type, self.name)
        self.writes += 1

    def zero(self, borrow: bool = False) -> None:
        """Write zeros into the variable's memory."""
        self.writes += 1
        self.buffer.zero_()


def device_shared(
    value: ArrayLike | torch.Tensor | None,
    name: str | None = None,
    device: str | torch.device = "cpu",
    memory: Any = None,
) -> DeviceSharedVariable:
    """Create a shared variable that lives on a device.

    Parameters
    ----------
    value : array_like, Tensor or None
        The first value; it fixes the variable's dtype and shape. With None, the value is what
        `memory` holds.
    device : str or torch.device
        "cpu", or a CUDA device as "cuda:0".
    memory : ndarray, Tensor, or object with ``__cuda_array_interface__``, optional
        The variable's memory: on a CPU, a NumPy array, which may be a view into memory shared with
        other processes; on a CUDA device, an object that exposes memory there; or a tensor on
        `device`. Several variables may lie in parts of one block. By default memory is allocated.

    Raises
    ------
    InputError
        The device does not exist.
    TypeError
        `value` and `memory` differ in shape or dtype, or `memory` cannot be used in place.
    """
    target = as_device(device)
    if memory is None:
        if value is None:
            raise TypeError("device_shared needs a value, or memory that holds one")
        buffer = _allocate(value, target)
    else:
        buffer = _wrap(memory, target)
    kind = TensorType(str(buffer.dtype).removeprefix("torch."), shape=tuple(buffer.shape))
    if value is not None:
        _check_same(value, buffer, name)
        write(buffer, value, kind, name)
    container = DeviceContainer(kind, storage=[buffer], name=name)
    # With a container, PyTensor requires None as `strict`.
    absent: Any = None
    return DeviceSharedVariable(
        type=kind, value=None, strict=absent, container=container, name=name
    )


def _allocate(value: ArrayLike | torch.Tensor, device: torch.device) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device=device)
    array = np.asarray(value)
    if array.dtype.name not in TORCH_DTYPES:
        raise TypeError(f"a device shared variable cannot hold dtype {array.dtype}")
    return torch.empty(array.shape, dtype=TORCH_DTYPES[array.dtype.name], device=device)


def _wrap(memory: Any, device: torch.device) -> torch.Tensor:
    """Return a tensor over `memory` with a storage of its own.

    torch.compile treats tensors of one storage as views of each other, but our variables lie side
    by side in a block.
    """
    if isinstance(memory, torch.Tensor):
        if memory.device != device:
            raise TypeError(f"memory is on {memory.device}, the variable must be on {device}")
        return torch.from_dlpack(memory.detach())
    if device.type != "cpu":
        if not hasattr(memory, "__cuda_array_interface__"):
            raise TypeError(f"memory of a variable on {device} must be on {device}, not the host")
        return torch.as_tensor(memory, device=device)
    if not isinstance(memory, np.ndarray):
        raise TypeError(f"memory of a variable on the CPU can't be a {type(memory).__name__}")
    if not memory.flags.writeable:
        raise TypeError("memory of a device shared variable must be writable")
    if memory.dtype.name not in TORCH_DTYPES or not memory.dtype.isnative:
        raise TypeError(f"memory of dtype {memory.dtype} cannot be used in place")
    if any(stride < 0 or stride % memory.itemsize for stride in memory.strides):
        raise TypeError(f"memory with strides {memory.strides} cannot be used in place")
    return torch.from_numpy(memory)


def _check_same(value: ArrayLike | torch.Tensor, buffer: torch.Tensor, name: str | None) -> None:
    """Raise TypeError unless a value has the shape and dtype of its memory."""
    dtype = getattr(value, "dtype", None)
    dtype_name = None if dtype is None else str(dtype).removeprefix("torch.")
    if np.shape(value) != tuple(buffer.shape) or dtype_name not in (
        None,
        str(buffer.dtype).removeprefix("torch."),
    ):
        raise TypeError(
            f"{name or 'value'} is {dtype_name or type(value).__name__} of shape "
            f"{np.shape(value)}; its memory is {buffer.dtype} of shape {tuple(buffer.shape)}"
        )


def is_on_device(variable: Variable, storage: list[Any]) -> bool:
    """Return whether an input of a function lives on the device: its storage holds a tensor."""
    return isinstance(variable.type, TensorType) and isinstance(storage[0], torch.Tensor)
