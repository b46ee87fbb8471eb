"""A network as data: layers by name, and the calls of them that make a graph.

The JSON of a graph decides no code: its layers are made from a closed registry, and from classes
that the caller gives.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tandem.errors import InputError
from tandem.layers.parameter import Parameter
from tandem.nn.arguments import NAME, integer, plain
from tandem.nn.layers import LAYERS, InputLayer, Layer, Shape, Softmax, Symbol
from tandem.nn.layers.base import ParameterLayer
from tandem.nn.layers.merging import chained
from tandem.validation import listed, shown, suggestion

NORM_ROWS = 32
"""Rows that a batch normalisation covers, by default."""

OUTPUTS = ("softmax", "sigmoid", "linear")
"""Activations between a network's logits and its predictions."""

MOST_NODES = 10_000
MOST_INPUTS = 100_000  # of all nodes together
MOST_PARAMETERS = 2**34
FORMAT = 1


@dataclass(frozen=True)
class Node:
    """One call of a layer, by name, on nodes by their numbers."""

    layer: str
    inputs: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Graph:
    """Layers and their calls, in an order in which they can run.

    Parameters
    ----------
    layers : mapping of str to Layer
        By name, in the order of their parameters.
    nodes : tuple of Node
        The first is the input, the last is the output.
    norm_rows : int
        Consecutive rows of the global minibatch that a batch normalisation covers.

    Raises
    ------
    InputError
        The graph has no single input, a node stands before what it is called on, shapes do not fit,
        a name is taken, or something is too large.
    """

    layers: Mapping[str, Layer]
    nodes: tuple[Node, ...]
    norm_rows: int = NORM_ROWS
    shapes: tuple[Shape, ...] = field(init=False, repr=False)  # of the nodes' outputs
    parameters: tuple[Parameter, ...] = field(init=False, repr=False)  # in order

    def __post_init__(self) -> None:
        try:
            integer(1).convert(self.norm_rows)
        except ValueError as error:
            raise _fault(f"norm_rows {shown(self.norm_rows)}", "a whole number above 0") from error
        if not 0 < len(self.nodes) <= MOST_NODES:
            raise _fault(f"{len(self.nodes)} nodes", f"1 to {MOST_NODES}")
        if sum(len(node.inputs) for node in self.nodes) > MOST_INPUTS:
            raise _fault("too many inputs of nodes", f"at most {MOST_INPUTS} together")
        used = {node.layer for node in self.nodes}
        for name in [*used - self.layers.keys(), *self.layers.keys() - used]:
            raise _fault(f"{shown(name)} without a call or a layer", "one layer and at least one")
        inputs = [isinstance(self.layers[node.layer], InputLayer) for node in self.nodes]
        if not inputs[0] or sum(inputs) != 1:
            raise _fault(f"{sum(inputs)} inputs", "one, before all other nodes")
        self._check_order()
        self._infer()

    def _check_order(self) -> None:
        """Refuse nodes that are called on later ones, or that nothing is called on."""
        read = set()
        for number, node in enumerate(self.nodes):
            if any(not 0 <= source < number for source in node.inputs):
                raise _fault(f"{node.layer} called on {shown(node.inputs)}", "earlier nodes")
            read |= {*node.inputs}
        for number, node in enumerate(self.nodes[:-1]):
            if number not in read:
                raise _fault(f"an output of {node.layer} that nothing reads", "one output")

    def _infer(self) -> None:
        """Infer shapes and parameters."""
        shapes: list[Shape] = []
        declared: dict[str, tuple[Parameter, ...]] = {}
        frozen = {*self.frozen}
        for node in self.nodes:
            layer, inputs = self.layers[node.layer], [shapes[n] for n in node.inputs]
            try:
                shapes.append(layer.output_shape(*inputs))
            except InputError as error:
                own = layer.name is None and node.layer != layer.label
                raise InputError(f"{node.layer}: {error}" if own else f"{error}") from error
            parameters = layer.declare(node.layer, *inputs)
            is_averaging = node.layer in declared and node.layer not in frozen
            if is_averaging and not all(p.trainable for p in parameters):
                raise _fault(
                    f"several calls of {node.layer}, of which each has averages of its own",
                    "one call, a layer of its own for each, or trainable=False",
                )
            if declared.setdefault(node.layer, parameters) != parameters:
                raise _fault(
                    f"{node.layer} called on inputs of different shapes", "ones of the same shape"
                )
        ordered = tuple(p for name in self.layers for p in declared[name])
        names = [parameter.name for parameter in ordered]
        if len({*names}) < len(names):
            raise _fault("parameters of the same name", "one parameter of each name")
        if (count := sum(math.prod(p.shape) for p in ordered)) > MOST_PARAMETERS:
            raise _fault(f"{count} parameters", f"at most {MOST_PARAMETERS}")
        object.__setattr__(self, "shapes", tuple(shapes))
        object.__setattr__(self, "parameters", ordered)

    @classmethod
    def traced(cls, inputs: Symbol, outputs: Symbol, norm_rows: int = NORM_ROWS) -> "Graph":
        """The graph from one symbol to another; layers without a name get one."""
        for symbol in (inputs, outputs):
            if not isinstance(symbol, Symbol):
                raise _fault(type(symbol).__name__, "symbols of nn.Input and of layers")
        ordered = _ordered(outputs)
        if inputs not in ordered:
            raise _fault("an output that does not depend on the input", "one that does")
        number = {symbol: index for index, symbol in enumerate(ordered)}
        layers = dict.fromkeys(symbol.layer for symbol in ordered)
        names = _named(layers)
        nodes = tuple(
            Node(names[symbol.layer], tuple(number[source] for source in symbol.inputs))
            for symbol in ordered
        )
        return cls({names[layer]: layer for layer in layers}, nodes, norm_rows)

    @classmethod
    def chained(cls, layers: Sequence[Any], norm_rows: int = NORM_ROWS) -> "Graph":
        """The graph of layers, blocks and models one after another; the first is an `Input`."""
        first, *others = layers or (None,)
        if isinstance(first, InputLayer):
            first = first()
        if not isinstance(first, Symbol):
            raise _fault(f"{type(first).__name__} at first", "an Input")
        return cls.traced(first, chained(first, others), norm_rows)

    def replayed(self, symbol: Symbol) -> Symbol:
        """Call the layers on another symbol: the result shares their parameters."""
        symbols = [symbol]
        for node in self.nodes[1:]:
            symbols.append(self.layers[node.layer](*(symbols[n] for n in node.inputs)))
        return symbols[-1]

    @property
    def input_shape(self) -> Shape:
        """Shape of a row, in Keras's order (row, column, channel)."""
        return self.shapes[0]

    @property
    def output_shape(self) -> Shape:
        """Shape of an output, in Keras's order."""
        return self.shapes[-1]

    @property
    def output(self) -> str:
        """The activation in which the graph ends: softmax of units, sigmoid, or else linear."""
        last = self.layers[self.nodes[-1].layer]
        activation = "softmax" if isinstance(last, Softmax) else getattr(last, "activation", None)
        is_known = type(last) in LAYERS.values() and activation in OUTPUTS
        if not is_known or (activation == "softmax" and len(self.output_shape) > 1):
            return "linear"
        return str(activation)

    @property
    def frozen(self) -> tuple[str, ...]:
        """The layers whose parameters are not trained."""
        return tuple(
            name
            for name, layer in self.layers.items()
            if isinstance(layer, ParameterLayer) and not layer.trainable
        )

    @property
    def untrained(self) -> tuple[str, ...]:
        """Names of the arrays that no optimizer steps: running averages."""
        return tuple(parameter.name for parameter in self.parameters if not parameter.trainable)

    @cached_property
    def total_parameters(self) -> int:
        """Numbers in all parameters, averages included."""
        return sum(math.prod(parameter.shape) for parameter in self.parameters)

    @cached_property
    def flops(self) -> int:
        """Floating-point operations of a forward pass of one row, a product and sum being two."""
        return sum(self.node_flops(number) for number in range(len(self.nodes)))

    def node_flops(self, number: int) -> int:
        """Floating-point operations of one node and row."""
        node = self.nodes[number]
        return self.layers[node.layer].flops(*(self.shapes[n] for n in node.inputs))

    def to_json(self) -> dict[str, Any]:
        """The graph as plain values, for `from_json`.

        Raises InputError if an own layer cannot be found again by its name, or has other values
        than numbers, strings, lists and mappings.
        """
        return {
            "format": FORMAT,
            "norm_rows": self.norm_rows,
            "layers": {name: _layer_to_json(name, layer) for name, layer in self.layers.items()},
            "nodes": [[node.layer, [*node.inputs]] for node in self.nodes],
        }

    @classmethod
    def from_json(cls, values: Any, layers: Iterable[type[Layer]] = ()) -> "Graph":
        """The graph of plain values.

        Parameters
        ----------
        values : dict
            As of `to_json`. Nothing is imported by a name in it.
        layers : iterable of classes
            The own layers that it may name.

        Raises
        ------
        InputError
            The values are no graph, or name a layer that is not given.
        """
        values = _mapping("the graph", values, ("format", "norm_rows", "layers", "nodes"))
        if values["format"] != FORMAT:
            raise _fault(f"format {shown(values['format'])}", f"{FORMAT}")
        known = LAYERS | {registered_name(kind): kind for kind in layers}
        given = values["layers"]
        if not isinstance(given, Mapping) or len(given) > MOST_NODES:
            raise _fault(f"layers {shown(given)}", f"a mapping of at most {MOST_NODES} names")
        made = {name: _layer_from_json(name, value, known) for name, value in given.items()}
        nodes = values["nodes"]
        if not isinstance(nodes, list) or len(nodes) > MOST_NODES:
            raise _fault(f"nodes {shown(nodes)}", f"a list of at most {MOST_NODES}")
        return cls(made, tuple(map(_node, nodes)), values["norm_rows"])


def registered_name(kind: type[Layer]) -> str:
    """Return what a layer's class is called in JSON: an own one "module:Class".

    Raises InputError if the class could not be found by that name in another process.
    """
    if not isinstance(kind, type) or not issubclass(kind, Layer):
        raise InputError(f"layers: found {shown(kind)}, expected subclasses of nn.layers.Layer")
    if LAYERS.get(kind.__name__) is kind:
        return kind.__name__
    return importable_name("layers", kind)


def importable_name(setting: str, thing: Any) -> str:
    """The name "module:name" of a class or function; InputError if it cannot be imported by it."""
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str):
        raise InputError(f"{setting}: found {shown(thing)}, expected a class or function")
    if module == "__main__" or not name.isidentifier():
        raise InputError(
            f"{setting}: found {module}:{name}, expected one at the top of a module that trainers"
            " can import: put it into a module"
        )
    return f"{module}:{name}"


def own_function(setting: str, function: Any) -> str:
    """The name "module:name" of a loss or metric of the user's own, which is called once.

    Raises InputError if it cannot be imported, or does not return a number for each row.
    """
    import pytensor.tensor as pt

    path = importable_name(setting, function)
    rows = function(*(pt.matrix(name, dtype="float32") for name in ("targets", "predictions")))
    if getattr(getattr(rows, "type", None), "ndim", None) != 1:
        raise InputError(f"{setting}: found {rows} of {path}, expected a number for each row")
    return path


def _fault(found: str, expected: str) -> InputError:
    return InputError(f"graph: found {found}, expected {expected}")


def _ordered(output: Symbol) -> list[Symbol]:
    """A symbol and all that it depends on, each behind its inputs."""
    done: dict[Symbol, None] = {}
    pending = [output]
    while pending:
        waiting = [s for s in reversed(pending[-1].inputs) if s not in done]
        if waiting:
            pending += waiting
        else:
            done[pending.pop()] = None
    return [*done]


def _named(layers: Iterable[Layer]) -> dict[Layer, str]:
    """A name for each layer: its own, or its class's with a number."""
    layers = [*layers]
    given = [layer.name for layer in layers if layer.name is not None]
    for name in given:
        if given.count(name) > 1:
            raise _fault(f"several layers of the name {name!r}", "a name of its own for each")
    taken, counts, names = {*given}, dict[str, int](), dict[Layer, str]()
    for layer in layers:
        if layer.name is not None:
            names[layer] = layer.name
            continue
        base = layer.default_name()
        number = counts.get(base, 0)
        while (name := f"{base}_{number}" if number else base) in taken:
            number += 1
        counts[base] = number + 1
        names[layer] = name
    return names


def _layer_to_json(name: str, layer: Layer) -> dict[str, Any]:
    values: dict[str, Any] = {"class": registered_name(type(layer))}
    for each in dataclasses.fields(layer):
        if each.name == "name" or not each.init:
            continue
        try:
            values[each.name] = plain(getattr(layer, each.name))
        except ValueError as error:
            raise InputError(f"{name}: {each.name}: {error}") from error
    return values


def _layer_from_json(name: Any, values: Any, known: Mapping[str, type[Layer]]) -> Layer:
    try:
        NAME.convert(name)
    except ValueError as error:
        raise _fault(f"a layer named {shown(name)}", NAME.expected) from error
    if not isinstance(values, Mapping) or not all(isinstance(key, str) for key in values):
        raise _fault(f"{name} as {shown(values)}", "a layer's class and arguments")
    kind = values.get("class")
    if not isinstance(kind, str) or kind not in known:
        if isinstance(kind, str) and ":" in kind:
            raise InputError(
                f"{name}: found the own layer {shown(kind)}, expected one that is given by"
                f" layers=[...], which are {listed([n for n in known if ':' in n])}"
            )
        hint = suggestion(kind, known) if isinstance(kind, str) else ""
        raise InputError(f"{name}: found the layer {shown(kind)}, expected a known one{hint}")
    arguments = {key: value for key, value in values.items() if key != "class"}
    fields = [each.name for each in dataclasses.fields(known[kind]) if each.init]
    for key in arguments:
        if key not in fields or key == "name":
            raise InputError(
                f"{name}: found the argument {shown(key)}, expected one of {kind}:"
                f" {', '.join(f for f in fields if f != 'name')}"
            )
    try:
        return known[kind](**arguments, name=name)
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        raise InputError(
            f"{name}: found {shown(arguments)}, expected arguments of {kind}: {error}"
        ) from error


def _node(value: Any) -> Node:
    if isinstance(value, list) and len(value) == 2 and isinstance(value[0], str):
        layer, inputs = value
        if isinstance(inputs, list) and all(type(n) is int for n in inputs):
            return Node(layer, tuple(inputs))
    raise _fault(f"the node {shown(value)}", "a layer's name and a list of earlier nodes' numbers")


def _mapping(what: str, values: Any, keys: Sequence[str]) -> dict[str, Any]:
    if not isinstance(values, Mapping) or {*values} != {*keys}:
        raise _fault(f"{what} as {shown(values)}", f"a mapping of {', '.join(keys)}")
    return dict(values)
