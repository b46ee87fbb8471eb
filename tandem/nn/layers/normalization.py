"""Batch normalisation and local response normalisation."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tandem.layers.parameter import Parameter, norm
from tandem.nn.arguments import COUNT, FLAG, argument, integer, number
from tandem.nn.layers.base import BuildContext, ParameterLayer, Shape, ShapedLike

if TYPE_CHECKING:
    from pytensor.tensor.variable import TensorVariable

_POSITIVE = number("a number above 0", lambda value: value > 0)


@dataclass(frozen=True, eq=False)
class BatchNormalization(ParameterLayer):
    """Normalise each unit or channel by its mean and variance over rows of the minibatch.

    In training, statistics are those of each `norm_rows` consecutive rows of the global minibatch,
    which is an argument of the model, so that the number of trainers changes nothing. The running
    variance is of unbiased variances, as PyTorch's; Keras's is of biased ones. Ioffe, Szegedy 2015.

    Parameters
    ----------
    axis : int
        -1, the last.
    momentum : float
        Fraction of the running averages that a step keeps.
    epsilon : float
        Added to the variance.
    center, scale : bool
        Whether a shift is added, and whether a factor is applied.
    """

    axis: int = argument(integer(-1, 3), -1)
    momentum: float = argument(number("a number from 0 to 1", lambda value: 0 <= value <= 1), 0.99)
    epsilon: float = argument(_POSITIVE, 1e-3)
    center: bool = argument(FLAG, True)
    scale: bool = argument(FLAG, True)

    def shape(self, *inputs: Shape) -> Shape:
        shape = self.single(inputs)
        if len(shape) == 2:
            raise self.fault(f"an input of shape {shape}", "(units,) or (row, column, channel)")
        if self.axis not in (-1, len(shape)):
            raise self.fault(f"axis {self.axis}", "-1: the channels are the last axis")
        return shape

    def declare(self, name: str, *inputs: Shape) -> tuple[Parameter, ...]:
        scale, shift, mean, variance = norm(name, inputs[0][-1], keep=self.momentum)
        return (*[scale] * self.scale, *[shift] * self.center, mean, variance)

    def build(self, context: BuildContext, *inputs: "TensorVariable") -> "TensorVariable":
        import pytensor.tensor as pt

        from tandem.layers.layers import batch_norm

        (x,) = inputs
        channels, parameters = x.type.shape[1], dict(context.parameters)
        for kind, has, value in (("weight", self.scale, 1), ("bias", self.center, 0)):
            if not has:
                constant = np.full(channels, value, x.type.dtype)
                parameters[f"{context.name}.{kind}"] = pt.constant(constant)
        return batch_norm(x, parameters, context.name, context.training, self.epsilon)

    def flops(self, *inputs: Shape) -> int:
        return 2 * math.prod(inputs[0])


@dataclass(frozen=True, eq=False)
class LocalResponseNormalization(ShapedLike):
    """``x / (k + alpha sum of x^2 over `size` neighbouring channels)^beta``.

    With the constants of Krizhevsky, Sutskever, Hinton 2012, section 3.3. `alpha` is not divided
    by `size`.
    """

    size: int = argument(COUNT, 5)
    alpha: float = argument(number(), 1e-4)
    beta: float = argument(number(), 0.75)
    k: float = argument(_POSITIVE, 2.0)

    def shape(self, *inputs: Shape) -> Shape:
        return self.image(inputs)

    def build(self, context: BuildContext, *inputs: "TensorVariable") -> "TensorVariable":
        from tandem.layers.layers import response_norm

        return response_norm(inputs[0], self.size, self.alpha, self.beta, self.k)

    def flops(self, *inputs: Shape) -> int:
        return math.prod(inputs[0]) * (2 * self.size + 3)
