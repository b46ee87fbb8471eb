"""Loops over images on a CPU: the memory that they work on, and the threads that run them.

Tensors are logically (picture, channel, row, column). The channels of a pixel lie side by side in
memory; images in another layout are converted.
"""

import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import numba
import numpy as np
import torch

from tandem.loops import compile_loop

Tensor = torch.Tensor


def empty(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, memory_format=torch.channels_last)


def images(x: Tensor) -> np.ndarray:
    """The memory of a tensor as (picture, row, column, channel), or a copy in this layout."""
    batch, channels, rows, columns = x.shape
    return by_pixel(x, (batch, rows, columns, channels))


def pixels(x: Tensor) -> np.ndarray:
    """`images` as (pixel, channel)."""
    return by_pixel(x, (len(x) * x.shape[2] * x.shape[3], x.shape[1]))


def by_pixel(x: Tensor, shape: tuple[int, ...]) -> np.ndarray:
    """`images` in another shape."""
    last = np.ascontiguousarray(x.numpy().transpose(0, 2, 3, 1))
    # An axis of length 1 may have any stride, and numba takes what is unusual for another layout.
    return last.reshape(-1).reshape(shape)


def numbers(x: Tensor, *values: float) -> tuple[np.floating, ...]:
    """Numbers in the tensor's precision, in which a loop then computes."""
    return tuple((np.float32 if x.dtype == torch.float32 else np.float64)(v) for v in values)


# numba's own pool of threads, which it takes if it finds no other, aborts the process if two
# threads enter it at once.
_one_at_a_time = threading.Lock()


def run(loop: Callable[..., None], *arguments: Any) -> None:
    """Run a loop with PyTorch's number of threads, which is restored afterwards.

    Where both use one OpenMP library, numba sets the number for both.
    """
    threads = torch.get_num_threads()
    with _one_at_a_time:
        try:
            numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
            _compiled(loop, *map(_kind, arguments))(*arguments)
        finally:
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)


def _kind(argument: Any) -> tuple[np.dtype, int] | type:
    if isinstance(argument, np.ndarray):
        return argument.dtype, argument.ndim
    return type(argument)


@cache
def _compiled(
    loop: Callable[..., None], *kinds: tuple[np.dtype, int] | type
) -> Callable[..., None]:
    """Compile a loop for arrays of some dtypes and numbers of axes, and scalars of some types."""
    # Without elements: a loop checks no bounds.
    sample = (
        kind(1) if isinstance(kind, type) else np.zeros((0,) * kind[1], kind[0]) for kind in kinds
    )
    # A product and a sum may be one instruction, rounded once.
    return compile_loop(loop, *sample, parallel=True, fastmath={"contract"})
