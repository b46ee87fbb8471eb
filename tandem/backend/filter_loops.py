"""Gradients of a convolution's filters on a CPU, by a loop that numba compiles.

The gradient of a tap is a sum over pixels, of an input channel's number under the tap times the
gradient of the filter's result. The loop keeps 6 x 16 such sums in registers, of six pairs of a tap
and a channel and of sixteen filters, while it passes over a block of pixels. The block has been
copied, once for all taps, so that what is multiplied lies side by side (Goto, van de Geijn 2008,
section 4). oneDNN's code for 256-bit vectors takes 1.1 to 3 times as long; that of AVX-512, with
which the loop would keep 8 x 32 sums, is faster.
"""

from functools import reduce

import numba
import numpy as np
import torch
from numba.extending import register_jitable

from tandem.backend.channels_last import images, run
from tandem.backend.vectors import COLUMNS, ROWS, VECTOR, add_products, copy_vector

Tensor = torch.Tensor

_FILTERS = COLUMNS  # whose sums are in registers at a time
_PAIRS = ROWS  # of a tap and a channel, whose sums are in registers
_SMALL, _LARGE = 256, 2048  # results in a block: of several pictures; of some rows of one


def filter_gradient(
    x: Tensor, w: Tensor, g: Tensor, stride: tuple[int, int], pad: tuple[int, int], groups: int
) -> Tensor:
    """Compute the output of `tandem.ops.conv.Conv2dWeightGrad` in float32, without dilation.

    None of the shapes is empty. The output does not depend on the number of threads.
    """
    filters, channels, height, width = w.shape
    filters, side = filters // groups, min(channels, VECTOR)
    panels, blocks = -(-filters // _FILTERS), -(-channels // side)
    # Pictures are divided into parts where filters are too few to be shared out to 16 threads.
    parts = min(len(x), 1 << max(0, (16 // panels).bit_length() - 1))
    shares = min(panels, -(-torch.get_num_threads() // parts))
    pairs = -(-width * side // _PAIRS) * _PAIRS
    gradient = torch.empty_like(w, memory_format=torch.contiguous_format)
    for group in range(groups):
        sums = np.zeros((parts, panels, blocks, height, pairs, _FILTERS), np.float32)
        sizes = channels, group * channels, filters, group * filters, side, width
        run(_filter_gradient, images(x), images(g), sums, *sizes, *stride, *pad, shares)
        total = torch.from_numpy(reduce(np.add, sums))[..., : width * side, :]
        by_tap = total.reshape(panels, blocks, height, width, side, _FILTERS)
        every = by_tap.permute(0, 5, 1, 4, 2, 3).reshape(panels * _FILTERS, -1, height, width)
        gradient[group * filters : (group + 1) * filters] = every[:filters, :channels]
    return gradient


def _filter_gradient(
    x: np.ndarray,
    g: np.ndarray,
    sums: np.ndarray,
    channels: int,
    first_channel: int,
    filters: int,
    first_filter: int,
    side: int,
    width: int,
    row_stride: int,
    column_stride: int,
    row_pad: int,
    column_pad: int,
    shares: int,
) -> None:
    parts, panels, blocks, height, pairs, _ = sums.shape
    pictures, image_rows, image_columns, all_channels = x.shape
    _, rows, columns, all_filters = g.shape
    together = max(1, _SMALL // max(1, rows * columns))
    strip = max(1, min(rows, _LARGE // max(1, columns)))
    # The copy has the pixels that windows read, zeros around images among them.
    line = (max(0, columns - 1) * column_stride + width) * side
    plane = ((strip - 1) * row_stride + height) * line
    read = max(0, min(image_columns, line // side - column_pad))
    pixels, numbers, totals = x.reshape(-1), g.reshape(-1), sums.reshape(-1)
    for task in numba.prange(parts * shares):
        part, share = task // shares, task % shares
        first, last = pictures * part // parts, pictures * (part + 1) // parts
        # The last pairs of a row of taps read on behind it; their sums are left out in the end.
        copied = np.zeros(blocks * together * plane + _PAIRS, np.float32)
        results = np.zeros(together * strip * columns * _FILTERS, np.float32)
        for number in range(-(-(last - first) // together) * -(-rows // strip)):
            begin = first + number // -(-rows // strip) * together
            top = number % -(-rows // strip) * strip
            count, length = min(together, last - begin), min(strip, rows - top)
            for line_number in range(count * ((length - 1) * row_stride + height)):
                n, r = divmod(line_number, (length - 1) * row_stride + height)
                row = top * row_stride + r - row_pad
                for block in range(blocks):
                    to = (block * together + n) * plane + r * line
                    if 0 <= row < image_rows:
                        at = ((begin + n) * image_rows + row) * image_columns * all_channels
                        at += first_channel + block * side
                        wide = min(side, channels - block * side)
                        to += column_pad * side
                        _copy_columns(copied, to, side, pixels, at, all_channels, read, wide)
                    else:
                        copied[to : to + line] = 0
            for panel in range(panels * share // shares, panels * (share + 1) // shares):
                wide = min(_FILTERS, filters - panel * _FILTERS)
                for n in range(count):
                    to = n * length * columns * _FILTERS
                    at = ((begin + n) * rows + top) * columns * all_filters
                    at += first_filter + panel * _FILTERS
                    _copy_columns(
                        results, to, _FILTERS, numbers, at, all_filters, length * columns, wide
                    )
                into = (part * panels + panel) * blocks * height * pairs * _FILTERS
                for block in range(blocks):
                    for tap in range(height):
                        start = block * together * plane + tap * line
                        for pair in range(0, pairs, _PAIRS):
                            counts = count, length, columns
                            steps = plane, row_stride * line, column_stride * side
                            at = start + pair
                            add_products(
                                totals, into, _FILTERS, True, copied, at, 1, results, 0, counts,
                                steps,
                            )  # fmt: skip
                            into += _PAIRS * _FILTERS


@register_jitable
def _copy_columns(  # type: ignore[no-untyped-def]
    target, to, to_step, source, at, at_step, columns, wide
) -> None:
    """Copy some numbers side by side, for each column."""
    if wide == VECTOR:
        for column in range(columns):
            copy_vector(target, to + column * to_step, source, at + column * at_step)
    elif wide == 2 * VECTOR:
        for column in range(columns):
            to_column, at_column = to + column * to_step, at + column * at_step
            copy_vector(target, to_column, source, at_column)
            copy_vector(target, to_column + VECTOR, source, at_column + VECTOR)
    elif wide == to_step == at_step:
        target[to : to + columns * wide] = source[at : at + columns * wide]
    else:
        for column in range(columns):
            for number in range(wide):
                target[to + column * to_step + number] = source[at + column * at_step + number]
