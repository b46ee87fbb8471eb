"""Activations: functions of each unit, whose values and gradients are finite for large inputs."""

import numpy as np
import pytensor.tensor as pt
from pytensor.tensor.variable import TensorVariable

from tandem.ops import relu

__all__ = [
    "arctan",
    "elu",
    "leaky_relu",
    "log_sigmoid",
    "relu",
    "relu6",
    "sigmoid",
    "softplus",
    "tanh",
]


def elu(x: TensorVariable, alpha: float = 1.0) -> TensorVariable:
    """``x`` above 0, else ``alpha (exp(x) - 1)``.

    Clevert, Unterthiner, Hochreiter 2015.
    """
    # Of an unbounded exponential, which is not used, the gradient would be infinity times 0.
    return relu(x) + _number(x, alpha) * pt.expm1(pt.minimum(x, _number(x, 0)))


def leaky_relu(x: TensorVariable, slope: float = 0.01) -> TensorVariable:
    """``x`` above 0, else ``slope x``.

    Maas, Hannun, Ng 2013.
    """
    return relu(x) + _number(x, slope) * pt.minimum(x, _number(x, 0))


def relu6(x: TensorVariable) -> TensorVariable:
    """``min(max(x, 0), 6)``.

    Howard et al. 2017, "MobileNets", by its program.
    """
    return pt.minimum(relu(x), _number(x, 6))


def sigmoid(x: TensorVariable) -> TensorVariable:
    """``1 / (1 + exp(-x))``."""
    return pt.sigmoid(x)


def tanh(x: TensorVariable) -> TensorVariable:
    """The hyperbolic tangent."""
    return pt.tanh(x)


def softplus(x: TensorVariable) -> TensorVariable:
    """``log(1 + exp(x))``."""
    return pt.softplus(x)


def log_sigmoid(x: TensorVariable) -> TensorVariable:
    """``log(1 / (1 + exp(-x)))``."""
    return -pt.softplus(-x)


def arctan(x: TensorVariable) -> TensorVariable:
    """The inverse of the tangent, between ``-pi / 2`` and ``pi / 2``."""
    return pt.arctan(x)


def _number(x: TensorVariable, value: float) -> np.ndarray:
    """A constant of the dtype of x."""
    return np.asarray(value, x.type.dtype)
