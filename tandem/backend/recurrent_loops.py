"""The steps of an LSTM or a GRU, float32 on a CPU: a product and a pass over memory for each.

Kernels would take seven calls for a step. LLVM vectorises no loop that has too many arrays to
compare their addresses, hence several loops over a row. The hyperbolic tangent is a rational
function, since numba can't vectorise the C library's.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, cast

import numba
import numpy as np
import torch

from tandem.loops import compile_loop

Tensor = torch.Tensor

_float = np.float32
_HALF, _ONE = _float(0.5), _float(1)
_BOUND = _float(7.90531110763549805)  # beyond it the function is 1 to within a rounding


@numba.njit(inline="always", error_model="numpy")
def _tanh(x: Any) -> Any:
    """Compute Eigen's rational function (``MathFunctionsImpl.h``), to 4 units in the last place."""
    x = _BOUND if x > _BOUND else x  # unlike min and max these let NaN through
    x = -_BOUND if x < -_BOUND else x
    y = x * x
    over = _float(-2.76076847742355e-16) * y + _float(2.00018790482477e-13)
    over = over * y + _float(-8.60467152213735e-11)
    over = over * y + _float(5.12229709037114e-08)
    over = over * y + _float(1.48572235717979e-05)
    over = over * y + _float(6.37261928875436e-04)
    over = over * y + _float(4.89352455891786e-03)
    under = _float(1.19825839466702e-06) * y + _float(1.18534705686654e-04)
    under = under * y + _float(2.26843463243900e-03)
    return x * over / (under * y + _float(4.89352518554385e-03))


@numba.njit(inline="always", error_model="numpy")
def _sigmoid(x: Any) -> Any:
    return _HALF * _tanh(_HALF * x) + _HALF


def _lstm(gates: Any, before: Any, c: Any, h: Any) -> None:
    """Write a step's c and h, (batch, unit), and over `gates`, (batch, 4 unit), what they become.

    `gates` are in the order i, f, g, o, as everywhere here.
    """
    rows, units = before.shape
    for row in range(rows):
        i, f = gates[row, :units], gates[row, units : 2 * units]
        g, o = gates[row, 2 * units : 3 * units], gates[row, 3 * units :]
        for n in range(units):
            i[n], f[n], g[n], o[n] = _sigmoid(i[n]), _sigmoid(f[n]), _tanh(g[n]), _sigmoid(o[n])
            c[row, n] = f[n] * before[row, n] + i[n] * g[n]
            h[row, n] = o[n] * _tanh(c[row, n])


def _lstm_grad(
    gates: Any, before: Any, c: Any, g_h: Any, g_c: Any, dh: Any, dc: Any, g_z: Any
) -> None:
    """Write the gradient of a step's gates to `g_z`, and that of the former c over `dc`.

    `gates` and `g_z` are (batch, 4 unit); the others (batch, unit): the former and this step's c,
    the gradients of this step's h and c alone, and those from later steps, `dh` to be overwritten.
    """
    rows, units = before.shape
    for row in range(rows):
        i, f = gates[row, :units], gates[row, units : 2 * units]
        g, o = gates[row, 2 * units : 3 * units], gates[row, 3 * units :]
        g_i, g_f = g_z[row, :units], g_z[row, units : 2 * units]
        g_g, g_o = g_z[row, 2 * units : 3 * units], g_z[row, 3 * units :]
        for n in range(units):
            dh[row, n] += g_h[row, n]
        for n in range(units):
            reached = _tanh(c[row, n])
            g_o[n] = dh[row, n] * reached * o[n] * (_ONE - o[n])
            g_i[n] = _ONE - reached * reached
        for n in range(units):
            dc[row, n] += g_c[row, n] + dh[row, n] * o[n] * g_i[n]
        for n in range(units):
            g_i[n] = dc[row, n] * g[n] * i[n] * (_ONE - i[n])
        for n in range(units):
            g_g[n] = dc[row, n] * i[n] * (_ONE - g[n] * g[n])
        for n in range(units):
            g_f[n] = dc[row, n] * before[row, n] * f[n] * (_ONE - f[n])
            dc[row, n] *= f[n]


def _gru(gates: Any, state: Any, before: Any, inner: Any, h: Any) -> None:
    """Write a step's h and, over `gates`, (batch, 3 unit) of the order u, r, n, what they become.

    `state`, (batch, 3 unit), is the product with the state `before`; `inner` takes the part of n.
    """
    rows, units = before.shape
    for row in range(rows):
        u, r, own = gates[row, :units], gates[row, units : 2 * units], gates[row, 2 * units :]
        s_u, s_r = state[row, :units], state[row, units : 2 * units]
        s_n = state[row, 2 * units :]
        for n in range(units):
            u[n], r[n] = _sigmoid(u[n] + s_u[n]), _sigmoid(r[n] + s_r[n])
        for n in range(units):
            inner[row, n] = s_n[n]
            own[n] = _tanh(own[n] + r[n] * s_n[n])
        for n in range(units):
            h[row, n] = own[n] + u[n] * (before[row, n] - own[n])


def _gru_grad(gates: Any, before: Any, inner: Any, g_h: Any, dh: Any, g_z: Any, g_s: Any) -> None:
    """Write the gradients of a step's z and s, (batch, 3 unit), and what of `dh` passes by them."""
    rows, units = before.shape
    for row in range(rows):
        u, r, own = gates[row, :units], gates[row, units : 2 * units], gates[row, 2 * units :]
        z_u, z_r, z_n = g_z[row, :units], g_z[row, units : 2 * units], g_z[row, 2 * units :]
        s_n = g_s[row, 2 * units :]
        for n in range(units):
            dh[row, n] += g_h[row, n]
        for n in range(units):
            z_n[n] = dh[row, n] * (_ONE - u[n]) * (_ONE - own[n] * own[n])
        for n in range(units):
            z_r[n] = z_n[n] * inner[row, n] * r[n] * (_ONE - r[n])
        for n in range(units):
            z_u[n] = dh[row, n] * (before[row, n] - own[n]) * u[n] * (_ONE - u[n])
        for n in range(units):
            s_n[n] = z_n[n] * r[n]
            dh[row, n] *= u[n]
        for n in range(2 * units):
            g_s[row, n] = g_z[row, n]


@cache
def _compiled(loop: Any, wide: int, *widths: int) -> Any:
    """Compile a loop over contiguous arrays of so many gates each."""
    return compile_loop(loop, *(np.zeros((1, width), _float) for width in (wide, *widths)))


def _views(*states: Tensor) -> list[list[np.ndarray]]:
    return [[*cast(Any, state.contiguous().numpy())] for state in states]


def _check_shapes(
    gates: Tensor,
    weight: Tensor,
    count: int,
    firsts: Sequence[Tensor],
    others: Sequence[Tensor] = (),
) -> None:
    """Refuse arrays that loops of `count` gates would read or write beyond."""
    steps, batch, width = gates.shape
    units = firsts[0].shape[1]
    if weight.shape != (units, width) or width != count * units:
        raise ValueError(
            f"found weights {tuple(weight.shape)} and {width} columns of gates, expected "
            f"{(units, count * units)} and {count * units} for states of {units} units"
        )
    for found, expected in [(x, (batch, units)) for x in firsts] + [
        (x, (steps, batch, units)) for x in others
    ]:
        if found.shape != expected:
            raise ValueError(f"a state has shape {tuple(found.shape)}, expected {expected}")


def lstm_steps(z: Tensor, weight: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `LSTMSteps`, and write over `z` if it is contiguous."""
    _check_shapes(z, weight, 4, (h, c))
    gates = z.contiguous()
    all_h, all_c = (z.new_empty((*z.shape[:2], len(weight))) for _ in range(2))
    step, before = _compiled(_lstm, 4, 1, 1, 1), c.contiguous().numpy()
    views = zip(gates.unbind(), all_h.unbind(), *_views(gates, all_c, all_h), strict=True)
    for product, next_h, own_gates, own_c, own_h in views:
        product.addmm_(h, weight)
        step(own_gates, before, own_c, own_h)
        h, before = next_h, own_c
    return all_h, all_c, gates


def lstm_steps_grad(
    gates: Tensor, weight: Tensor, c0: Tensor, c: Tensor, g_h: Tensor, g_c: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `LSTMStepsGrad`."""
    _check_shapes(gates, weight, 4, [c0], (c, g_h, g_c))
    g_z = torch.empty_like(gates, memory_format=torch.contiguous_format)
    dh, dc, transposed = torch.zeros_like(c0), torch.zeros_like(c0), weight.T.contiguous()
    step, of_h, of_c = _compiled(_lstm_grad, 4, 1, 1, 1, 1, 1, 1, 4), dh.numpy(), dc.numpy()
    own_gates, own_c, own_g_h, own_g_c, found = _views(gates, c, g_h, g_c, g_z)
    befores = [c0.contiguous().numpy(), *own_c][:-1]
    steps = zip(own_gates, befores, own_c, own_g_h, own_g_c, found, g_z.unbind(), strict=True)
    for *known, own_z, product in reversed([*steps]):
        step(*known, of_h, of_c, own_z)
        torch.mm(product, transposed, out=dh)
    return g_z, dh, dc


def gru_steps(z: Tensor, weight: Tensor, bias: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `GRUSteps`, and write over `z` if it is contiguous."""
    _check_shapes(z, weight, 3, [h])
    gates = z.contiguous()
    all_h, inner = (z.new_empty((*z.shape[:2], len(weight))) for _ in range(2))
    step, state = _compiled(_gru, 3, 3, 1, 1, 1), z.new_empty(z.shape[1:])
    product, before = state.numpy(), h.contiguous().numpy()
    views = zip(all_h.unbind(), *_views(gates, inner, all_h), strict=True)
    for next_h, own_gates, own_inner, own_h in views:
        torch.addmm(bias, h, weight, out=state)
        step(own_gates, product, before, own_inner, own_h)
        h, before = next_h, own_h
    return all_h, gates, inner


def gru_steps_grad(
    gates: Tensor, weight: Tensor, inner: Tensor, h0: Tensor, h: Tensor, g_h: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `GRUStepsGrad`."""
    _check_shapes(gates, weight, 3, [h0], (h, inner, g_h))
    g_z, g_s = (torch.empty_like(gates, memory_format=torch.contiguous_format) for _ in range(2))
    dh, transposed = torch.zeros_like(h0), weight.T.contiguous()
    step, of_h = _compiled(_gru_grad, 3, 1, 1, 1, 1, 3, 3), dh.numpy()
    own_gates, own_inner, own_h, own_g_h, own_z, own_s = _views(gates, inner, h, g_h, g_z, g_s)
    befores = [h0.contiguous().numpy(), *own_h][:-1]
    steps = zip(own_gates, befores, own_inner, own_g_h, own_z, own_s, g_s.unbind(), strict=True)
    for *known, into_z, into_s, product in reversed([*steps]):
        step(*known, of_h, into_z, into_s)
        dh.addmm_(product, transposed)
    return g_z, g_s, dh
