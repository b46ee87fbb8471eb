"""The rectified linear unit."""

# A make_node names its inputs, in place of the *inputs of PyTensor's Op.
# mypy: disable-error-code=override

from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Apply
from pytensor.tensor.variable import TensorVariable

from tandem.ops.base import SameShapeOp, Values, same_dtype, same_shape, tensor_input


class Relu(SameShapeOp):
    """Rectified linear unit, as `relu` defines it."""

    __props__ = ()

    def make_node(self, x: Any) -> Apply:
        x = tensor_input(self, "x", x, None)
        return Apply(self, [x], [pt.tensor(dtype=x.type.dtype, shape=x.type.shape)])

    def perform(self, node: Apply, inputs: Values, output_storage: list[list[Any]]) -> None:
        (x,) = inputs
        output_storage[0][0] = np.asarray(np.maximum(x, 0))

    def pullback(self, inputs: Values, outputs: Values, cotangents: Values) -> list[Any]:
        return [ReluGrad()(outputs[0], cotangents[0])]


class ReluGrad(SameShapeOp):
    """Gradient of `Relu` from its output: ``ReluGrad()(y, g)`` is g where y > 0 and 0 where y == 0.

    It takes the output instead of the input, which need not be kept. Where y is NaN, g passes, so
    that a diverged network does not look converged.
    """

    __props__ = ()

    def make_node(self, y: Any, g: Any) -> Apply:
        y = tensor_input(self, "y", y, None)
        g = tensor_input(self, "g", g, y.type.ndim)
        dtype = same_dtype(self, y=y, g=g)
        shape = same_shape(self, "y and g", y.type.shape, g.type.shape)
        return Apply(self, [y, g], [pt.tensor(dtype=dtype, shape=shape)])

    def perform(self, node: Apply, inputs: Values, output_storage: list[list[Any]]) -> None:
        y, g = inputs
        output_storage[0][0] = np.where(y <= 0, np.zeros((), g.dtype), g)

    def pullback(self, inputs: Values, outputs: Values, cotangents: Values) -> list[Any]:
        y, _ = inputs
        return [pt.zeros_like(y), ReluGrad()(y, cotangents[0])]


def relu(x: Any) -> TensorVariable:
    """Compute ``max(x, 0)``, NaN where x is NaN, of a float tensor of any shape.

    Krizhevsky, Sutskever, Hinton 2012, section 3.1.

    Raises
    ------
    TypeError
        x is not a tensor of float32 or float64.
    """
    return Relu()(x)
