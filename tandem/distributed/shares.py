"""Shares of an average as numbers that float32 holds exactly.

Three times ``float32(1/3)`` is ``1 + 3e-8``: with rounded shares each average would multiply what
it averages by such a factor, which in weights adds up over the steps, as weight decay does. And
three numbers that add up to 1, near 1/3, round most of their products in one direction. So vectors
are multiplied by whole numbers over a power of two, and their sum is divided once.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

_LARGEST = 1 << 24  # float32 holds all whole numbers up to it


def weights_and_divisor(shares: Sequence[float]) -> tuple[Sequence[float], float]:
    """Find weights and a divisor: the sum of weighted vectors, divided, is their average.

    Shares are quotients of whole numbers, such as of a trainer's pictures and a minibatch's. Where
    these have no common denominator up to 2**24, the weights are the shares, and the divisor is 1.
    So they are for shares over a power of two, such as those of 2 or 4 trainers with equal parts.

    Returns
    -------
    tuple
        The weights, by rank, and the divisor, above 0.5 and at most 1.
    """
    return _find(tuple(shares))


@lru_cache(maxsize=64)  # a run has a few: of whole minibatches, and of each last one
def _find(shares: tuple[float, ...]) -> tuple[tuple[float, ...], float]:
    # Quotients by such numbers are farther apart than what rounding to float64 has changed.
    quotients = [Fraction(share).limit_denominator(_LARGEST) for share in shares]
    common = math.lcm(*(quotient.denominator for quotient in quotients))
    counts = [int(quotient * common) for quotient in quotients]
    exact = all(n / common == share for n, share in zip(counts, shares, strict=True))
    if not exact or max(common, *counts) > _LARGEST:
        return shares, 1.0
    power = 1 << (common - 1).bit_length()
    return tuple(count / power for count in counts), common / power
