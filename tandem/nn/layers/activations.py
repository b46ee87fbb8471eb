"""Activations as layers."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tandem.nn.activations import ACTIVATION, activated, softmax, symbolic_axis
from tandem.nn.arguments import argument, integer, number, optional
from tandem.nn.initializers import NOT_NEGATIVE
from tandem.nn.layers.base import BuildContext, Shape, ShapedLike

if TYPE_CHECKING:
    from pytensor.tensor.variable import TensorVariable


@dataclass(frozen=True, eq=False)
class Activation(ShapedLike):
    """An activation by its name, see `tandem.nn.activations.ACTIVATIONS`."""

    activation: str = argument(ACTIVATION)

    def build(self, context: BuildContext, *inputs: "TensorVariable") -> "TensorVariable":
        return activated(inputs[0], self.activation)


@dataclass(frozen=True, eq=False)
class ReLU(ShapedLike):
    """``min(x, max_value)`` where x is above `threshold`, else ``slope (x - threshold)``.

    Parameters
    ----------
    max_value : float, optional
        At least 0; None: no upper bound.
    negative_slope : float
    threshold : float
    """

    max_value: float | None = argument(optional(NOT_NEGATIVE), None)
    negative_slope: float = argument(NOT_NEGATIVE, 0.0)
    threshold: float = argument(NOT_NEGATIVE, 0.0)

    def build(self, context: BuildContext, *inputs: "TensorVariable") -> "TensorVariable":
        import numpy as np
        import pytensor.tensor as pt

        from tandem.layers.activations import relu

        (x,) = inputs
        zero, slope, threshold = (
            np.asarray(value, x.type.dtype) for value in (0, self.negative_slope, self.threshold)
        )
        y = pt.switch(pt.gt(x, threshold), x, zero) if self.threshold else relu(x)
        if self.max_value is not None:
            y = pt.minimum(y, np.asarray(self.max_value, x.type.dtype))
        if self.negative_slope:
            y = y + slope * pt.minimum(x - threshold if self.threshold else x, zero)
        return y


@dataclass(frozen=True, eq=False)
class LeakyReLU(ShapedLike):
    """``x`` above 0, else ``negative_slope x``."""

    negative_slope: float = argument(NOT_NEGATIVE, 0.3)

    def build(self, context: BuildContext, *inputs: "TensorVariable") -> "TensorVariable":
        from tandem.layers.activations import leaky_relu

        return leaky_relu(inputs[0], self.negative_slope)


@dataclass(frozen=True, eq=False)
class ELU(ShapedLike):
    """``x`` above 0, else ``alpha (exp(x) - 1)``."""

    alpha: float = argument(number(), 1.0)

    def build(self, context: BuildContext, *inputs: "TensorVariable") -> "TensorVariable":
        from tandem.layers.activations import elu

        return elu(inputs[0], self.alpha)


@dataclass(frozen=True, eq=False)
class Softmax(ShapedLike):
    """``exp(x) / sum of exp(x)`` over an axis of (batch, row, column, channel) but the first."""

    axis: int = argument(integer(-3, 3), -1)

    def shape(self, *inputs: Shape) -> Shape:
        shape = self.single(inputs)
        if not -len(shape) <= self.axis <= len(shape) or self.axis == 0:
            raise self.fault(f"axis {self.axis} of rows of shape {shape}", "an axis of the rows")
        return shape

    def build(self, context: BuildContext, *inputs: "TensorVariable") -> "TensorVariable":
        (x,) = inputs
        return softmax(x, symbolic_axis(self.axis, x.type.ndim))
