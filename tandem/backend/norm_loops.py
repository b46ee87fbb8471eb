"""Batch normalisation on a CPU, by loops that numba compiles; see `tandem.backend.channels_last`.

A group's pixels are shared out in parts, whose number depends on their number alone. The sums of a
part are taken by tiles that stay in the cache, in the tensor's precision, and added up in float64.
So what is computed depends neither on the number of threads nor on chance.
"""

from functools import lru_cache

import numba
import numpy as np
import torch

from tandem.backend.channels_last import empty, pixels, run

Tensor = torch.Tensor

_MOST_PARTS = 64  # of a group's pixels
_LEAST_PIXELS = 64  # in a part, where there are several
_TILE = 32  # pixels


def batch_norm(
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    valid: Tensor | None,
    rows: int,
    epsilon: float,
    rectify: bool = False,
    other: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Compute the outputs of `tandem.ops.BatchNorm`, or of `tandem.ops.NormRelu` with `rectify`."""
    if other is not None and other.shape != x.shape:
        raise ValueError(f"other has shape {tuple(other.shape)}, expected {tuple(x.shape)}")
    y, channels = empty_like(x), x.shape[1]
    bounds, parts = group_bounds(x, valid, rows)
    check_lengths(channels, scale=scale, shift=shift)
    means, inverses = (torch.empty((len(bounds), channels), dtype=x.dtype) for _ in range(2))
    mean, variance = (torch.empty(channels, dtype=x.dtype) for _ in range(2))
    vectors = (v.contiguous().numpy() for v in (scale, shift, mean, variance, means, inverses))
    images = pixel_rows(x), pixel_rows(y), pixel_rows(x if other is None else other)
    adds = other is not None
    options = np.float64(epsilon), rectify, adds, True, True
    run(normalize_loop, *images, *vectors, bounds, parts, *options)
    return y, mean, variance, means, inverses


def batch_norm_gradient(
    x: Tensor,
    scale: Tensor,
    g: Tensor,
    means: Tensor,
    inverses: Tensor,
    valid: Tensor | None,
    rows: int,
    rectified: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the outputs of `tandem.ops.BatchNormGrad`.

    `rectified` is the shift, if a ReLU follows: then those of `tandem.ops.NormReluGrad`.
    """
    if g.shape != x.shape:
        raise ValueError(f"g has shape {tuple(g.shape)}, expected {tuple(x.shape)}")
    dx, channels = empty_like(x), x.shape[1]
    bounds, parts = group_bounds(x, valid, rows)
    check_lengths(channels, scale=scale)
    for name, each in (("means", means), ("inverses", inverses)):
        if each.shape != (len(bounds), channels):
            raise ValueError(
                f"{name} has shape {tuple(each.shape)}, expected {(len(bounds), channels)}"
            )
    dscale, dshift = (torch.empty(channels, dtype=x.dtype) for _ in range(2))
    shift, has_relu = (scale, False) if rectified is None else (rectified, True)
    check_lengths(channels, shift=shift)
    vectors = (v.contiguous().numpy() for v in (scale, shift, means, inverses, dscale, dshift))
    images = pixel_rows(x), pixel_rows(g), pixel_rows(dx)
    run(gradient_loop, *images, *vectors, bounds, parts, has_relu, True, True, np.float64(0))
    return dx, dscale, dshift


def check_lengths(channels: int, **vectors: Tensor) -> None:
    for name, vector in vectors.items():
        if len(vector) != channels:
            raise ValueError(f"{name} has {len(vector)} numbers, expected {channels}")


def group_bounds(x: Tensor, valid: Tensor | None, rows: int) -> tuple[np.ndarray, int]:
    """Bounds of each group, (group, 3), and the number of parts of its pixels.

    Bounds are its first pixel, that after its last valid one, and that after its last.
    """
    batch = len(x)
    return _bounds(batch, x.shape[2:].numel(), rows, batch if valid is None else int(valid))


@lru_cache(maxsize=256)  # a network has a few sizes of images; NumPy takes longer than a small loop
def _bounds(batch: int, area: int, rows: int, last: int) -> tuple[np.ndarray, int]:
    first = rows * np.arange(-(-batch // rows), dtype=np.int64)
    end = np.minimum(first + rows, batch)
    bounds = area * np.stack([first, np.clip(last, first, end), end], axis=1)
    parts = 1
    while parts < _MOST_PARTS and 2 * parts * _LEAST_PIXELS <= min(rows, batch) * area:
        parts *= 2
    return bounds, parts


def empty_like(x: Tensor) -> Tensor:
    return empty(x.shape, x.dtype) if x.ndim == 4 else torch.empty(x.shape, dtype=x.dtype)


def pixel_rows(x: Tensor) -> np.ndarray:
    """(pixel, channel), or (row, unit)."""
    return pixels(x) if x.ndim == 4 else x.contiguous().numpy()


def normalize_loop(
    x: np.ndarray,
    y: np.ndarray,
    other: np.ndarray,
    scale: np.ndarray,
    shift: np.ndarray,
    mean: np.ndarray,
    variance: np.ndarray,
    means: np.ndarray,
    inverses: np.ndarray,
    bounds: np.ndarray,
    parts: int,
    epsilon: float,
    rectify: bool,
    adds: bool,
    measures: bool,
    applies: bool,
) -> None:
    groups, channels = means.shape
    none = x.dtype.type(0)
    if measures:
        centres = np.zeros((groups * parts, channels))
        squares = np.zeros((groups * parts, channels))
        for number in numba.prange(groups * parts):
            group, part = number // parts, number % parts
            first, count = bounds[group, 0], bounds[group, 1] - bounds[group, 0]
            begin, end = first + count * part // parts, first + count * (part + 1) // parts
            centre, square = centres[number], squares[number]
            total, energy = np.empty(channels, x.dtype), np.empty(channels, x.dtype)
            for start in range(begin, end, _TILE):
                stop = min(start + _TILE, end)
                for c in range(channels):
                    total[c] = 0
                    energy[c] = 0
                for p in range(start, stop):
                    for c in range(channels):
                        total[c] += x[p, c]
                share = x.dtype.type(1.0 / (stop - start))
                for c in range(channels):
                    total[c] *= share
                for p in range(start, stop):
                    for c in range(channels):
                        d = x[p, c] - total[c]
                        energy[c] += d * d
                # Chan, Golub, LeVeque 1979: the sums of squares about two means, joined.
                grown = (stop - start) / (stop - begin)
                before = float(start - begin)
                for c in range(channels):
                    moved = total[c] - centre[c]
                    centre[c] += moved * grown
                    square[c] += energy[c] + moved * moved * before * grown
        for c in range(channels):
            mean[c] = 0
            variance[c] = 0
        everything = 0
        for group in range(groups):
            everything += bounds[group, 1] - bounds[group, 0]
        reported = np.zeros((2, channels))
        for group in range(groups):
            count = bounds[group, 1] - bounds[group, 0]
            centre, square = centres[group * parts], squares[group * parts]
            seen = count // parts
            for part in range(1, parts):
                more = count * (part + 1) // parts - count * part // parts
                if more == 0:
                    continue
                added, energies = centres[group * parts + part], squares[group * parts + part]
                grown, before = more / (seen + more), float(seen)
                for c in range(channels):
                    moved = added[c] - centre[c]
                    centre[c] += moved * grown
                    square[c] += energies[c] + moved * moved * before * grown
                seen += more
            weight = count / max(1, everything)
            for c in range(channels):
                inverse = 1.0 / np.sqrt(square[c] / max(1, count) + epsilon)
                means[group, c] = centre[c]
                inverses[group, c] = inverse
                reported[0, c] += weight * centre[c]
                reported[1, c] += weight * square[c] / max(1, count - 1)
        for c in range(channels):
            mean[c] = reported[0, c]
            variance[c] = reported[1, c]
    if not applies:
        return
    factors = np.empty((groups, channels), x.dtype)
    for group in range(groups):
        for c in range(channels):
            factors[group, c] = inverses[group, c] * scale[c]
    for number in numba.prange(groups * parts):
        group, part = number // parts, number % parts
        first, valid, last = bounds[group, 0], bounds[group, 1], bounds[group, 2]
        count = last - first
        begin, end = first + count * part // parts, first + count * (part + 1) // parts
        factor, middle = factors[group], means[group]
        if adds:
            for p in range(begin, min(end, valid)):
                for c in range(channels):
                    value = (x[p, c] - middle[c]) * factor[c] + shift[c] + other[p, c]
                    y[p, c] = none if value <= none else value
            for p in range(max(begin, valid), end):
                for c in range(channels):
                    value = shift[c] + other[p, c]
                    y[p, c] = none if value <= none else value
        elif rectify:
            for p in range(begin, min(end, valid)):
                for c in range(channels):
                    value = (x[p, c] - middle[c]) * factor[c] + shift[c]
                    y[p, c] = none if value <= none else value
            for p in range(max(begin, valid), end):
                for c in range(channels):
                    y[p, c] = none if shift[c] <= none else shift[c]
        else:
            for p in range(begin, min(end, valid)):
                for c in range(channels):
                    y[p, c] = (x[p, c] - middle[c]) * factor[c] + shift[c]
            for p in range(max(begin, valid), end):
                for c in range(channels):
                    y[p, c] = shift[c]


def gradient_loop(
    x: np.ndarray,
    g: np.ndarray,
    dx: np.ndarray,
    scale: np.ndarray,
    shift: np.ndarray,
    means: np.ndarray,
    inverses: np.ndarray,
    dscale: np.ndarray,
    dshift: np.ndarray,
    bounds: np.ndarray,
    parts: int,
    has_relu: bool,
    adds_up: bool,
    applies: bool,
    values: float,
) -> None:
    groups, channels = means.shape
    none = x.dtype.type(0)
    factors = np.empty((3, groups, channels), x.dtype)
    for group in range(groups):
        for c in range(channels):
            factors[0, group, c] = inverses[group, c] * scale[c]
    if adds_up:
        sums = np.zeros((groups * parts, channels))
        products = np.zeros((groups * parts, channels))
        for number in numba.prange(groups * parts):
            group, part = number // parts, number % parts
            first, count = bounds[group, 0], bounds[group, 1] - bounds[group, 0]
            begin, end = first + count * part // parts, first + count * (part + 1) // parts
            centre, add, multiply = means[group], sums[number], products[number]
            total, along = np.empty(channels, x.dtype), np.empty(channels, x.dtype)
            slope = factors[0, group]
            for start in range(begin, end, _TILE):
                for c in range(channels):
                    total[c] = 0
                    along[c] = 0
                if has_relu:
                    for p in range(start, min(start + _TILE, end)):
                        for c in range(channels):
                            d = x[p, c] - centre[c]
                            gated = none if d * slope[c] + shift[c] <= none else g[p, c]
                            total[c] += gated
                            along[c] += gated * d
                else:
                    for p in range(start, min(start + _TILE, end)):
                        for c in range(channels):
                            total[c] += g[p, c]
                            along[c] += g[p, c] * (x[p, c] - centre[c])
                for c in range(channels):
                    add[c] += total[c]
                    multiply[c] += along[c]
        reported = np.zeros((2, channels))
        for group in range(groups):
            count = max(1, bounds[group, 1] - bounds[group, 0])
            add, multiply = sums[group * parts], products[group * parts]
            for part in range(1, parts):
                for c in range(channels):
                    add[c] += sums[group * parts + part, c]
                    multiply[c] += products[group * parts + part, c]
            for c in range(channels):
                inverse = float(inverses[group, c])
                factors[1, group, c] = add[c] / count
                factors[2, group, c] = multiply[c] * inverse * inverse / count
                reported[0, c] += multiply[c] * inverse
                reported[1, c] += add[c]
        for c in range(channels):
            dscale[c] = reported[0, c]
            dshift[c] = reported[1, c]
    else:  # of one group, with sums over more rows
        for c in range(channels):
            factors[1, 0, c] = dshift[c] / values
            factors[2, 0, c] = dscale[c] * inverses[0, c] / values
    if not applies:
        return
    for number in numba.prange(groups * parts):
        group, part = number // parts, number % parts
        first, valid, last = bounds[group, 0], bounds[group, 1], bounds[group, 2]
        count = last - first
        begin, end = first + count * part // parts, first + count * (part + 1) // parts
        slope, level, along = factors[0, group], factors[1, group], factors[2, group]
        middle = means[group]
        if has_relu:
            for p in range(begin, min(end, valid)):
                for c in range(channels):
                    d = x[p, c] - middle[c]
                    gated = none if d * slope[c] + shift[c] <= none else g[p, c]
                    dx[p, c] = slope[c] * ((gated - level[c]) - d * along[c])
        else:
            for p in range(begin, min(end, valid)):
                for c in range(channels):
                    d = x[p, c] - middle[c]
                    dx[p, c] = slope[c] * ((g[p, c] - level[c]) - d * along[c])
        for p in range(max(begin, valid), end):
            for c in range(channels):
                dx[p, c] = 0
