"""Distributions of the initial values of weights, by the sizes of their layer.

Each is a function of a unit's inputs and of what an input goes to, the fan-in and the fan-out, and
returns the standard deviation and the distribution's name.
"""

import math
from collections.abc import Callable

from tandem.layers.parameter import Distribution

__all__ = [
    "Initial",
    "glorot",
    "he_in",
    "he_out",
    "lecun_uniform",
    "normal",
    "torch_linear",
    "truncated",
]

Initial = Callable[[int, int], tuple[float, Distribution]]


def he_in(inputs: int, outputs: int) -> tuple[float, Distribution]:
    """Normal, variance ``2 / fan-in``: ReLU keeps the variance of the signal (He et al. 2015)."""
    return math.sqrt(2 / inputs), "normal"


def he_out(inputs: int, outputs: int) -> tuple[float, Distribution]:
    """Normal, variance ``2 / fan-out``: ReLU keeps the variance of the gradient (He et al.)."""
    return math.sqrt(2 / outputs), "normal"


def glorot(inputs: int, outputs: int) -> tuple[float, Distribution]:
    """Uniform, variance ``2 / (fan-in + fan-out)`` (Glorot and Bengio 2010)."""
    return math.sqrt(2 / (inputs + outputs)), "uniform"


def lecun_uniform(inputs: int, outputs: int) -> tuple[float, Distribution]:
    """Uniform, variance ``1 / fan-in``: what Caffe's filler ``xavier`` draws."""
    return math.sqrt(1 / inputs), "uniform"


def torch_linear(inputs: int, outputs: int) -> tuple[float, Distribution]:
    """Uniform, variance ``1 / (3 fan-in)``: what PyTorch's ``nn.Linear`` draws."""
    return math.sqrt(1 / (3 * inputs)), "uniform"


def normal(std: float) -> Initial:
    """Normal, of one standard deviation whatever the layer's sizes."""
    return lambda inputs, outputs: (std, "normal")


def truncated(std: float) -> Initial:
    """Normal, redrawn beyond two standard deviations."""
    return lambda inputs, outputs: (std, "truncated")
