"""Convolutions, and borders of zeros."""

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tandem.layers.parameter import Parameter
from tandem.nn.activations import ACTIVATION, activated
from tandem.nn.arguments import (
    COUNT,
    DATA_FORMAT,
    FLAG,
    PADDING,
    PAIR,
    Argument,
    Pair,
    Sizes,
    argument,
    integers,
    pair,
)
from tandem.nn.initializers import INITIALIZER, GlorotUniform, Initializer, Zeros
from tandem.nn.layers.base import BuildContext, Layer, ParameterLayer, Shape
from tandem.nn.layers.core import affine
from tandem.nn.layers.windows import Side, same_padding, window_counts

if TYPE_CHECKING:
    from pytensor.tensor.variable import TensorVariable


class _Convolution(ParameterLayer):
    """Base of convolutions, depthwise ones too: windows, bias and activation.

    It is no dataclass, so that each has Keras's order of arguments.
    """

    kernel_size: Sizes
    strides: Sizes
    padding: str
    dilation_rate: Sizes
    activation: str | None
    use_bias: bool
    bias_initializer: Initializer | str

    def __post_init__(self) -> None:
        super().__post_init__()
        if max(pair(self.strides)) > 1 and max(pair(self.dilation_rate)) > 1:
            raise self.fault(
                f"strides {self.strides} and dilation_rate {self.dilation_rate}",
                "one of them to be 1",
            )

    @abstractmethod
    def _weight_shape(self, channels: int) -> tuple[int, int, int, int]:
        """(filter, channel of its group, row, column)."""

    @abstractmethod
    def _groups(self, channels: int) -> int: ...

    @property
    def _reach(self) -> Pair:
        """Pixels from the first to the last tap of a filter, both counted."""
        rows, columns = (
            (taps - 1) * dilation + 1
            for taps, dilation in zip(
                *map(pair, (self.kernel_size, self.dilation_rate)), strict=True
            )
        )
        return rows, columns

    def shape(self, *inputs: Shape) -> Shape:
        image = self.image(inputs)
        counts = window_counts(self, image, self._reach, pair(self.strides), self.padding)
        return (*counts, self._weight_shape(image[2])[0])

    def build(self, context: BuildContext, *inputs: "TensorVariable") -> "TensorVariable":
        from tandem.ops import conv2d, pad2d

        (x,) = inputs
        channels, *image = x.type.shape[1:]
        sides: list[Side] = [(0, 0), (0, 0)]
        if self.padding == "same":
            lengths = zip(image, self._reach, pair(self.strides), strict=True)
            sides = [same_padding(n, reach, stride) for n, reach, stride in lengths]
        (top, bottom), (left, right) = sides
        pad = (top, left)
        if top != bottom or left != right:
            x, pad = pad2d(x, (top, bottom, left, right)), (0, 0)
        bias = context.parameter("bias") if self.use_bias else None
        weight, groups = context.parameter("weight"), self._groups(channels)
        y = conv2d(x, weight, bias, self.strides, pad, groups, self.dilation_rate)
        return activated(y, self.activation)

    def flops(self, *inputs: Shape) -> int:
        _, *taps = self._weight_shape(inputs[0][2])
        return math.prod(self.shape(*inputs)) * (2 * math.prod(taps) + self.use_bias)


@dataclass(frozen=True, eq=False)
class Conv2D(_Convolution):
    """Convolution of images with filters, in the sense of cross-correlation.

    Parameters
    ----------
    filters : int
    kernel_size, strides, dilation_rate : int or (int, int)
        Of rows and columns, pixels. A convolution has strides or a dilation.
    padding : {"valid", "same"}
        No zeros, or as many as leave ``ceil(row / stride)`` rows, the odd one behind.
    data_format : {"channels_last"}, optional
    groups : int
        Each group of filters takes its part of the channels.
    activation : str, optional
    use_bias : bool
    kernel_initializer, bias_initializer : Initializer or str
    """

    filters: int = argument(COUNT)
    kernel_size: Sizes = argument(PAIR)
    strides: Sizes = argument(PAIR, (1, 1))
    padding: str = argument(PADDING, "valid")
    data_format: str | None = argument(DATA_FORMAT, None)
    dilation_rate: Sizes = argument(PAIR, (1, 1))
    groups: int = argument(COUNT, 1)
    activation: str | None = argument(ACTIVATION, None)
    use_bias: bool = argument(FLAG, True)
    kernel_initializer: Initializer | str = argument(INITIALIZER, GlorotUniform())
    bias_initializer: Initializer | str = argument(INITIALIZER, Zeros())

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.filters % self.groups:
            raise self.fault(
                f"{self.filters} filters in {self.groups} groups", "a multiple of the groups"
            )

    def shape(self, *inputs: Shape) -> Shape:
        channels = self.image(inputs)[2]
        if channels % self.groups:
            raise self.fault(
                f"{channels} channels for {self.groups} groups", "a multiple of the groups"
            )
        return super().shape(*inputs)

    def _weight_shape(self, channels: int) -> tuple[int, int, int, int]:
        return (self.filters, channels // self.groups, *pair(self.kernel_size))

    def _groups(self, channels: int) -> int:
        return self.groups

    def declare(self, name: str, *inputs: Shape) -> tuple[Parameter, ...]:
        shape = self._weight_shape(inputs[0][2])
        window = math.prod(pair(self.kernel_size))
        fans = (shape[1] * window, self.filters * window)
        bias = self.bias_initializer if self.use_bias else None
        return affine(name, shape, fans, self.kernel_initializer, bias)


@dataclass(frozen=True, eq=False)
class DepthwiseConv2D(_Convolution):
    """Convolution of each channel with `depth_multiplier` filters of its own.

    Other parameters are those of `Conv2D`.
    """

    kernel_size: Sizes = argument(PAIR)
    strides: Sizes = argument(PAIR, (1, 1))
    padding: str = argument(PADDING, "valid")
    depth_multiplier: int = argument(COUNT, 1)
    data_format: str | None = argument(DATA_FORMAT, None)
    dilation_rate: Sizes = argument(PAIR, (1, 1))
    activation: str | None = argument(ACTIVATION, None)
    use_bias: bool = argument(FLAG, True)
    depthwise_initializer: Initializer | str = argument(INITIALIZER, GlorotUniform())
    bias_initializer: Initializer | str = argument(INITIALIZER, Zeros())

    def _weight_shape(self, channels: int) -> tuple[int, int, int, int]:
        return (channels * self.depth_multiplier, 1, *pair(self.kernel_size))

    def _groups(self, channels: int) -> int:
        return channels

    def declare(self, name: str, *inputs: Shape) -> tuple[Parameter, ...]:
        channels, window = inputs[0][2], math.prod(pair(self.kernel_size))
        # As Keras counts, by the axes of its kernel (row, column, channel, multiplier).
        fans = (channels * window, self.depth_multiplier * window)
        bias = self.bias_initializer if self.use_bias else None
        return affine(name, self._weight_shape(channels), fans, self.depthwise_initializer, bias)


def _sides(value: Any) -> tuple[Side, Side]:
    sides = value if isinstance(value, tuple | list) else (value, value)
    if len(sides) != 2:
        raise ValueError("no pair")
    first, last = (integers(2, 0).convert(side) for side in sides)
    return (first[0], first[1]), (last[0], last[1])


@dataclass(frozen=True, eq=False)
class ZeroPadding2D(Layer):
    """Zeros around images.

    Parameters
    ----------
    padding : int, (int, int) or ((int, int), (int, int))
        Of all sides; of rows and of columns; or ((top, bottom), (left, right)).
    data_format : {"channels_last"}, optional
    """

    padding: Sizes | tuple[Side, Side] = argument(
        Argument("a whole number of at least 0, two, or two pairs", _sides), (1, 1)
    )
    data_format: str | None = argument(DATA_FORMAT, None)

    def shape(self, *inputs: Shape) -> Shape:
        rows, columns, channels = self.image(inputs)
        (top, bottom), (left, right) = _sides(self.padding)
        return rows + top + bottom, columns + left + right, channels

    def build(self, context: BuildContext, *inputs: "TensorVariable") -> "TensorVariable":
        from tandem.ops import pad2d

        rows, columns = _sides(self.padding)
        return pad2d(inputs[0], (*rows, *columns))
