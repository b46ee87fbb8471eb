"""A call of a layer while a graph is built, and the pass that makes all calls of a model."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Variable
from pytensor.tensor.variable import TensorVariable

from tandem.errors import InputError
from tandem.keras.graph import (
    AnyLayer,
    Budget,
    GraphData,
    LayerData,
    Reference,
    decoded,
    read_layer,
)
from tandem.keras.lowering.registry import find_lowering
from tandem.keras.weights import kind_of
from tandem.layers.parameter import Parameter
from tandem.layers.training_pass import Training
from tandem.validation import listed, shown

MOST_ELEMENTS = 2**31  # of a row of an output
MOST_PARAMETERS = 2**34
LARGEST = 2**24
"""The largest number of units, pixels or steps in a configuration."""

_IGNORED = {"name", "trainable", "dtype", "autocast", "seed", "data_format", "input_axes"}
_IGNORED |= {"dtype_policy", "quantization_config", "build_input_shape", "batch_input_shape"}

Outputs = list[TensorVariable]


class Pass:
    """One graph of a model: its parameters, masks, and what training reports.

    Without `parameters`, the pass declares them.

    Attributes
    ----------
    declared : dict of str to Parameter
    frozen : dict of str
        Layers and parameters that are not trained, in order.
    shapes : dict of str to tuple of int
        Of a row of each layer's first output.
    masks : dict of variable to variable
        Of outputs, bool (batch, step): the steps that count.
    costs : dict of str to variable
        Of regularizers of parameters, scalars.
    activities : list of variable
        Costs of regularizers of outputs, (batch,).
    loops : dict of str
        Layers whose steps are a loop, in training or validation.
    """

    def __init__(
        self,
        dtype: str,
        training: Training | None = None,
        parameters: Mapping[str, TensorVariable] | None = None,
    ) -> None:
        self.dtype, self.training, self.parameters = dtype, training, parameters
        self.declared: dict[str, Parameter] = {}
        self.frozen: dict[str, None] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.masks: dict[Variable, TensorVariable] = {}
        self.costs: dict[str, TensorVariable] = {}
        self.activities: Outputs = []
        self.loops: dict[str, None] = {}
        self.budget = Budget()
        self.rows_in_row = 1  # steps that are rows of a larger minibatch
        self._placeholders: dict[str, TensorVariable] = {}
        self._random = self._size = 0

    def run(self, graph: GraphData, inputs: Sequence[Any], prefix: str = "") -> Outputs:
        """Build the outputs of a model for those of its inputs."""
        if len(inputs) != len(graph.inputs):
            raise InputError(
                f"{prefix or graph.name}: found {len(inputs)} inputs, expected {len(graph.inputs)}"
            )
        given = dict(zip(graph.inputs, inputs, strict=True))
        built: list[Outputs] = []

        def resolved(value: Any) -> Any:
            if isinstance(value, Reference):
                return self._output(built[value.node], value, graph.nodes[value.node].layer)
            if isinstance(value, list | tuple):
                return type(value)(map(resolved, value))
            if isinstance(value, dict):
                return {key: resolved(part) for key, part in value.items()}
            return value

        for node in graph.nodes:
            if node.layer in given:
                built.append([given[node.layer]])
                continue
            arguments = [resolved(value) for value in node.arguments]
            keywords = {key: resolved(value) for key, value in node.keywords}
            self.budget.take(nodes=1)
            name = f"{prefix}{node.layer}"
            built.append(self.apply(graph.layers[node.layer], name, arguments, keywords))
        return [resolved(reference) for reference in graph.outputs]

    def _output(self, outputs: Outputs, reference: Reference, layer: str) -> TensorVariable:
        if reference.output >= len(outputs):
            raise InputError(
                f"{layer}: found {len(outputs)} outputs, expected at least {reference.output + 1}"
            )
        found = outputs[reference.output]
        if reference.shape is not None:
            self._check_shape(layer, found, reference.shape)
        return found

    def _check_shape(self, layer: str, found: TensorVariable, expected: Sequence[Any]) -> None:
        """Refuse an output of another shape than Keras inferred."""
        fits = found.type.ndim == len(expected) and all(
            None in pair or pair[0] == pair[1]
            for pair in zip(found.type.shape, expected, strict=True)
        )
        if not fits:
            raise InputError(
                f"{layer}: found an output of shape {found.type.shape}, expected "
                f"{tuple(expected)}, as in the model's configuration"
            )

    def apply(
        self,
        layer: AnyLayer,
        name: str,
        arguments: Sequence[Any],
        keywords: Mapping[str, Any] | None = None,
    ) -> Outputs:
        """Build the outputs of one call of a layer or model, under a name."""
        if isinstance(layer, GraphData):
            given = {**(keywords or {}), "training": None}  # which Keras's models replace
            inputs, masks = _flat(arguments, layer.inputs), _parts(given.pop("mask", None))
            others = [key for key, value in given.items() if value is not None]
            if others or not all(isinstance(mask, Variable | None) for mask in masks):
                found = listed(others) or "a mask of constants"
                raise InputError(f"{name}: found {found} of a model's call, expected none")
            # Keras sorts masks in a mapping, whatever the order of inputs.
            self.masks |= {x: m for x, m in zip(inputs, masks, strict=False) if m is not None}
            return self.run(layer, inputs, f"{name}.")
        lowering = find_lowering(layer.kind, name)
        call = Call(self, layer, name, dict(keywords or {}))
        inputs = _flat(arguments)
        call.mask = call.first_mask = call.keywords.pop("mask", None)
        if call.mask is None and inputs:
            call.first_mask = self.masks.get(inputs[0])
            # As in Keras, which gives a layer the mask of its only argument.
            is_only = sum(1 for given in (*arguments, *call.keywords.values()) if _flat(given)) == 1
            call.mask = call.first_mask if is_only else None
        with _faults_named(name):
            result = lowering.function(call, *arguments)
            call.check_finished()
        outputs = [*result] if isinstance(result, list | tuple) else [result]
        outputs = [self._checked(name, output) for output in outputs]
        for output in outputs:
            call.regularize(output, "activity_regularizer")
        if lowering.keeps_mask and call.first_mask is not None:
            self.masks.setdefault(outputs[0], call.first_mask)
        return outputs

    def _checked(self, name: str, output: Any) -> TensorVariable:
        if not isinstance(output, Variable):
            raise InputError(f"{name}: found {shown(str(output))}, expected a PyTensor variable")
        output = cast(TensorVariable, output)
        if output.type.dtype.startswith("float") and output.type.dtype != self.dtype:
            output = output.astype(self.dtype)
        lengths = output.type.shape[1:]
        if None in lengths:
            raise InputError(
                f"{name}: found an output of shape {output.type.shape}, expected every length but "
                "the batch's to be known"
            )
        if math.prod(cast(tuple[int, ...], lengths)) > MOST_ELEMENTS:
            raise InputError(
                f"{name}: found an output of shape {output.type.shape}, expected at most "
                f"{MOST_ELEMENTS} elements in a row"
            )
        self.shapes.setdefault(name, cast(tuple[int, ...], lengths))
        return output

    def parameter(self, declared: Parameter) -> TensorVariable:
        """Return the variable of a parameter, which a pass without parameters declares."""
        if self.parameters is not None:
            return self.parameters[declared.name]
        if self.declared.setdefault(declared.name, declared) != declared:
            raise InputError(
                f"{declared.name}: found shape {declared.shape}, expected "
                f"{self.declared[declared.name].shape}, as in an earlier call"
            )
        if declared.name not in self._placeholders:
            self._size += math.prod(declared.shape)
            if self._size > MOST_PARAMETERS:
                raise InputError(
                    f"{declared.name}: found {self._size} parameters up to here, expected at most "
                    f"{MOST_PARAMETERS}"
                )
            self._placeholders[declared.name] = pt.tensor(
                declared.name, dtype=self.dtype, shape=declared.shape
            )
        return self._placeholders[declared.name]

    def next_random(self) -> int:
        """Number of the next random mask of the graph."""
        self._random += 1
        return self._random - 1


class Call:
    """One call of a layer: its configuration, parameters and context.

    Attributes
    ----------
    name : str
        The layer's path: its name, behind those of the models in which it stands.
    config : mapping
        As Keras saves it.
    keywords : dict
        Of the call.
    mask : bool (batch, step), or None
        Of the only input, or as it is given.
    first_mask : bool (batch, step), or None
        Of the first input, for the output.
    training : Training or None
        None for validation.
    frozen : bool
        Whether the layer is not trained, by `freeze` or, as in Keras 3, by its own `trainable`.
    """

    def __init__(self, pass_: Pass, layer: LayerData, name: str, keywords: dict[str, Any]) -> None:
        self.pass_, self.name, self.config = pass_, name, layer.config
        self.kind, self.keywords = layer.kind, keywords
        self.mask: Any = None
        self.first_mask: Any = None
        keywords.pop("training", None)  # Keras's models replace it by their own
        self.training = pass_.training
        is_named = self.training is not None and self.training.is_frozen(name)
        self.frozen = is_named or self.config.get("trainable") is False
        self._read = {*_IGNORED}
        self._inside: list[Call] = []

    @property
    def dtype(self) -> str:
        """Type of the network's floating-point numbers."""
        return self.pass_.dtype

    def value(self, key: str, default: Any = None) -> Any:
        """A value of the configuration as it is, or one that is given where there is none."""
        self._read.add(key)
        found = self.config.get(key, default)
        return decoded(found, self.name) if isinstance(found, dict | list) else found

    def integer(
        self, key: str, least: int = 1, most: int = LARGEST, default: int | None = None
    ) -> int:
        """A whole number of the configuration; InputError if it is none in a range."""
        found = self.value(key, default)
        if type(found) is not int or not least <= found <= most:
            raise self.fault(f"{key} {shown(found)}", f"a whole number from {least} to {most}")
        return found

    def integers(self, key: str, count: int, least: int = 1, given: Any = None) -> tuple[int, ...]:
        """Several whole numbers, of the configuration or as given; one stands for equal ones."""
        found = self.value(key) if given is None else given
        values = found if isinstance(found, list | tuple) else [found] * count
        if len(values) != count or any(
            type(n) is not int or not least <= n <= LARGEST for n in values
        ):
            raise self.fault(
                f"{key} {shown(found)}", f"{count} whole numbers from {least} to {LARGEST}"
            )
        return tuple(values)

    def number(
        self, key: str, least: float = -math.inf, most: float = math.inf, default: Any = None
    ) -> float:
        """A number of the configuration; InputError if it is none in a range."""
        found = self.value(key, default)
        if type(found) not in (int, float) or not least <= found <= most or abs(found) > 1e300:
            raise self.fault(f"{key} {shown(found)}", f"a number from {least:g} to {most:g}")
        return float(found)

    def flag(self, key: str, default: bool | None = None) -> bool:
        """True or False of the configuration."""
        found = self.value(key, default)
        if not isinstance(found, bool):
            raise self.fault(f"{key} {shown(found)}", "true or false")
        return found

    def word(self, key: str, *words: str) -> str:
        """One of a few words of the configuration."""
        found = self.value(key)
        if not isinstance(found, str) or found not in words:
            raise self.fault(f"{key} {shown(found)}", " or ".join(words))
        return found

    def axes(self, key: str, ndim: int, given: Any = None) -> list[int]:
        """One axis or several but the batch's, from 1, of the configuration or as given."""
        found = self.value(key) if given is None else given
        many = found if isinstance(found, list | tuple) else [found]
        if any(type(n) is not int or not -ndim <= n < ndim or n % ndim == 0 for n in many):
            raise self.fault(f"{key} {shown(found)}", f"axes of {ndim} but the first, the batch's")
        return [n % ndim for n in many]

    def axis(self, key: str, ndim: int, given: Any = None) -> int:
        """The only one of `axes`."""
        found, *others = self.axes(key, ndim, given)
        if others:
            raise self.fault(f"{key} {shown(self.value(key))}", "one axis")
        return found

    def parameter(
        self,
        name: str,
        shape: Sequence[int | None],
        *,
        keep: float = 0.0,
        trainable: bool = True,
        layer: str = "",
        settings: str | None = None,
    ) -> TensorVariable:
        """A parameter of the layer.

        Its initial value, by its kind, is used only where `init_weights_skip` leaves out Keras's.

        Parameters
        ----------
        name : str
            As Keras names it, such as ``kernel``.
        shape : sequence of int
            In our layout: filters are (out, in, row, column).
        keep : float
            Of an average: the fraction of the old value that a step keeps.
        trainable : bool
            False: an optimizer leaves it alone.
        layer : str
            A part of the layer, such as ``query``, that has the parameter.
        settings : str, optional
            Beginning of the key of its regularizer in the configuration.
        """
        kind_name, kind = kind_of(name)
        lengths = [n for n in shape if isinstance(n, int) and 0 < n <= MOST_ELEMENTS]
        if len(lengths) != len(shape):
            raise self.fault(f"{name} of shape {(*shape,)}", "known lengths")
        key = name.removesuffix("_kernel") if settings is None else settings
        owner = f"{self.name}.{layer}" if layer else self.name
        mean = float(kind == "scale" or name.endswith("variance"))
        fans = sum(lengths[:2]) * math.prod(lengths[2:])
        std = math.sqrt(2 / max(1, fans)) if kind == "weight" else 0.0  # Glorot, Bengio 2010
        declared = Parameter(f"{owner}.{kind_name}", tuple(lengths), kind, mean, std, keep=keep)
        if declared.trainable and (self.frozen or not trainable):
            self.pass_.frozen[self.name if self.frozen else declared.name] = None
        elif self.frozen:
            self.pass_.frozen[self.name] = None
        variable = self.pass_.parameter(declared)
        self._refuse_constraint(f"{key}_constraint")
        cost = self._regularized(f"{key}_regularizer", variable, None)
        if cost is not None and declared.trainable and not self.frozen:
            self.pass_.costs[declared.name] = cost
        return variable

    def _refuse_constraint(self, key: str) -> None:
        if self.value(key) is not None:
            raise self.fault(key, "none: constraints of parameters are not supported")

    def regularize(self, y: TensorVariable, key: str, given: Any = None) -> None:
        """Add the cost of an output by the regularizer of a key of the configuration, or given."""
        axes = [*range(1, y.type.ndim)]
        cost = self._regularized(key, y, axes, given)
        if cost is not None and self.rows_in_row > 1:
            raise self.fault(f"{key} of a layer of steps", "none")
        self.pass_.activities += [] if cost is None else [cost]

    def _regularized(
        self, key: str, variable: TensorVariable, axes: list[int] | None, given: Any = None
    ) -> TensorVariable | None:
        """The cost of a variable by L1, L2 or both, summed over axes, by default over all."""
        given = self.value(key) if given is None else given
        if given is None:
            return None
        if isinstance(given, str):
            given = {"class_name": given.upper(), "config": {}}
        config = given.get("config") if isinstance(given, dict) else None
        classes = {"L1": ("l1",), "L2": ("l2",), "L1L2": ("l1", "l2"), "L1_L2": ("l1", "l2")}
        factors = classes.get(given["class_name"]) if isinstance(config, dict) else None
        if factors is None or not isinstance(config, dict):
            raise self.fault(f"{key} {shown(given)}", "L1, L2 or L1L2")
        cost = pt.constant(np.zeros((), self.dtype))
        for factor, size in (("l1", abs), ("l2", pt.sqr)):
            weight = config.get(factor, 0.01) if factor in factors else 0
            if type(weight) not in (int, float) or not 0 <= weight < 1e30:
                raise self.fault(f"{key} {shown(given)}", "factors of at least 0")
            if weight:
                cost = cost + np.asarray(weight, self.dtype) * size(variable).sum(axis=axes)
        return cost

    def inner(self, key: str) -> AnyLayer:
        """A layer or model in the configuration."""
        self._read.add(key)
        return read_layer(self.config.get(key), f"{self.name}.{key}", self.pass_.budget)

    def inners(self, key: str) -> list[AnyLayer]:
        """Several layers in the configuration."""
        self._read.add(key)
        place, budget = f"{self.name}.{key}", self.pass_.budget
        return [read_layer(v, f"{place}{n}", budget) for n, v in enumerate(self.config[key])]

    def inside(self, layer: AnyLayer) -> "Call":
        """A call of a layer inside this one, whose lowering is this one's too."""
        if not isinstance(layer, LayerData):
            raise self.fault(f"the model {layer.name}", "a layer")
        found = Call(self.pass_, layer, f"{self.name}.{layer.name}", {})
        found.training = self.training
        self._inside.append(found)
        return found

    @property
    def rows_in_row(self) -> int:
        """Number of the minibatch's rows that are steps of one row of the run's."""
        return self.pass_.rows_in_row

    @contextlib.contextmanager
    def several_rows(self, count: int) -> Iterator[None]:
        """Build layers of which a number of rows are steps of one row of the run's."""
        before = self.pass_.rows_in_row
        self.pass_.rows_in_row = count * before
        try:
            yield
        finally:
            self.pass_.rows_in_row = before

    def apply(self, layer: AnyLayer, name: str, *inputs: Any, **keywords: Any) -> Outputs:
        """Build the outputs of a layer inside this one, under its own name behind this one's."""
        name = f"{self.name}.{name}" if name else self.name
        return self.pass_.apply(layer, name, inputs, keywords)

    def mask_of(self, x: Any) -> TensorVariable | None:
        """The mask of a variable, bool (batch, step), or None."""
        return self.pass_.masks.get(x)

    def set_mask(self, y: TensorVariable, mask: TensorVariable | None) -> TensorVariable:
        """Return an output, after its mask was set."""
        if mask is not None:
            self.pass_.masks[y] = mask
        return y

    def next_random(self) -> int:
        """Number of the next random mask of the graph."""
        return self.pass_.next_random()

    def fault(self, found: str, expected: str) -> InputError:
        """The error about something that this layer can't use."""
        return InputError(f"{self.name}: found {found}, expected {expected}")

    def check_finished(self) -> None:
        """Refuse a value of the configuration, or of the call, that the lowering left unread."""
        for call in self._inside:
            call.check_finished()
            if call.value("activity_regularizer") is not None:
                raise call.fault("activity_regularizer", "none: it is that of the layer around")
        if self.kind.startswith("own:"):
            return
        dtype = self.config.get("dtype")
        dtype = dtype.get("config", {}).get("name") if isinstance(dtype, dict) else dtype
        if not self.kind.startswith("ops.") and dtype not in (None, "float32", "float64"):
            raise self.fault(f"dtype {shown(dtype)}", "float32: a run's precision is its own")
        self.value("activity_regularizer")  # of which `Pass` adds the cost
        left = {k: v for k, v in self.config.items() if k not in self._read}
        left |= self.keywords
        for key, value in left.items():
            is_initial = key.endswith("_initializer")
            if value not in (None, False, 0) and value != [] and not is_initial:
                raise self.fault(f"{key} {shown(str(value))}", f"none: {key} is not supported")


def _flat(values: Any, keys: Sequence[str] = ()) -> list[Any]:
    """The variables in nested lists and mappings."""
    return [part for part in _parts(values, keys) if isinstance(part, Variable)]


def _parts(values: Any, keys: Sequence[str] = ()) -> list[Any]:
    """The values in nested lists and mappings; of one that has some keys, in their order."""
    if isinstance(values, Mapping):
        values = [values[k] for k in (keys if keys and {*keys} <= {*values} else sorted(values))]
    if isinstance(values, list | tuple):
        return [part for value in values for part in _parts(value, keys)]
    return [values]


@contextlib.contextmanager
def _faults_named(name: str) -> Iterator[None]:
    """Name the layer in errors about shapes and types, and make them `InputError`s."""
    try:
        yield
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
        text = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{name}: {text}") from error


# Axes


def planes(x: TensorVariable, data_format: Any = "channels_last") -> TensorVariable:
    """Images or sequences as (batch, channel, row, column), of sequences in one column.

    Where x is such a view already, what it is a view of: so pairs of shuffles cancel.
    """
    if data_format == "channels_first":
        return x if x.type.ndim == 4 else x.dimshuffle(0, 1, 2, "x")
    order: tuple[Any, ...] = (0, 3, 1, 2) if x.type.ndim == 4 else (0, 2, 1, "x")
    if x.type.ndim not in (3, 4):
        raise ValueError(f"found an input of shape {x.type.shape}, expected images or sequences")
    if is_view(x):
        return cast(TensorVariable, cast(Any, x.owner).inputs[0])
    return x.dimshuffle(*order)


def pixels(y: TensorVariable, ndim: int, data_format: Any = "channels_last") -> TensorVariable:
    """Turn (batch, channel, row, column) back to images of 4 or sequences of 3 axes."""
    if data_format == "channels_first":
        return y if ndim == 4 else y.dimshuffle(0, 1, 2)
    return y.dimshuffle(0, 2, 3, 1) if ndim == 4 else y.dimshuffle(0, 2, 1)


def is_view(x: TensorVariable) -> bool:
    """Return whether x is what `pixels` returned."""
    order = getattr(getattr(x.owner, "op", None), "new_order", None)
    return order in ((0, 2, 3, 1), (0, 2, 1)) and cast(Any, x.owner).inputs[0].type.ndim == 4


def by_element(function: Callable[..., TensorVariable], *inputs: Any) -> TensorVariable:
    """Apply a function of each element, of (batch, channel, row, column) where inputs are views."""
    variables = [x for x in inputs if isinstance(x, TensorVariable) and x.type.ndim]
    ndims = {x.type.ndim for x in variables}
    if len(ndims) == 1 and ndims <= {3, 4} and any(map(is_view, variables)):
        moved = [planes(x) if isinstance(x, TensorVariable) and x.type.ndim else x for x in inputs]
        return pixels(function(*moved), ndims.pop())
    return function(*inputs)


def number(value: float, like: "TensorVariable | Call") -> np.ndarray:
    """A constant of the dtype of a variable, or of a layer's network."""
    return np.asarray(value, like.dtype)
