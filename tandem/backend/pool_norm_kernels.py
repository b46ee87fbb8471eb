"""Triton kernels of a GPU: max pooling, ReLU and normalisation in one pass over memory each way.

Images lie channels-last, and a program works on all channels of some pooled pixels. Numbers are
computed in float32 whatever they are stored in. Importing this module imports Triton.
"""

# Triton's language has Python's syntax, but neither its types nor its unpacking.
# mypy: disable-error-code="no-untyped-def, assignment"
# ruff: noqa: RUF005

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from tandem.ops.pool_norm import Norm

Tensor = torch.Tensor

_FORWARD_TILE = 1024  # elements that a program holds of each tensor


def _wide(channels: int) -> int:
    return max(8, triton.next_power_of_2(channels))


def _tile(channels: int, columns: int, stride: int) -> int:
    return _wide(channels) * triton.next_power_of_2(-(-columns // stride))


@triton.jit
def _split(x):
    """Cut the channels into groups of eight; return the first of every group, the second ..."""
    pairs = tl.reshape(x, (x.shape[0], x.shape[1] // 8, 2, 2, 2))
    even, odd = tl.split(pairs)
    e0, e1 = tl.split(even)
    o0, o1 = tl.split(odd)
    x0, x4 = tl.split(e0)
    x2, x6 = tl.split(e1)
    x1, x5 = tl.split(o0)
    x3, x7 = tl.split(o1)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def _join(x):
    """Undo `_split`."""
    even = tl.join(tl.join(x[0], x[4]), tl.join(x[2], x[6]))
    odd = tl.join(tl.join(x[1], x[5]), tl.join(x[3], x[7]))
    return tl.reshape(tl.join(even, odd), (x[0].shape[0], x[0].shape[1] * 8))


@triton.jit
def _beside(x, step: tl.constexpr):
    """Return the value of the next group, or of the one before it; zero beyond the ends."""
    group = tl.arange(0, x.shape[1])[None, :] + step
    inside = (group >= 0) & (group < x.shape[1])
    place = tl.broadcast_to(tl.where(inside, group, 0), x.shape)
    return tl.where(inside, tl.gather(x, place, 1), 0.0)


@triton.jit
def _window_sums(x, HALF: tl.constexpr):
    """Sum over the HALF <= 4 channels on each side; x is zero beyond the last channel.

    A thread holds eight channels, so nearly all sums are of its own registers.
    """
    here = _split(x)
    sums = ()
    before = ()
    after = ()
    for k in tl.static_range(HALF):
        before = before + (_beside(here[8 - HALF + k], -1),)
        after = after + (_beside(here[k], 1),)
    around = before + here + after
    for k in tl.static_range(8):
        total = around[k]
        for step in tl.static_range(1, 2 * HALF + 1):
            total += around[k + step]
        sums = sums + (total,)
    return _join(sums)


@triton.jit
def _inverse_power(scale, BETA: tl.constexpr):
    if BETA == 0.75:
        root = tl.rsqrt(scale)
        return root * tl.sqrt(root)
    else:
        return tl.exp2(-BETA * tl.log2(scale))


@triton.jit
def _forward(
    x,
    bias,
    y,
    places,
    z,
    rows,
    columns,
    pooled_rows,
    pooled_columns,
    CHANNELS: tl.constexpr,
    SIZE: tl.constexpr,
    STRIDE: tl.constexpr,
    HALF: tl.constexpr,
    ALPHA: tl.constexpr,
    BETA: tl.constexpr,
    K: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILE_CHANNELS: tl.constexpr,
):
    """Pool one row of windows of an image, in part; HALF < 0 is without normalisation."""
    number, p = tl.program_id(0) // pooled_rows, tl.program_id(0) % pooled_rows
    q = (tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS))[:, None]
    c = tl.arange(0, TILE_CHANNELS)[None, :]
    inside = (q < pooled_columns) & (c < CHANNELS)
    corner = x + (number.to(tl.int64) * rows + p * STRIDE) * columns * CHANNELS
    best = tl.full((TILE_COLUMNS, TILE_CHANNELS), float("-inf"), tl.float32)
    place = tl.zeros((TILE_COLUMNS, TILE_CHANNELS), tl.int32)
    for i in tl.static_range(SIZE):
        for j in tl.static_range(SIZE):
            offset = (i * columns + q * STRIDE + j) * CHANNELS + c
            value = tl.load(corner + offset, inside, float("-inf")).to(tl.float32)
            larger = (value > best) | (value != value)
            best = tl.where(larger, value, best)
            place = tl.where(larger, i * SIZE + j, place)
    best += tl.load(bias + c, c < CHANNELS, 0.0)
    # Not a maximum: what is not finite stays so.
    a = tl.where(best <= 0, 0.0, best).to(y.dtype.element_ty)
    at = (tl.program_id(0).to(tl.int64) * pooled_columns + q) * CHANNELS + c
    tl.store(y + at, a, inside)
    tl.store(places + at, place.to(tl.int8), inside)
    if HALF >= 0:
        # The gradient has the stored value only.
        a = tl.where(inside, a.to(tl.float32), 0.0)
        scale = K + ALPHA * _window_sums(a * a, HALF)
        tl.store(z + at, (a * _inverse_power(scale, BETA)).to(z.dtype.element_ty), inside)


@triton.jit
def _pooled_gradient(
    y,
    g,
    at,
    inside,
    HALF: tl.constexpr,
    ALPHA: tl.constexpr,
    BETA: tl.constexpr,
    K: tl.constexpr,
):
    """The gradient with respect to what pooling returned."""
    a = tl.load(y + at, inside, 0.0).to(tl.float32)
    t = tl.load(g + at, inside, 0.0).to(tl.float32)
    if HALF >= 0:
        scale = K + ALPHA * _window_sums(a * a, HALF)
        t *= _inverse_power(scale, BETA)
        t -= 2 * ALPHA * BETA * a * _window_sums(t * a / scale, HALF)
    return tl.where(a <= 0, 0.0, t)


@triton.jit
def _backward(
    y,
    places,
    g,
    dx,
    bias_sums,
    rows,
    columns,
    pooled_rows,
    pooled_columns,
    strips,
    CHANNELS: tl.constexpr,
    SIZE: tl.constexpr,
    STRIDE: tl.constexpr,
    HALF: tl.constexpr,
    ALPHA: tl.constexpr,
    BETA: tl.constexpr,
    K: tl.constexpr,
    STRIP: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILE_CHANNELS: tl.constexpr,
):
    """Write STRIP rows of blocks of STRIDE x STRIDE pixels, each from the windows that cover it.

    They are the window that begins in the block, and those before it in the row, the column and
    both. Each pooled gradient is computed once, but for the row above a strip.
    """
    number, strip = tl.program_id(0) // strips, tl.program_id(0) % strips
    q = tl.arange(0, TILE_COLUMNS)[:, None]
    c = tl.arange(0, TILE_CHANNELS)[None, :]
    before = tl.broadcast_to(tl.maximum(q - 1, 0), (TILE_COLUMNS, TILE_CHANNELS))
    total = tl.zeros((TILE_COLUMNS, TILE_CHANNELS), tl.float32)
    above = tl.zeros((TILE_COLUMNS, TILE_CHANNELS), tl.float32)
    place_above = tl.full((TILE_COLUMNS, TILE_CHANNELS), -1, tl.int32)
    for step in range(-1, STRIP):
        p = strip * STRIP + step
        inside = (p >= 0) & (p < pooled_rows) & (q < pooled_columns) & (c < CHANNELS)
        at = ((number.to(tl.int64) * pooled_rows + p) * pooled_columns + q) * CHANNELS + c
        h = _pooled_gradient(y, g, at, inside, HALF, ALPHA, BETA, K)
        place = tl.load(places + at, inside, -1).to(tl.int32)
        if step >= 0:
            total += h
            for i in tl.static_range(STRIDE):
                for j in tl.static_range(STRIDE):
                    value = tl.where(place == i * SIZE + j, h, 0.0)
                    if i + STRIDE < SIZE:
                        here = place_above == (i + STRIDE) * SIZE + j
                        value += tl.where(here, above, 0.0)
                    if j + STRIDE < SIZE:
                        left = tl.where(place == i * SIZE + j + STRIDE, h, 0.0)
                        if i + STRIDE < SIZE:
                            here = place_above == (i + STRIDE) * SIZE + j + STRIDE
                            left += tl.where(here, above, 0.0)
                        value += tl.where(q > 0, tl.gather(left, before, 0), 0.0)
                    row, column = p * STRIDE + i, q * STRIDE + j
                    there = ((number.to(tl.int64) * rows + row) * columns + column) * CHANNELS + c
                    kept = (row < rows) & (column < columns) & (c < CHANNELS)
                    tl.store(dx + there, value.to(dx.dtype.element_ty), kept)
        above, place_above = h, place
    at = tl.program_id(0) * CHANNELS + tl.arange(0, TILE_CHANNELS)
    tl.store(bias_sums + at, tl.sum(total, 0), tl.arange(0, TILE_CHANNELS) < CHANNELS)


_STRIP = 8  # rows of blocks, of which a program computes one more


def _constants(size: int, stride: int, norm: Norm | None) -> dict[str, Any]:
    window, alpha, beta, k = norm or (-1, 0.0, 0.0, 1.0)
    half = window // 2 if norm else -1
    return {"SIZE": size, "STRIDE": stride, "HALF": half, "ALPHA": alpha, "BETA": beta, "K": k}


def forward(
    x: Tensor, bias: Tensor, results: Sequence[Tensor], size: int, stride: int, norm: Norm | None
) -> None:
    """Compute `tandem.ops.PoolNorm` into y, places and z, of which z is not used without `norm`.

    x, y and z are float32 or bfloat16 (batch, channel, row, column), channels-last.
    """
    y, places, z = results
    batch, channels, rows, columns = x.shape
    pooled, wide = y.shape[2:], _wide(channels)
    tile = min(max(1, _FORWARD_TILE // wide), triton.next_power_of_2(pooled[1]))
    _forward[(batch * pooled[0], triton.cdiv(pooled[1], tile))](
        x,
        bias,
        y,
        places,
        z,
        rows,
        columns,
        *pooled,
        CHANNELS=channels,
        **_constants(size, stride, norm),
        TILE_COLUMNS=tile,
        TILE_CHANNELS=wide,
    )


def backward(
    inputs: Sequence[Tensor], dx: Tensor, size: int, stride: int, norm: Norm | None
) -> Tensor:
    """Compute `tandem.ops.PoolNormGrad` of y, places and g into dx; return the biases' gradient.

    y, g and dx are float32 or bfloat16 (batch, channel, row, column), channels-last.
    """
    y, places, g = inputs
    batch, channels, rows, columns = dx.shape
    strips = triton.cdiv(triton.cdiv(rows, stride), _STRIP)
    sums = torch.empty((batch * strips, channels), dtype=torch.float32, device=y.device)
    tile = _tile(channels, columns, stride)
    _backward[(batch * strips,)](
        y,
        places,
        g,
        dx,
        sums,
        rows,
        columns,
        *y.shape[2:],
        strips,
        CHANNELS=channels,
        **_constants(size, stride, norm),
        STRIP=_STRIP,
        TILE_COLUMNS=tile // _wide(channels),
        TILE_CHANNELS=_wide(channels),
        # More than eight elements of each tensor would fill a thread's registers.
        num_warps=min(max(tile // 256, 1), 16),
    )
    return sums.sum(0)
