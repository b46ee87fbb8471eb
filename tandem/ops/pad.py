"""Borders of zeros around images."""

# A make_node names its inputs, in place of the *inputs of PyTensor's Op.
# mypy: disable-error-code=override

from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Apply
from pytensor.tensor.variable import TensorVariable

from tandem.ops.base import TensorOp, Values, positive_int, tensor_input


class Pad2d(TensorOp):
    """Zeros on each side of images, as `pad2d` defines it."""

    __props__ = ("sides",)

    def __init__(self, sides: tuple[int, int, int, int]) -> None:
        if not isinstance(sides, tuple | list) or len(sides) != 4:
            raise TypeError(f"Pad2d: sides must be (top, bottom, left, right), got {sides!r}")
        self.sides = tuple(positive_int("Pad2d", "sides", side, least=0) for side in sides)

    def make_node(self, x: Any) -> Apply:
        x = tensor_input(self, "x", x, 4)
        batch, channels, *image = x.type.shape
        lengths = (
            None if n is None else n + added for n, added in zip(image, self._added, strict=True)
        )
        shape = (batch, channels, *lengths)
        return Apply(self, [x], [pt.tensor(dtype=x.type.dtype, shape=shape)])

    def perform(self, node: Apply, inputs: Values, output_storage: list[list[Any]]) -> None:
        top, bottom, left, right = self.sides
        edges = ((0, 0), (0, 0), (top, bottom), (left, right))
        output_storage[0][0] = np.pad(inputs[0], edges)

    def infer_shape(self, fgraph: Any, node: Apply, shapes: list[tuple]) -> list[tuple]:
        batch, channels, rows, columns = shapes[0]
        return [(batch, channels, rows + self._added[0], columns + self._added[1])]

    def pullback(self, inputs: Values, outputs: Values, cotangents: Values) -> list[Any]:
        (x,), (g,) = inputs, cotangents
        top, _, left, _ = self.sides
        rows, columns = (
            x.shape[axis] if x.type.shape[axis] is None else x.type.shape[axis] for axis in (2, 3)
        )
        return [g[:, :, top : top + rows, left : left + columns]]

    @property
    def _added(self) -> tuple[int, int]:
        """Rows and columns that are added."""
        return self.sides[0] + self.sides[1], self.sides[2] + self.sides[3]


def pad2d(x: Any, sides: tuple[int, int, int, int]) -> TensorVariable:
    """Put zeros around images: a number of rows or columns of its own on each side.

    A convolution or pooling pads both ends of an axis alike. Padding that keeps ``ceil(row /
    stride)`` rows, "same" in other libraries, needs one more at the end where the stride is 2.

    Parameters
    ----------
    x : float (batch, channel, row, column)
    sides : (int, int, int, int)
        (top, bottom, left, right), in pixels.

    Returns
    -------
    float (batch, channel, top + row + bottom, left + column + right)
    """
    return Pad2d(sides)(x)
