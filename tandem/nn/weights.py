"""The arrays of a graph of layers: initial values, checks, Keras's order and layout.

By name, filters are (filter, channel of its group, row, column), matrices (in, out). In Keras's
layout filters are (row, column, channel, filter).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tandem.errors import InputError
from tandem.layers.parameter import Parameter, layer_of
from tandem.nn.graph import Graph
from tandem.nn.layers import DepthwiseConv2D, Layer
from tandem.validation import unmasked

Weights = dict[str, np.ndarray]
"""Float32 arrays by name."""


def initial_weights(graph: Graph, seed: int) -> Weights:
    """Draw the initial values, a function of the seed alone."""
    return {
        parameter.name: parameter.initial_value(seed, position, "float32")
        for position, parameter in enumerate(graph.parameters)
    }


def checked_weights(graph: Graph, weights: Mapping[str, np.ndarray]) -> Weights:
    """Copy the arrays of a graph; raises InputError if one is missing or has another shape."""
    if not isinstance(weights, Mapping):
        raise InputError(
            f"weights: found {type(weights).__name__}, expected arrays by name; those of a file "
            "are nn.load_model(path).weights"
        )
    found = {}
    for parameter in graph.parameters:
        value = weights.get(parameter.name)
        if value is None or np.shape(value) != parameter.shape:
            there = "nothing" if value is None else f"shape {np.shape(value)}"
            raise InputError(
                f"weights: found {there} for {parameter.name}, expected {parameter.shape}"
            )
        found[parameter.name] = _float32(value, parameter.name)
    return found


def to_keras(graph: Graph, weights: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """The arrays in Keras's order and layout."""
    return [
        _to_keras(graph.layers[layer_of(parameter.name)], weights[parameter.name]).copy()
        for parameter in _in_keras_order(graph)
    ]


def from_keras(graph: Graph, arrays: Sequence[np.ndarray]) -> Weights:
    """Arrays in Keras's order and layout by name; raises InputError unless they fit."""
    if len(arrays) != (count := len(graph.parameters)):
        raise InputError(f"set_weights: found {len(arrays)} arrays, expected {count}")
    found = {}
    for parameter, value in zip(_in_keras_order(graph), arrays, strict=True):
        layer = graph.layers[layer_of(parameter.name)]
        expected = _to_keras(layer, np.empty(parameter.shape)).shape
        if np.shape(value) != expected:
            raise InputError(
                f"set_weights: found shape {np.shape(value)} for {parameter.name}, expected "
                f"{expected}"
            )
        found[parameter.name] = _from_keras(layer, _float32(value, parameter.name))
    return found


def _float32(value: Any, name: str) -> np.ndarray:
    """Copy an array as float32; raises InputError if it cannot hold the values."""
    given = unmasked(value, f"weights: {name}")
    if given.dtype.kind not in "biuf":
        raise InputError(f"weights: {name}: found {given.dtype}, expected real numbers")
    with np.errstate(over="ignore"):
        found = np.array(given, np.float32)
    if (lost := np.isinf(found) & np.isfinite(given)).any():
        raise InputError(
            f"weights: {name}: found {given[lost][0]}, expected numbers that float32 can hold"
        )
    return found


def _in_keras_order(graph: Graph) -> list[Parameter]:
    """The parameters in the order of Keras's layers.

    First come those with the most calls between them and the output, and of these the one that a
    search from the output, depth first, meets first.
    """
    nodes, depths = graph.nodes, dict.fromkeys(graph.layers, 0)
    of_nodes = [0] * len(nodes)
    for number in reversed(range(len(nodes))):
        node = nodes[number]
        depths[node.layer] = depth = max(of_nodes[number], depths[node.layer])
        for source in node.inputs:
            of_nodes[source] = max(of_nodes[source], depth + 1)
    met: dict[str, int] = {}
    seen: set[int] = set()
    pending = [len(nodes) - 1]
    while pending:
        if (number := pending.pop()) not in seen:
            seen.add(number)
            met.setdefault(nodes[number].layer, len(met))
            pending += reversed(nodes[number].inputs)
    return sorted(
        graph.parameters, key=lambda p: (-depths[layer_of(p.name)], met[layer_of(p.name)])
    )


def kept_weights(before: Graph, weights: Mapping[str, np.ndarray], graph: Graph) -> Weights:
    """The arrays of a graph's layers under their names in another, which may differ."""
    names = {layer: name for name, layer in before.layers.items()}
    found = {}
    for parameter in graph.parameters:
        name = layer_of(parameter.name)
        if (old := names.get(graph.layers[name])) is not None:
            found[parameter.name] = weights[old + parameter.name.removeprefix(name)]
    return found


def _to_keras(layer: Layer, value: np.ndarray) -> np.ndarray:
    if value.ndim != 4:
        return value
    if isinstance(layer, DepthwiseConv2D):  # (channel x multiplier, 1, row, column)
        parts = value.reshape(-1, layer.depth_multiplier, *value.shape[2:])
        return parts.transpose(2, 3, 0, 1)
    return value.transpose(2, 3, 1, 0)


def _from_keras(layer: Layer, value: np.ndarray) -> np.ndarray:
    if value.ndim != 4:
        return value
    if isinstance(layer, DepthwiseConv2D):
        return value.transpose(2, 3, 0, 1).reshape(-1, 1, *value.shape[:2])
    return value.transpose(3, 2, 0, 1)
