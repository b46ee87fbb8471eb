"""Max pooling, ReLU and local response normalisation as one Op, for a kernel that does all three.

No network is written with it: a rewrite of graphs for GPUs puts it in their place.
"""

# A make_node names its inputs, in place of the *inputs of PyTensor's Op.
# mypy: disable-error-code=override

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Apply

from tandem.ops.base import TensorOp, Values, positive_int, tensor_input
from tandem.ops.lrn import LRN, LRNGrad
from tandem.ops.pool import MaxPool2d, MaxPool2dGrad
from tandem.ops.relu import Relu, ReluGrad

Norm = tuple[int, float, float, float]
"""Size, alpha, beta and k of `tandem.ops.lrn`."""


class PoolNorm(TensorOp):
    """Max pooling of ``x + b``, ReLU and, with `norm`, `lrn`.

    ``PoolNorm(size, stride, norm)(x, b)``, of images x and a bias b of each channel, is the list of
    y, the pooled and rectified images, places and, with `norm`, z, the normalised y. A place, int8,
    is the first maximum's position in its window, in row-major order.
    """

    __props__ = ("size", "stride", "norm")

    def __init__(self, size: int, stride: int, norm: Norm | None = None) -> None:
        self.size = positive_int("PoolNorm", "size", size)
        self.stride = positive_int("PoolNorm", "stride", stride)
        self.norm = norm

    def make_node(self, x: Any, b: Any) -> Apply:
        x, b = tensor_input(self, "x", x, 4), tensor_input(self, "b", b, 1)
        y = MaxPool2d(self.size, self.stride).make_node(x).outputs[0]
        dtypes = [x.type.dtype, "int8", x.type.dtype][: 3 if self.norm else 2]
        return Apply(self, [x, b], [pt.tensor(dtype=d, shape=y.type.shape) for d in dtypes])

    def perform(self, node: Apply, inputs: Values, output_storage: list[list[Any]]) -> None:
        x, b = inputs
        pooled, argmax = _compute(MaxPool2d(self.size, self.stride), x + b[:, None, None])
        (y,) = _compute(Relu(), pooled)
        row, column = np.divmod(argmax, x.shape[3])
        row -= self.stride * np.arange(y.shape[2])[:, None]
        column -= self.stride * np.arange(y.shape[3])
        results = [y, (self.size * row + column).astype(np.int8)]
        if self.norm:
            results.append(_compute(LRN(*self.norm), y)[0])
        for storage, result in zip(output_storage, results, strict=True):
            storage[0] = result

    def infer_shape(self, fgraph: Any, node: Apply, shapes: list[tuple]) -> list[tuple]:
        pooled = MaxPool2d(self.size, self.stride).infer_shape(fgraph, node, shapes)[0]
        return [pooled] * len(node.outputs)


class PoolNormGrad(TensorOp):
    """Gradient of `PoolNorm` with respect to the images and the biases.

    ``PoolNormGrad(size, stride, norm, image)(y, places, g)``, with g the gradient with respect to
    z, or to y without `norm`, and `image` the rows and columns of x, is the list of both.
    """

    __props__ = ("size", "stride", "norm", "image")

    def __init__(self, size: int, stride: int, norm: Norm | None, image: Sequence[int]) -> None:
        self.size = positive_int("PoolNormGrad", "size", size)
        self.stride = positive_int("PoolNormGrad", "stride", stride)
        self.norm, self.image = norm, tuple(image)

    def make_node(self, y: Any, places: Any, g: Any) -> Apply:
        y, g = tensor_input(self, "y", y, 4), tensor_input(self, "g", g, 4)
        places = tensor_input(self, "places", places, 4, ("int8",))
        batch, channels = y.type.shape[:2]
        shapes = [(batch, channels, *self.image), (channels,)]
        outputs = [pt.tensor(dtype=y.type.dtype, shape=shape) for shape in shapes]
        return Apply(self, [y, places, g], outputs)

    def perform(self, node: Apply, inputs: Values, output_storage: list[list[Any]]) -> None:
        y, places, g = inputs
        if self.norm:
            _, scale = _compute(LRN(*self.norm), y)
            (g,) = _compute(LRNGrad(*self.norm), y, scale, g)
        (g,) = _compute(ReluGrad(), y, g)
        row, column = np.divmod(places.astype(np.int64), self.size)
        row += self.stride * np.arange(y.shape[2])[:, None]
        column += self.stride * np.arange(y.shape[3])
        x = np.empty((*y.shape[:2], *self.image), y.dtype)
        pooling = MaxPool2dGrad(self.size, self.stride)
        (dx,) = _compute(pooling, x, row * self.image[1] + column, g)
        output_storage[0][0], output_storage[1][0] = dx, g.sum(axis=(0, 2, 3))

    def infer_shape(self, fgraph: Any, node: Apply, shapes: list[tuple]) -> list[tuple]:
        (batch, channels, *_), *_ = shapes
        return [
            (batch, channels, *(pt.constant(n, dtype="int64") for n in self.image)),
            (channels,),
        ]


def _compute(op: TensorOp, *arrays: np.ndarray) -> list[np.ndarray]:
    """Compute an Op on arrays by its `perform`."""
    node = op.make_node(*(pt.as_tensor_variable(array) for array in arrays))
    cells: list[list[Any]] = [[None] for _ in node.outputs]
    op.perform(node, arrays, cells)
    return [cell[0] for cell in cells]
