"""Batch normalisation by statistics of more rows than these, by the loops of `norm_loops`.

Each function runs one stage of a loop: its sums, or what follows from them.
"""

import numpy as np
import torch

from tandem.backend.channels_last import run
from tandem.backend.norm_loops import (
    check_lengths,
    empty_like,
    gradient_loop,
    group_bounds,
    normalize_loop,
    pixel_rows,
)

Tensor = torch.Tensor


def channel_sums(x: Tensor, pivot: Tensor, valid: Tensor | None) -> Tensor:
    """Compute the output of `tandem.ops.ChannelSums`."""
    channels, images = x.shape[1], pixel_rows(x)
    check_lengths(channels, pivot=pivot)
    bounds, parts = group_bounds(x, valid, len(x))
    mean, variance, unused = (torch.empty(channels, dtype=x.dtype) for _ in range(3))
    saved = [torch.empty((1, channels), dtype=x.dtype).numpy() for _ in range(2)]
    vectors = unused.numpy(), unused.numpy(), mean.numpy(), variance.numpy(), *saved
    options = np.float64(1), False, False, True, False
    run(normalize_loop, images, images, images, *vectors, bounds, parts, *options)
    count = int(bounds[0, 1] - bounds[0, 0])
    moved = mean.double() - pivot.double()
    squares = variance.double() * max(1, count - 1)
    return torch.stack([count * moved, squares + count * moved * moved])


def normalize(
    x: Tensor, scale: Tensor, shift: Tensor, mean: Tensor, inverse: Tensor, valid: Tensor | None
) -> Tensor:
    """Compute ``scale (x - mean) inverse + shift``, and the shift in rows that are not valid."""
    y, images = empty_like(x), pixel_rows(x)
    if not len(x):
        return y
    bounds, parts = group_bounds(x, valid, len(x))
    check_lengths(x.shape[1], scale=scale, shift=shift, mean=mean, inverse=inverse)
    own = [v.contiguous().numpy() for v in (scale, shift, mean, inverse)]
    vectors = *own, own[2][np.newaxis], own[3][np.newaxis]
    options = np.float64(1), False, False, False, True
    run(normalize_loop, images, pixel_rows(y), images, *vectors, bounds, parts, *options)
    return y


def channel_gradient_sums(
    x: Tensor, g: Tensor, mean: Tensor, inverse: Tensor, valid: Tensor | None
) -> Tensor:
    """Compute the output of `tandem.ops.ChannelGradientSums`."""
    sums = torch.empty((2, x.shape[1]), dtype=x.dtype)
    _run_gradient(x, g, x, (inverse, mean, inverse, sums), valid, (True, False, 0.0))
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
    dx = empty_like(x)
    values = max(1.0, float(count))
    _run_gradient(x, g, dx, (scale, mean, inverse, sums), valid, (False, True, values))
    return dx


def _run_gradient(
    x: Tensor,
    g: Tensor,
    dx: Tensor,
    given: tuple[Tensor, Tensor, Tensor, Tensor],
    valid: Tensor | None,
    stage: tuple[bool, bool, float],
) -> None:
    """Run one stage of the gradient, of all rows as one group; `given` ends with both sums."""
    if g.shape != x.shape:
        raise ValueError(f"g has shape {tuple(g.shape)}, expected {tuple(x.shape)}")
    scale, mean, inverse, _ = given
    bounds, parts = group_bounds(x, valid, len(x))
    check_lengths(x.shape[1], scale=scale, mean=mean, inverse=inverse)
    slope, centre, factor, added = (v.contiguous().numpy() for v in given)
    vectors = slope, slope, centre[np.newaxis], factor[np.newaxis], added[0], added[1]
    *does, values = stage
    options = False, *does, np.float64(values)
    run(
        gradient_loop,
        pixel_rows(x),
        pixel_rows(g),
        pixel_rows(dx),
        *vectors,
        bounds,
        parts,
        *options,
    )
