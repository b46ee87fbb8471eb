"""Layers of several inputs, and blocks of paths that end in one."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any, ClassVar

from tandem.errors import InputError
from tandem.nn.activations import symbolic_axis
from tandem.nn.arguments import argument, integer
from tandem.nn.layers.base import BuildContext, Layer, Shape, Symbol

if TYPE_CHECKING:
    from pytensor.tensor.variable import TensorVariable


@dataclass(frozen=True, eq=False)
class Add(Layer):
    """The sum of inputs of one shape."""

    def shape(self, *inputs: Shape) -> Shape:
        shapes = sorted({*inputs})
        if len(inputs) < 2 or len(shapes) > 1:
            found = " and ".join(map(str, shapes)) if len(shapes) > 1 else str(len(inputs))
            raise self.fault(f"inputs: {found}", "at least two inputs, of one shape")
        return inputs[0]

    def build(self, context: BuildContext, *inputs: "TensorVariable") -> "TensorVariable":
        return reduce(add, inputs)

    def flops(self, *inputs: Shape) -> int:
        return (len(inputs) - 1) * math.prod(inputs[0])


@dataclass(frozen=True, eq=False)
class Concatenate(Layer):
    """Inputs one behind the other, along an axis of (batch, row, column, channel)."""

    axis: int = argument(integer(-3, 3), -1)

    def shape(self, *inputs: Shape) -> Shape:
        if len(inputs) < 2:
            raise self.fault(f"inputs: {len(inputs)}", "at least two")
        axes = len(inputs[0])
        if not -axes <= self.axis <= axes or self.axis == 0:
            raise self.fault(f"axis {self.axis} of {axes} axes of a row", "an axis of the rows")
        axis = self.axis % (axes + 1) - 1
        others = {(len(shape), *shape[:axis], *shape[axis + 1 :]) for shape in inputs}
        if len(others) > 1:
            found = " and ".join(map(str, sorted({*inputs})))
            raise self.fault(f"inputs of shapes {found}", "ones that differ in that axis alone")
        return (*inputs[0][:axis], sum(s[axis] for s in inputs), *inputs[0][axis + 1 :])

    def build(self, context: BuildContext, *inputs: "TensorVariable") -> "TensorVariable":
        import pytensor.tensor as pt

        return pt.concatenate(inputs, axis=symbolic_axis(self.axis, inputs[0].type.ndim))


class _Block:
    """Paths of layers from one input to one layer that merges them."""

    merge: ClassVar[type[Layer]]

    def __init__(self, *paths: Any, name: str | None = None) -> None:
        kind = type(self).__name__
        if len(paths) < 2 or not all(isinstance(path, list | tuple) for path in paths):
            raise InputError(
                f"{kind}: found {len(paths)} paths, or one that is no list, expected at least two"
                " lists of layers; an empty one is the identity"
            )
        self.paths: tuple[tuple[Any, ...], ...] = tuple(tuple(path) for path in paths)
        self._merge = self.merge(name=name)

    def __call__(self, symbol: Symbol) -> Symbol:
        """Call the paths on a symbol, and the layer that merges on what they return."""
        return self._merge([chained(symbol, path) for path in self.paths])


class Residual(_Block):
    """The sum of paths, each a list of layers; an empty path is the identity."""

    merge = Add


class Concatenated(_Block):
    """The channels of paths, each a list of layers, one behind the other."""

    merge = Concatenate


def chained(symbol: Symbol, layers: Sequence[Any]) -> Symbol:
    """Call layers, blocks or models one after another, the first on a symbol."""
    for layer in layers:
        if isinstance(layer, type) or not callable(layer):
            kind = layer.__name__ if isinstance(layer, type) else type(layer).__name__
            raise InputError(f"found {kind} in a list of layers, expected a layer")
        symbol = layer(symbol)
    return symbol
