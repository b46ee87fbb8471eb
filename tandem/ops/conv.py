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
    Pair,
    TensorOp,
    Values,
    count_windows,
    int_pair,
    positive_int,
    same_dtype,
    same_length,
    same_shape,
    tensor_input,
    window_count,
)


class _ConvolutionOp(TensorOp):
    """Base of the convolution and its two gradients."""

    __props__ = ("stride", "pad", "groups", "dilation")

    def __init__(
        self, stride: Pair = 1, pad: Pair = 0, groups: int = 1, dilation: Pair = 1
    ) -> None:
        owner = type(self).__name__
        self.stride = int_pair(owner, "stride", stride)
        self.pad = int_pair(owner, "pad", pad, least=0)
        self.groups = positive_int(owner, "groups", groups)
        self.dilation = int_pair(owner, "dilation", dilation)

    def _like(self, kind: type["_ConvolutionOp"]) -> "_ConvolutionOp":
        """Another Op of this convolution."""
        return kind(self.stride, self.pad, self.groups, self.dilation)

    def _output_shape(self, x: TensorVariable, w: TensorVariable) -> tuple[Length, ...]:
        """Return the static shape of the convolution of x with w, or raise ValueError."""
        batch, channels, *image = x.type.shape
        filters, group_channels, *window = w.type.shape
        if group_channels is not None:
            group_channels *= self.groups
        same_length(self, "channels of x and groups * axis 1 of w", channels, group_channels)
        if filters is not None and filters % self.groups:
            raise ValueError(
                f"{self}: the filters must divide into {self.groups} groups, got {filters}"
            )
        reach = (None if n is None else self._reach(n, axis) for axis, n in enumerate(window))
        rows, columns = (
            window_count(self, *lengths)
            for lengths in zip(image, reach, self.stride, self.pad, strict=True)
        )
        return batch, filters, rows, columns

    def _reach(self, taps: Any, axis: int) -> Any:
        """Number of pixels from the first to the last tap of a filter, both counted."""
        return self.dilation[axis] * (taps - 1) + 1

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
        reach = tuple(self._reach(taps, axis) for axis, taps in enumerate(window))
        windows = sliding_window_view(self._padded(x), reach, axis=(2, 3))
        (down, right), (below, beside) = self.stride, self.dilation
        return windows[:, :, ::down, ::right, ::below, ::beside]

    def _positions(self, tap: int, count: int, axis: int) -> slice:
        """The padded rows, or columns, that a tap of the filter meets."""
        first, stride = tap * self.dilation[axis], self.stride[axis]
        return slice(first, first + stride * count, stride)

    def _padded(self, x: np.ndarray) -> np.ndarray:
        return np.pad(x, ((0, 0), (0, 0), *((pad, pad) for pad in self.pad)))

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
        reach = (self._reach(taps, axis) for axis, taps in enumerate(window))
        rows, columns = (
            count_windows(*lengths)
            for lengths in zip(image, reach, self.stride, self.pad, strict=True)
        )
        return [(batch, filters, rows, columns)]

    def pullback(self, inputs: Values, outputs: Values, cotangents: Values) -> list[Any]:
        x, w, _ = inputs
        (g,) = cotangents
        return [
            self._like(Conv2dInputGrad)(x, w, g),
            self._like(Conv2dWeightGrad)(x, w, g),
            g.sum(axis=(0, 2, 3)),
        ]


class Conv2dInputGrad(_ConvolutionOp):
    """Gradient of a convolution with respect to its images.

    ``Conv2dInputGrad(stride, pad, groups, dilation)(x, w, g)``, with g the gradient with respect to
    the convolution's output, is shaped like x, of which only the shape is used. It is an Op of its
    own, so that the first layer's, which nothing uses, is never computed.
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
                below = self._positions(i, rows, 0)
                right = self._positions(j, columns, 1)
                padded_part[:, :, below, right] += np.einsum(
                    "boyx,oc->bcyx", g_part, filters[:, :, i, j], optimize=True
                )
        height, width = x.shape[2:]
        top, left = self.pad
        inside = padded[:, :, top : top + height, left : left + width]
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
            self._like(Conv2dWeightGrad)(v, w, g),
            self._like(Conv2d)(v, w, _no_bias(w)),
        ]


class Conv2dWeightGrad(_ConvolutionOp):
    """Gradient of a convolution with respect to its filters.

    ``Conv2dWeightGrad(stride, pad, groups, dilation)(x, w, g)``, with g the gradient with respect
    to the convolution's output, is shaped like w, of which only the shape is used.
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
            self._like(Conv2dInputGrad)(x, v, g),
            disconnected_type(),
            self._like(Conv2d)(x, v, _no_bias(v)),
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
    """A bias of zeros: a constant, which no kernel adds, if the number of filters is known."""
    filters = w.type.shape[0]
    if filters is None:
        return pt.zeros((w.shape[0],), dtype=w.type.dtype)
    return pt.constant(np.zeros(filters, w.type.dtype))


def conv2d(
    x: Any,
    w: Any,
    b: Any = None,
    stride: Pair = 1,
    pad: Pair = 0,
    groups: int = 1,
    dilation: Pair = 1,
) -> TensorVariable:
    """Correlate images with filters and add a bias.

    ``y[n, o, p, q] = b[o] + sum over c, i, j of x'[n, c0 + c, stride p + dilation i, stride q +
    dilation j] w[o, c, i, j]``, where x' is x with `pad` zeros on every side and c0 the first
    channel of the group of filter o. The filters are not flipped. Krizhevsky, Sutskever, Hinton
    2012, "ImageNet classification with deep convolutional neural networks", section 3.5, for the
    groups; with a group to each channel it is a depthwise convolution.

    Parameters
    ----------
    x : float (batch, channel, row, column)
    w : float (filter, channel of its group, row, column)
        Filters of group k, the k-th of `groups` parts, take the k-th part of the channels.
    b : float (filter,), optional
    stride, pad, dilation : int or (int, int)
        Distance between windows, zeros added on both sides, and distance between the taps of a
        filter, in pixels: of rows and of columns, or of both.

    Returns
    -------
    float (batch, filter, (row + 2 pad - dilation (filter row - 1) - 1) // stride + 1, likewise
    columns)

    Raises
    ------
    TypeError
        An input has another number of axes, or the dtypes differ or are not float32 or float64.
    ValueError
        Known shapes do not fit each other.
    """
    op = Conv2d(stride, pad, groups, dilation)
    if b is None:
        w = tensor_input(op, "w", w, 4)
        b = _no_bias(w)
    return op(x, w, b)


TILE = 6
"""Rows and columns of the tiles of Winograd's convolutions."""

# Times in multiplications of two numbers, fitted with AVX2 to layers of AlexNet, VGG and ResNets,
# and taken with AVX-512 too.
_TO_MULTIPLY = 1.15
_TO_MOVE = 40, 10  # to transform a number of a tile of a channel, and of a result
_TO_TRANSFORM_FILTER = 90, 45  # for each number that it then has, and of its gradient
_PICTURES = 32  # if a graph does not say how many


def winograd_pays(node: Apply, kept: bool = False) -> bool:
    """Return whether Winograd's products take less time than those of each pixel with each tap.

    These are of filters of 3 x 3 or 5 x 5 with stride 1, a convolution's or a gradient's. Fewer
    multiplications must make up for the transforms, for which it takes enough channels and tiles.
    Those of filters may be `kept` from one call to the next.
    """
    op: Any = node.op
    x, w = node.inputs[:2]
    y = node.outputs[0] if isinstance(op, Conv2d) else node.inputs[2]
    (batch, *picture), shape, result = x.type.shape, w.type.shape, y.type.shape[1:]
    plain = op.stride == op.dilation == (1, 1)
    known = None not in (*picture, *shape, *result)
    if not (plain and known and x.type.dtype == "float32"):
        return False
    (_, *image), (filters, channels, side, columns), (_, height, width) = picture, shape, result
    batch = _PICTURES if batch is None else batch
    if side != columns or side not in {3, 5}:
        return False
    direct = side**2 * height * width * batch * channels * filters
    if isinstance(op, Conv2dInputGrad):  # a convolution of g that must not crop it
        if max(op.pad) >= side:
            return False
        height, width = image
    m = TILE + 1 - side
    tiles, filters = batch * -(-height // m) * -(-width // m), filters // op.groups
    between = (filters, channels) if isinstance(op, Conv2dInputGrad) else (channels, filters)
    moved = sum(count * each for count, each in zip(between, _TO_MOVE, strict=True))
    each = _TO_TRANSFORM_FILTER[isinstance(op, Conv2dWeightGrad)]
    transformed = 0 if kept else each
    pairs = channels * filters * (tiles * _TO_MULTIPLY + transformed)
    return op.groups * TILE**2 * (pairs + tiles * moved) < direct
