"""Batch normalisation by groups of rows, value by value."""

from collections.abc import Iterator

import numpy as np

EPSILON = 1e-3


def norm_arrays(shape: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    """Images, scales, shifts and a gradient, float64."""
    rng = np.random.default_rng(len(shape))
    x, g = 3 * rng.normal(size=shape) + 2, rng.normal(size=shape)
    return x, rng.normal(size=shape[1]), rng.normal(size=shape[1]), g


def _groups(x: np.ndarray, rows: int, valid: int) -> Iterator[tuple[slice, int]]:
    """Rows of each group of which some are valid, and the number of values of a channel."""
    for first in range(0, valid, rows):
        own = slice(first, min(first + rows, valid))
        yield own, (own.stop - own.start) * int(np.prod(x.shape[2:]))


def batch_norm_by_loops(
    x: np.ndarray, scale: np.ndarray, shift: np.ndarray, rows: int, valid: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Outputs of `tandem.ops.batch_norm`; rows that are not valid have the shift."""
    y, mean, variance = np.empty_like(x), np.zeros_like(scale), np.zeros_like(scale)
    for c in range(x.shape[1]):
        y[:, c] = shift[c]
        for own, count in _groups(x, rows, valid):
            values = [float(value) for value in x[own, c].ravel()]
            centre = sum(values) / count
            square = sum((value - centre) ** 2 for value in values)
            share = (own.stop - own.start) / valid
            mean[c] += share * centre
            variance[c] += share * (square / (count - 1) if count > 1 else 0)
            root = (square / count + EPSILON) ** 0.5
            y[own, c] = scale[c] * (x[own, c] - centre) / root + shift[c]
    return y, mean, variance


def gradients_by_loops(
    x: np.ndarray, scale: np.ndarray, g: np.ndarray, rows: int, valid: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gradients of x, scale and shift: the derivative of each output with respect to each input."""
    dx, dscale, dshift = np.zeros_like(x), np.zeros_like(scale), np.zeros_like(scale)
    for c in range(x.shape[1]):
        for own, count in _groups(x, rows, valid):
            values, slopes = x[own, c].ravel(), g[own, c].ravel()
            centre = sum(values) / count
            root = (sum((value - centre) ** 2 for value in values) / count + EPSILON) ** 0.5
            normal = [(value - centre) / root for value in values]
            found = np.zeros(count)
            for i, j in np.ndindex(count, count):
                # Of output i with respect to input j.
                change = (i == j) - 1 / count - normal[i] * normal[j] / count
                found[j] += slopes[i] * scale[c] * change / root
            dx[own, c] = found.reshape(x[own, c].shape)
            dscale[c] += sum(s * n for s, n in zip(slopes, normal, strict=True))
            dshift[c] += sum(slopes)
    return dx, dscale, dshift
