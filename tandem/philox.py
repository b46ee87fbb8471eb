"""Counted randomness: each random choice is a pure integer function of its purpose.

Philox-4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011,
section 4.3) maps a 128-bit counter and a 64-bit key to four 32-bit words. Here the key is the
seed, and the counter is (block of units, dataset index, epoch, purpose), so no two choices of a run
share a counter, and any choice can be computed at any time on any device, in any order.

The code uses only ``*``, ``+``, ``^``, ``&`` and ``>>`` on 64-bit integers, so it runs on NumPy
arrays and on PyTorch tensors alike, and gives the same bits on both.
"""

from enum import IntEnum
from typing import Any

import numpy as np

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_CHUNK = 1 << 14  # keys computed at a time, so that Philox works in the cache


class Purpose(IntEnum):
    """The purpose of a random word: the last word of the counter. Values are part of the format."""

    ORDER = 0
    CROP = 1
    MIRROR = 2
    BATCH_CROP = 3
    BATCH_MIRROR = 4
    LISTING = 5  # preprocessing's one shuffle of the list of pictures
    GOSSIP = 6  # which rank sends to which, of (step, rank) for (epoch, index)
    COLOUR = 7  # of the colour noise of a picture
    SYNTHETIC = 8  # pixels and labels of synthetic pictures
    DROPOUT = 256  # plus the number of the dropout layer


def philox4x32(counter: tuple[Any, Any, Any, Any], seed: Any) -> tuple[Any, Any, Any, Any]:
    """Apply Philox-4x32-10 to a counter of four words and a 64-bit key.

    The words are int64 arrays or tensors, or ints, in [0, 2**32) that broadcast together; so are
    the four results, each uniform and independent of the others.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _WORD, _high(seed)
    for _ in range(_ROUNDS):
        # The 64-bit products wrap around in int64; the masks below read them as unsigned.
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            _high(product1) ^ c1 ^ k0,
            product1 & _WORD,
            _high(product0) ^ c3 ^ k1,
            product0 & _WORD,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def _high(value: Any) -> Any:
    """The upper 32 bits of 64; PyTensor's variables have no shift."""
    shifted = value >> 32 if hasattr(value, "__rshift__") else value // 2**32
    return shifted & _WORD


def words(seed: int, epoch: int, indices: np.ndarray, purpose: int, count: int) -> np.ndarray:
    """Random 32-bit words for each dataset index, int64 (n, count) in [0, 2**32).

    `indices` are below 2**32; `purpose` is a `Purpose`, or ``Purpose.DROPOUT`` plus the number of
    the layer. Word j of an index does not depend on `count`.
    """
    blocks = np.arange(-(-count // 4), dtype=np.int64)[np.newaxis, :]
    column = np.asarray(indices, np.int64)[:, np.newaxis]
    four = philox4x32((blocks, column, np.array([epoch]), np.array([purpose])), int(seed))
    drawn = np.stack(np.broadcast_arrays(*four), axis=-1)
    return drawn.reshape(len(column), 4 * blocks.size)[:, :count]


def normals(seed: int, epoch: int, indices: np.ndarray, purpose: int, count: int) -> np.ndarray:
    """Random normal numbers for each dataset index, float64 (n, count), mean 0 and variance 1.

    Two `words` u and v make two of them by Box and Muller's method: ``r cos t`` and ``r sin t``
    with ``r = sqrt(-2 log((u + 1) / 2**32))`` and ``t = 2 pi v / 2**32``. None exceeds 6.7.
    """
    half = -(-count // 2)
    drawn = words(seed, epoch, indices, purpose, 2 * half).reshape(len(indices), half, 2)
    radius = np.sqrt(-2 * np.log((drawn[..., 0] + 1) / 2**32))
    angle = 2 * np.pi * (drawn[..., 1] / 2**32)
    pairs = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=-1)
    return pairs.reshape(len(indices), 2 * half)[:, :count]


def permutation(count: int, seed: int, epoch: int, purpose: int) -> np.ndarray:
    """Shuffle the numbers from 0 to `count` - 1, at most 2**32: int64 (count,).

    Number i has a 64-bit key, the first two `words` of dataset index i, the first of them in the
    high bits; the numbers are sorted by key. Equal keys, which are very rare, keep their order.
    """
    keys = np.empty(count, np.uint64)
    for start in range(0, count, _CHUNK):
        some = np.arange(start, min(start + _CHUNK, count), dtype=np.int64)
        high, low = words(seed, epoch, some, purpose, 2).T.astype(np.uint64)
        keys[start : start + len(some)] = high << np.uint64(32) | low
    return np.argsort(keys, kind="stable").astype(np.int64, copy=False)
