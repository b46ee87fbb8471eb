"""One step of an LSTM's gradient in one pass over memory, where kernels would take seven calls."""

from functools import cache
from typing import Any

import numpy as np

from tandem.loops import compile_loop


def lstm_step_grad(
    gates: Any, reached: Any, before: Any, g_h: Any, g_c: Any, dh: Any, dc: Any, g_z: Any
) -> None:
    """Write the gradient of a step's gates to `g_z`, and that of the former c over `dc`.

    `gates` and `g_z` are (batch, 4 unit), in the order i, f, g, o; the others (batch, unit):
    tanh(c), the former c, the gradients of this step's h and c alone, and those from later steps.
    """
    rows, units = reached.shape
    one = reached.dtype.type(1)
    for row in range(rows):
        i, f = gates[row, :units], gates[row, units : 2 * units]
        g, o = gates[row, 2 * units : 3 * units], gates[row, 3 * units :]
        for n in range(units):
            r = reached[row, n]
            h = dh[row, n] + g_h[row, n]
            c = dc[row, n] + g_c[row, n] + h * o[n] * (one - r * r)
            g_z[row, n] = c * g[n] * i[n] * (one - i[n])
            g_z[row, units + n] = c * before[row, n] * f[n] * (one - f[n])
            g_z[row, 2 * units + n] = c * i[n] * (one - g[n] * g[n])
            g_z[row, 3 * units + n] = h * r * o[n] * (one - o[n])
            dc[row, n] = c * f[n]


@cache
def compiled(dtype: str) -> Any:
    """Compile the loop for arrays of a dtype, each of which is contiguous."""
    wide, narrow = np.zeros((1, 4), dtype), np.zeros((1, 1), dtype)
    return compile_loop(lstm_step_grad, wide, *[narrow] * 6, wide.copy())
