"""Two-dimensional convolution, in the sense of cross-correlation."""

# A make_node names its inputs, in place of the *inputs of PyTensor's Op.
# mypy: disable-error-code=override

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytensor.tensor as pt
from numpy.lib.stride_tricks import sliding_window_view
from pytensor.gradient import disconnected_type
from pytensor.graph.basic import Apply
from pytensor.tensor.variable import TensorVariable

from tandem.ops.base import (
    Length,
    TensorOp,
    Values,
    positive_int,
    same_dtype,
    same_length,
    same_shape,
    tensor_input,
    window_count,
)


class _ConvolutionOp(TensorOp):
    """Base of the convolution and its two gradients."""

    __props__ = ("stride", "pad", "groups")

    def __init__(self, stride: int = 1, pad: int = 0, groups: int = 1) -> None:
        owner = type(self).__name__
        self.stride = positive_int(owner, "stride", stride)
        self.pad = positive_int(owner, "pad", pad, least=0)
        self.groups = positive_int(owner, "groups", groups)

    def _output_shape(self, x: TensorVariable, w: TensorVariable) -> tuple[Length, ...]:
        """Return the static shape of the convolution of x with w, or raise ValueError."""
        batch, channels, rows, columns = x.type.shape
        filters, group_channels, filter_rows, filter_columns = w.type.shape
        if group_channels is not None:
            group_channels *= self.groups
        same_length(self, "channels of x and groups * axis 1 of w", channels, group_channels)
        if filters is not None and filters % self.groups:
            raise ValueError(
                f"{self}: the filters must divide into {self.groups} groups, got {filters}"
            )
        return (
            batch,
            filters,
            window_count(self, rows, filter_rows, self.stride, self.pad),
            window_count(self, columns, filter_columns, self.stride, self.pad),
        )

    def _gradient_inputs(
        self, x: Any, w: Any, g: Any
    ) -> tuple[TensorVariable, TensorVariable, TensorVariable]:
        """Check the inputs of a gradient Op: g must be shaped like the convolution's output."""
        x = tensor_input(self, "x", x, 4)
        w = tensor_input(self, "w", w, 4)
        g = tensor_input(self, "g", g, 4)
        same_dtype(self, x=x, w=w, g=g)
        same_shape(
            self, "g and of the convolution of x with w", g.type.shape, self._output_shape(x, w)
        )
        return x, w, g

    def _windows(self, x: np.ndarray, window: tuple[int, int]) -> np.ndarray:
        """View of the padded x as (batch, channel, out row, out column, row, column)."""
        windows = sliding_window_view(self._padded(x), window, axis=(2, 3))
        return windows[:, :, :: self.stride, :: self.stride]

    def _padded(self, x: np.ndarray) -> np.ndarray:
        edge = (self.pad, self.pad)
        return np.pad(x, ((0, 0), (0, 0), edge, edge))

    def _by_group(self, *arrays_and_axes: tuple[np.ndarray, int]) -> Iterator[tuple[Any, ...]]:
        """Each group's part of every array, split along its axis."""
        parts = (np.split(array, self.groups, axis) for array, axis in arrays_and_axes)
        return zip(*parts, strict=True)


class Conv2d(_ConvolutionOp):
    """Convolution with bias, as `conv2d` defines it."""

    def make_node(self, x: Any, w: Any, b: Any) -> Apply:
        x = tensor_input(self, "x", x, 4)
        w = tensor_input(self, "w", w, 4)
        b = tensor_input(self, "b", b, 1)
        dtype = same_dtype(self, x=x, w=w, b=b)
        batch, filters, rows, columns = self._output_shape(x, w)
        filters = same_length(self, "filters of w and length of b", filters, *b.type.shape)
        return Apply(
            self, [x, w, b], [pt.tensor(dtype=dtype, shape=(batch, filters, rows, columns))]
        )

    def perform(self, node: Apply, inputs: Values, output_storage: list[list[Any]]) -> None:
        x, w, b = inputs
        if b.shape != w.shape[:1]:
            raise ValueError(f"{self}: w has {w.shape[0]} filters, b has {b.shape[0]}")
        y = [
            np.einsum("bcyxij,ocij->boyx", windows, filters, optimize=True)
            for windows, filters in self._by_group((self._windows(x, w.shape[2:]), 1), (w, 0))
        ]
        output_storage[0][0] = np.concatenate(y, axis=1) + b[:, np.newaxis, np.newaxis]

    def infer_shape(self, fgraph: Any, node: Apply, shapes: list[tuple]) -> list[tuple]:
        (batch, _, *image), (filters, _, *window), _ = shapes
        rows, columns = (
            (length + 2 * self.pad - part) // self.stride + 1
            for length, part in zip(image, window, strict=True)
        )
        return [(batch, filters, rows, columns)]

    def pullback(self, inputs: Values, outputs: Values, cotangents: Values) -> list[Any]:
        x, w, _ = inputs
        (g,) = cotangents
        return [
            Conv2dInputGrad(self.stride, self.pad, self.groups)(x, w, g),
            Conv2dWeightGrad(self.stride, self.pad, self.groups)(x, w, g),
            g.sum(axis=(0, 2, 3)),
        ]


class Conv2dInputGrad(_ConvolutionOp):
    """Gradient of a convolution with respect to its images.

    ``Conv2dInputGrad(stride, pad, groups)(x, w, g)``, with g the gradient with respect to the
    convolution's output, is shaped like x, of which only the shape is used. It is an Op of its own,
    so that the first layer's, which nothing uses, is never computed.
    """

    def make_node(self, x: Any, w: Any, g: Any) -> Apply:
        x, w, g = self._gradient_inputs(x, w, g)
        return Apply(self, [x, w, g], [pt.tensor(dtype=x.type.dtype, shape=x.type.shape)])

    def perform(self, node: Apply, inputs: Values, output_storage: list[list[Any]]) -> None:
        x, w, g = inputs
        padded = np.zeros_like(self._padded(x))
        rows, columns = g.shape[2:]
        groups = self._by_group((padded, 1), (w, 0), (g, 1))
        for padded_part, filters, g_part in groups:
            for i, j in np.ndindex(*w.shape[2:]):
                below = slice(i, i + self.stride * rows, self.stride)
                right = slice(j, j + self.stride * columns, self.stride)
                padded_part[:, :, below, right] += np.einsum(
                    "boyx,oc->bcyx", g_part, filters[:, :, i, j], optimize=True
                )
        height, width = x.shape[2:]
        inside = padded[:, :, self.pad : self.pad + height, self.pad : self.pad + width]
        output_storage[0][0] = np.ascontiguousarray(inside)

    def infer_shape(self, fgraph: Any, node: Apply, shapes: list[tuple]) -> list[tuple]:
        return [shapes[0]]

    def connection_pattern(self, node: Apply) -> list[list[bool]]:
        return [[False], [True], [True]]

    def pullback(self, inputs: Values, outputs: Values, cotangents: Values) -> list[Any]:
        _, w, g = inputs
        (v,) = cotangents
        return [
            disconnected_type(),
            Conv2dWeightGrad(self.stride, self.pad, self.groups)(v, w, g),
            Conv2d(self.stride, self.pad, self.groups)(v, w, _no_bias(w)),
        ]


class Conv2dWeightGrad(_ConvolutionOp):
    """Gradient of a convolution with respect to its filters.

    ``Conv2dWeightGrad(stride, pad, groups)(x, w, g)``, with g the gradient with respect to the
    convolution's output, is shaped like w, of which only the shape is used.
    """

    def make_node(self, x: Any, w: Any, g: Any) -> Apply:
        x, w, g = self._gradient_inputs(x, w, g)
        return Apply(self, [x, w, g], [pt.tensor(dtype=w.type.dtype, shape=w.type.shape)])

    def perform(self, node: Apply, inputs: Values, output_storage: list[list[Any]]) -> None:
        x, w, g = inputs
        gradient = [
            np.einsum("bcyxij,boyx->ocij", windows, g_part, optimize=True)
            for windows, g_part in self._by_group((self._windows(x, w.shape[2:]), 1), (g, 1))
        ]
        output_storage[0][0] = np.concatenate(gradient, axis=0)

    def infer_shape(self, fgraph: Any, node: Apply, shapes: list[tuple]) -> list[tuple]:
        return [shapes[1]]

    def connection_pattern(self, node: Apply) -> list[list[bool]]:
        return [[True], [False], [True]]

    def pullback(self, inputs: Values, outputs: Values, cotangents: Values) -> list[Any]:
        x, _, g = inputs
        (v,) = cotangents
        return [
            Conv2dInputGrad(self.stride, self.pad, self.groups)(x, v, g),
            disconnected_type(),
            Conv2d(self.stride, self.pad, self.groups)(x, v, _no_bias(v)),
        ]


class Conv2dBiasGrad(TensorOp):
    """Gradient of a convolution with respect to its bias.

    It is the sum of g over batch and pixels. Like the other two gradients it takes g as a factor,
    so that they share one rounded copy. The gradient of `Conv2d` is an ordinary sum, which a
    rewrite of graphs for GPUs replaces by this.
    """

    __props__ = ()

    def make_node(self, g: Any) -> Apply:
        g = tensor_input(self, "g", g, 4)
        return Apply(self, [g], [pt.tensor(dtype=g.type.dtype, shape=g.type.shape[1:2])])

    def perform(self, node: Apply, inputs: Values, output_storage: list[list[Any]]) -> None:
        output_storage[0][0] = inputs[0].sum(axis=(0, 2, 3))


def _no_bias(w: TensorVariable) -> TensorVariable:
    return pt.zeros((w.shape[0],), dtype=w.type.dtype)


def conv2d(
    x: Any, w: Any, b: Any, stride: int = 1, pad: int = 0, groups: int = 1
) -> TensorVariable:
    """Correlate images with filters and add a bias.

    ``y[n, o, p, q] = b[o] + sum over c, i, j of x'[n, c0 + c, stride p + i, stride q + j]
    w[o, c, i, j]``, where x' is x with `pad` zeros on every side and c0 the first channel of the
    group of filter o. The filters are not flipped. Krizhevsky, Sutskever, Hinton 2012, "ImageNet
    classification with deep convolutional neural networks", section 3.5, for the groups.

    Parameters
    ----------
    x : float (batch, channel, row, column)
    w : float (filter, channel of its group, row, column)
        Filters of group k, the k-th of `groups` parts, take the k-th part of the channels.
    b : float (filter,)
    stride, pad : int
        Distance between windows, and zeros added on each of the four sides, in pixels.

    Returns
    -------
    float (batch, filter, (row + 2 pad - filter row) // stride + 1, likewise columns)

    Raises
    ------
    TypeError
        An input has another number of axes, or the dtypes differ or are not float32 or float64.
    ValueError
        Known shapes do not fit each other.
    """
    return Conv2d(stride, pad, groups)(x, w, b)
