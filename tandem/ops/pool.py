"""Two-dimensional pooling with overlapping windows: maxima and averages."""

# A make_node names its inputs, in place of the *inputs of PyTensor's Op.
# mypy: disable-error-code=override

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytensor.tensor as pt
from numpy.lib.stride_tricks import sliding_window_view
from pytensor.gradient import DisconnectedType, disconnected_type
from pytensor.graph.basic import Apply
from pytensor.tensor.variable import TensorVariable

from tandem.ops.base import (
    Length,
    Pair,
    TensorOp,
    Values,
    count_windows,
    int_pair,
    same_dtype,
    same_shape,
    tensor_input,
    window_count,
)


class _PoolingOp(TensorOp):
    __props__: tuple[str, ...] = ("size", "stride", "pad", "ceil")

    def __init__(self, size: Pair, stride: Pair, pad: Pair = 0, ceil: bool = False) -> None:
        owner = type(self).__name__
        self.size = int_pair(owner, "size", size)
        self.stride = int_pair(owner, "stride", stride)
        self.pad = int_pair(owner, "pad", pad, least=0)
        if any(2 * pad > size for pad, size in zip(self.pad, self.size, strict=True)):
            raise ValueError(
                f"{owner}: pad must be at most half of size, so that no window lies outside, got"
                f" {pad} and {size}"
            )
        self.ceil = bool(ceil)

    def _output_shape(self, x: TensorVariable) -> tuple[Length, ...]:
        batch, channels, *image = x.type.shape
        rows, columns = (window_count(self, *lengths) for lengths in self._axes(image))
        return batch, channels, rows, columns

    def infer_shape(self, fgraph: Any, node: Apply, shapes: list[tuple]) -> list[tuple]:
        batch, channels, *image = shapes[0]
        rows, columns = (count_windows(*lengths) for lengths in self._axes(image))
        return [(batch, channels, rows, columns)] * len(node.outputs)

    def _axes(self, image: Any) -> Iterator[tuple[Any, ...]]:
        """Length, size, stride, pad and ceil for each axis."""
        for lengths in zip(image, self.size, self.stride, self.pad, strict=True):
            yield (*lengths, self.ceil)

    def _edges(self, shape: tuple[int, ...]) -> list[tuple[int, int]]:
        """Pixels by which windows reach over each side of images of a shape, for `np.pad`."""
        edges = [(0, 0), (0, 0)]
        for length, size, stride, pad, ceil in self._axes(shape[2:]):
            last = (count_windows(length, size, stride, pad, ceil) - 1) * stride + size - pad
            edges.append((pad, max(pad, last - length)))
        return edges

    def _windows(self, padded: np.ndarray) -> np.ndarray:
        """View of padded images as (batch, channel, out row, out column, row, column)."""
        windows = sliding_window_view(padded, self.size, axis=(2, 3))
        return windows[:, :, :: self.stride[0], :: self.stride[1]]


class MaxPool2d(_PoolingOp):
    """Max pooling with the position of each maximum, as `max_pool2d` defines it.

    Outputs are the maxima and, int64 of the same shape, each one's flat index ``row * columns +
    column`` in its input plane: the first maximum in the window's row-major order, or any NaN.
    """

    def make_node(self, x: Any) -> Apply:
        x = tensor_input(self, "x", x, 4)
        shape = self._output_shape(x)
        outputs = [pt.tensor(dtype=dtype, shape=shape) for dtype in (x.type.dtype, "int64")]
        return Apply(self, [x], outputs)

    def perform(self, node: Apply, inputs: Values, output_storage: list[list[Any]]) -> None:
        (x,) = inputs
        edges = self._edges(x.shape)
        windows = self._windows(np.pad(x, edges, constant_values=-np.inf))
        within = self._windows(np.pad(np.ones_like(x, bool), edges))
        flat, is_pixel = (v.reshape(*v.shape[:4], math.prod(self.size)) for v in (windows, within))
        first = flat.argmax(axis=-1)[..., np.newaxis]
        # Where all pixels are -inf, the pad is no smaller.
        first = np.where(
            np.take_along_axis(is_pixel, first, -1), first, is_pixel.argmax(-1)[..., np.newaxis]
        )
        within_row, within_column = np.divmod(first[..., 0], self.size[1])
        top = self.stride[0] * np.arange(windows.shape[2])[:, np.newaxis] - self.pad[0]
        left = self.stride[1] * np.arange(windows.shape[3]) - self.pad[1]
        output_storage[0][0] = np.take_along_axis(flat, first, -1)[..., 0]
        output_storage[1][0] = (top + within_row) * x.shape[3] + left + within_column

    def connection_pattern(self, node: Apply) -> list[list[bool]]:
        return [[True, False]]

    def pullback(self, inputs: Values, outputs: Values, cotangents: Values) -> list[Any]:
        g = cotangents[0]
        if isinstance(g.type, DisconnectedType):
            return [disconnected_type()]
        gradient = MaxPool2dGrad(self.size, self.stride, self.pad, self.ceil)
        return [gradient(inputs[0], outputs[1], g)]


class MaxPool2dGrad(_PoolingOp):
    """Gradient of `MaxPool2d`: each g is added to the pixel that was the maximum.

    ``MaxPool2dGrad(size, stride, pad, ceil)(x, argmax, g)`` is shaped like x, of which only the
    shape is used.
    """

    def make_node(self, x: Any, argmax: Any, g: Any) -> Apply:
        x = tensor_input(self, "x", x, 4)
        argmax = tensor_input(self, "argmax", argmax, 4, ("int64",))
        g = tensor_input(self, "g", g, 4)
        same_dtype(self, x=x, g=g)
        shapes = (argmax.type.shape, g.type.shape, self._output_shape(x))
        same_shape(self, "argmax, of g and of the pooled x", *shapes)
        return Apply(self, [x, argmax, g], [pt.tensor(dtype=x.type.dtype, shape=x.type.shape)])

    def perform(self, node: Apply, inputs: Values, output_storage: list[list[Any]]) -> None:
        x, argmax, g = inputs
        planes = x.shape[0] * x.shape[1]
        gradient = np.zeros((planes, x.shape[2] * x.shape[3]), x.dtype)
        plane = np.arange(planes)[:, np.newaxis]
        pooled = planes, g.shape[2] * g.shape[3]
        # Windows overlap, so a pixel may occur more than once; `+=` would count it only once.
        np.add.at(gradient, (plane, argmax.reshape(pooled)), g.reshape(pooled))
        output_storage[0][0] = gradient.reshape(x.shape)

    def infer_shape(self, fgraph: Any, node: Apply, shapes: list[tuple]) -> list[tuple]:
        return [shapes[0]]

    def connection_pattern(self, node: Apply) -> list[list[bool]]:
        return [[False], [False], [True]]

    def pullback(self, inputs: Values, outputs: Values, cotangents: Values) -> list[Any]:
        _, argmax, _ = inputs
        (v,) = cotangents
        at_maxima = pt.take_along_axis(v.flatten(3), argmax.flatten(3), axis=2)
        return [disconnected_type(), disconnected_type(), at_maxima.reshape(argmax.shape)]


class _AveragingOp(_PoolingOp):
    __props__ = ("size", "stride", "pad", "ceil", "count_pad")

    def __init__(
        self,
        size: Pair,
        stride: Pair,
        pad: Pair = 0,
        ceil: bool = False,
        count_pad: bool = True,
    ) -> None:
        super().__init__(size, stride, pad, ceil)
        self.count_pad = bool(count_pad)

    def _like(self, kind: type["_AveragingOp"]) -> "_AveragingOp":
        """Another Op of this pooling."""
        return kind(self.size, self.stride, self.pad, self.ceil, self.count_pad)

    def _counts(self, shape: tuple[int, ...]) -> np.ndarray:
        """Number of pixels by which each window's sum is divided: (out row, out column)."""
        counts = []
        for length, size, stride, pad, ceil in self._axes(shape[2:]):
            first = stride * np.arange(count_windows(length, size, stride, pad, ceil)) - pad
            border = pad if self.count_pad else 0
            last = np.minimum(first + size, length + border)
            counts.append(last - np.maximum(first, -border))
        return np.multiply.outer(*counts)


class AveragePool2d(_AveragingOp):
    """Average pooling, as `average_pool2d` defines it."""

    def make_node(self, x: Any) -> Apply:
        x = tensor_input(self, "x", x, 4)
        return Apply(self, [x], [pt.tensor(dtype=x.type.dtype, shape=self._output_shape(x))])

    def perform(self, node: Apply, inputs: Values, output_storage: list[list[Any]]) -> None:
        (x,) = inputs
        sums = self._windows(np.pad(x, self._edges(x.shape))).sum(axis=(4, 5))
        output_storage[0][0] = (sums / self._counts(x.shape)).astype(x.dtype)

    def pullback(self, inputs: Values, outputs: Values, cotangents: Values) -> list[Any]:
        return [self._like(AveragePool2dGrad)(inputs[0], cotangents[0])]


class AveragePool2dGrad(_AveragingOp):
    """Gradient of `AveragePool2d`: each g is divided among the pixels of its window.

    ``AveragePool2dGrad(size, stride, pad, ceil, count_pad)(x, g)`` is shaped like x, of which only
    the shape is used.
    """

    def make_node(self, x: Any, g: Any) -> Apply:
        x, g = tensor_input(self, "x", x, 4), tensor_input(self, "g", g, 4)
        same_dtype(self, x=x, g=g)
        same_shape(self, "g and of the pooled x", g.type.shape, self._output_shape(x))
        return Apply(self, [x, g], [pt.tensor(dtype=x.type.dtype, shape=x.type.shape)])

    def perform(self, node: Apply, inputs: Values, output_storage: list[list[Any]]) -> None:
        x, g = inputs
        edges = self._edges(x.shape)
        padded = np.zeros_like(np.pad(x, edges))
        shares = (g / self._counts(x.shape)).astype(g.dtype)
        (down, right), (rows, columns) = self.stride, g.shape[2:]
        for i, j in np.ndindex(self.size):
            below, beside = slice(i, i + down * rows, down), slice(j, j + right * columns, right)
            padded[:, :, below, beside] += shares
        (top, _), (left, _) = edges[2:]
        inside = padded[:, :, top : top + x.shape[2], left : left + x.shape[3]]
        output_storage[0][0] = np.ascontiguousarray(inside)

    def infer_shape(self, fgraph: Any, node: Apply, shapes: list[tuple]) -> list[tuple]:
        return [shapes[0]]

    def connection_pattern(self, node: Apply) -> list[list[bool]]:
        return [[False], [True]]

    def pullback(self, inputs: Values, outputs: Values, cotangents: Values) -> list[Any]:
        return [disconnected_type(), self._like(AveragePool2d)(cotangents[0])]


def max_pool2d(
    x: Any, size: Pair, stride: Pair, pad: Pair = 0, ceil: bool = False
) -> TensorVariable:
    """Take the maximum of each window; windows overlap where `stride` is less than `size`.

    ``y[n, c, p, q] = max over i, j < size of x[n, c, stride p - pad + i, stride q - pad + j]``, of
    the pixels that exist. Krizhevsky, Sutskever, Hinton 2012, section 3.4.

    Parameters
    ----------
    x : float (batch, channel, row, column)
    size, stride, pad : int or (int, int)
        Window's sides, distance between windows, and how far the first begins outside of the image,
        in pixels: of rows and of columns, or of both. `pad` is at most half of `size`.
    ceil : bool
        Whether rows and columns left over at the lower and right edges have windows too, which
        reach over the edge; they are ignored otherwise.

    Returns
    -------
    float (batch, channel, (row + 2 pad - size) // stride + 1, likewise columns)
        With `ceil` the quotient is rounded up, unless the last window would begin behind the image.

    Raises
    ------
    TypeError
        x is not a four-dimensional tensor of float32 or float64.
    ValueError
        The window does not fit into x, whose size is known, or `pad` is too large.
    """
    y, _ = MaxPool2d(size, stride, pad, ceil)(x)
    return y


def average_pool2d(
    x: Any,
    size: Pair,
    stride: Pair,
    pad: Pair = 0,
    ceil: bool = False,
    count_pad: bool = True,
) -> TensorVariable:
    """Take the mean of each window, with the windows of `max_pool2d`.

    Parameters
    ----------
    count_pad : bool
        Whether the mean counts `pad` zeros on every side; else it is the mean of the pixels that
        exist. What `ceil` adds beyond the pad never counts.
    """
    return AveragePool2d(size, stride, pad, ceil, count_pad)(x)
