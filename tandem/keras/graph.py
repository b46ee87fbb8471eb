"""A Keras model as data: its layers by name, and the calls of them that make a graph.

It is read from the configuration that Keras saves, without Keras. Nothing in it is executed, and
no name in it is imported.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tandem import nested
from tandem.errors import InputError
from tandem.validation import shown

MOST_LAYERS = 10_000  # of a model, those of models in it included
MOST_NODES = 10_000
MOST_CONSTANTS = 2**24  # numbers in the constants of one configuration
LONGEST_NAME = 200  # characters

Shape = tuple[int | None, ...]
"""Lengths with the batch, which is None, at first; None for others that are not known."""

MODELS = ("Functional", "Sequential", "Model")


@dataclass(frozen=True)
class Reference:
    """An output of a node."""

    node: int
    output: int = 0
    shape: Shape | None = None  # as Keras inferred it


@dataclass(frozen=True)
class Node:
    """One call of a layer, whose arguments may contain references to earlier nodes."""

    layer: str
    arguments: tuple[Any, ...] = ()
    keywords: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, eq=False)
class LayerData:
    """A layer, or an operation of `keras.ops`.

    Attributes
    ----------
    name : str
        In its model.
    kind : str
        Class of Keras, ``ops.`` and the class of an operation, or ``own:`` and a class of the
        user's own.
    config : dict
        As Keras saves it.
    """

    name: str
    kind: str
    config: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class GraphData:
    """A Functional or Sequential model.

    Attributes
    ----------
    name : str
    layers : mapping of str to LayerData or GraphData
        By name, in Keras's order. `InputLayer`s are among them.
    nodes : tuple of Node
        In an order in which they can run; the inputs come first.
    inputs : tuple of str
        Names of the input layers, in Keras's order.
    outputs : tuple of Reference
    """

    name: str
    layers: Mapping[str, "LayerData | GraphData"]
    nodes: tuple[Node, ...]
    inputs: tuple[str, ...]
    outputs: tuple[Reference, ...]

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names of the layers whose outputs they are, as Keras names losses and metrics."""
        return tuple(self.nodes[reference.node].layer for reference in self.outputs)


AnyLayer = LayerData | GraphData


def read_graph(values: Any) -> GraphData:
    """Read a model from the JSON of `keras.saving.serialize_keras_object`.

    Raises
    ------
    InputError
        It is no Functional or Sequential model, refers to what is not there, or is too large.
    """
    try:
        values = nested.plain(values)
    except ValueError as error:
        raise InputError(f"model: {error}") from error
    layer = read_layer(values, "model", Budget())
    if not isinstance(layer, GraphData):
        raise InputError(
            f"model: found {shown(layer.kind.removeprefix('own:'))}, expected a Functional or "
            "Sequential model: subclassed models can't be converted, because their graph is code"
        )
    return layer


class Budget:
    """The layers and nodes that may still be read of a model."""

    def __init__(self) -> None:
        self.layers, self.nodes = MOST_LAYERS, MOST_NODES

    def take(self, layers: int = 0, nodes: int = 0) -> None:
        """Take a number of each; InputError if fewer are left."""
        self.layers, self.nodes = self.layers - layers, self.nodes - nodes
        if min(self.layers, self.nodes) < 0:
            raise InputError(
                f"model: found too many layers or calls, expected at most {MOST_LAYERS} layers and "
                f"{MOST_NODES} calls"
            )


def read_layer(values: Any, place: str, budget: Budget) -> AnyLayer:
    """Read a layer or model that stands at a place; see `read_graph`."""
    budget.take(layers=1)
    kind, config = _field(values, "class_name", str, place), _field(values, "config", dict, place)
    name = values.get("name") or config.get("name") or place
    _check_name(name)
    module = values.get("module")
    if not isinstance(module, str) or module.partition(".")[0] != "keras":
        return LayerData(name, f"own:{kind}", config)
    if module.startswith(("keras.src.ops", "keras.ops")):
        return LayerData(name, f"ops.{kind}", config)
    if kind not in MODELS:
        return LayerData(name, kind, config)
    if kind == "Sequential":
        return _read_sequential(name, config, budget)
    return _read_functional(name, config, budget)


def _read_sequential(name: str, config: Mapping[str, Any], budget: Budget) -> GraphData:
    given = _field(config, "layers", list, name)
    layers = [read_layer(values, f"{name}_{n}", budget) for n, values in enumerate(given)]
    if not layers or not _is_input(layers[0]):
        shape = config.get("build_input_shape")
        if shape is None:
            raise _fault(name, "a model that is not built", "one with an Input, or built")
        layers.insert(0, LayerData(f"{name}_input", "InputLayer", {"batch_shape": shape}))
    nodes = [Node(layers[0].name)]
    nodes += [Node(each.name, (Reference(n),)) for n, each in enumerate(layers[1:])]
    by_name = _by_name(name, layers)
    budget.take(nodes=len(nodes))
    end = (Reference(len(nodes) - 1),)
    return GraphData(name, by_name, tuple(nodes), (layers[0].name,), end)


def _read_functional(name: str, config: Mapping[str, Any], budget: Budget) -> GraphData:
    given = _field(config, "layers", list, name)
    layers = _by_name(name, [read_layer(v, f"{name}_{n}", budget) for n, v in enumerate(given)])
    calls: dict[tuple[str, int], Any] = {}
    for layer, values in zip(layers.values(), given, strict=True):
        found = _field(values, "inbound_nodes", list, layer.name)
        budget.take(nodes=len(found) + 1)
        calls |= {(layer.name, n): call for n, call in enumerate(found)}
        if _is_input(layer):
            calls[layer.name, 0] = None
    inputs = [*_references(config.get("input_layers"), name)]
    # Here alone Keras counts the calls of a Functional model inside from 1.
    models = {
        layer.name
        for layer, values in zip(layers.values(), given, strict=True)
        if isinstance(layer, GraphData) and values["class_name"] != "Sequential"
    }
    outputs = [
        ((layer, call - (layer in models)), output)
        for (layer, call), output in _references(config.get("output_layers"), name)
    ]
    if not inputs or not outputs:
        raise _fault(name, "no inputs or no outputs", "at least one of each")
    for key, _ in inputs:
        if calls.get(key, ()) is not None:
            raise _fault(name, f"the input {shown(key[0])}", "an InputLayer")
    order = _ordered(name, calls, [*inputs, *outputs])
    number = {key: n for n, key in enumerate(order)}
    nodes = tuple(_node(key[0], calls[key], number) for key in order)
    return GraphData(
        name,
        layers,
        nodes,
        tuple(key[0] for key, _ in inputs),
        tuple(Reference(number[key], output) for key, output in outputs),
    )


Key = tuple[str, int]
"""A layer's name and the number of its call."""


def _ordered(name: str, calls: Mapping[Key, Any], ends: list[tuple[Key, int]]) -> list[Key]:
    """All calls on which the ends depend, in the order in which Keras runs them.

    Those with the longest way to an output are first, each behind its inputs.
    """
    done: dict[Key, None] = {}
    for end, _ in ends:
        pending, open_ = [end], set[Key]()
        while pending:
            key = pending[-1]
            if key in done:
                pending.pop()
                continue
            if key not in calls:
                raise _fault(name, f"call {key[1]} of {shown(key[0])}", "a call that is there")
            waiting = [k for k in _sources(calls[key], key[0]) if k not in done]
            if not waiting:
                done[pending.pop()] = None
            elif key in open_:
                raise _fault(name, f"a circle through {shown(key[0])}", "a graph without circles")
            else:
                open_.add(key)
                pending += reversed(waiting)
    depths, deepest = dict[Key, int](), Counter[str]()
    for key in reversed(done):
        depth = deepest[key[0]] = max(depths.setdefault(key, 0), deepest[key[0]])
        depths[key] = depth
        for source in _sources(calls[key], key[0]):
            depths[source] = max(depths.get(source, 0), depth + 1)
    return sorted(depths, key=lambda key: -depths[key])


def _sources(call: Any, layer: str) -> list[Key]:
    """The calls whose outputs a call takes."""
    found, pending = [], [call]
    while pending:
        value = pending.pop()
        if isinstance(value, list):
            pending += reversed(value)
        elif isinstance(value, dict):
            if value.get("class_name") == "__keras_tensor__":
                found.append(_history(value, layer)[0])
            else:
                pending += [value[key] for key in sorted(value, reverse=True)]
    return found


def _node(layer: str, call: Any, number: Mapping[Key, int]) -> Node:
    if call is None:
        return Node(layer)
    arguments, keywords = _field(call, "args", list, layer), _field(call, "kwargs", dict, layer)
    return Node(
        layer,
        tuple(decoded(value, layer, number) for value in arguments),
        tuple((key, decoded(value, layer, number)) for key, value in keywords.items()),
    )


def decoded(value: Any, layer: str, number: Mapping[Key, int] | None = None) -> Any:
    """A value of a configuration or a call: tuples, slices, arrays and references as objects."""
    if isinstance(value, list):
        return [decoded(part, layer, number) for part in value]
    if not isinstance(value, dict):
        return value
    kind = value.get("class_name")
    config = value.get("config")
    if kind == "__keras_tensor__" and number is not None:
        key, output = _history(value, layer)
        return Reference(number[key], output, _shape(value["config"].get("shape"), layer))
    if kind == "__tuple__":
        return tuple(decoded(v, layer, number) for v in _field(value, "items", list, layer))
    if kind == "__ellipsis__":
        return Ellipsis
    if kind == "__slice__" and isinstance(config, dict):
        parts = [decoded(config.get(key), layer, number) for key in ("start", "stop", "step")]
        if any(not (part is None or isinstance(part, int)) for part in parts):
            raise _fault(layer, f"the slice {shown(config)}", "whole numbers")
        return slice(*parts)
    if kind in ("__numpy__", "__tensor__") and isinstance(config, dict):
        return constant(config.get("value"), layer)
    return {key: decoded(part, layer, number) for key, part in value.items()}


def constant(value: Any, layer: str) -> np.ndarray:
    """Numbers of a configuration as an array; raises InputError for anything else."""
    try:
        found = np.asarray(value)
    except (ValueError, OverflowError) as error:
        raise _fault(layer, shown(value), "an array of numbers") from error
    if found.dtype.kind not in "biuf" or found.size > MOST_CONSTANTS:
        raise _fault(layer, shown(value), f"at most {MOST_CONSTANTS} numbers")
    return found


def _history(value: Mapping[str, Any], layer: str) -> tuple[Key, int]:
    history = _field(_field(value, "config", dict, layer), "keras_history", list, layer)
    return _reference(history, layer)


def _reference(value: Any, layer: str) -> tuple[Key, int]:
    is_one = isinstance(value, list) and len(value) == 3 and isinstance(value[0], str)
    if not is_one or any(type(n) is not int or n < 0 for n in value[1:]):
        raise _fault(layer, shown(value), "a layer's name and the numbers of a call and an output")
    return (value[0], value[1]), value[2]


def _references(value: Any, model: str) -> Iterator[tuple[Key, int]]:
    """The references in lists and mappings, in the order in which Keras flattens them."""
    if isinstance(value, list) and value and isinstance(value[0], str):
        yield _reference(value, model)
    elif isinstance(value, list):
        for part in value:
            yield from _references(part, model)
    elif isinstance(value, dict) and value.get("class_name") == "__tuple__":
        yield from _references(_field(value, "items", list, model), model)
    elif isinstance(value, dict):
        for key in sorted(value):
            yield from _references(value[key], model)
    else:
        raise _fault(model, shown(value), "references to layers")


def _shape(value: Any, layer: str) -> Shape | None:
    """A shape that Keras inferred; None if it is not given."""
    if value is None:
        return None
    if not isinstance(value, list) or any(n is not None and type(n) is not int for n in value):
        raise _fault(layer, f"the shape {shown(value)}", "a list of lengths")
    return tuple(value)


def _by_name(model: str, layers: list[AnyLayer]) -> dict[str, AnyLayer]:
    found = {layer.name: layer for layer in layers}
    if len(found) < len(layers):
        raise _fault(model, "several layers of one name", "a name of its own for each")
    return found


def _is_input(layer: AnyLayer) -> bool:
    return isinstance(layer, LayerData) and layer.kind == "InputLayer"


def _check_name(name: Any) -> None:
    is_name = isinstance(name, str) and 0 < len(name) <= LONGEST_NAME
    if not is_name or "/" in name or not name.isprintable():
        raise InputError(
            f"model: found a layer named {shown(name)}, expected at most {LONGEST_NAME} characters "
            "that print, and no slash"
        )


def _field(values: Any, key: str, kind: type, place: str) -> Any:
    """A value of a mapping; InputError if there is none of this type."""
    found = values.get(key) if isinstance(values, dict) else None
    if not isinstance(found, kind):
        raise _fault(place, f"{shown(found)} as {key}", _EXPECTED[kind])
    return found


_EXPECTED: dict[Any, str] = {str: "text", list: "a list", dict: "a mapping"}


def _fault(place: str, found: str, expected: str) -> InputError:
    return InputError(f"{place}: found {found}, expected {expected}")
