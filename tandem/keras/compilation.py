"""The choices of Keras's `compile`, as settings and data of a run; it imports Keras."""

import functools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

from tandem.errors import InputError
from tandem.keras.arrays import fits_output, in_order
from tandem.keras.losses import OF_GROUPS, OF_LABELS, is_here
from tandem.keras.weights import kind_of
from tandem.optim.averaged import AVERAGE
from tandem.validation import listed, suggestion

_MOMENTS = {"first_moment": "_momentums", "second_moment": "_velocities"}


@dataclass(frozen=True)
class _Optimizer:
    """The counterpart of a class of Keras: its arguments by our settings, and its states."""

    name: str
    settings: Mapping[str, str]
    states: dict[str, str]  # attribute of Keras's, by ours
    fixed: Mapping[str, Any] = field(default_factory=dict)


def _named(prefix: str, *arguments: str) -> dict[str, str]:
    """Arguments of Keras by our settings, whose names begin with the optimizer's."""
    ours = {"rho": "decay", "beta_1": "beta1", "beta_2": "beta2"}
    return {f"{prefix}_{ours.get(name, name)}": name for name in arguments}


_BETAS = _named("adam", "beta_1", "beta_2", "epsilon")
_ADAM = _Optimizer(
    "adam",
    {**_BETAS, "adam_amsgrad": "amsgrad"},
    {**_MOMENTS, "largest_second_moment": "_velocity_hats"},
    {"adam_epsilon_hat": True},
)
_OPTIMIZERS = {
    "SGD": _Optimizer(
        "sgd",
        {"momentum": "momentum", "use_nesterov_momentum": "nesterov"},
        {"momentum": "momentums"},
    ),
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "Nadam": _Optimizer("nadam", _BETAS, _MOMENTS, {"nadam_decay": 1.0}),
    "Adamax": _Optimizer("adamax", _BETAS, {"first_moment": "_m", "infinity_norm": "_u"}),
    "RMSprop": _Optimizer(
        "rmsprop",
        _named("rmsprop", "rho", "epsilon", "momentum", "centered"),
        {
            "mean_square": "_velocities",
            "momentum": "_momentums",
            "mean_gradient": "_average_gradients",
        },
        {"rmsprop_epsilon_inside": True},
    ),
    "Adagrad": _Optimizer(
        "adagrad", _named("adagrad", "epsilon"), {"sum_of_squares": "_accumulators"}
    ),
    "Adadelta": _Optimizer(
        "adadelta",
        _named("adadelta", "rho", "epsilon"),
        {"mean_square": "_accumulated_grads", "mean_squared_step": "_accumulated_delta_vars"},
    ),
    "Lion": _Optimizer("lion", _named("lion", "beta_1", "beta_2"), {"momentum": "_momentums"}),
}
_CLIPS = {"clip_norm": "clipnorm", "clip_global_norm": "global_clipnorm", "clip_value": "clipvalue"}
_METHODS = (
    *("call", "fit", "train_step", "test_step", "compute_loss", "compute_metrics"),
    *("make_train_function", "make_test_function"),
)
_AT_DEFAULT = {"axis": -1, "ignore_class": None, "from_sorted_ids": False}
_TRACED = (  # functions of metrics that become graphs; others, and those of users, Keras measures
    *("accuracy", "binary_accuracy", "binary_focal_crossentropy", "categorical_focal_crossentropy"),
    *("categorical_hinge", "cosine_similarity", "huber", "kl_divergence", "log_cosh", "poisson"),
    *("mean_absolute_error", "mean_absolute_percentage_error", "mean_squared_error"),
    "mean_squared_logarithmic_error",
)
_MEANS = ("mean", "sum_over_batch_size")
OWN = "own"  # the function of a loss of the user's
_AS_GIVEN = (OWN, "circle", "ctc", "categorical_generalized_cross_entropy")
"""Losses whose targets may have another shape than outputs."""
_AVERAGE = {AVERAGE: "_model_variables_moving_average"}  # of any optimizer's weights


def check_model(model: Any) -> None:
    """Refuse what has no graph, and a training step of one's own, by an InputError."""
    if not isinstance(model, keras.Model):
        raise InputError(f"model: found {type(model).__name__}, expected a keras.Model")
    name, kind = model.name, type(model)
    if not isinstance(model, keras.Sequential | _functional()):
        raise InputError(
            f"{name}: found the subclassed model {kind.__name__}, expected a Functional or "
            "Sequential one: a method call is code, which other processes do not run"
        )
    if method := own_method(model, *_METHODS):
        raise InputError(
            f"{name}: found a {method} of {kind.__name__}'s own, expected Keras's: "
            "other processes train the graph of its layers"
        )


def check_activations(model: Any) -> None:
    """Refuse functions that have the names of Keras's activations, by an InputError.

    A layer's configuration has the name alone.
    """
    layers = model._flatten_layers(include_self=False)
    for layer in (each for each in layers if type(each).__module__.startswith("keras.")):
        for key in ("activation", "recurrent_activation"):
            found = getattr(layer, key, None)
            name = getattr(found, "__name__", "")
            if getattr(keras.activations, name, found) is not found:
                raise InputError(
                    f"{layer.name}: found the {key} {found.__module__}.{name}, expected "
                    f"keras.activations.{name}, or a layer of your own"
                )


def own_method(found: Any, *methods: str) -> str | None:
    """The first of some methods that a model, loss or metric has from outside Keras, if any."""
    for method in methods:
        owner = next((base for base in type(found).__mro__ if method in vars(base)), None)
        if owner is not None and not owner.__module__.startswith("keras."):
            return method
    return None


def _functional() -> type:
    return type(keras.Model(inputs := keras.Input((1,)), inputs))


@dataclass(frozen=True)
class Compilation:
    """The choices of `compile`.

    Attributes
    ----------
    settings : dict
        Keys of the configuration.
    losses, metrics : list of dict
        As those of `tandem.keras.losses.Objective`.
    foreign : tuple of str
        Names of the metrics that Keras alone measures.
    as_given : frozenset of int
        Outputs whose targets have a shape of their own, of losses alone that take it.
    """

    settings: Mapping[str, Any]
    losses: Sequence[Mapping[str, Any]]
    metrics: Sequence[Mapping[str, Any]]
    foreign: tuple[str, ...]
    as_given: frozenset[int]

    @classmethod
    def of(cls, model: Any, row: Callable[[], tuple[Any, Any]]) -> "Compilation":
        """Read a compiled model; `row` returns inputs and targets of one row.

        Raises
        ------
        InputError
            The model is not compiled, or with what has no counterpart.
        """
        if not model.compiled or model.optimizer is None or model.loss is None:
            raise InputError(
                f"{model.name}: found no optimizer and loss, expected a call of compile first"
            )
        for loss in keras.tree.flatten(model.loss):
            # Of these two Keras chooses one by the shapes.
            if isinstance(loss, str) and loss.lower() not in ("crossentropy", "ce"):
                try:
                    keras.losses.get(loss)
                except ValueError:
                    hint = suggestion(loss, filter(str.islower, dir(keras.losses)))
                    raise InputError(f"loss: found {loss}, expected one of Keras's{hint}") from None
        settings = optimizer_settings(model.optimizer)
        x, y = row()
        model.evaluate(x, y, verbose=0)  # by which Keras finds what names stand for
        model.reset_metrics()
        model.optimizer.build(model.trainable_variables)
        if model.optimizer.weight_decay:
            settings["decay_kinds"] = _decay_kinds(model)
        outputs = [tuple(tensor.shape[1:]) for tensor in model.outputs]
        given = [each.shape[1:] for each in in_order(y, output_names(model), "y")]
        shapes = [
            (output if fits_output(target, output) else target, output)
            for target, output in zip(given, outputs, strict=True)
        ]
        losses = [*_losses(model, shapes)]
        as_given = frozenset(n for n, (target, output) in enumerate(shapes) if target != output)
        as_given -= {each["output"] for each in losses if each["function"] not in _AS_GIVEN}
        kinds = {loss["output"]: loss["function"] in OF_LABELS for loss in losses}
        metrics, foreign = _metrics(model._compile_metrics, kinds, shapes)
        return cls(settings, losses, metrics, foreign, as_given)

    @property
    def of_groups(self) -> bool:
        """Return whether a loss is one of all rows together."""
        return any(
            each["function"] in OF_GROUPS
            or "ignore_class" in each["options"]
            or each["reduction"] == "mean_with_sample_weight"
            for each in self.losses
        )

    def ignored(self, output: int) -> int | None:
        """The label of an output that its loss leaves out, if there is one."""
        found = (x["options"].get("ignore_class") for x in self.losses if x["output"] == output)
        return next(found, None)

    def takes_labels(self, output: int) -> bool:
        """Return whether targets of an output are whole numbers."""
        return any(
            each["function"] in OF_LABELS for each in self.losses if each["output"] == output
        )


def optimizer_settings(optimizer: Any) -> dict[str, Any]:
    """The keys of the configuration that an optimizer stands for; InputError for another."""
    kind, rate = type(optimizer).__name__, optimizer._learning_rate
    if callable(rate) and not isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        raise InputError(
            f"{kind}: found a function as learning_rate, expected a number or a "
            "LearningRateSchedule"
        )
    config = optimizer.get_config()
    found = _OPTIMIZERS.get(kind) if type(optimizer).__module__.startswith("keras.") else None
    if found is None:
        raise InputError(f"optimizer: found {kind}, expected any of {', '.join(_OPTIMIZERS)}")
    if config.get("loss_scale_factor") is not None:
        raise InputError(f"{kind}: found a loss_scale_factor, expected None")
    if config["use_ema"] and accumulated(optimizer) > 1:
        raise InputError(f"{kind}: found use_ema with gradient_accumulation_steps, expected one")
    settings = {ours: config[theirs] for ours, theirs in found.settings.items()}
    if kind == "SGD":
        settings["use_momentum"] = settings["momentum"] > 0
        settings["use_nesterov_momentum"] &= settings["use_momentum"]
    decay = config.get("weight_decay") or 0.0
    clips = {ours: config[theirs] for ours, theirs in _CLIPS.items() if config.get(theirs)}
    if config["use_ema"]:
        settings["average_weights"] = config["ema_momentum"]
        settings["average_overwrites"] = config["ema_overwrite_frequency"] or 0
    return {
        **settings,
        **found.fixed,
        **clips,
        "optimizer": found.name,
        "weight_decay": decay,
        "decoupled_decay": decay > 0,
        "bias_rate": 1.0,
    }


def _decay_kinds(model: Any) -> list[str]:
    """The kinds of parameters that decay; InputError where only some of a kind do."""
    decays: dict[str, set[bool]] = {}
    for variable in model.trainable_variables:
        kind = kind_of(variable.name)[1]
        decays.setdefault(kind, set()).add(model.optimizer._use_weight_decay(variable))
    if mixed := [kind for kind, found in decays.items() if len(found) > 1]:
        raise InputError(
            f"exclude_from_weight_decay: found some parameters of the kind {listed(mixed)}, "
            "expected all of a kind, such as biases, or none"
        )
    return [kind for kind, found in decays.items() if found == {True}]


def states_of(optimizer: Any) -> dict[str, list[Any]]:
    """Keras's variables of each of our optimizer's states, in the order of its own; built."""
    names = _OPTIMIZERS[type(optimizer).__name__].states | _AVERAGE
    found = {ours: getattr(optimizer, theirs, None) for ours, theirs in names.items()}
    return {ours: [*values] for ours, values in found.items() if values}


def accumulated(optimizer: Any) -> int:
    """The batches of which an update has the mean of the gradients."""
    return optimizer.gradient_accumulation_steps or 1


def rates_of(optimizer: Any, steps: int) -> tuple[float, ...]:
    """The learning rates of the next updates, of which the last goes on."""
    rate = optimizer._learning_rate  # a schedule, or a variable
    if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        begin, each = int(optimizer.iterations) + 1, accumulated(optimizer)
        return tuple(float(rate(n * each - 1)) for n in range(begin, begin + steps))
    return (float(optimizer.learning_rate),)


Shapes = Sequence[tuple[Any, Any]]
"""Of a row of the targets, and of each output."""


def _losses(model: Any, shapes: Shapes) -> Iterator[dict[str, Any]]:
    compiled = model._compile_loss
    for path, loss, weight, key in compiled._flat_losses:
        place, output = f"loss {loss.name}", _output(path, model)
        reduction = "mean" if loss.reduction in _MEANS else loss.reduction
        if reduction not in ("mean", "sum", "mean_with_sample_weight"):
            raise InputError(
                f"{place}: found reduction={loss.reduction!r}, expected sum_over_batch_size, sum "
                "or mean_with_sample_weight"
            )
        if own_method(loss, "__call__"):
            raise InputError(
                f"{place}: found a __call__ of {type(loss).__name__}'s own, expected a call of "
                "its own, which returns numbers for each row"
            )
        known = None if own_method(loss, "call") else getattr(loss, "fn", None)
        function = function_of(known, getattr(loss, "_fn_kwargs", {}))
        if not is_here(function):
            is_keras = type(loss).__module__.startswith("keras.") and function["function"]
            graph = traced(loss.call, *shapes[output], place, reduction == "mean")
            name = function["function"] if is_keras else OWN
            function = {"function": name, "graph": graph, "options": {}}
        if function["function"] in OF_GROUPS and reduction != "mean":
            raise InputError(f"{place}: found reduction={reduction!r}, expected its default")
        yield {
            **function,
            "reduction": reduction,
            "name": key,
            "output": output,
            "weight": 1.0 if weight is None else float(weight),
        }


def traced(
    call: Callable[..., Any], target: Any, output: Any, place: str, has_mean: bool = True
) -> dict[str, Any]:
    """The graph of a loss or metric, as a model of targets and outputs, by a call with symbols.

    A mean of all values is left out, if that of rows follows. Raises InputError where the
    function takes no symbols, or returns no values of rows.
    """
    y, p = keras.Input(target, name="targets"), keras.Input(output, name="outputs")
    way_out = (
        "operations of keras.ops, which give numbers for each row: for anything else write a layer "
        "of your own with a lowering, whose output is the loss"
    )
    try:
        found = call(y, p)
    except Exception as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        raise InputError(f"{place}: found {text} of symbols, expected {way_out}") from error
    if has_mean and isinstance(found, keras.KerasTensor) and found.shape == ():
        operation, number, _ = found._keras_history
        if type(operation).__name__ == "Mean" and operation.axis is None:
            found = operation._inbound_nodes[number].arguments.args[0]
    if not isinstance(found, keras.KerasTensor) or found.shape[:1] != (None,):
        shape = getattr(found, "shape", None)
        raise InputError(f"{place}: found a result of shape {shape}, expected {way_out}")
    return without_keras(keras.Model([y, p], found))


def _output(path: Sequence[Any], model: Any) -> int:
    """The number of the output at a path into Keras's structure of them."""
    if not path:
        return 0
    if isinstance(path[0], int):
        return int(path[0])
    return output_names(model).index(path[0])


def output_names(model: Any) -> list[str]:
    """Names of the outputs of a built model, as Keras begins those of losses and metrics."""
    graph = getattr(model, "_functional", None) or model  # of a Sequential
    outputs = graph._outputs_struct
    return sorted(outputs) if isinstance(outputs, dict) else [*graph.output_names]


def _metrics(
    compiled: Any, labels: Mapping[int, bool], shapes: Shapes
) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """The metrics that we have, under Keras's names, and the names of others."""
    found, foreign, seen = [], [], Counter[str]()
    groups = [] if compiled is None else [(g, False) for g in enumerate(compiled._flat_metrics)]
    groups += [(g, True) for g in enumerate(compiled._flat_weighted_metrics)] if groups else []
    for (output, group), weighted in groups:
        for metric in group.metrics if group else ():
            prefix = f"{group.output_name}_" if group.output_name else ""
            name = prefix + metric.name
            name = f"{prefix}weighted_{metric.name}" if weighted and name in seen else name
            seen[name] += 1
            name = name if seen[name] == 1 else f"{name}_{seen[name] - 1}"
            has_own = own_method(metric, "update_state", "result", "reset_state")
            known = None if has_own else getattr(metric, "_fn", None)
            function = function_of(known, getattr(metric, "_fn_kwargs", {}))
            if function["function"] in _TRACED and shapes[output][0] == shapes[output][1]:
                call = functools.partial(metric._fn, **function.pop("options"))
                function["graph"] = traced(call, *shapes[output], f"metric {name}")
            own = (function["function"] in OF_LABELS) == labels.get(output)
            if own and ("graph" in function or is_here(function)):
                found.append({**function, "name": name, "output": output, "weighted": weighted})
            else:
                foreign.append(name)
    return found, (*foreign,)


def function_of(function: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """The name of a function of Keras, empty for another, with options that are no defaults."""
    is_keras = (getattr(function, "__module__", "") or "").startswith("keras.")
    name = function.__name__ if is_keras else ""
    defaults = {"axis": None} if name in OF_GROUPS else _AT_DEFAULT
    given = {k: v for k, v in options.items() if k not in defaults or v != defaults[k]}
    return {"function": name, "options": given}


def without_keras(model: Any) -> dict[str, Any]:
    """The JSON of a model that a run needs: its graph, without what `compile` chose."""
    with warnings.catch_warnings():  # of a loss that is a lambda
        warnings.filterwarnings("ignore", message=".*includes a `lambda`")
        found = keras.saving.serialize_keras_object(model)
    found.pop("compile_config", None)
    return dict(found)


def first_rows(values: Any, count: int = 1) -> Any:
    """The first rows of each array of a structure."""
    return keras.tree.map_structure(lambda each: np.asarray(each[:count]), values)
