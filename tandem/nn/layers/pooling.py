"""Pooling of images: maxima and averages."""

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tandem.nn.arguments import (
    DATA_FORMAT,
    FLAG,
    PADDING,
    PAIR,
    Pair,
    Sizes,
    argument,
    optional,
    pair,
)
from tandem.nn.layers.base import BuildContext, Layer, Shape
from tandem.nn.layers.windows import same_padding, window_counts

if TYPE_CHECKING:
    from pytensor.tensor.variable import TensorVariable


@dataclass(frozen=True, eq=False)
class _Pooling(Layer):
    """Base of maxima and averages: windows."""

    pool_size: Sizes = argument(PAIR, (2, 2))
    strides: Sizes | None = argument(optional(PAIR), None)
    padding: str = argument(PADDING, "valid")
    data_format: str | None = argument(DATA_FORMAT, None)

    @property
    def _strides(self) -> Pair:
        return pair(self.strides or self.pool_size)

    def shape(self, *inputs: Shape) -> Shape:
        image = self.image(inputs)
        return (
            *window_counts(self, image, pair(self.pool_size), self._strides, self.padding),
            image[2],
        )

    def build(self, context: BuildContext, *inputs: "TensorVariable") -> "TensorVariable":
        (x,) = inputs
        if self.padding == "valid":
            return self._pool(x, pair(self.pool_size), (0, 0), False)
        # An Op pads both ends alike. Windows that lack a pixel at the end are there by `ceil`; at
        # stride 1, where none is left over, the image is padded more and loses its first window.
        sizes, pads, firsts = [], [], []
        lengths = zip(x.type.shape[2:], pair(self.pool_size), self._strides, strict=True)
        for length, size, stride in lengths:
            before, behind = same_padding(length, size, stride)
            if length < size and length <= stride:  # the only window has the whole axis
                size, before, behind = length, 0, 0
            sizes.append(size)
            pads.append(behind if stride == 1 else before)
            firsts.append(behind - before if stride == 1 else 0)
        y = self._pool(x, (sizes[0], sizes[1]), (pads[0], pads[1]), True)
        return y[:, :, firsts[0] :, firsts[1] :] if any(firsts) else y

    @abstractmethod
    def _pool(self, x: "TensorVariable", size: Pair, pad: Pair, ceil: bool) -> "TensorVariable":
        """Pool images that are padded at both ends of an axis."""

    def flops(self, *inputs: Shape) -> int:
        return math.prod(self.shape(*inputs)) * math.prod(pair(self.pool_size))


@dataclass(frozen=True, eq=False)
class MaxPooling2D(_Pooling):
    """The maximum of each window.

    Parameters
    ----------
    pool_size : int or (int, int)
        Rows and columns of a window, pixels.
    strides : int or (int, int), optional
        Distance between windows; by default their size.
    padding : {"valid", "same"}
        Whole windows alone, or ``ceil(row / stride)`` rows of windows, which may reach over edges.
    data_format : {"channels_last"}, optional
    """

    def _pool(self, x: "TensorVariable", size: Pair, pad: Pair, ceil: bool) -> "TensorVariable":
        from tandem.ops import max_pool2d

        return max_pool2d(x, size, self._strides, pad, ceil)


@dataclass(frozen=True, eq=False)
class AveragePooling2D(_Pooling):
    """The mean of the pixels in each window that are in the image.

    Parameters are those of `MaxPooling2D`.
    """

    def _pool(self, x: "TensorVariable", size: Pair, pad: Pair, ceil: bool) -> "TensorVariable":
        from tandem.ops import average_pool2d

        return average_pool2d(x, size, self._strides, pad, ceil, count_pad=False)


@dataclass(frozen=True, eq=False)
class GlobalAveragePooling2D(Layer):
    """The mean of all pixels of each channel: (channel,), or with `keepdims` (1, 1, channel)."""

    data_format: str | None = argument(DATA_FORMAT, None)
    keepdims: bool = argument(FLAG, False)

    def shape(self, *inputs: Shape) -> Shape:
        channels = self.image(inputs)[2]
        return (1, 1, channels) if self.keepdims else (channels,)

    def build(self, context: BuildContext, *inputs: "TensorVariable") -> "TensorVariable":
        from tandem.layers.layers import global_average_pool

        y = global_average_pool(inputs[0])
        return y.dimshuffle(0, 1, "x", "x") if self.keepdims else y

    def flops(self, *inputs: Shape) -> int:
        return math.prod(inputs[0])
