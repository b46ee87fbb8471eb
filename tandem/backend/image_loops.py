"""Normalisation and pooling of images on a CPU, by loops that numba compiles.

Tensors are logically (picture, channel, row, column). The channels of a pixel lie side by side in
memory, so the loops over them are vectorised; images in another layout are converted. A loop
passes over memory once. What it computes does not depend on the number of threads.
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

_PARTS = 64  # of the pixels, shared out to threads
_BLOCK = 16  # float32 numbers in a line of a cache


def lrn(x: Tensor, size: int, alpha: float, k: float) -> tuple[Tensor, Tensor]:
    """Compute the outputs of `tandem.ops.LRN` with the exponent 0.75: y and the scale."""
    y, scale = _empty(x.shape, x.dtype), _empty(x.shape, x.dtype)
    arrays = _pixels(x), _pixels(y), _pixels(scale)
    _run(_lrn, x.dtype, *arrays, size // 2, *_numbers(x, alpha, k))
    return y, scale


def lrn_gradient(x: Tensor, scale: Tensor, g: Tensor, size: int, alpha: float) -> Tensor:
    """Compute the output of `tandem.ops.LRNGrad` with the exponent 0.75."""
    _check_shapes(x.shape, x=x, scale=scale, g=g)
    gradient = _empty(x.shape, x.dtype)
    arrays = _pixels(x), _pixels(scale), _pixels(g), _pixels(gradient)
    _run(_lrn_gradient, x.dtype, *arrays, size // 2, *_numbers(x, -2 * alpha * 0.75))
    return gradient


def max_pool(x: Tensor, size: int, stride: int) -> tuple[Tensor, Tensor]:
    """Compute the outputs of `tandem.ops.MaxPool2d`: maxima and argmax; NaN is a maximum."""
    shape = _pooled(x.shape, size, stride)
    y, argmax = _empty(shape, x.dtype), _empty(shape, torch.int64)
    _run(_max_pool, x.dtype, _images(x), _images(y), _images(argmax), size, stride)
    return y, argmax


def max_pool_gradient(x: Tensor, argmax: Tensor, g: Tensor, size: int, stride: int) -> Tensor:
    """Compute the output of `tandem.ops.MaxPool2dGrad`; of `x` only the shape is used."""
    _check_shapes(_pooled(x.shape, size, stride), argmax=argmax, g=g)
    gradient = _empty(x.shape, g.dtype)
    arrays = _images(argmax), _images(g), _images(gradient)
    _run(_max_pool_gradient, g.dtype, *arrays, size, stride)
    return gradient


def to_nchw(x: Tensor, channels: slice) -> Tensor:
    """Copy some channels of images into planes: the pixels of a channel side by side."""
    planes = torch.empty((len(x), channels.stop - channels.start, *x.shape[2:]), dtype=x.dtype)
    _run(_to_nchw, x.dtype, _rows(x), planes.flatten(2).numpy(), channels.start)
    return planes


def from_nchw(planes: Tensor, y: Tensor, channels: slice) -> None:
    """Copy planes into some channels of images that lie in memory channels-last."""
    _run(_from_nchw, y.dtype, planes.flatten(2).numpy(), _rows(y), channels.start)


def _pooled(shape: torch.Size, size: int, stride: int) -> torch.Size:
    if min(shape[2:]) < size:
        raise ValueError(f"a window of {size} x {size} does not fit into images of {tuple(shape)}")
    return torch.Size((*shape[:2], *((n - size) // stride + 1 for n in shape[2:])))


def _check_shapes(shape: torch.Size, **operands: Tensor) -> None:
    for name, operand in operands.items():
        if operand.shape != shape:
            raise ValueError(f"{name} has shape {tuple(operand.shape)}, expected {tuple(shape)}")


def _empty(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, memory_format=torch.channels_last)


def _images(x: Tensor) -> np.ndarray:
    """The memory of a tensor as (picture, row, column, channel), or a copy in this layout."""
    return x.permute(0, 2, 3, 1).contiguous().numpy()


def _rows(x: Tensor) -> np.ndarray:
    """`_images` as (picture, pixel, channel)."""
    return _images(x).reshape(len(x), x.shape[2] * x.shape[3], x.shape[1])


def _pixels(x: Tensor) -> np.ndarray:
    """`_images` as (pixel, channel)."""
    return _images(x).reshape(len(x) * x.shape[2] * x.shape[3], x.shape[1])


def _numbers(x: Tensor, *values: float) -> tuple[np.floating, ...]:
    """Numbers in the tensor's precision, in which a loop then computes."""
    return tuple((np.float32 if x.dtype == torch.float32 else np.float64)(v) for v in values)


# numba's own pool of threads, which it takes if it finds no other, aborts the process if two
# threads enter it at once.
_one_at_a_time = threading.Lock()


def _run(loop: Callable[..., None], dtype: torch.dtype, *arguments: Any) -> None:
    """Run a loop with PyTorch's number of threads, which is restored afterwards.

    Where both use one OpenMP library, numba sets the number for both.
    """
    threads = torch.get_num_threads()
    with _one_at_a_time:
        try:
            numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
            _compiled(loop, dtype)(*arguments)
        finally:
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)


@cache
def _compiled(loop: Callable[..., None], dtype: torch.dtype) -> Callable[..., None]:
    x = torch.ones((1, 1, 1, 1), dtype=dtype)
    sample: tuple[Any, ...] = {
        _lrn: (*[_pixels(x)] * 3, 0, *_numbers(x, 1, 1)),
        _lrn_gradient: (*[_pixels(x)] * 4, 0, *_numbers(x, 1)),
        _max_pool: (_images(x), _images(x), _images(x.long()), 1, 1),
        _max_pool_gradient: (_images(x.long()), _images(x), _images(x), 1, 1),
        _to_nchw: (_rows(x), _rows(x), 0),
        _from_nchw: (_rows(x), _rows(x), 0),
    }[loop]
    # A product and a sum may be one instruction, rounded once.
    return compile_loop(loop, *sample, parallel=True, fastmath={"contract"})


def _lrn(
    x: np.ndarray,
    y: np.ndarray,
    scale: np.ndarray,
    half: int,
    alpha: np.floating,
    k: np.floating,
) -> None:
    pixels, channels = x.shape
    one = x.dtype.type(1)
    for part in numba.prange(_PARTS):
        squares = np.zeros(channels + 2 * half, x.dtype)
        for p in range(pixels * part // _PARTS, pixels * (part + 1) // _PARTS):
            total = scale[p]
            for c in range(channels):
                squares[half + c] = x[p, c] * x[p, c]
                total[c] = 0
            for first in range(2 * half + 1):
                for c in range(channels):
                    total[c] += squares[first + c]
            for c in range(channels):
                total[c] = k + alpha * total[c]
                root = one / np.sqrt(total[c])
                y[p, c] = x[p, c] * (root * np.sqrt(root))


def _lrn_gradient(
    x: np.ndarray,
    scale: np.ndarray,
    g: np.ndarray,
    gradient: np.ndarray,
    half: int,
    factor: np.floating,
) -> None:
    pixels, channels = x.shape
    one = x.dtype.type(1)
    for part in numba.prange(_PARTS):
        terms = np.zeros(channels + 2 * half, x.dtype)
        total = np.zeros(channels, x.dtype)
        for p in range(pixels * part // _PARTS, pixels * (part + 1) // _PARTS):
            for c in range(channels):
                root = one / np.sqrt(scale[p, c])
                scaled = g[p, c] * (root * np.sqrt(root))
                gradient[p, c] = scaled
                terms[half + c] = scaled * x[p, c] / scale[p, c]
                total[c] = 0
            for first in range(2 * half + 1):
                for c in range(channels):
                    total[c] += terms[first + c]
            for c in range(channels):
                gradient[p, c] += factor * x[p, c] * total[c]


def _max_pool(x: np.ndarray, y: np.ndarray, argmax: np.ndarray, size: int, stride: int) -> None:
    pictures, _, columns, channels = x.shape
    rows = y.shape[1]
    for number in numba.prange(pictures * rows):
        n, p = number // rows, number % rows
        for q in range(y.shape[2]):
            top, left = p * stride, q * stride
            best, where = y[n, p, q], argmax[n, p, q]
            for c in range(channels):
                best[c] = x[n, top, left, c]
                where[c] = top * columns + left
            for tap in range(1, size * size):
                row, column = top + tap // size, left + tap % size
                for c in range(channels):
                    value = x[n, row, column, c]
                    if value > best[c] or value != value:
                        best[c] = value
                        where[c] = row * columns + column


def _max_pool_gradient(
    argmax: np.ndarray, g: np.ndarray, gradient: np.ndarray, size: int, stride: int
) -> None:
    pictures, rows, columns, channels = gradient.shape
    none = g.dtype.type(0)
    for number in numba.prange(pictures * rows):
        n, row = number // rows, number % rows
        first = max(0, (row - size) // stride + 1)
        last = min(g.shape[1] - 1, row // stride)
        for column in range(columns):
            here, total = row * columns + column, gradient[n, row, column]
            for c in range(channels):
                total[c] = 0
            for p in range(first, last + 1):
                for q in range(
                    max(0, (column - size) // stride + 1),
                    min(g.shape[2] - 1, column // stride) + 1,
                ):
                    for c in range(channels):
                        total[c] += g[n, p, q, c] if argmax[n, p, q, c] == here else none


def _to_nchw(images: np.ndarray, planes: np.ndarray, first: int) -> None:
    pictures, channels, pixels = planes.shape
    blocks = -(-channels // _BLOCK)
    for number in numba.prange(pictures * blocks):
        n, begin = number // blocks, number % blocks * _BLOCK
        for p in range(pixels):
            for c in range(begin, min(begin + _BLOCK, channels)):
                planes[n, c, p] = images[n, p, first + c]


def _from_nchw(planes: np.ndarray, images: np.ndarray, first: int) -> None:
    pictures, channels, pixels = planes.shape
    blocks = -(-channels // _BLOCK)
    for number in numba.prange(pictures * blocks):
        n, begin = number // blocks, number % blocks * _BLOCK
        for p in range(pixels):
            for c in range(begin, min(begin + _BLOCK, channels)):
                images[n, p, first + c] = planes[n, c, p]
