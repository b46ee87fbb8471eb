"""Whether an average changes vectors that are equal."""

import numpy as np

MOST_GROWTH = 1e-6 / 3000
"""By an average of equal vectors: less than 1e-6 in 3,000 of them."""


def weights(size: int = 1 << 19) -> np.ndarray:
    """Numbers of many magnitudes, float32 (size,), none of them 0."""
    rng = np.random.default_rng(0)
    return (rng.normal(size=size) * 10.0 ** rng.uniform(-4, 0, size)).astype(np.float32)


def growth(before: np.ndarray, after: np.ndarray) -> float:
    """The mean of what each number has grown by, relative to what it was.

    Roundings, of 3e-8 each, cancel over many numbers.
    """
    return float((after / before.astype(float) - 1).mean())
