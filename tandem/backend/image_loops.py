"""Normalisation over channels, and planes of images, on a CPU, by loops that numba compiles.

Tensors are logically (picture, channel, row, column). The channels of a pixel lie side by side in
memory, so the loops over them are vectorised; images in another layout are converted. A loop
passes over memory once. What it computes does not depend on the number of threads.
"""

import numba
import numpy as np
import torch

from tandem.backend.channels_last import empty, images, numbers, pixels, rows, run

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


def from_nchw(planes: Tensor, y: Tensor, channels: slice) -> None:
    """Copy planes into some channels of images that lie in memory channels-last."""
    run(_from_nchw, planes.flatten(2).numpy(), rows(y), channels.start)


def to_tiles(x: Tensor, channels: slice, size: int, step: int, pad: int) -> Tensor:
    """Cut some channels of images into squares, every `step` pixels, with `pad` zeros around.

    Returns (channel, picture and square, row, column): images as filters, channels as pictures.
    """
    count = -(-(x.shape[2] + 2 * pad - (size - step)) // step)
    tiles = torch.empty((channels.stop - channels.start, len(x) * count**2, size, size))
    run(_to_tiles, images(x), tiles.numpy(), channels.start, step, pad, count)
    return tiles


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


def _from_nchw(planes: np.ndarray, images: np.ndarray, first: int) -> None:
    pictures, channels, pixels = planes.shape
    blocks = -(-channels // _BLOCK)
    for number in numba.prange(pictures * blocks):
        n, begin = number // blocks, number % blocks * _BLOCK
        for p in range(pixels):
            for c in range(begin, min(begin + _BLOCK, channels)):
                images[n, p, first + c] = planes[n, c, p]


def _to_tiles(
    images: np.ndarray, tiles: np.ndarray, first: int, step: int, pad: int, count: int
) -> None:
    channels, squares, size, _ = tiles.shape
    _, rows, columns, _ = images.shape
    blocks = -(-channels // _BLOCK)
    for number in numba.prange(squares * blocks):
        t, begin = number // blocks, number % blocks * _BLOCK
        end = min(begin + _BLOCK, channels)
        n, top, left = t // count**2, t // count % count * step - pad, t % count * step - pad
        for r in range(size):
            for q in range(size):
                inside = 0 <= top + r < rows and 0 <= left + q < columns
                for c in range(begin, end):
                    tiles[c, t, r, q] = images[n, top + r, left + q, first + c] if inside else 0
