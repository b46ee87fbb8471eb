"""Weighted averages of vectors, in one pass over memory, by loops that numba compiles.

Importing this module imports numba, which takes time and memory: a trainer does so in its
first exchange. Products and sums are rounded one by one and never fused into one operation, so the
bits are those of NumPy's expressions.
"""

import functools
import logging
from collections.abc import Callable, Sequence

import numba
import numpy as np

log = logging.getLogger(__name__)

Loop = Callable[[tuple[np.ndarray, ...], tuple[np.floating, ...]], None]
"""Called with vectors and the weight of each."""


def average_into_all(vectors: Sequence[np.ndarray], shares: Sequence[float]) -> None:
    """Replace every vector by their weighted average, without the interpreter's lock.

    Vectors are float (n,) of one dtype, each in one piece, and are added in this order. Weights add
    up to 1; a vector of weight 0 is not read.
    """
    _run(_into_all, vectors, shares, vectors)


def average_into_first(vectors: Sequence[np.ndarray], shares: Sequence[float]) -> None:
    """Replace the first vector by the weighted average of all, as `average_into_all` does it.

    Where the first has weight 0, the first that has one is overwritten as well.
    """
    _run(_into_first, vectors, shares, vectors[:1])


def add_into(
    target: np.ndarray, terms: Sequence[np.ndarray], weights: Sequence[np.floating]
) -> None:
    """Replace a vector by the weighted sum of others of its dtype, added in their order.

    It may be the first of them too. No weight may be 0.
    """
    loop = _compiled(_into_other, target.dtype, 1 + len(terms))
    loop((target, *terms), (target.dtype.type(0), *weights))


def _run(
    loop: Loop,
    vectors: Sequence[np.ndarray],
    shares: Sequence[float],
    targets: Sequence[np.ndarray],
) -> None:
    """Run a loop over the vectors that have a weight, and give the other targets a copy."""
    dtype = vectors[0].dtype
    pairs = [(v, dtype.type(s)) for v, s in zip(vectors, shares, strict=True) if s > 0]
    terms, weights = zip(*pairs, strict=True)
    _compiled(loop, dtype, len(terms))(terms, weights)
    for target, share in zip(targets, shares, strict=False):
        if not share > 0:
            np.copyto(target, terms[0])


@functools.cache
def _compiled(loop: Loop, dtype: np.dtype, terms: int) -> Loop:
    """The loop in machine code, which numba keeps on disk for the next run if it can."""
    sample = (np.zeros(1, dtype),) * terms, (dtype.type(1),) * terms
    try:
        compiled = numba.njit(loop, nogil=True, cache=True)
        compiled(*sample)
    except Exception as error:  # no folder, a full disk, or whatever a damaged file leads to
        log.debug("numba's cache can't be used: %s", error)
        compiled = numba.njit(loop, nogil=True)
        compiled(*sample)
    return compiled


def _into_all(vectors: tuple[np.ndarray, ...], weights: tuple[np.floating, ...]) -> None:
    for i in range(vectors[0].size):
        total = vectors[0][i] * weights[0]
        for k in range(1, len(vectors)):
            total += vectors[k][i] * weights[k]
        for k in range(len(vectors)):
            vectors[k][i] = total


def _into_first(vectors: tuple[np.ndarray, ...], weights: tuple[np.floating, ...]) -> None:
    first = vectors[0]
    for i in range(first.size):
        total = first[i] * weights[0]
        for k in range(1, len(vectors)):
            total += vectors[k][i] * weights[k]
        first[i] = total


def _into_other(vectors: tuple[np.ndarray, ...], weights: tuple[np.floating, ...]) -> None:
    target = vectors[0]
    for i in range(target.size):
        total = vectors[1][i] * weights[1]
        for k in range(2, len(vectors)):
            total += vectors[k][i] * weights[k]
        target[i] = total
