"""Arrays in memory that all processes see: inputs of data-parallel functions."""

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import context
from typing import Any

import numpy as np
import numpy.typing as npt
from pytensor import config
from pytensor.graph.basic import Variable

from tandem.memory import HostBuffer
from tandem.validation import unmasked


class Data:
    """An array of fixed dtype and number of dimensions, in host memory that workers see.

    It is indexed, read and written as an array is, and `numpy.asarray` of it is not a copy. Its
    memory grows when a value needs it, never shrinks but by `free_memory`, and is released with the
    last reference to it, in whichever process.

    A `Data` needs no pool: it may be made before `fork`. It is the same memory in a process of the
    user's that gets it as an argument (`multiprocessing` with the "spawn" method), or is forked.
    Values that one process writes are seen by the others. A new shape or more memory is seen only
    in the process that sets it.

    Made by `data`.

    Parameters
    ----------
    dtype : dtype
        Of the array: numbers or booleans.
    ndim : int
        Its number of dimensions. All lengths are 0 at first.
    minibatch : bool
        Whether it holds just the rows that a call works on, so that `batch` does not apply to it.
    name : str, optional
        For messages.

    Raises
    ------
    TypeError
        The dtype is another.
    ValueError
        `ndim` is negative.
    """

    def __init__(
        self, dtype: npt.DTypeLike, ndim: int, minibatch: bool = False, name: str | None = None
    ) -> None:
        self._dtype = np.dtype(dtype).newbyteorder("=")
        if self._dtype.kind not in "biufc":
            raise TypeError(f"an input is of numbers or booleans, not of {self._dtype}")
        self._ndim = operator.index(ndim)
        if self._ndim < 0:
            raise ValueError(f"an array can't have {ndim} dimensions")
        self._minibatch, self._name = bool(minibatch), name
        self._shape = (0,) * self._ndim
        self._buffer: HostBuffer | None = self._new_buffer()
        self._array: npt.NDArray[Any] | None = None  # the view of the memory, once it is needed

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the array."""
        return self._dtype

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return self._ndim

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths of the array's axes."""
        return self._shape

    @property
    def size(self) -> int:
        """Number of items of the array."""
        return math.prod(self._shape)

    @property
    def alloc_size(self) -> int:
        """Number of items for which there is memory."""
        return 0 if self._buffer is None else self._buffer.nbytes // self._dtype.itemsize

    @property
    def minibatch(self) -> bool:
        """Return whether it holds just the rows that a call works on."""
        return self._minibatch

    @property
    def name(self) -> str | None:
        """Name for messages."""
        return self._name

    @property
    def data(self) -> npt.NDArray[Any]:
        """The array, as a view of the memory. One taken earlier stays valid, in its old shape."""
        if self._array is None:
            self._array = self.buffer.array(self._shape, self._dtype)
        return self._array

    @property
    def buffer(self) -> HostBuffer:
        """The memory; another object after `free_memory`."""
        if self._buffer is None:
            self._buffer = self._new_buffer()
        return self._buffer

    @property
    def array_place(self) -> tuple[int, tuple[int, ...], str]:
        """Offset in `buffer` in bytes, shape and dtype of the array."""
        return 0, self._shape, self._dtype.name

    def set_value(self, input_data: Any, force_cast: bool = False, oversize: float = 1) -> None:
        """Copy a value into the array, which takes its shape.

        Parameters
        ----------
        input_data : array_like
            As many dimensions as `ndim`; `Data` too.
        force_cast : bool
            Whether it is cast to `dtype` also where that may lose digits.
        oversize : float
            From 1 to 2: for how many times the value's size memory is allocated, if there is not
            enough.

        Raises
        ------
        InputError
            The system has too little memory.
        TypeError
            The value can't be cast safely, or has another number of dimensions.
        ValueError
            `oversize` is out of range.
        """
        value = self.condition_data(input_data, force_cast)
        self._reshape(value.shape, oversize)
        self[...] = value

    def set_length(self, length: int, oversize: float = 1) -> None:
        """Change the length of the first axis, as `set_shape` does it."""
        if not self._ndim:
            raise ValueError("an array without dimensions has no length")
        self._reshape((length, *self._shape[1:]), oversize)

    def set_shape(self, shape: Sequence[int], oversize: float = 1) -> None:
        """Change the shape; items keep their place in memory, in C order.

        So rows keep their values where the axes but the first keep their lengths. New memory holds
        zeros, and memory that was used before, what was last written there.

        Raises
        ------
        InputError
            The system has too little memory.
        ValueError
            The number of dimensions would change, a length is negative, or `oversize` is not from 1
            to 2.
        """
        if len(shape) != self._ndim:
            raise ValueError(
                f"{self!r} can't have the shape {tuple(shape)}: its number of dimensions is fixed"
            )
        self._reshape(shape, oversize)

    def condition_data(self, input_data: Any, force_cast: bool = False) -> npt.NDArray[Any]:
        """Return the array that `set_value` would store; not a copy where none is needed.

        Raises TypeError as `set_value` does.
        """
        return as_array(input_data, self._dtype, self._ndim, f"the value of {self!r}", force_cast)

    def free_memory(self) -> None:
        """Release the memory; all lengths become 0.

        It is freed once workers, and arrays taken from it, don't use it any more. The next value
        gets new memory.
        """
        if self._buffer is not None:
            self._buffer.close()
        self._buffer = self._array = None
        self._shape = (0,) * self._ndim

    def __getitem__(self, key: Any) -> Any:
        return self.data[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        array = self.data  # which may be mapped anew, at another address
        if isinstance(value, np.ndarray) and self.buffer.was_mapped(value):
            value = value.copy()  # NumPy sees no overlap
        array[key] = value

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)

    def __array__(
        self, dtype: npt.DTypeLike | None = None, copy: bool | None = None
    ) -> npt.NDArray[Any]:
        return np.array(self.data, dtype=dtype, copy=copy)

    def __repr__(self) -> str:
        minibatch = ", minibatch" if self._minibatch else ""
        name = "" if self._name is None else f", name={self._name!r}"
        return f"Data({self._dtype} {self._shape}{minibatch}{name})"

    def __reduce__(self) -> tuple[Callable[..., "Data"], tuple[Any, ...]]:
        if context.get_spawning_popen() is None:
            raise TypeError(
                "a Data can be passed to another process only as an argument of one that is being "
                "started with multiprocessing's spawn method"
            )
        return _received, (self.buffer, self.array_place, self._minibatch, self._name)

    def _new_buffer(self) -> HostBuffer:
        # The name of such memory has at most 249 bytes.
        nbytes = 0 if self._ndim else self._dtype.itemsize
        return HostBuffer.create(nbytes, (self._name or "data")[:60])

    def _reshape(self, shape: Sequence[int], oversize: float) -> None:
        if not 1 <= oversize <= 2:
            raise ValueError(f"oversize is {oversize!r}, and must be from 1 to 2")
        lengths = tuple(operator.index(length) for length in shape)
        if any(length < 0 for length in lengths):
            raise ValueError(f"an array can't have the shape {lengths}")
        size = math.prod(lengths)
        if size > self.alloc_size:
            self.buffer.resize(int(size * oversize) * self._dtype.itemsize)
        if lengths != self._shape:
            self._shape, self._array = lengths, None


def data(
    value: Any = None,
    var: Any = None,
    dtype: npt.DTypeLike | None = None,
    ndim: int | None = None,
    shape: Sequence[int] | None = None,
    minibatch: bool = False,
    force_cast: bool = False,
    oversize: float = 1,
    name: str | None = None,
) -> Data:
    """Make a `Data`, an input of data-parallel functions that workers read where it lies.

    Parameters
    ----------
    value : array_like or PyTensor variable, optional
        The value, which is copied. A variable is taken for `var`.
    var : PyTensor variable or array, optional
        What defines dtype and number of dimensions.
    dtype : dtype, optional
        By default that of `var`, else of `value`.
    ndim : int, optional
        By default that of `var`, else of `value` or `shape`.
    shape : sequence of int, optional
        The shape, where there is no value.
    minibatch : bool
        Whether it will hold just the rows that a call works on: `batch` does not apply to it.
    force_cast : bool
        Whether the value is cast also where that may lose digits.
    oversize : float
        From 1 to 2: for how many times the present size memory is allocated.
    name : str, optional
        For messages; by default that of `var`.

    Raises
    ------
    InputError
        The system has too little memory.
    TypeError
        dtype or number of dimensions can't be found, or the value can't be cast to them safely.
    ValueError
        The arguments contradict each other, or `oversize` is out of range.
    """
    if isinstance(value, Variable):
        if var is not None:
            raise ValueError("the value is a variable, and so is var; pass one of them")
        value, var = None, value
    if var is not None:
        if not (hasattr(var, "dtype") and hasattr(var, "ndim")):
            raise TypeError(f"var has no dtype and number of dimensions: {type(var).__name__}")
        dtype = _agreed("dtype", None if dtype is None else np.dtype(dtype), np.dtype(var.dtype))
        ndim = _agreed("ndim", ndim, var.ndim)
        name = getattr(var, "name", None) if name is None else name
    if shape is not None:
        shape = tuple(shape)
        if value is not None and np.shape(value) != shape:
            raise ValueError(f"shape is {shape}, and the value has {np.shape(value)}")
        ndim = _agreed("ndim", ndim, len(shape))
    if value is not None:
        dtype = np.asarray(value).dtype if dtype is None else dtype
        ndim = np.ndim(value) if ndim is None else ndim
    if dtype is None or ndim is None:
        raise TypeError("data needs a value, a variable, or a dtype with ndim or shape")
    made = Data(dtype, ndim, minibatch, name)
    if value is not None:
        made.set_value(value, force_cast, oversize)
    else:
        made._reshape(made.shape if shape is None else shape, oversize)
    return made


def as_array(
    value: Any, dtype: npt.DTypeLike, ndim: int, what: str, force_cast: bool = False
) -> npt.NDArray[Any]:
    """Return a value as an array of a dtype and number of dimensions, itself if it is one.

    Values are cast as PyTensor casts inputs: an array where its dtype is promoted to the one
    expected; Python's and NumPy's numbers, and lists of them, where all are represented exactly,
    or a single float is given for PyTensor's `floatX`.

    Parameters
    ----------
    value : array_like
        An array, a `Data`, a number, or a list of numbers.
    dtype, ndim
        What is expected.
    what : str
        How error messages call it, such as "input 0".
    force_cast : bool
        Whether any value is cast.

    Raises
    ------
    TypeError
        It can't be cast safely, or has another number of dimensions.
    """
    expected = np.dtype(dtype)
    if isinstance(value, Variable):
        raise TypeError(f"{what}: expected {expected}, got the variable {value}")
    array = _converted(value, what)
    if array.dtype != expected:
        if not (force_cast or _is_safe(value, array, expected)):
            raise TypeError(
                f"{what}: expected {expected}, got {array.dtype}, which can't be cast without "
                "loss; force_cast=True casts it"
            )
        with np.errstate(over="ignore", invalid="ignore"):
            array = array.astype(expected)
    if array.ndim != ndim:
        raise TypeError(
            f"{what}: expected {_dimensions(ndim)}, got {_dimensions(array.ndim)}, "
            f"the shape {array.shape}"
        )
    return array


def _converted(value: Any, what: str) -> npt.NDArray[Any]:
    try:
        return unmasked(value, what)
    except ValueError as error:
        raise TypeError(f"{what} is no array of numbers: {error}") from error


def _is_safe(value: Any, array: npt.NDArray[Any], expected: np.dtype) -> bool:
    """Return whether the cast of a value, of which `array` is made, is one that PyTensor does."""
    if not isinstance(value, int | float | complex | list | tuple | np.generic):
        return _is_promoted(array.dtype, expected)
    if isinstance(value, float | np.floating) and expected == config.floatX:
        return True
    if array.dtype.kind not in "biufc" or (array.dtype.kind == "c" != expected.kind):
        return False
    with np.errstate(all="ignore"):
        cast = array.astype(expected)
    return np.array_equal(cast, array, equal_nan=True)


def _is_promoted(given: np.dtype, expected: np.dtype) -> bool:
    try:
        return np.promote_types(given, expected) == expected
    except TypeError:  # such as of a date and a number
        return False


def _agreed(what: str, given: Any, implied: Any) -> Any:
    """Return what an argument and another that implies it have in common."""
    if given is not None and given != implied:
        raise ValueError(f"{what} is {given}, and the other arguments imply {implied}")
    return implied


def _dimensions(number: int) -> str:
    return f"{number} dimension{'' if number == 1 else 's'}"


def _received(
    buffer: HostBuffer, place: tuple[int, tuple[int, ...], str], minibatch: bool, name: str | None
) -> Data:
    """Make the `Data` in a process that was started with it."""
    _, shape, dtype = place
    made = Data.__new__(Data)
    made._dtype, made._ndim, made._shape = np.dtype(dtype), len(shape), shape
    made._minibatch, made._name = minibatch, name
    made._buffer, made._array = buffer, None
    return made
