"""Two-dimensional max pooling with overlapping windows."""

# A make_node names its inputs, in place of the *inputs of PyTensor's Op.
# mypy: disable-error-code=override

from typing import Any

import numpy as np
import pytensor.tensor as pt
from numpy.lib.stride_tricks import sliding_window_view
from pytensor.gradient import DisconnectedType, disconnected_type
from pytensor.graph.basic import Apply
from pytensor.tensor.variable import TensorVariable

from tandem.ops.base import (
    Length,
    TensorOp,
    Values,
    positive_int,
    same_dtype,
    same_shape,
    tensor_input,
    window_count,
)


class _PoolingOp(TensorOp):
    __props__ = ("size", "stride")

    def __init__(self, size: int, stride: int) -> None:
        owner = type(self).__name__
        self.size = positive_int(owner, "size", size)
        self.stride = positive_int(owner, "stride", stride)

    def _output_shape(self, x: TensorVariable) -> tuple[Length, ...]:
        batch, channels, *image = x.type.shape
        rows, columns = (window_count(self, n, self.size, self.stride) for n in image)
        return batch, channels, rows, columns


class MaxPool2d(_PoolingOp):
    """Max pooling with the position of each maximum, as `max_pool2d` defines it.

    Outputs are the maxima and, int64 of the same shape, each one's flat index ``row * columns +
    column`` in its input plane: the first maximum in the window's row-major order.
    """

    def make_node(self, x: Any) -> Apply:
        x = tensor_input(self, "x", x, 4)
        shape = self._output_shape(x)
        outputs = [pt.tensor(dtype=dtype, shape=shape) for dtype in (x.type.dtype, "int64")]
        return Apply(self, [x], outputs)

    def perform(self, node: Apply, inputs: Values, output_storage: list[list[Any]]) -> None:
        (x,) = inputs
        windows = sliding_window_view(x, (self.size, self.size), axis=(2, 3))
        windows = windows[:, :, :: self.stride, :: self.stride]
        flat = windows.reshape(*windows.shape[:4], self.size**2)
        first = flat.argmax(axis=-1)
        within_row, within_column = np.divmod(first, self.size)
        top = self.stride * np.arange(windows.shape[2])[:, np.newaxis]
        left = self.stride * np.arange(windows.shape[3])
        output_storage[0][0] = np.take_along_axis(flat, first[..., np.newaxis], -1)[..., 0]
        output_storage[1][0] = (top + within_row) * x.shape[3] + left + within_column

    def infer_shape(self, fgraph: Any, node: Apply, shapes: list[tuple]) -> list[tuple]:
        batch, channels, *image = shapes[0]
        rows, columns = ((length - self.size) // self.stride + 1 for length in image)
        return [(batch, channels, rows, columns)] * 2

    def connection_pattern(self, node: Apply) -> list[list[bool]]:
        return [[True, False]]

    def pullback(self, inputs: Values, outputs: Values, cotangents: Values) -> list[Any]:
        g = cotangents[0]
        if isinstance(g.type, DisconnectedType):
            return [disconnected_type()]
        return [MaxPool2dGrad(self.size, self.stride)(inputs[0], outputs[1], g)]


class MaxPool2dGrad(_PoolingOp):
    """Gradient of `MaxPool2d`: each g is added to the pixel that was the maximum.

    ``MaxPool2dGrad(size, stride)(x, argmax, g)`` is shaped like x, of which only the shape is used.
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


def max_pool2d(x: Any, size: int, stride: int) -> TensorVariable:
    """Take the maximum of each window; windows overlap where `stride` is less than `size`.

    ``y[n, c, p, q] = max over i, j < size of x[n, c, stride p + i, stride q + j]``. No padding;
    rows and columns left over at the lower and right edges are ignored. Krizhevsky, Sutskever,
    Hinton 2012, section 3.4.

    Parameters
    ----------
    x : float (batch, channel, row, column)
    size, stride : int
        Window's side and distance between windows, in pixels.

    Returns
    -------
    float (batch, channel, (row - size) // stride + 1, (column - size) // stride + 1)

    Raises
    ------
    TypeError
        x is not a four-dimensional tensor of float32 or float64.
    ValueError
        The window does not fit into x, whose size is known.
    """
    y, _ = MaxPool2d(size, stride)(x)
    return y
