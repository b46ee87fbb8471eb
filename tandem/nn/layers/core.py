"""Inputs, fully connected layers, dropout and changes of shape or scale."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tandem.layers.parameter import Parameter
from tandem.nn.activations import ACTIVATION, activated
from tandem.nn.arguments import COUNT, DATA_FORMAT, FLAG, Argument, argument, integers, number
from tandem.nn.initializers import (
    INITIALIZER,
    GlorotUniform,
    Initializer,
    Zeros,
    find_initializer,
)
from tandem.nn.layers.base import BuildContext, Layer, ParameterLayer, Shape, ShapedLike, Symbol

if TYPE_CHECKING:
    from pytensor.tensor.variable import TensorVariable


def _row_shape(value: Any) -> Shape:
    lengths = value if isinstance(value, tuple | list) else (value,)
    if not 1 <= len(lengths) <= 3:
        raise ValueError("no shape of a row")
    return integers(len(lengths), 1).convert(lengths)


@dataclass(frozen=True, eq=False)
class InputLayer(Layer):
    """The rows that a network takes: `Input` makes one and its symbol."""

    row_shape: Shape = argument(
        Argument("one to three lengths, without the batch: (row, column, channel)", _row_shape)
    )

    def shape(self, *inputs: Shape) -> Shape:
        if inputs:
            raise self.fault("a call on symbols", "none: an input takes data")
        return self.row_shape

    def build(self, context: BuildContext, *inputs: "TensorVariable") -> "TensorVariable":
        raise TypeError("an input's graph is the data itself")


def Input(shape: Any, *, name: str | None = None) -> Symbol:
    """Symbol of a network's rows.

    Parameters
    ----------
    shape : tuple of int
        Of a row, without the batch: (row, column, channel), or one or two lengths.
    name : str, optional
    """
    return InputLayer(shape, name=name)()


@dataclass(frozen=True, eq=False)
class Dense(ParameterLayer):
    """Fully connected layer: ``activation(x kernel + bias)``.

    Parameters
    ----------
    units : int
    activation : str, optional
        Of `tandem.nn.activations.ACTIVATIONS`.
    use_bias : bool
    kernel_initializer, bias_initializer : Initializer or str
    """

    units: int = argument(COUNT)
    activation: str | None = argument(ACTIVATION, None)
    use_bias: bool = argument(FLAG, True)
    kernel_initializer: Initializer | str = argument(INITIALIZER, GlorotUniform())
    bias_initializer: Initializer | str = argument(INITIALIZER, Zeros())

    def shape(self, *inputs: Shape) -> Shape:
        shape = self.single(inputs)
        if len(shape) != 1:
            raise self.fault(f"an input of shape {shape}", "(units,): put a Flatten before it")
        return (self.units,)

    def declare(self, name: str, *inputs: Shape) -> tuple[Parameter, ...]:
        units = (inputs[0][0], self.units)
        return affine(name, units, units, self.kernel_initializer, self._bias)

    @property
    def _bias(self) -> Initializer | str | None:
        return self.bias_initializer if self.use_bias else None

    def build(self, context: BuildContext, *inputs: "TensorVariable") -> "TensorVariable":
        import pytensor.tensor as pt

        y = pt.dot(inputs[0], context.parameter("weight"))
        if self.use_bias:
            y = y + context.parameter("bias")
        return activated(y, self.activation)

    def flops(self, *inputs: Shape) -> int:
        return self.units * (2 * inputs[0][0] + self.use_bias)


def affine(
    name: str,
    shape: Shape,
    fans: tuple[int, int],
    kernel: Initializer | str,
    bias: Initializer | str | None,
) -> tuple[Parameter, ...]:
    """Weight and, if any, bias of a layer: filters are the first axis of four, the last of two."""
    drawn = find_initializer(kernel).draw(*fans)
    weight = Parameter(f"{name}.weight", shape, "weight", drawn.mean, drawn.std, drawn.distribution)
    if bias is None:
        return (weight,)
    units = shape[0] if len(shape) == 4 else shape[1]
    drawn = find_initializer(bias).draw(units, units)
    return weight, Parameter(
        f"{name}.bias", (units,), "bias", drawn.mean, drawn.std, drawn.distribution
    )


@dataclass(frozen=True, eq=False)
class Dropout(ShapedLike):
    """Drop units in training with probability `rate`, and divide the others by ``1 - rate``.

    Srivastava et al. 2014. Masks follow from the run's seed and from the row, not from its place
    in a minibatch.
    """

    rate: float = argument(number("a number of at least 0 and below 1", lambda v: 0 <= v < 1))

    def shape(self, *inputs: Shape) -> Shape:
        shape = self.single(inputs)
        if len(shape) == 2:
            raise self.fault(f"an input of shape {shape}", "(units,) or (row, column, channel)")
        return shape

    def build(self, context: BuildContext, *inputs: "TensorVariable") -> "TensorVariable":
        from tandem.layers.layers import dropout

        if not self.rate:
            return inputs[0]
        return dropout(inputs[0], self.rate, context.number, context.training, inverted=True)


@dataclass(frozen=True, eq=False)
class Flatten(Layer):
    """All elements of a row on one axis, in Keras's order (row, column, channel)."""

    data_format: str | None = argument(DATA_FORMAT, None)

    def shape(self, *inputs: Shape) -> Shape:
        return (math.prod(self.single(inputs)),)

    def build(self, context: BuildContext, *inputs: "TensorVariable") -> "TensorVariable":
        return flattened(inputs[0])


def flattened(x: "TensorVariable") -> "TensorVariable":
    """A minibatch as (batch, unit), the units of images in the order (row, column, channel)."""
    lengths = x.type.shape[1:]
    if x.type.ndim == 4 and lengths[1:] != (1, 1) and lengths[0] != 1:
        x = x.dimshuffle(0, 2, 3, 1)
    return x if x.type.ndim == 2 else x.reshape((x.shape[0], math.prod(lengths)))


@dataclass(frozen=True, eq=False)
class Rescaling(ShapedLike):
    """``scale x + offset``."""

    scale: float = argument(number())
    offset: float = argument(number(), 0.0)

    def build(self, context: BuildContext, *inputs: "TensorVariable") -> "TensorVariable":
        import numpy as np

        (x,) = inputs
        scale, offset = (np.asarray(value, x.type.dtype) for value in (self.scale, self.offset))
        return x * scale + offset if self.offset else x * scale

    def flops(self, *inputs: Shape) -> int:
        return (2 if self.offset else 1) * math.prod(inputs[0])
