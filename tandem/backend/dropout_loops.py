"""Dropout of images on a CPU in one pass, by a loop that numba compiles."""

import numba
import numpy as np
import torch

from tandem.backend.channels_last import empty, images, numbers, run

Tensor = torch.Tensor

_PARTS = 64  # of the pictures' blocks, shared out to threads
_WORD = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_FIRST, _SECOND = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_FIRST_STEP, _SECOND_STEP = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)


def dropout(
    x: Tensor,
    keys: tuple[Tensor, Tensor, Tensor],
    purpose: int,
    threshold: int,
    factor: float,
    first: int = 0,
) -> Tensor:
    """Compute the output of `tandem.ops.Dropout`, with the words of `tandem.philox`."""
    seed, epoch, indices = keys
    if len(indices) != len(x):
        raise ValueError(f"x has {len(x)} rows, indices has {len(indices)}")
    if x.ndim == 4:
        y = empty(x.shape, x.dtype)
        arrays = [images(each).reshape(len(x), x.shape[1:].numel()) for each in (x, y)]
    else:
        y = torch.empty(x.shape, dtype=x.dtype)
        arrays = [x.contiguous().numpy(), y.numpy()]
    counters = [np.uint64(int(n) & 0xFFFFFFFFFFFFFFFF) for n in (seed, epoch, purpose, threshold)]
    run(_dropout, *arrays, indices.contiguous().numpy(), *counters, *numbers(x, factor), first)
    return y


def _dropout(
    x: np.ndarray,
    y: np.ndarray,
    indices: np.ndarray,
    seed: np.uint64,
    epoch: np.uint64,
    purpose: np.uint64,
    threshold: np.uint64,
    factor: np.floating,
    first: int,
) -> None:
    pictures, units = x.shape
    before = first // 4
    blocks = -(-(first + units) // 4) - before if units else 0
    zero = x.dtype.type(0)
    for number in numba.prange(pictures * _PARTS):
        n, part = number // _PARTS, number % _PARTS
        index = np.uint64(indices[n])
        for block in range(blocks * part // _PARTS, blocks * (part + 1) // _PARTS):
            c0, c1, c2, c3 = np.uint64(before + block), index, epoch, purpose
            k0, k1 = seed & _WORD, seed >> _HALF
            for _ in range(10):
                product0, product1 = c0 * _FIRST, c2 * _SECOND
                c0, c1 = (product1 >> _HALF) ^ c1 ^ k0, product1 & _WORD
                c2, c3 = (product0 >> _HALF) ^ c3 ^ k1, product0 & _WORD
                k0, k1 = (k0 + _FIRST_STEP) & _WORD, (k1 + _SECOND_STEP) & _WORD
            at = 4 * (before + block) - first
            words = (c0, c1, c2, c3)
            for j in range(max(0, -at), min(4, units - at)):
                y[n, at + j] = x[n, at + j] * factor if words[j] >= threshold else zero
