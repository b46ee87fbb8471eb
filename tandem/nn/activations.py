"""Activations by Keras 3's names, and PyDTNN's arctan."""

from typing import TYPE_CHECKING, Any

from tandem.nn.arguments import Argument, known_name

if TYPE_CHECKING:
    from pytensor.tensor.variable import TensorVariable

ACTIVATIONS = (
    "linear",
    "relu",
    "leaky_relu",
    "relu6",
    "elu",
    "sigmoid",
    "log_sigmoid",
    "tanh",
    "arctan",
    "softplus",
    "softmax",
)
"""The activations that a layer may name."""

LEAKY_SLOPE = 0.2  # of the function; the layer has 0.3, as in Keras

_find = known_name(ACTIVATIONS)


def _name(value: Any) -> str:
    return "linear" if value is None else _find(value)


ACTIVATION = Argument("the name of an activation", _name)


def activated(x: "TensorVariable", name: str | None) -> "TensorVariable":
    """Apply an activation of `ACTIVATIONS`; softmax is that of units or channels."""
    from tandem.layers import activations

    if name in (None, "linear"):
        return x
    if name == "softmax":
        return softmax(x, symbolic_axis(-1, x.type.ndim))
    if name == "leaky_relu":
        return activations.leaky_relu(x, LEAKY_SLOPE)
    return getattr(activations, str(name))(x)


def softmax(x: "TensorVariable", axis: int) -> "TensorVariable":
    """``exp(x) / sum of exp(x)`` over an axis."""
    import pytensor.tensor as pt

    return pt.special.softmax(x, axis=axis)


def symbolic_axis(axis: int, ndim: int) -> int:
    """The axis of a symbolic minibatch for one of (batch, row, column, channel).

    Minibatches of images are (batch, channel, row, column); others have the same axes.
    """
    axis %= ndim
    return (0, 2, 3, 1)[axis] if ndim == 4 else axis
