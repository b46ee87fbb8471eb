"""Keras's variables as our parameters by name, and back.

In our files filters are (out, in, row, column), matrices (in, out); of sequences, filters have one
column. A parameter is named by the path of its layer, then its kind: ``backbone.conv1.weight``.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from tandem.errors import InputError
from tandem.layers.parameter import Kind
from tandem.validation import listed, unmasked

PARAMETERS: dict[str, tuple[str, Kind]] = {
    "kernel": ("weight", "weight"),
    "embeddings": ("weight", "weight"),
    "gamma": ("weight", "scale"),
    "beta": ("bias", "shift"),
    "moving_mean": ("running_mean", "average"),
    "moving_variance": ("running_var", "average"),
}
"""Names in our files, and kinds, of parameters by Keras's names; others have Keras's."""


def kind_of(name: str) -> tuple[str, Kind]:
    """The name in our files, and the kind, of a parameter by Keras's name."""
    return PARAMETERS.get(name, (name, "bias" if name.endswith("bias") else "weight"))


_UNNAMED = re.compile(r"variable(_\d+)?")

Weights = dict[str, np.ndarray]
"""Float32 arrays by name."""


def read_weights(model: Any) -> Weights:
    """Read the variables of a Keras model, in our layout.

    Parameters
    ----------
    model : keras.Model
        Functional or Sequential, and built.
    """
    return {
        name: np.array(to_ours(kind, variable, _value(variable)), np.float32, order="C")
        for name, kind, variable in variables(model)
    }


def write_weights(model: Any, weights: Mapping[str, np.ndarray]) -> None:
    """Set the variables of a Keras model from arrays in our layout.

    Raises InputError, and changes nothing, unless there is an array of the right shape for each.
    """
    found = []
    for name, kind, variable in variables(model):
        if name not in weights:
            raise InputError(
                f"weights: found nothing for {name}, expected an array (there are "
                f"{listed([*weights])})"
            )
        value = from_ours(kind, variable, unmasked(weights[name], name))
        if value.shape != tuple(variable.shape):
            raise InputError(
                f"weights: found shape {np.shape(weights[name])} for {name}, expected that of "
                f"Keras's {variable.path}, {tuple(variable.shape)}"
            )
        found.append((variable, value))
    for variable, value in found:
        variable.assign(value)


def variables(model: Any) -> Iterator[tuple[str, str, Any]]:
    """Our name, the layer's class and the variable, for each of a model.

    Raises InputError if a layer stands in several models inside: Keras's configuration does not
    say that they share it.
    """
    seen: dict[int, str] = {}
    for layer in model.layers:
        for name, kind, variable in _of_layer(layer, layer.name):
            if seen.setdefault(id(variable), name) != name:
                raise InputError(
                    f"model: found one layer as {seen[id(variable)]} and {name}, expected layers "
                    "that stand in one of the models inside a model"
                )
            yield name, kind, variable


def parts_of(layer: Any) -> list[Any]:
    """The layers of a model or a wrapper."""
    if type(layer).__name__ == "Bidirectional":
        return [layer.forward_layer, layer.backward_layer]
    parts = [*getattr(layer, "layers", ())]
    is_wrapper = not parts and hasattr(layer, "layer") and hasattr(layer.layer, "weights")
    return [layer.layer] if is_wrapper else parts


def _of_layer(layer: Any, path: str) -> Iterator[tuple[str, str, Any]]:
    kind, parts = type(layer).__name__, parts_of(layer)
    for part in parts:
        yield from _of_layer(part, f"{path}.{part.name}")
    unnamed = 0
    for variable in [] if parts else layer.weights:
        if np.dtype(variable.dtype).kind != "f":
            continue  # a count, such as that of a layer which adapts to data
        *owners, name = _below(variable.path, layer.name)
        if kind in ("LSTM", "GRU", "SimpleRNN"):
            owners = []  # the cell, of whose name the configuration says nothing
        if _UNNAMED.fullmatch(name):  # Keras counts those of all layers
            name, unnamed = f"variable_{unnamed}" if unnamed else "variable", unnamed + 1
        yield ".".join([path, *owners, kind_of(name)[0]]), kind, variable


def _below(path: str, layer: str) -> list[str]:
    """The parts of a variable's path behind the layer's name."""
    parts = path.split("/")
    where = len(parts) - 1 - parts[::-1].index(layer) if layer in parts[:-1] else len(parts) - 2
    return parts[where + 1 :]


def _value(variable: Any) -> np.ndarray:
    return np.asarray(variable.numpy())


def to_ours(kind: str, variable: Any, value: np.ndarray) -> np.ndarray:
    """An array of Keras in our layout."""
    if not _is_filters(kind, variable):
        return value
    if value.ndim == 3:
        value = value[:, np.newaxis]
    if _is_depthwise(kind, variable):  # (row, column, channel, multiplier)
        return value.transpose(2, 3, 0, 1).reshape(-1, 1, *value.shape[:2])
    return value.transpose(3, 2, 0, 1)


def from_ours(kind: str, variable: Any, value: np.ndarray) -> np.ndarray:
    """An array in our layout as Keras has it."""
    if not _is_filters(kind, variable) or value.ndim != 4:
        return value
    if _is_depthwise(kind, variable):
        multiplier = variable.shape[-1]
        if len(value) % multiplier:
            return value
        value = value.reshape(-1, multiplier, *value.shape[2:]).transpose(2, 3, 0, 1)
    else:
        value = value.transpose(2, 3, 1, 0)
    return value[:, 0] if len(variable.shape) == 3 and value.shape[1] == 1 else value


def _is_filters(kind: str, variable: Any) -> bool:
    return "Conv" in kind and len(variable.shape) > 2


def _is_depthwise(kind: str, variable: Any) -> bool:
    return kind.startswith("Depthwise") or variable.name == "depthwise_kernel"
