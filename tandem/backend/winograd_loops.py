"""Convolutions with filters of 3 x 3 or 5 x 5 and stride 1 on a CPU, by loops that numba compiles.

Filters of r x r move over a tile of 6 x 6 pixels to m x m places, m + r = 7. Taken as polynomials,
their values at 6 x 6 points are multiplied, where the sum itself takes (m r)^2 products: 144 for 3
x 3, 100 for 5 x 5 (Winograd 1980; Lavin, Gray 2016, section 4). So images and filters are
transformed, products are summed over channels by 36 products of matrices, and their results are
transformed back; a gradient of filters takes the transposed transforms. With the points 0, +-1 /
sqrt(2), +-sqrt(2) and infinity results are off by 1.2 to 3.5 times as much as oneDNN's, half of
what +-1 and +-2 give (on points: Barabasz, Anderson, Soodhalter, Gregg 2020).

Blocks of tiles are worked on one after the other, so that what is between stays in caches.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numba
import numpy as np
import torch
from numba.core import types
from numba.extending import intrinsic, register_jitable

from tandem.backend.channels_last import empty, images, run
from tandem.backend.vectors import (
    COLUMNS,
    ROWS,
    VECTOR,
    add_product,
    add_products,
    address,
    index,
    place,
    vector,
)
from tandem.ops.conv import TILE

Tensor = torch.Tensor

_POINTS = 0.0, 0.5**0.5, -(0.5**0.5), 2**0.5, -(2**0.5)  # and infinity
_POINT_PAIRS = TILE * TILE
_PARTS = 32  # of tiles, shared out to threads
_LEAST_TILES = 5 * ROWS  # of a block
_CACHE = 1 << 18  # numbers of a block of transformed tiles
_FEWEST, _MOST = 48, 96  # tiles of a block, whole rows of sums for both lengths of vectors
_FILTERS = COLUMNS  # side by side
_APART = 16  # numbers between points, whose numbers would displace each other from a cache


def convolve(
    x: Tensor,
    transformed: Tensor,
    bias: Tensor | None,
    filters: int,
    side: int,
    pad: Sequence[int],
) -> Tensor:
    """Convolve images with filters given by `transform_filters`, and add a bias.

    `filters` counts those of all groups; `side` is 3 or 5. All is float32, and only the number
    of pictures may be 0. The output does not depend on the number of threads.
    """
    groups, _, panels, lines, _ = transformed.shape
    channels = lines - 1
    _check("x has channels", x.shape[1], groups * channels)
    height, width = (n + 2 * p - side + 1 for n, p in zip(x.shape[2:], pad, strict=True))
    y = empty(torch.Size((len(x), filters, height, width)), x.dtype)
    of_group = filters // groups
    biases = np.zeros((groups, panels * _FILTERS), np.float32)
    if bias is not None:
        biases[:, :of_group] = bias.reshape(groups, of_group).numpy()
    pixels, results = images(x), images(y)
    for group in range(groups):
        operands = pixels, transformed[group].numpy(), biases[group], results
        sizes = group * channels, group * of_group, of_group, side
        together, threads = _together(channels, of_group), torch.get_num_threads()
        run(_convolve, *operands, *sizes, *pad, together, threads)
    return y


def transform_filters(w: Tensor, groups: int, turned: bool = False) -> Tensor:
    """Transform filters for `convolve`: (group, point, panel of filters, channel, filter).

    Behind the channels is an empty line: points whose distance is a power of two would displace
    each other from a cache.

    Those whose convolution with the gradient of the result is that of the images have inputs and
    outputs exchanged and are turned by 180 degrees.
    """
    filters, channels, side, _ = w.shape
    of_group = filters // groups
    inputs, outputs = (of_group, channels) if turned else (channels, of_group)
    panels = -(-outputs // _FILTERS)
    transformed = w.new_empty(groups, _POINT_PAIRS, panels, inputs + 1, _FILTERS)
    numbers = w.contiguous().view(-1).numpy()
    run(_transform_filters, numbers, transformed.numpy(), outputs, side, turned)
    return transformed


def filter_gradient(x: Tensor, w: Tensor, g: Tensor, pad: Sequence[int], groups: int) -> Tensor:
    """Compute the output of `tandem.ops.conv.Conv2dWeightGrad` in float32, for stride 1.

    Only the number of pictures may be 0. The output does not depend on the number of threads.
    """
    filters, channels, side, _ = w.shape
    of_group = filters // groups
    area = (n + 2 * p - side + 1 for n, p in zip(x.shape[2:], pad, strict=True))
    _check("x has channels", x.shape[1], groups * channels)
    _check("g has the shape", tuple(g.shape), (len(x), filters, *area))
    panels, lines = -(-of_group // _FILTERS), -(-channels // ROWS) * ROWS + 1
    gradient = torch.empty_like(w, memory_format=torch.contiguous_format)
    pixels, results, together = images(x), images(g), _together(channels, of_group)
    for group in range(groups):
        sums = np.zeros((_POINT_PAIRS, panels, lines, _FILTERS), np.float32)
        sizes = channels, group * channels, of_group, group * of_group, side
        run(_add_tiles, pixels, results, sums, *sizes, *pad, together)
        rows = gradient[group * of_group : (group + 1) * of_group].numpy()
        run(_transform_sums, sums, rows)
    return gradient


def _check(what: str, found: object, expected: object) -> None:
    """Raise ValueError where a loop would read what is not there."""
    if found != expected:
        raise ValueError(f"{what} {found}, expected {expected}")


def _together(channels: int, filters: int) -> int:
    """The tiles of a block: as many as stay in a cache, and enough to make use of the filters."""
    tiles = _CACHE // (_POINT_PAIRS * (channels + filters))
    return max(_FEWEST, min(_MOST, tiles // ROWS * ROWS))


def _minimal_filtering(m: int, r: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Make the transforms of pixels, of filters, and to results: (6, 6), (6, r), (m, 6).

    Lavin and Gray's B', G and A' for one dimension.
    """
    values, filters, results = np.zeros((TILE, TILE)), np.zeros((TILE, r)), np.zeros((m, TILE))
    for number, point in enumerate(_POINTS):
        others = [other for other in _POINTS if other != point]
        values[number, : TILE - 1] = np.poly(others)[::-1]
        filters[number] = point ** np.arange(r) / np.prod(np.subtract(point, others))
        results[:, number] = point ** np.arange(m)
    values[-1], filters[-1, -1], results[-1, -1] = np.poly(_POINTS)[::-1], 1, 1
    return values, filters, results


# The polynomial of two opposite points is a sum and a difference of the same even and odd terms.
_BUTTERFLY = np.eye(TILE)
for _first in (1, 3):
    _BUTTERFLY[_first : _first + 2, _first : _first + 2] = [[1, 1], [1, -1]]


def _transformation(matrices: dict[int, np.ndarray]) -> Callable[..., None]:
    """Make a function for loops that transforms squares of vectors, both ways, and may add a bias.

    The matrix is that of the filters' side, or of `TILE` for pixels. A square begins at a position,
    and has a step downwards and one to the right.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        side, _, to, to_steps, _, at, at_steps, _, at_bias = arguments
        biased = not isinstance(signature.args[7], types.Omitted)

        def vector_at(operand: int, position: Any) -> Any:
            kind, array = signature.args[operand], arguments[operand]
            return place(builder, address(context, builder, kind, array, position))

        def square(operand: int, position: Any, steps: Any, places: tuple[int, int]) -> Any:
            for axis, number in enumerate(places):
                step = builder.extract_value(steps, axis)
                position = builder.add(position, builder.mul(step, index(number)))
            return vector_at(operand, position)

        added = builder.load(vector_at(7, at_bias), align=4) if biased else None
        for value, matrix in matrices.items():
            with builder.if_then(builder.icmp_signed("==", side, index(value))):
                length, columns = matrix.shape[1], []
                for q in range(length):
                    places = [square(4, at, at_steps, (r, q)) for r in range(length)]
                    column = [builder.load(each, align=4) for each in places]
                    columns.append(_product(builder, matrix, column))
                for r, row in enumerate(zip(*columns, strict=True)):
                    for q, result in enumerate(_product(builder, matrix, row)):
                        total = builder.fadd(result, added) if biased else result
                        builder.store(total, square(1, to, to_steps, (r, q)), align=4)
        return context.get_dummy_value()

    @intrinsic
    def transform(  # type: ignore[no-untyped-def]
        typing, side, target, to, to_steps, source, at, at_steps, bias=None, at_bias=None
    ):
        number, steps = types.intp, types.UniTuple(types.intp, 2)
        biases = (types.Omitted(None),) * 2 if bias is None else (bias, number)
        operands = number, target, number, steps, source, number, steps, *biases
        return types.void(*operands), generate

    return transform


def _product(builder: Any, matrix: np.ndarray, vectors: Sequence[Any]) -> list[Any]:
    """Multiply a transform with some vectors."""
    if len(matrix) == TILE:
        halves = np.linalg.solve(_BUTTERFLY, matrix)
        return _exchanged(builder, [_combined(builder, row, vectors) for row in halves])
    halves = np.linalg.solve(_BUTTERFLY, matrix.T).T
    return [_combined(builder, row, _exchanged(builder, vectors)) for row in halves]


def _exchanged(builder: Any, vectors: Sequence[Any]) -> list[Any]:
    """Multiply the butterfly with vectors."""
    first, a, b, c, d, last = vectors
    pairs = [each for p, q in ((a, b), (c, d)) for each in (builder.fadd(p, q), builder.fsub(p, q))]
    return [first, *pairs, last]


def _combined(builder: Any, factors: np.ndarray, vectors: Sequence[Any]) -> Any:
    """A sum of vectors times factors, of which those that are 0 take no time."""
    total = None
    for factor, each in zip(factors.round(12), vectors, strict=True):
        if not factor:
            continue
        if total is None:
            total = each if factor == 1 else builder.fmul(each, vector([factor] * VECTOR))
        elif abs(factor) == 1:
            total = (builder.fadd if factor == 1 else builder.fsub)(total, each)
        else:
            total = add_product(builder, total, each, vector([factor] * VECTOR))
    return total


_TRANSFORMS = {side: _minimal_filtering(TILE + 1 - side, side) for side in (3, 5)}
_from_pixels = _transformation({TILE: _TRANSFORMS[3][0]})
_from_filters = _transformation({side: each[1] for side, each in _TRANSFORMS.items()})
_to_filters = _transformation({side: each[1].T for side, each in _TRANSFORMS.items()})
_to_results = _transformation({side: each[2] for side, each in _TRANSFORMS.items()})
_from_results = _transformation({side: each[2].T for side, each in _TRANSFORMS.items()})


def _convolve(
    x: np.ndarray,
    transformed: np.ndarray,
    bias: np.ndarray,
    y: np.ndarray,
    first_channel: int,
    first_filter: int,
    filters: int,
    side: int,
    row_pad: int,
    column_pad: int,
    together: int,
    threads: int,
) -> None:
    _, panels, lines, _ = transformed.shape
    channels = lines - 1
    pictures, rows, columns, all_filters = y.shape
    m = TILE + 1 - side
    across = -(-columns // m)
    of_picture = -(-rows // m) * across
    all_tiles = pictures * of_picture
    together = min(together, -(-all_tiles // ROWS) * ROWS)
    blocks = -(-all_tiles // max(1, together))
    even = -(-blocks // threads) * threads
    if 0 < blocks < 4 * threads and all_tiles >= _LEAST_TILES * even:
        together = -(-all_tiles // (even * ROWS)) * ROWS
        blocks = -(-all_tiles // together)
    parts = min(blocks, _PARTS)
    # Few blocks that don't occupy all threads alike: these share panels too.
    shares = min(panels, threads) if blocks < 4 * threads and blocks % threads else 1
    weights, results = transformed.reshape(-1), y.reshape(-1)
    lanes, wide = -(-channels // VECTOR) * VECTOR, panels * _FILTERS
    of_tiles, of_sums = together * lanes + _APART, together * wide + _APART
    for task in numba.prange(parts * shares):
        part, share = task // shares, task % shares
        first, last = panels * share // shares, panels * (share + 1) // shares
        tiles = np.zeros(_POINT_PAIRS * of_tiles, np.float32)
        sums = np.empty(_POINT_PAIRS * of_sums, np.float32)
        patch = np.zeros(_POINT_PAIRS * lanes, np.float32)
        small = np.zeros(m * m * wide, np.float32)
        for block in range(blocks * part // parts, blocks * (part + 1) // parts):
            begin = block * together
            count = min(together, all_tiles - begin)
            for t in range(count):
                n, tile = divmod(begin + t, of_picture)
                top, left = tile // across * m - row_pad, tile % across * m - column_pad
                _transform_tile(
                    TILE, tiles, t * lanes, of_tiles, _FILTERS,
                    x, n, top, left, first_channel, channels, patch,
                )  # fmt: skip
            for point in range(_POINT_PAIRS):
                for panel in range(first, last):
                    for t in range(0, count, ROWS):
                        add_products(
                            sums, point * of_sums + t * wide + panel * _FILTERS, wide, False,
                            tiles, point * of_tiles + t * lanes, lanes,
                            weights, (point * panels + panel) * lines * _FILTERS,
                            (1, 1, channels), (0, 0, 1),
                        )  # fmt: skip
            for t in range(count):
                n, tile = divmod(begin + t, of_picture)
                top, left = tile // across * m, tile % across * m
                at = ((n * rows + top) * columns + left) * all_filters + first_filter
                whole = top + m <= rows and left + m <= columns and filters % VECTOR == 0
                into, to, steps = results, at, (columns * all_filters, all_filters)
                if not whole:
                    into, to, steps = small, 0, (m * wide, wide)
                begin_filter, end_filter = first * _FILTERS, min(filters, last * _FILTERS)
                for f in range(begin_filter, end_filter, VECTOR):
                    _to_results(
                        side, into, to + f, steps,
                        sums, t * wide + f, (TILE * of_sums, of_sums), bias, f,
                    )  # fmt: skip
                for r in range(0 if whole else min(m, rows - top)):
                    for q in range(min(m, columns - left)):
                        to, of = at + (r * columns + q) * all_filters, (r * m + q) * wide
                        for f in range(begin_filter, end_filter):
                            results[to + f] = small[of + f]


def _transform_filters(
    filters: np.ndarray, transformed: np.ndarray, outputs: int, side: int, turned: bool
) -> None:
    groups, _, panels, lines, _ = transformed.shape
    inputs = lines - 1
    taps, all_inputs = side * side, (outputs if turned else inputs) * side * side
    by_output, by_input = (taps, all_inputs) if turned else (all_inputs, taps)
    results = transformed.reshape(-1)
    step = panels * lines * _FILTERS
    for task in numba.prange(groups * panels):
        group, panel = task // panels, task % panels
        square = np.zeros(taps * _FILTERS, np.float32)
        begin = group * inputs * outputs * taps + panel * _FILTERS * by_output
        for i in range(inputs):
            for lane in range(min(_FILTERS, outputs - panel * _FILTERS)):
                at = begin + lane * by_output + i * by_input
                for tap in range(taps):
                    of = taps - 1 - tap if turned else tap
                    square[tap * _FILTERS + lane] = filters[at + of]
            to = ((group * _POINT_PAIRS * panels + panel) * lines + i) * _FILTERS
            for lane in range(0, _FILTERS, VECTOR):
                _from_filters(
                    side, results, to + lane, (TILE * step, step),
                    square, lane, (side * _FILTERS, _FILTERS),
                )  # fmt: skip


def _add_tiles(
    x: np.ndarray,
    g: np.ndarray,
    sums: np.ndarray,
    channels: int,
    first_channel: int,
    filters: int,
    first_filter: int,
    side: int,
    row_pad: int,
    column_pad: int,
    together: int,
) -> None:
    _, panels, lines, _ = sums.shape
    pictures, rows, columns, _ = g.shape
    m = TILE + 1 - side
    across = -(-columns // m)
    of_picture = -(-rows // m) * across
    all_tiles = pictures * of_picture
    totals = sums.reshape(-1)
    # Rows are seldom as long as a power of two, and so do not displace each other from a cache.
    lanes = -(-channels // _FILTERS) * _FILTERS + _FILTERS
    of_tiles, of_panel = together * lanes + _APART, together * _FILTERS + _APART
    tiles = np.zeros(_POINT_PAIRS * of_tiles, np.float32)
    results = np.zeros(_POINT_PAIRS * panels * of_panel, np.float32)
    parts = min(together, _PARTS)
    for block in range(-(-all_tiles // together)):
        begin = block * together
        count = min(together, all_tiles - begin)
        for part in numba.prange(parts):
            patch = np.zeros(_POINT_PAIRS * max(lanes, panels * _FILTERS), np.float32)
            for t in range(count * part // parts, count * (part + 1) // parts):
                n, tile = divmod(begin + t, of_picture)
                top, left = tile // across * m, tile % across * m
                _transform_tile(
                    TILE, tiles, t * lanes, of_tiles, _FILTERS,
                    x, n, top - row_pad, left - column_pad, first_channel, channels, patch,
                )  # fmt: skip
                _transform_tile(
                    side, results, t * _FILTERS, panels * of_panel, of_panel,
                    g, n, top, left, first_filter, filters, patch,
                )  # fmt: skip
        for task in numba.prange(_POINT_PAIRS * panels):
            point = task // panels
            for c in range(0, channels, ROWS):
                add_products(
                    totals, (task * lines + c) * _FILTERS, _FILTERS, True,
                    tiles, point * of_tiles + c, 1,
                    results, task * of_panel, (1, 1, count), (0, 0, lanes),
                )  # fmt: skip


def _transform_sums(sums: np.ndarray, gradient: np.ndarray) -> None:
    _, panels, lines, _ = sums.shape
    filters, channels, side, _ = gradient.shape
    taps, totals = side * side, sums.reshape(-1)
    step = panels * lines * _FILTERS
    rows = gradient.reshape(filters, channels * taps)
    for panel in numba.prange(panels):
        square = np.zeros(taps * _FILTERS, np.float32)
        for c in range(channels):
            for lane in range(0, _FILTERS, VECTOR):
                _to_filters(
                    side, square, lane, (side * _FILTERS, _FILTERS),
                    totals, (panel * lines + c) * _FILTERS + lane, (TILE * step, step),
                )  # fmt: skip
            for lane in range(min(_FILTERS, filters - panel * _FILTERS)):
                for tap in range(taps):
                    rows[panel * _FILTERS + lane, c * taps + tap] = square[tap * _FILTERS + lane]


@register_jitable
def _transform_tile(  # type: ignore[no-untyped-def]
    side, target, to, step, panel_step, source, n, top, left, first_channel, channels, patch
) -> None:
    """Transform a tile of pixels, or of a result's gradient for filters of a side."""
    _, rows, columns, all_channels = source.shape
    numbers, size = source.reshape(-1), TILE if side == TILE else TILE + 1 - side
    inside = top >= 0 and left >= 0 and top + size <= rows and left + size <= columns
    at = ((n * rows + top) * columns + left) * all_channels + first_channel
    tile, steps = numbers, (columns * all_channels, all_channels)
    if not inside or channels % VECTOR:
        lanes = -(-channels // VECTOR) * VECTOR
        patch[: size * size * lanes] = 0
        for r in range(max(0, -top), min(size, rows - top)):
            for q in range(max(0, -left), min(size, columns - left)):
                of, into = at + (r * columns + q) * all_channels, (r * size + q) * lanes
                patch[into : into + channels] = numbers[of : of + channels]
        tile, at, steps = patch, 0, (size * lanes, lanes)
    for c in range(0, channels, VECTOR):
        into = to + c // _FILTERS * panel_step + c % _FILTERS
        if side == TILE:
            _from_pixels(side, target, into, (TILE * step, step), tile, at + c, steps)
        else:
            _from_results(side, target, into, (TILE * step, step), tile, at + c, steps)
