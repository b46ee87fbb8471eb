"""Products of few rows with a matrix, by loops that numba compiles.

Such a product takes the time in which the matrix is read. Libraries first copy a part of it into
their own order, which for a few rows takes as long again. The first loop reads the rows of the
matrix side by side, each from its beginning to its end, as processors fetch in advance. The second
reads panels of few columns, into which a matrix that stays the same is brought once.
"""

import numba
import numpy as np
import torch

from tandem.backend.channels_last import run
from tandem.backend.vectors import COLUMNS, ROWS, add_products

Tensor = torch.Tensor

_STRIP = 256  # columns, of which eight rows stay in the first cache


def multiply(x: Tensor, y: Tensor) -> Tensor:
    """Multiply matrices of one dtype; of the number of threads the result does not depend."""
    if x.shape[1] != len(y):
        raise ValueError(f"found {x.shape[1]} columns and {len(y)} rows, expected equal numbers")
    product = torch.empty((len(x), y.shape[1]), dtype=x.dtype)
    arrays = x.contiguous().numpy(), y.contiguous().numpy(), product.numpy()
    run(_multiply, *arrays, torch.get_num_threads())
    return product


def _multiply(x: np.ndarray, y: np.ndarray, out: np.ndarray, parts: int) -> None:
    inner, columns = y.shape
    whole = inner - inner % 8
    for part in numba.prange(parts):
        first, last = columns * part // parts, columns * (part + 1) // parts
        out[:, first:last] = 0
        for k in range(0, whole, 8):
            for begin in range(first, last, _STRIP):
                end = min(begin + _STRIP, last)
                y0, y1 = y[k, begin:end], y[k + 1, begin:end]
                y2, y3 = y[k + 2, begin:end], y[k + 3, begin:end]
                y4, y5 = y[k + 4, begin:end], y[k + 5, begin:end]
                y6, y7 = y[k + 6, begin:end], y[k + 7, begin:end]
                for row in range(len(x)):
                    x0, x1, x2, x3, x4, x5, x6, x7 = x[row, k : k + 8]
                    total = out[row, begin:end]
                    for c in range(end - begin):
                        low = x0 * y0[c] + x1 * y1[c] + x2 * y2[c] + x3 * y3[c]
                        high = x4 * y4[c] + x5 * y5[c] + x6 * y6[c] + x7 * y7[c]
                        total[c] += low + high
        for k in range(whole, inner):
            for row in range(len(x)):
                for c in range(first, last):
                    out[row, c] += x[row, k] * y[k, c]


def to_panels(y: Tensor) -> Tensor:
    """Bring a matrix into panels: (panel, row, column), the last one's filled up with zeros."""
    rows, columns = y.shape
    padded = torch.nn.functional.pad(y, (0, -columns % COLUMNS))
    return padded.view(rows, padded.shape[1] // COLUMNS, COLUMNS).transpose(0, 1).contiguous()


def multiply_panels(x: Tensor, panels: Tensor, columns: int) -> Tensor:
    """Multiply float32 (row, inner) with a matrix of so many columns, in panels."""
    count, inner, wide = panels.shape
    if x.shape[1] != inner:
        raise ValueError(f"found {x.shape[1]} columns and {inner} rows, expected equal numbers")
    padded = torch.nn.functional.pad(x, (0, 0, 0, -len(x) % ROWS)).contiguous()
    sums = torch.empty(len(padded), count * wide)
    run(_add_panels, padded.numpy(), panels.numpy(), sums.numpy())
    return sums[: len(x), :columns].contiguous()


def _add_panels(x: np.ndarray, panels: np.ndarray, sums: np.ndarray) -> None:
    count, inner, _ = panels.shape
    rows, wide = sums.shape
    numbers, weights, results = x.reshape(-1), panels.reshape(-1), sums.reshape(-1)
    for panel in numba.prange(count):
        for row in range(0, rows, ROWS):
            add_products(
                results, row * wide + panel * COLUMNS, wide, False,
                numbers, row * inner, inner,
                weights, panel * inner * COLUMNS, (1, 1, inner), (0, 0, 1),
            )  # fmt: skip
