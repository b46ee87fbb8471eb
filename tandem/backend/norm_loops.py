"""Batch normalisation on a CPU, by loops that numba compiles; see `tandem.backend.channels_last`.

A group's pixels are shared out in parts, whose number depends on their number alone. The sums of a
part are taken by tiles that stay in the cache, in the tensor's precision, and added up in float64.
So what is computed depends neither on the number of threads nor on chance.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import numba
import numpy as np
import torch

from tandem.backend.channels_last import empty, pixels, run

Tensor = torch.Tensor

_MOST_PARTS = 64  # of a group's pixels
_LEAST_PIXELS = 64  # in a part, where there are several
_TILE = 32  # pixels


class Statistics(NamedTuple):
    """Numbers of each channel that the loop of a normalisation writes, or reads."""

    mean: Tensor  # of all groups, (channel,), as the variance
    variance: Tensor
    means: Tensor  # (group, channel), as the inverses of standard deviations
    inverses: Tensor


def batch_norm(
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    valid: Tensor | None,
    rows: int,
    epsilon: float,
    relu: bool = False,
    other: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Compute the outputs of `tandem.ops.BatchNorm`."""
    _check_shapes(x, other=other)
    _check_lengths(x, scale=scale, shift=shift)
    y, found = _empty_like(x), _empty_statistics(x, rows)
    images = x, y, x if other is None else other
    options = np.float64(epsilon), relu, other is not None, True, True
    _normalize(images, scale, shift, found, valid, rows, options)
    return y, *found


def batch_norm_gradient(
    x: Tensor,
    scale: Tensor,
    shift: Tensor | None,
    g: Tensor,
    means: Tensor,
    inverses: Tensor,
    valid: Tensor | None,
    rows: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the outputs of `tandem.ops.BatchNormGrad`; the shift is for one with `relu`."""
    groups = -(-len(x) // rows), x.shape[1]
    for name, each in (("means", means), ("inverses", inverses)):
        if each.shape != groups:
            raise ValueError(f"{name} has shape {tuple(each.shape)}, expected {groups}")
    dx, sums = _empty_like(x), torch.empty((2, x.shape[1]), dtype=x.dtype)
    options = shift is not None, True, True, np.float64(0)
    vectors = scale, scale if shift is None else shift, means, inverses, sums
    _run_gradient((x, g, dx), vectors, valid, rows, options)
    return dx, sums[0], sums[1]


# The stages, of all rows as one group


def channel_sums(x: Tensor, pivot: Tensor, valid: Tensor | None) -> Tensor:
    """Compute the output of `tandem.ops.ChannelSums`."""
    _check_lengths(x, pivot=pivot)
    rows = max(1, len(x))
    found, (bounds, _) = _empty_statistics(x, rows), _group_bounds(x, valid, rows)
    options = np.float64(1), False, False, True, False
    _normalize((x, x, x), pivot, pivot, found, valid, rows, options)
    count = int(bounds[0, 1] - bounds[0, 0])
    moved = found.mean.double() - pivot.double()
    squares = found.variance.double() * max(1, count - 1)
    return torch.stack([count * moved, squares + count * moved * moved])


def normalize(
    x: Tensor, scale: Tensor, shift: Tensor, mean: Tensor, inverse: Tensor, valid: Tensor | None
) -> Tensor:
    """Compute ``scale (x - mean) inverse + shift``, and the shift in rows that are not valid."""
    _check_lengths(x, scale=scale, shift=shift, mean=mean, inverse=inverse)
    y, given = _empty_like(x), Statistics(mean, inverse, mean[None], inverse[None])
    options = np.float64(1), False, False, False, True
    _normalize((x, y, x), scale, shift, given, valid, max(1, len(x)), options)
    return y


def channel_gradient_sums(
    x: Tensor, g: Tensor, mean: Tensor, inverse: Tensor, valid: Tensor | None
) -> Tensor:
    """Compute the output of `tandem.ops.ChannelGradientSums`."""
    sums = torch.empty((2, x.shape[1]), dtype=x.dtype)
    vectors = inverse, inverse, mean[None], inverse[None], sums
    _run_gradient((x, g, x), vectors, valid, max(1, len(x)), (False, True, False, np.float64(0)))
    return sums


def gradient_by_sums(
    x: Tensor,
    g: Tensor,
    scale: Tensor,
    mean: Tensor,
    inverse: Tensor,
    sums: Tensor,
    count: Tensor,
    valid: Tensor | None,
) -> Tensor:
    """Compute the output of `tandem.ops.BatchNormBySumsGrad`."""
    dx, values = _empty_like(x), np.float64(max(1.0, float(count)))
    vectors = scale, scale, mean[None], inverse[None], sums
    _run_gradient((x, g, dx), vectors, valid, max(1, len(x)), (False, False, True, values))
    return dx


def _normalize(
    images: tuple[Tensor, Tensor, Tensor],
    scale: Tensor,
    shift: Tensor,
    found: Statistics,
    valid: Tensor | None,
    rows: int,
    options: tuple[Any, ...],
) -> None:
    """Run `normalize_loop` with its last arguments as `options`."""
    bounds = _group_bounds(images[0], valid, rows)
    vectors = (v.contiguous().numpy() for v in (scale, shift, *found))
    run(normalize_loop, *map(_pixel_rows, images), *vectors, *bounds, *options)


def _run_gradient(
    images: tuple[Tensor, Tensor, Tensor],
    vectors: tuple[Tensor, ...],
    valid: Tensor | None,
    rows: int,
    options: tuple[Any, ...],
) -> None:
    """Run `gradient_loop` with its last arguments as `options`; `vectors` end with both sums."""
    x, g, _ = images
    _check_shapes(x, g=g)
    scale, shift, means, inverses, _ = vectors
    _check_lengths(x, scale=scale, shift=shift, means=means.T, inverses=inverses.T)
    bounds = _group_bounds(x, valid, rows)
    *arrays, (dscale, dshift) = (v.contiguous().numpy() for v in vectors)
    run(gradient_loop, *map(_pixel_rows, images), *arrays, dscale, dshift, *bounds, *options)


def _check_shapes(x: Tensor, **images: Tensor | None) -> None:
    for name, each in images.items():
        if each is not None and each.shape != x.shape:
            raise ValueError(f"{name} has shape {tuple(each.shape)}, expected {tuple(x.shape)}")


def _check_lengths(x: Tensor, **vectors: Tensor) -> None:
    for name, vector in vectors.items():
        if len(vector) != x.shape[1]:
            raise ValueError(f"{name} has {len(vector)} numbers, expected {x.shape[1]}")


def _empty_statistics(x: Tensor, rows: int) -> Statistics:
    groups, channels = -(-len(x) // rows), x.shape[1]
    shapes = (channels,), (channels,), (groups, channels), (groups, channels)
    return Statistics(*(torch.empty(shape, dtype=x.dtype) for shape in shapes))


def _group_bounds(x: Tensor, valid: Tensor | None, rows: int) -> tuple[np.ndarray, int]:
    """Bounds of each group, (group, 3), and the number of parts of its pixels.

    Bounds are its first pixel, that after its last valid one, and that after its last.
    """
    batch = len(x)
    return _bounds(batch, x.shape[2:].numel(), rows, batch if valid is None else int(valid))


@lru_cache(maxsize=256)  # a network has a few sizes of images; NumPy takes longer than a small loop
def _bounds(batch: int, area: int, rows: int, last: int) -> tuple[np.ndarray, int]:
    first = rows * np.arange(max(1, -(-batch // rows)), dtype=np.int64)
    end = np.minimum(first + rows, batch)
    bounds = area * np.stack([first, np.clip(last, first, end), end], axis=1)
    parts = 1
    while parts < _MOST_PARTS and 2 * parts * _LEAST_PIXELS <= min(rows, batch) * area:
        parts *= 2
    return bounds, parts


def _empty_like(x: Tensor) -> Tensor:
    return empty(x.shape, x.dtype) if x.ndim == 4 else torch.empty(x.shape, dtype=x.dtype)


def _pixel_rows(x: Tensor) -> np.ndarray:
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
    relu: bool,
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
        elif relu:
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
    relu: bool,
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
                if relu:
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
        if relu:
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
