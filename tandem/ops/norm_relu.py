"""Batch normalisation and ReLU as one Op, for loops that do both.

No network is written with it: a rewrite of graphs for CPUs puts it in their place.
"""

# A make_node names its inputs, in place of the *inputs of PyTensor's Op.
# mypy: disable-error-code=override

from typing import Any

import numpy as np
from pytensor.graph.basic import Apply

from tandem.ops.base import TensorOp, Values, positive_int, same_shape, tensor_input
from tandem.ops.batch_norm import BatchNorm, BatchNormGrad


class NormRelu(TensorOp):
    """ReLU of a batch normalisation, or with `adds` of its sum with other images.

    ``NormRelu(rows, epsilon, adds)(x, scale, shift)``, with `adds` and the other images as a fourth
    input, and with `valid` as the last where it is given, has the outputs of `BatchNorm`.
    """

    __props__ = ("rows", "epsilon", "adds")

    def __init__(self, rows: int, epsilon: float, adds: bool = False) -> None:
        self.norm = BatchNorm(rows, epsilon)
        self.rows, self.epsilon, self.adds = self.norm.rows, self.norm.epsilon, adds

    def make_node(self, x: Any, scale: Any, shift: Any, *more: Any) -> Apply:
        others, valid = more[: self.adds], more[self.adds :]
        node = self.norm.make_node(x, scale, shift, *valid)
        kind = node.inputs[0].type
        others = tuple(
            tensor_input(self, "other", other, kind.ndim, (kind.dtype,)) for other in others
        )
        for other in others:
            same_shape(self, "x and other", kind.shape, other.type.shape)
        inputs = [*node.inputs[:3], *others, *node.inputs[3:]]
        return Apply(self, inputs, [output.type() for output in node.outputs])

    def perform(self, node: Apply, inputs: Values, output_storage: list[list[Any]]) -> None:
        last = 3 + self.adds
        self.norm.perform(node, [*inputs[:3], *inputs[last:]], output_storage)
        y = output_storage[0][0]
        output_storage[0][0] = np.maximum(y + inputs[3] if self.adds else y, 0)

    def infer_shape(self, fgraph: Any, node: Apply, shapes: list[tuple]) -> list[tuple]:
        return self.norm.infer_shape(fgraph, node, shapes)


class NormReluGrad(TensorOp):
    """Gradient of `NormRelu` without other images.

    ``NormReluGrad(rows)(x, scale, shift, g, means, inverses)``, or with `valid` as another input,
    has the outputs of `BatchNormGrad`. Where y is above 0 is computed again: that takes less than
    reading it.
    """

    __props__ = ("rows",)

    def __init__(self, rows: int) -> None:
        self.rows = positive_int("NormReluGrad", "rows", rows)

    def make_node(self, x: Any, scale: Any, shift: Any, *more: Any) -> Apply:
        node = BatchNormGrad(self.rows).make_node(x, scale, *more)
        shift = tensor_input(self, "shift", shift, 1, (node.inputs[1].type.dtype,))
        inputs = [*node.inputs[:2], shift, *node.inputs[2:]]
        return Apply(self, inputs, [output.type() for output in node.outputs])

    def perform(self, node: Apply, inputs: Values, output_storage: list[list[Any]]) -> None:
        x, scale, shift, g, means, inverses, *valid = inputs
        y = np.empty_like(x)
        for group in range(len(means)):
            rows = slice(group * self.rows, (group + 1) * self.rows)
            across = (-1, *[1] * (x.ndim - 2))
            factor = (inverses[group] * scale).reshape(across)
            y[rows] = (x[rows] - means[group].reshape(across)) * factor + shift.reshape(across)
        g = np.where(y <= 0, np.zeros((), g.dtype), g)
        gradient = BatchNormGrad(self.rows)
        gradient.perform(node, [x, scale, g, means, inverses, *valid], output_storage)

    def infer_shape(self, fgraph: Any, node: Apply, shapes: list[tuple]) -> list[tuple]:
        return [shapes[0], shapes[1], shapes[1]]
