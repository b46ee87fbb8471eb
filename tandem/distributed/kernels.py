"""Weighted averages of vectors, in one pass over memory, by loops that numba compiles.

Importing this module imports numba, which takes time and memory: a trainer does so in its first
exchange, if not before. Products, sums and quotients are rounded one by one and never fused into
one operation, so the bits are those of NumPy's expressions.
"""

import functools
from collections.abc import Callable, Sequence

import numpy as np

from tandem.distributed.shares import weights_and_divisor
from tandem.loops import compile_loop

Loop = Callable[[tuple[np.ndarray, ...], tuple[np.floating, ...], np.floating], None]
"""Called with vectors, the weight of each, and what their sum is divided by."""


def average_into_all(vectors: Sequence[np.ndarray], shares: Sequence[float]) -> None:
    """Replace every vector by their weighted average, without the interpreter's lock.

    Vectors are float (n,) of one dtype, each in one piece, and are added in this order, multiplied
    and divided as `weights_and_divisor` has it. A vector whose share is 0 is not read.
    """
    _run(_into_all, vectors, shares, vectors)


def average_into_first(vectors: Sequence[np.ndarray], shares: Sequence[float]) -> None:
    """Replace the first vector by the weighted average of all, as `average_into_all` does it.

    Where the first has no share, the first that has one is overwritten as well.
    """
    _run(_into_first, vectors, shares, vectors[:1])


def add_into(
    target: np.ndarray, terms: Sequence[np.ndarray], weights: Sequence[float], divisor: float = 1.0
) -> None:
    """Replace a vector by the weighted sum of others of its dtype, added in their order, divided.

    It may be the first of them too. No weight may be 0.
    """
    loop, kind = _compiled(_into_other, target.dtype, 1 + len(terms)), target.dtype.type
    loop((target, *terms), (kind(0), *map(kind, weights)), kind(divisor))


def _run(
    loop: Loop,
    vectors: Sequence[np.ndarray],
    shares: Sequence[float],
    targets: Sequence[np.ndarray],
) -> None:
    """Run a loop over the vectors that have a share, and give the other targets a copy."""
    dtype, (weights, divisor) = vectors[0].dtype, weights_and_divisor(shares)
    pairs = [(v, dtype.type(w)) for v, w in zip(vectors, weights, strict=True) if w > 0]
    terms, factors = zip(*pairs, strict=True)
    _compiled(loop, dtype, len(terms))(terms, factors, dtype.type(divisor))
    for target, share in zip(targets, shares, strict=False):
        if not share > 0:
            np.copyto(target, terms[0])


@functools.cache
def _compiled(loop: Loop, dtype: np.dtype, terms: int) -> Loop:
    sample = (np.zeros(1, dtype),) * terms, (dtype.type(1),) * terms, dtype.type(1)
    return compile_loop(loop, *sample)


def _into_all(
    vectors: tuple[np.ndarray, ...], weights: tuple[np.floating, ...], divisor: np.floating
) -> None:
    for i in range(vectors[0].size):
        total = vectors[0][i] * weights[0]
        for k in range(1, len(vectors)):
            total += vectors[k][i] * weights[k]
        total /= divisor
        for k in range(len(vectors)):
            vectors[k][i] = total


def _into_first(
    vectors: tuple[np.ndarray, ...], weights: tuple[np.floating, ...], divisor: np.floating
) -> None:
    first = vectors[0]
    for i in range(first.size):
        total = first[i] * weights[0]
        for k in range(1, len(vectors)):
            total += vectors[k][i] * weights[k]
        first[i] = total / divisor


def _into_other(
    vectors: tuple[np.ndarray, ...], weights: tuple[np.floating, ...], divisor: np.floating
) -> None:
    target = vectors[0]
    for i in range(target.size):
        total = vectors[1][i] * weights[1]
        for k in range(2, len(vectors)):
            total += vectors[k][i] * weights[k]
        target[i] = total / divisor
