"""The steps of recurrent layers: LSTM and GRU.

Inputs come projected, ``z = x W + b`` of all steps at once, since only what depends on the state
has to be computed step after step. Gradients of the weights are products over all steps as well.
"""

# A make_node names its inputs, in place of the *inputs of PyTensor's Op.
# mypy: disable-error-code=override

from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.gradient import DisconnectedType
from pytensor.graph.basic import Apply
from pytensor.tensor.variable import TensorVariable

from tandem.ops.base import TensorOp, Values, same_dtype, same_length, tensor_input


class _StepsOp(TensorOp):
    """An Op over (step, batch, unit); `gates` is how many units stand side by side in z."""

    __props__ = ()
    gates: int

    def _inputs(self, *, z: Any, weight: Any, **others: Any) -> list[TensorVariable]:
        """Check that the units of all inputs are those of the weight, (unit, gates * unit)."""
        z, weight = tensor_input(self, "z", z, 3), tensor_input(self, "weight", weight, 2)
        given = {name: tensor_input(self, name, value, None) for name, value in others.items()}
        same_dtype(self, z=z, weight=weight, **given)
        own = [variable.type.shape[-1] for variable in given.values() if variable.type.ndim > 1]
        units = same_length(self, "units", weight.type.shape[0], *own)
        wide = None if units is None else self.gates * units
        same_length(self, "gates of the units", wide, weight.type.shape[1], z.type.shape[2])
        return [z, weight, *given.values()]

    def _like(self, z: TensorVariable, weight: TensorVariable, gates: int = 1) -> TensorVariable:
        """Make a variable of all steps, with so many gates."""
        units = weight.type.shape[0]
        wide = None if units is None else gates * units
        return pt.tensor(dtype=z.type.dtype, shape=(*z.type.shape[:2], wide))


class LSTMSteps(_StepsOp):
    """The steps of an LSTM (Hochreiter, Schmidhuber 1997, with Gers' forget gate).

    ``LSTMSteps()(z, weight, h0, c0)``: the gates i, f, g, o of step t are the sigmoid, for g the
    hyperbolic tangent, of ``z[t] + h[t-1] weight``; ``c[t] = f c[t-1] + i g`` and
    ``h[t] = o tanh(c[t])``. Outputs are h and c, (step, batch, unit), and the gates, (step, batch,
    4 unit), which the gradient reuses.
    """

    gates = 4

    def make_node(self, z: Any, weight: Any, h0: Any, c0: Any) -> Apply:
        inputs = self._inputs(z=z, weight=weight, h0=h0, c0=c0)
        outputs = [self._like(inputs[0], inputs[1], gates) for gates in (1, 1, 4)]
        return Apply(self, inputs, outputs)

    def infer_shape(self, fgraph: Any, node: Apply, shapes: list[tuple]) -> list[tuple]:
        (steps, batch, wide), (units, _), *_ = shapes
        return [(steps, batch, units), (steps, batch, units), (steps, batch, wide)]

    def perform(self, node: Apply, inputs: Values, output_storage: list[list[Any]]) -> None:
        z, weight, h, c = inputs
        all_h, all_c, gates = (_empty(z, len(weight), count) for count in (1, 1, 4))
        for t in range(len(z)):
            gates[t] = z[t] + h @ weight
            i, f, g, o = _divided(gates[t], len(weight))
            i[...], f[...], g[...], o[...] = _sigmoid(i), _sigmoid(f), np.tanh(g), _sigmoid(o)
            c = all_c[t] = f * c + i * g
            h = all_h[t] = o * np.tanh(c)
        _store(output_storage, all_h, all_c, gates)

    def pullback(self, inputs: Values, outputs: Values, cotangents: Values) -> list[Any]:
        _, weight, h0, c0 = inputs
        h, c, gates = outputs
        g_h, g_c = (_connected(g, like) for g, like in zip(cotangents[:2], (h, c), strict=True))
        _refuse_gates(self, cotangents[2])
        g_z, g_h0, g_c0 = LSTMStepsGrad()(gates, weight, c0, c, g_h, g_c)
        return [g_z, _weight_gradient(h0, h, g_z), g_h0, g_c0]


class LSTMStepsGrad(_StepsOp):
    """Gradient of `LSTMSteps` with respect to z, h0 and c0.

    ``LSTMStepsGrad()(gates, weight, c0, c, g_h, g_c)``, with the gradients of h and c.
    """

    gates = 4

    def make_node(self, gates: Any, weight: Any, c0: Any, c: Any, g_h: Any, g_c: Any) -> Apply:
        inputs = self._inputs(z=gates, weight=weight, c0=c0, c=c, g_h=g_h, g_c=g_c)
        return Apply(self, inputs, [inputs[0].type(), inputs[2].type(), inputs[2].type()])

    def infer_shape(self, fgraph: Any, node: Apply, shapes: list[tuple]) -> list[tuple]:
        return [shapes[0], shapes[2], shapes[2]]

    def perform(self, node: Apply, inputs: Values, output_storage: list[list[Any]]) -> None:
        gates, weight, c0, c, g_h, g_c = inputs
        g_z, dh, dc = np.empty_like(gates), np.zeros_like(c0), np.zeros_like(c0)
        for t in reversed(range(len(gates))):
            i, f, g, o = _divided(gates[t], len(weight))
            reached = np.tanh(c[t])
            dh = dh + g_h[t]
            dc = dc + g_c[t] + dh * o * (1 - reached**2)
            before = c[t - 1] if t else c0
            di, df, dg, do = _divided(g_z[t], len(weight))
            di[...], df[...] = dc * g * i * (1 - i), dc * before * f * (1 - f)
            dg[...], do[...] = dc * i * (1 - g**2), dh * reached * o * (1 - o)
            dh, dc = g_z[t] @ weight.T, dc * f
        _store(output_storage, g_z, dh, dc)


class GRUSteps(_StepsOp):
    """The steps of a GRU (Cho et al. 2014) whose reset gate follows the product with the state.

    ``GRUSteps()(z, weight, bias, h0)``: with ``s = h[t-1] weight + bias``, the gates u and r are
    the sigmoid of ``z[t] + s``, and n is the hyperbolic tangent of ``z[t] + r s``;
    ``h[t] = u h[t-1] + (1 - u) n``. Outputs are h, (step, batch, unit), the gates u, r, n, (step,
    batch, 3 unit), and the part of s that is n's, (step, batch, unit), which the gradient reuses.
    """

    gates = 3

    def make_node(self, z: Any, weight: Any, bias: Any, h0: Any) -> Apply:
        inputs = self._inputs(z=z, weight=weight, bias=bias, h0=h0)
        outputs = [self._like(inputs[0], inputs[1], gates) for gates in (1, 3, 1)]
        return Apply(self, inputs, outputs)

    def infer_shape(self, fgraph: Any, node: Apply, shapes: list[tuple]) -> list[tuple]:
        (steps, batch, wide), (units, _), *_ = shapes
        return [(steps, batch, units), (steps, batch, wide), (steps, batch, units)]

    def perform(self, node: Apply, inputs: Values, output_storage: list[list[Any]]) -> None:
        z, weight, bias, h = inputs
        all_h, gates, inner = (_empty(z, len(weight), count) for count in (1, 3, 1))
        for t in range(len(z)):
            of_u, of_r, inner[t] = _divided(h @ weight + bias, len(weight))
            z_u, z_r, z_n = _divided(z[t], len(weight))
            u, r, n = _divided(gates[t], len(weight))
            u[...], r[...] = _sigmoid(z_u + of_u), _sigmoid(z_r + of_r)
            n[...] = np.tanh(z_n + r * inner[t])
            h = all_h[t] = u * h + (1 - u) * n
        _store(output_storage, all_h, gates, inner)

    def pullback(self, inputs: Values, outputs: Values, cotangents: Values) -> list[Any]:
        _, weight, _, h0 = inputs
        h, gates, inner = outputs
        for other in cotangents[1:]:
            _refuse_gates(self, other)
        g_h = _connected(cotangents[0], h)
        g_z, g_s, g_h0 = GRUStepsGrad()(gates, weight, inner, h0, h, g_h)
        return [g_z, _weight_gradient(h0, h, g_s), g_s.sum((0, 1)), g_h0]


class GRUStepsGrad(_StepsOp):
    """Gradient of `GRUSteps` with respect to z, s and h0, of which that of s is the bias' too.

    ``GRUStepsGrad()(gates, weight, inner, h0, h, g_h)``, with the gradient of h.
    """

    gates = 3

    def make_node(self, gates: Any, weight: Any, inner: Any, h0: Any, h: Any, g_h: Any) -> Apply:
        inputs = self._inputs(z=gates, weight=weight, inner=inner, h0=h0, h=h, g_h=g_h)
        return Apply(self, inputs, [inputs[0].type(), inputs[0].type(), inputs[3].type()])

    def infer_shape(self, fgraph: Any, node: Apply, shapes: list[tuple]) -> list[tuple]:
        return [shapes[0], shapes[0], shapes[3]]

    def perform(self, node: Apply, inputs: Values, output_storage: list[list[Any]]) -> None:
        gates, weight, inner, h0, h, g_h = inputs
        units = len(weight)
        g_z, g_s, dh = np.empty_like(gates), np.empty_like(gates), np.zeros_like(h0)
        for t in reversed(range(len(gates))):
            u, r, n = _divided(gates[t], units)
            before = h[t - 1] if t else h0
            dh = dh + g_h[t]
            du, dr, dn = _divided(g_z[t], units)
            dn[...] = dh * (1 - u) * (1 - n**2)
            du[...], dr[...] = dh * (before - n) * u * (1 - u), dn * inner[t] * r * (1 - r)
            g_s[t] = g_z[t]
            g_s[t, :, 2 * units :] *= r
            dh = dh * u + g_s[t] @ weight.T
        _store(output_storage, g_z, g_s, dh)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * np.tanh(0.5 * x) + 0.5


def _divided(gates: np.ndarray, units: int) -> list[np.ndarray]:
    """Views of the gates, each (batch, unit)."""
    return [gates[:, n : n + units] for n in range(0, gates.shape[1], units)]


def _empty(z: np.ndarray, units: int, gates: int) -> np.ndarray:
    return np.empty((*z.shape[:2], gates * units), z.dtype)


def _store(output_storage: list[list[Any]], *values: np.ndarray) -> None:
    for storage, value in zip(output_storage, values, strict=True):
        storage[0] = value


def _connected(g: Any, like: TensorVariable) -> Any:
    return pt.zeros_like(like) if isinstance(g.type, DisconnectedType) else g


def _refuse_gates(op: TensorOp, g: Any) -> None:
    if not isinstance(g.type, DisconnectedType):
        raise NotImplementedError(f"{op}: what the gradient reuses has no gradient of its own")


def _weight_gradient(h0: Any, h: Any, g: Any) -> TensorVariable:
    """Sum over steps of the states before them times gradients of the gates."""
    before = pt.concatenate([h0[np.newaxis], h[:-1]])
    rows = [x.reshape((-1, x.shape[2])) for x in (before, g)]
    return pt.dot(rows[0].T, rows[1])


def lstm(z: Any, weight: Any, h0: Any, c0: Any) -> tuple[TensorVariable, TensorVariable]:
    """Make all steps of an LSTM; see `LSTMSteps`.

    Parameters
    ----------
    z : float32 or float64 (step, batch, 4 unit)
        Projected inputs, gates in the order i, f, g, o.
    weight : (unit, 4 unit)
    h0, c0 : (batch, unit)

    Returns
    -------
    h, c : (step, batch, unit)
    """
    h, c, _ = LSTMSteps()(z, weight, h0, c0)
    return h, c


def gru(z: Any, weight: Any, bias: Any, h0: Any) -> TensorVariable:
    """Make all steps of a GRU; see `GRUSteps`.

    Parameters
    ----------
    z : float32 or float64 (step, batch, 3 unit)
        Projected inputs, gates in the order u, r, n.
    weight : (unit, 3 unit)
    bias : (3 unit,)
        Of the product with the state.
    h0 : (batch, unit)

    Returns
    -------
    h : (step, batch, unit)
    """
    h, _, _ = GRUSteps()(z, weight, bias, h0)
    return h
