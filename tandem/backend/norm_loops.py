"""Batch normalisation on a CPU, by loops that numba compiles; see `tandem.backend.channels_last`.

Pixels of few channels are taken several at once: a line has the channels of one or more pixels, its
lanes, enough for vectors. A group's lines are shared out in parts, whose number depends on the
sizes alone. The sums of a part are taken by tiles that stay in the cache, in the tensor's
precision, and added up in float64. So what is computed depends neither on the number of threads nor
on chance.
"""

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numba
import numpy as np
import torch

from tandem.backend.channels_last import by_pixel, empty, run

Tensor = torch.Tensor

_MOST_PARTS = 64  # of a group's lines
_FEWEST_NUMBERS = 8192  # in a part, where there are several; a tile at least
_MOST_LANES = 128  # where a line has more than one pixel
_TILE = 32  # lines


class Statistics(NamedTuple):
    """Numbers of each channel that the loop of a normalisation writes, or reads."""

    mean: np.ndarray  # of all groups, (channel,), as the variance
    variance: np.ndarray
    means: np.ndarray  # (group, channel), as the inverses of standard deviations
    inverses: np.ndarray


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
    y, images = _empty_like(x), x if other is None else other
    options = np.float64(epsilon), relu, other is not None, True, True
    found = _normalize((x, y, images), scale, shift, None, valid, rows, options)
    return y, *map(torch.from_numpy, found)


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
    options = np.float64(1), False, False, True, False
    found = _normalize((x, x, x), pivot, pivot, None, valid, max(1, len(x)), options)
    count = x.shape[2:].numel() * (len(x) if valid is None else min(int(valid), len(x)))
    mean, variance = (torch.from_numpy(each).double() for each in found[:2])
    moved = mean - pivot.double()
    return torch.stack([count * moved, variance * max(1, count - 1) + count * moved * moved])


def normalize(
    x: Tensor, scale: Tensor, shift: Tensor, mean: Tensor, inverse: Tensor, valid: Tensor | None
) -> Tensor:
    """Compute ``scale (x - mean) inverse + shift``, and the shift in rows that are not valid."""
    _check_lengths(x, scale=scale, shift=shift, mean=mean, inverse=inverse)
    y, (middle, scales) = _empty_like(x), (v.contiguous().numpy() for v in (mean, inverse))
    given = Statistics(middle, scales, middle[None], scales[None])
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
    given: Statistics | None,
    valid: Tensor | None,
    rows: int,
    options: tuple[Any, ...],
) -> Statistics:
    """Run `normalize_loop` with its last arguments as `options`; return its statistics."""
    lines = _lines(images[0], valid, rows)
    vectors = scale.contiguous().numpy(), shift.contiguous().numpy()
    found = given or _empty_statistics(vectors[0], -(-len(images[0]) // rows))
    arguments = *_by_line(images, lines), *vectors, *found, lines.bounds, lines.parts
    run(normalize_loop, *arguments, *options)
    return found


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
    lines = _lines(x, valid, rows)
    *arrays, sums = (v.contiguous().numpy() for v in vectors)
    arrays += [*sums, lines.bounds]
    run(gradient_loop, *_by_line(images, lines), *arrays, lines.parts, *options)


def _check_shapes(x: Tensor, **images: Tensor | None) -> None:
    for name, each in images.items():
        if each is not None and each.shape != x.shape:
            raise ValueError(f"{name} has shape {tuple(each.shape)}, expected {tuple(x.shape)}")


def _check_lengths(x: Tensor, **vectors: Tensor) -> None:
    for name, vector in vectors.items():
        if len(vector) != x.shape[1]:
            raise ValueError(f"{name} has {len(vector)} numbers, expected {x.shape[1]}")


def _empty_statistics(like: np.ndarray, groups: int) -> Statistics:
    each, every = (
        np.empty((2, *like.shape), like.dtype),
        np.empty((2, groups, *like.shape), like.dtype),
    )
    return Statistics(*each, *every)


class _Lines(NamedTuple):
    """How images are divided."""

    shape: tuple[int, int]  # number of lines, and their lanes
    bounds: np.ndarray  # (group, 3): the first line, that after the last valid one, that after all
    parts: int  # of a group


def _lines(x: Tensor, valid: Tensor | None, rows: int) -> _Lines:
    batch, channels = x.shape[:2]
    last = batch if valid is None else int(valid)
    return _divided(batch, channels, x.shape[2:].numel(), rows, last)


@lru_cache(maxsize=256)  # a network has a few sizes of images; NumPy takes longer than a small loop
def _divided(batch: int, channels: int, area: int, rows: int, last: int) -> _Lines:
    most = max(1, _MOST_LANES // max(1, channels))
    pixels = max(n for n in range(1, most + 1) if area % n == 0)  # of a picture, in a line
    first = rows * np.arange(max(1, -(-batch // rows)), dtype=np.int64)
    end = np.minimum(first + rows, batch)
    bounds = area // pixels * np.stack([first, np.clip(last, first, end), end], axis=1)
    of_part = max(_TILE * pixels, _FEWEST_NUMBERS // max(1, channels))
    parts = 1
    while parts < _MOST_PARTS and 2 * parts * of_part <= min(rows, batch) * area:
        parts *= 2
    return _Lines((batch * area // pixels, pixels * channels), bounds, parts)


def _empty_like(x: Tensor) -> Tensor:
    return empty(x.shape, x.dtype) if x.ndim == 4 else torch.empty(x.shape, dtype=x.dtype)


def _by_line(images: Iterable[Tensor], lines: _Lines) -> Iterator[np.ndarray]:
    for x in images:
        yield by_pixel(x, lines.shape) if x.ndim == 4 else x.contiguous().numpy()


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
    lanes, none = x.shape[1], x.dtype.type(0)
    width = lanes // channels
    if measures:
        centres = np.zeros((groups * parts, channels))
        squares = np.zeros((groups * parts, channels))
        for number in numba.prange(groups * parts):
            group, part = number // parts, number % parts
            first, count = bounds[group, 0], bounds[group, 1] - bounds[group, 0]
            begin, end = first + count * part // parts, first + count * (part + 1) // parts
            middle, spread = np.zeros(lanes), np.zeros(lanes)
            total, energy = np.empty(lanes, x.dtype), np.empty(lanes, x.dtype)
            for start in range(begin, end, _TILE):
                stop = min(start + _TILE, end)
                for c in range(lanes):
                    total[c] = 0
                    energy[c] = 0
                for p in range(start, stop):
                    for c in range(lanes):
                        total[c] += x[p, c]
                share = x.dtype.type(1.0 / (stop - start))
                for c in range(lanes):
                    total[c] *= share
                for p in range(start, stop):
                    for c in range(lanes):
                        d = x[p, c] - total[c]
                        energy[c] += d * d
                # Chan, Golub, LeVeque 1979: the sums of squares about two means, joined.
                grown = (stop - start) / (stop - begin)
                before = float(start - begin)
                for c in range(lanes):
                    moved = total[c] - middle[c]
                    middle[c] += moved * grown
                    spread[c] += energy[c] + moved * moved * before * grown
            centre, square = centres[number], squares[number]
            for pixel in range(width):
                grown, before = 1 / (pixel + 1), float(pixel * (end - begin))
                for c in range(channels):
                    moved = middle[pixel * channels + c] - centre[c]
                    centre[c] += moved * grown
                    square[c] += spread[pixel * channels + c] + moved * moved * before * grown
        for c in range(channels):
            mean[c] = 0
            variance[c] = 0
        everything = 0
        for group in range(groups):
            everything += width * (bounds[group, 1] - bounds[group, 0])
        reported = np.zeros((2, channels))
        for group in range(groups):
            count = bounds[group, 1] - bounds[group, 0]
            centre, square = centres[group * parts], squares[group * parts]
            seen = width * (count // parts)
            for part in range(1, parts):
                more = width * (count * (part + 1) // parts - count * part // parts)
                if more == 0:
                    continue
                added, energies = centres[group * parts + part], squares[group * parts + part]
                grown, before = more / (seen + more), float(seen)
                for c in range(channels):
                    moved = added[c] - centre[c]
                    centre[c] += moved * grown
                    square[c] += energies[c] + moved * moved * before * grown
                seen += more
            count *= width
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
    factors = np.empty((groups, 3, lanes), x.dtype)
    for group in range(groups):
        for lane in range(lanes):
            c = lane % channels
            factors[group, 0, lane] = inverses[group, c] * scale[c]
            factors[group, 1, lane] = means[group, c]
            factors[group, 2, lane] = shift[c]
    for number in numba.prange(groups * parts):
        group, part = number // parts, number % parts
        first, valid, last = bounds[group, 0], bounds[group, 1], bounds[group, 2]
        count = last - first
        begin, end = first + count * part // parts, first + count * (part + 1) // parts
        factor, middle, level = factors[group, 0], factors[group, 1], factors[group, 2]
        if adds:
            for p in range(begin, min(end, valid)):
                for c in range(lanes):
                    value = (x[p, c] - middle[c]) * factor[c] + level[c] + other[p, c]
                    y[p, c] = none if value <= none else value
            for p in range(max(begin, valid), end):
                for c in range(lanes):
                    value = level[c] + other[p, c]
                    y[p, c] = none if value <= none else value
        elif relu:
            for p in range(begin, min(end, valid)):
                for c in range(lanes):
                    value = (x[p, c] - middle[c]) * factor[c] + level[c]
                    y[p, c] = none if value <= none else value
            for p in range(max(begin, valid), end):
                for c in range(lanes):
                    y[p, c] = none if level[c] <= none else level[c]
        else:
            for p in range(begin, min(end, valid)):
                for c in range(lanes):
                    y[p, c] = (x[p, c] - middle[c]) * factor[c] + level[c]
            for p in range(max(begin, valid), end):
                for c in range(lanes):
                    y[p, c] = level[c]


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
    lanes, none = x.shape[1], x.dtype.type(0)
    width = lanes // channels
    factors = np.empty((groups, 5, lanes), x.dtype)
    for group in range(groups):
        for lane in range(lanes):
            c = lane % channels
            factors[group, 0, lane] = inverses[group, c] * scale[c]
            factors[group, 1, lane] = means[group, c]
            factors[group, 2, lane] = shift[c]
    if adds_up:
        sums = np.zeros((groups * parts, channels))
        products = np.zeros((groups * parts, channels))
        for number in numba.prange(groups * parts):
            group, part = number // parts, number % parts
            first, count = bounds[group, 0], bounds[group, 1] - bounds[group, 0]
            begin, end = first + count * part // parts, first + count * (part + 1) // parts
            slope, middle, bias = factors[group, 0], factors[group, 1], factors[group, 2]
            add, multiply = np.zeros(lanes), np.zeros(lanes)
            total, along = np.empty(lanes, x.dtype), np.empty(lanes, x.dtype)
            for start in range(begin, end, _TILE):
                for c in range(lanes):
                    total[c] = 0
                    along[c] = 0
                if relu:
                    for p in range(start, min(start + _TILE, end)):
                        for c in range(lanes):
                            d = x[p, c] - middle[c]
                            gated = none if d * slope[c] + bias[c] <= none else g[p, c]
                            total[c] += gated
                            along[c] += gated * d
                else:
                    for p in range(start, min(start + _TILE, end)):
                        for c in range(lanes):
                            total[c] += g[p, c]
                            along[c] += g[p, c] * (x[p, c] - middle[c])
                for c in range(lanes):
                    add[c] += total[c]
                    multiply[c] += along[c]
            for pixel in range(width):
                for c in range(channels):
                    sums[number, c] += add[pixel * channels + c]
                    products[number, c] += multiply[pixel * channels + c]
        reported = np.zeros((2, channels))
        for group in range(groups):
            count = max(1, width * (bounds[group, 1] - bounds[group, 0]))
            add, multiply = sums[group * parts], products[group * parts]
            for part in range(1, parts):
                for c in range(channels):
                    add[c] += sums[group * parts + part, c]
                    multiply[c] += products[group * parts + part, c]
            for lane in range(lanes):
                c = lane % channels
                inverse = float(inverses[group, c])
                factors[group, 3, lane] = add[c] / count
                factors[group, 4, lane] = multiply[c] * inverse * inverse / count
            for c in range(channels):
                inverse = float(inverses[group, c])
                reported[0, c] += multiply[c] * inverse
                reported[1, c] += add[c]
        for c in range(channels):
            dscale[c] = reported[0, c]
            dshift[c] = reported[1, c]
    else:  # of one group, with sums over more rows
        for lane in range(lanes):
            c = lane % channels
            factors[0, 3, lane] = dshift[c] / values
            factors[0, 4, lane] = dscale[c] * inverses[0, c] / values
    if not applies:
        return
    for number in numba.prange(groups * parts):
        group, part = number // parts, number % parts
        first, valid, last = bounds[group, 0], bounds[group, 1], bounds[group, 2]
        count = last - first
        begin, end = first + count * part // parts, first + count * (part + 1) // parts
        slope, middle, bias = factors[group, 0], factors[group, 1], factors[group, 2]
        level, along = factors[group, 3], factors[group, 4]
        if relu:
            for p in range(begin, min(end, valid)):
                for c in range(lanes):
                    d = x[p, c] - middle[c]
                    gated = none if d * slope[c] + bias[c] <= none else g[p, c]
                    dx[p, c] = slope[c] * ((gated - level[c]) - d * along[c])
        else:
            for p in range(begin, min(end, valid)):
                for c in range(lanes):
                    d = x[p, c] - middle[c]
                    dx[p, c] = slope[c] * ((g[p, c] - level[c]) - d * along[c])
        for p in range(max(begin, valid), end):
            for c in range(lanes):
                dx[p, c] = 0
