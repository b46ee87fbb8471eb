"""Local response normalisation across channels."""

# A make_node names its inputs, in place of the *inputs of PyTensor's Op.
# mypy: disable-error-code=override

from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.gradient import DisconnectedType, disconnected_type
from pytensor.graph.basic import Apply
from pytensor.tensor.variable import TensorVariable

from tandem.ops.base import SameShapeOp, Values, positive_int, same_dtype, same_shape, tensor_input


class _NormalizationOp(SameShapeOp):
    __props__ = ("size", "alpha", "beta", "k")

    def __init__(self, size: int, alpha: float, beta: float, k: float) -> None:
        owner = type(self).__name__
        self.size = positive_int(owner, "size", size)
        if self.size % 2 == 0:
            raise ValueError(f"{owner}: size must be odd, for a window has a centre, got {size}")
        if not (alpha >= 0 and k > 0):
            raise ValueError(
                f"{owner}: alpha must not be negative and k must be positive, got {alpha} and {k}"
            )
        self.alpha, self.beta, self.k = float(alpha), float(beta), float(k)


class LRN(_NormalizationOp):
    """Local response normalisation, as `lrn` defines it.

    Outputs are y and the scale ``k + alpha * sum of squares``, which the gradient reuses.
    """

    def make_node(self, x: Any) -> Apply:
        x = tensor_input(self, "x", x, 4)
        outputs = [pt.tensor(dtype=x.type.dtype, shape=x.type.shape) for _ in range(2)]
        return Apply(self, [x], outputs)

    def perform(self, node: Apply, inputs: Values, output_storage: list[list[Any]]) -> None:
        (x,) = inputs
        scale = self.k + self.alpha * channel_sums(x * x, self.size)
        output_storage[0][0] = x * scale**-self.beta
        output_storage[1][0] = scale

    def pullback(self, inputs: Values, outputs: Values, cotangents: Values) -> list[Any]:
        (x,), (_, scale), (g, g_scale) = inputs, outputs, cotangents
        terms = []
        if not isinstance(g.type, DisconnectedType):
            terms.append(LRNGrad(self.size, self.alpha, self.beta, self.k)(x, scale, g))
        if not isinstance(g_scale.type, DisconnectedType):
            twice_alpha = constant(2 * self.alpha, x.type.dtype)
            terms.append(twice_alpha * x * channel_sums_graph(g_scale, self.size))
        return [pt.add(*terms) if terms else disconnected_type()]


class LRNGrad(_NormalizationOp):
    """Gradient of `LRN` with respect to its input.

    ``LRNGrad(size, alpha, beta, k)(x, scale, g)``, with g the gradient with respect to y, is
    ``g scale^-beta - 2 alpha beta x * sum over the window's channels of g x scale^(-beta - 1)``,
    shaped like x.
    """

    def make_node(self, x: Any, scale: Any, g: Any) -> Apply:
        x = tensor_input(self, "x", x, 4)
        scale = tensor_input(self, "scale", scale, 4)
        g = tensor_input(self, "g", g, 4)
        dtype = same_dtype(self, x=x, scale=scale, g=g)
        shape = same_shape(self, "x, scale and g", x.type.shape, scale.type.shape, g.type.shape)
        return Apply(self, [x, scale, g], [pt.tensor(dtype=dtype, shape=shape)])

    def perform(self, node: Apply, inputs: Values, output_storage: list[list[Any]]) -> None:
        x, scale, g = inputs
        direct = g * scale**-self.beta
        through_scale = x * channel_sums(direct * x / scale, self.size)
        output_storage[0][0] = direct - 2 * self.alpha * self.beta * through_scale

    def pullback(self, inputs: Values, outputs: Values, cotangents: Values) -> list[Any]:
        # The partial derivatives with x, scale and g held apart; scale's own dependence on x is
        # added by the pullback of LRN.
        (x, scale, g), (v,) = inputs, cotangents
        dtype = x.type.dtype
        factor = constant(2 * self.alpha * self.beta, dtype)
        beta = constant(self.beta, dtype)
        power = scale ** constant(-self.beta - 1, dtype)
        around = channel_sums_graph(v * x, self.size)
        return [
            -factor * (v * channel_sums_graph(g * x * power, self.size) + around * g * power),
            g * power * (factor * (beta + constant(1, dtype)) * around * x / scale - beta * v),
            power * (v * scale - factor * around * x),
        ]


def channel_sums(x: np.ndarray, size: int) -> np.ndarray:
    """Sum over the `size` channels around each; channels beyond the first and last count as 0."""
    half = size // 2
    padded = np.pad(x, ((0, 0), (half, half), (0, 0), (0, 0)))
    return np.sum([padded[:, i : i + x.shape[1]] for i in range(size)], axis=0)


def channel_sums_graph(x: TensorVariable, size: int) -> TensorVariable:
    """`channel_sums` as a graph."""
    edge = pt.zeros((x.shape[0], size // 2, *x.shape[2:]), dtype=x.type.dtype)
    padded = pt.concatenate([edge, x, edge], axis=1)
    return pt.add(*(padded[:, i : i + x.shape[1]] for i in range(size)))


def constant(value: float, dtype: str) -> np.ndarray:
    """`value` in `dtype`, so that it does not turn a float32 graph into float64."""
    return np.asarray(value, dtype)


def lrn(
    x: Any, size: int = 5, alpha: float = 1e-4, beta: float = 0.75, k: float = 2.0
) -> TensorVariable:
    """Divide each value by a power of the energy in the channels around it.

    ``y[n, c] = x[n, c] / (k + alpha * sum over |c' - c| <= size // 2 of x[n, c']^2)^beta``; alpha
    is not divided by `size`, as some libraries do. Krizhevsky, Sutskever, Hinton 2012, section 3.3.

    Parameters
    ----------
    x : float (batch, channel, row, column)
    size : int
        Number of channels in the window, odd.
    alpha, beta, k : float
        alpha not negative, k positive.

    Raises
    ------
    TypeError
        x is not a four-dimensional tensor of float32 or float64.
    ValueError
        A parameter is out of its range.
    """
    y, _ = LRN(size, alpha, beta, k)(x)
    return y
