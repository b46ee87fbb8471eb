"""Normalisation and pooling of images on a CPU, by loops that numba compiles.

Tensors are logically (picture, channel, row, column). The channels of a pixel lie side by side in
memory, so the loops over them are vectorised; images in another layout are converted. A loop
passes over memory once. What it computes does not depend on the number of threads.
"""

import numba
import numpy as np
import torch

from tandem.backend.channels_last import empty, images, numbers, pixels, rows, run
from tandem.ops.base import count_windows
from tandem.ops.pool import MaxPool2d, MaxPool2dGrad

Tensor = torch.Tensor

_PARTS = 64  # of the pixels, shared out to threads
_BLOCK = 16  # float32 numbers in a line of a cache


def lrn(x: Tensor, size: int, alpha: float, k: float) -> tuple[Tensor, Tensor]:
    """Compute the outputs of `tandem.ops.LRN` with the exponent 0.75: y and the scale."""
    y, scale = empty(x.shape, x.dtype), empty(x.shape, x.dtype)
    arrays = pixels(x), pixels(y), pixels(scale)
    run(_lrn, *arrays, size // 2, *numbers(x, alpha, k))
    return y, scale


def lrn_gradient(x: Tensor, scale: Tensor, g: Tensor, size: int, alpha: float) -> Tensor:
    """Compute the output of `tandem.ops.LRNGrad` with the exponent 0.75."""
    _check_shapes(x.shape, x=x, scale=scale, g=g)
    gradient = empty(x.shape, x.dtype)
    arrays = pixels(x), pixels(scale), pixels(g), pixels(gradient)
    run(_lrn_gradient, *arrays, size // 2, *numbers(x, -2 * alpha * 0.75))
    return gradient


def max_pool(x: Tensor, op: MaxPool2d) -> tuple[Tensor, Tensor]:
    """Compute the outputs of `tandem.ops.MaxPool2d`: maxima and argmax; NaN is a maximum."""
    shape = _pooled(x.shape, op)
    y, argmax = empty(shape, x.dtype), empty(shape, torch.int64)
    arrays = images(x), images(y), images(argmax)
    run(_max_pool, *arrays, *op.size, *op.stride, *op.pad)
    return y, argmax


def max_pool_gradient(x: Tensor, argmax: Tensor, g: Tensor, op: MaxPool2dGrad) -> Tensor:
    """Compute the output of `tandem.ops.MaxPool2dGrad`; of `x` only the shape is used."""
    _check_shapes(_pooled(x.shape, op), argmax=argmax, g=g)
    gradient = empty(x.shape, g.dtype)
    arrays = images(argmax), images(g), images(gradient)
    run(_max_pool_gradient, *arrays, *op.size, *op.stride, *op.pad)
    return gradient


def to_nchw(x: Tensor, channels: slice) -> Tensor:
    """Copy some channels of images into planes: the pixels of a channel side by side."""
    planes = torch.empty((len(x), channels.stop - channels.start, *x.shape[2:]), dtype=x.dtype)
    run(_to_nchw, rows(x), planes.flatten(2).numpy(), channels.start)
    return planes


def from_nchw(planes: Tensor, y: Tensor, channels: slice) -> None:
    """Copy planes into some channels of images that lie in memory channels-last."""
    run(_from_nchw, planes.flatten(2).numpy(), rows(y), channels.start)


def _pooled(shape: torch.Size, op: MaxPool2d | MaxPool2dGrad) -> torch.Size:
    lengths = list(zip(shape[2:], op.size, op.stride, op.pad, strict=True))
    if any(length + 2 * pad < size for length, size, _, pad in lengths):
        window = " x ".join(map(str, op.size))
        raise ValueError(f"a window of {window} does not fit into images of {tuple(shape)}")
    return torch.Size((*shape[:2], *(count_windows(*axis, op.ceil) for axis in lengths)))


def _check_shapes(shape: torch.Size, **operands: Tensor) -> None:
    for name, operand in operands.items():
        if operand.shape != shape:
            raise ValueError(f"{name} has shape {tuple(operand.shape)}, expected {tuple(shape)}")


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


def _max_pool(
    x: np.ndarray,
    y: np.ndarray,
    argmax: np.ndarray,
    height: int,
    width: int,
    down: int,
    right: int,
    above: int,
    before: int,
) -> None:
    pictures, all_rows, columns, channels = x.shape
    rows = y.shape[1]
    for number in numba.prange(pictures * rows):
        n, p = number // rows, number % rows
        top, bottom = p * down - above, min(p * down - above + height, all_rows)
        top = max(top, 0)
        for q in range(y.shape[2]):
            left, end = q * right - before, min(q * right - before + width, columns)
            left = max(left, 0)
            best, where = y[n, p, q], argmax[n, p, q]
            for c in range(channels):
                best[c] = x[n, top, left, c]
                where[c] = top * columns + left
            wide = end - left
            for tap in range(1, (bottom - top) * wide):
                row, column = top + tap // wide, left + tap % wide
                for c in range(channels):
                    value = x[n, row, column, c]
                    if value > best[c] or value != value:
                        best[c] = value
                        where[c] = row * columns + column


def _max_pool_gradient(
    argmax: np.ndarray,
    g: np.ndarray,
    gradient: np.ndarray,
    height: int,
    width: int,
    down: int,
    right: int,
    above: int,
    before: int,
) -> None:
    pictures, rows, columns, channels = gradient.shape
    none = g.dtype.type(0)
    for number in numba.prange(pictures * rows):
        n, row = number // rows, number % rows
        first = max(0, (row + above - height) // down + 1)
        last = min(g.shape[1] - 1, (row + above) // down)
        for column in range(columns):
            here, total = row * columns + column, gradient[n, row, column]
            for c in range(channels):
                total[c] = 0
            for p in range(first, last + 1):
                for q in range(
                    max(0, (column + before - width) // right + 1),
                    min(g.shape[2] - 1, (column + before) // right) + 1,
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
