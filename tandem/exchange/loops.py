"""The loops of an exchange on the host, compiled by numba: one pass over memory, no temporaries.

Importing this module imports numba, which takes a moment and some memory: `tandem.exchange.average`
does so in a trainer's first exchange. Products and sums are rounded one by one and never fused into
one operation, so the bits are those of NumPy's expressions.
"""

import functools
import logging
from collections.abc import Callable, Sequence

import numba
import numpy as np

log = logging.getLogger(__name__)

Loop = Callable[[tuple[np.ndarray, ...], tuple[np.floating, ...]], None]
"""Called with vectors and the weight of each."""


def run(loop: Loop, vectors: Sequence[np.ndarray], weights: Sequence[np.floating]) -> None:
    """Run a loop. It doesn't hold the interpreter's lock.

    Parameters
    ----------
    loop : callable
        As `into_all`.
    vectors : sequence of float arrays (n,)
        Of one dtype, each in one piece.
    weights : sequence of scalars
        Of the same dtype and number.
    """
    _compiled(loop, vectors[0].dtype, len(vectors))(tuple(vectors), tuple(weights))


def into_all(vectors: tuple[np.ndarray, ...], weights: tuple[np.floating, ...]) -> None:
    """Replace every vector by the weighted sum of all, added in their order."""
    for i in range(vectors[0].size):
        total = vectors[0][i] * weights[0]
        for k in range(1, len(vectors)):
            total += vectors[k][i] * weights[k]
        for k in range(len(vectors)):
            vectors[k][i] = total


def into_first(vectors: tuple[np.ndarray, ...], weights: tuple[np.floating, ...]) -> None:
    """Replace the first vector by the weighted sum of the others, added in their order.

    The first may be among the others too. Its own weight is not used.
    """
    for i in range(vectors[0].size):
        total = vectors[1][i] * weights[1]
        for k in range(2, len(vectors)):
            total += vectors[k][i] * weights[k]
        vectors[0][i] = total


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
