"""Layers and losses of a user, in a module that can be imported."""

from dataclasses import dataclass
from typing import Any

import pytensor.tensor as pt

from tandem.layers.parameter import Parameter
from tandem.nn.layers import BuildContext, Layer, Shape


@dataclass(frozen=True, eq=False)
class Scaled(Layer):
    """A learnt factor for each unit, to a power."""

    power: int = 1

    def shape(self, *inputs: Shape) -> Shape:
        return inputs[0]

    def declare(self, name: str, *inputs: Shape) -> tuple[Parameter, ...]:
        return (Parameter(f"{name}.weight", inputs[0], "scale", 2.0),)

    def build(self, context: BuildContext, *inputs: Any) -> Any:
        return inputs[0] * context.parameter("weight") ** self.power


@dataclass(frozen=True, eq=False)
class Shrinking(Layer):
    """A layer whose graph has another shape than it says."""

    def shape(self, *inputs: Shape) -> Shape:
        return inputs[0]

    def build(self, context: BuildContext, *inputs: Any) -> Any:
        return inputs[0][:, 1:]


@dataclass(frozen=True, eq=False)
class Shapeless(Layer):
    """A layer that returns no shape."""

    def shape(self, *inputs: Shape) -> Any:
        return [3]

    def build(self, context: BuildContext, *inputs: Any) -> Any:
        return inputs[0]


def fourth_power(targets: Any, predictions: Any) -> Any:
    """A loss of the rows of float targets."""
    return ((targets - predictions) ** 4).sum(axis=1)


def mean_fourth_power(targets: Any, predictions: Any) -> Any:
    """No loss of rows: their mean."""
    return fourth_power(targets, predictions).mean()


not_a_function = pt.lscalar()
