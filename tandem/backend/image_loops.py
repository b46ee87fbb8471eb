"""Normalisation over channels on a CPU, by loops that numba compiles.

Tensors are logically (picture, channel, row, column). The channels of a pixel lie side by side in
memory, so the loops over them are vectorised; images in another layout are converted. A loop
passes over memory once. What it computes does not depend on the number of threads.
"""

import numba
import numpy as np
import torch

from tandem.backend.channels_last import empty, numbers, pixels, run

Tensor = torch.Tensor

_PARTS = 64  # of the pixels, shared out to threads


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
