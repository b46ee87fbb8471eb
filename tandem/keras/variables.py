"""Keras's variables, those of its optimizer too, as a checkpoint of a run, and back."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tandem.artifacts.checkpoint import Checkpoint, RunState
from tandem.errors import InputError
from tandem.keras.compilation import accumulated, states_of
from tandem.keras.weights import (
    from_ours,
    parts_of,
    read_weights,
    to_ours,
    variables,
    write_weights,
)
from tandem.layers.network import NetworkDescription
from tandem.optim import optimizer_of
from tandem.validation import listed


def untrained(model: Any) -> tuple[str, ...]:
    """Names of the running averages, which no optimizer steps."""
    fixed = {id(v) for layer in _layers(model) for v in layer._non_trainable_variables}
    return tuple(name for name, _, variable in variables(model) if id(variable) in fixed)


def check_variables(model: Any) -> None:
    """Refuse what a model's configuration does not say of its variables, by an InputError.

    It says which layers are trained, and what regularizes variables of Keras's layers.
    """
    trained = {id(variable) for variable in model.trainable_variables}
    fixed = {id(v) for layer in _layers(model) for v in layer._non_trainable_variables}
    fixed |= {id(variable) for variable in _frozen(model)}
    for name, _, variable in variables(model):
        if (id(variable) in trained) == (id(variable) in fixed):
            found = "is" if id(variable) in trained else "is not"
            raise InputError(
                f"{name}: found a variable that {found} trained, expected trainable="
                f"{id(variable) in trained} of its whole layer: a model's configuration has that "
                "alone"
            )
        if variable.constraint is not None:
            raise InputError(
                f"{name}: found a constraint, expected none: constraints of parameters are not "
                "supported"
            )
    for layer in _layers(model):
        is_own = not type(layer).__module__.startswith("keras.")
        for variable in layer.weights if is_own else ():
            key = f"{variable.name.removesuffix('_kernel')}_regularizer"
            if variable.regularizer is not None and layer.get_config().get(key) is None:
                raise InputError(
                    f"{layer.name}: found a regularizer of {variable.name}, expected it as {key} "
                    "of get_config"
                )


def _frozen(layer: Any) -> list[Any]:
    """Variables of the layers that are not trained by a model's configuration."""
    cells = [layer.cell] if type(layer).__name__ == "RNN" else getattr(layer, "cells", [])
    if parts := (*parts_of(layer), *cells):
        return [variable for part in parts for variable in _frozen(part)]
    return [] if layer.trainable else [*layer.variables]


def _layers(model: Any) -> list[Any]:
    return [*model._flatten_layers(include_self=False)]


def as_checkpoint(
    model: Any, network: NetworkDescription, epoch: int, config: Mapping[str, Any]
) -> Checkpoint:
    """The weights and the optimizer's states of a compiled model, after so many epochs.

    `config` has the settings that say of which optimizer the states are.
    """
    weights, averages = read_weights(model), untrained(model)
    zeros = {name: np.zeros_like(v) for name, v in weights.items() if name not in averages}
    states = {state: dict(zeros) for state in optimizer_of(config).states}
    for state, name, kind, variable, of in _states(model):
        states[state][name] = np.ascontiguousarray(
            to_ours(kind, variable, np.asarray(of.numpy())), np.float32
        )
    state = RunState(epoch=epoch, updates=int(model.optimizer.iterations), history=({},) * epoch)
    return Checkpoint(weights, states, network, state, dict(config), {}, averages)


def _states(model: Any) -> Any:
    """Each state of each trained parameter: its name, the parameter's, and Keras's variables."""
    optimizer = model.optimizer
    places = {id(variable): n for n, variable in enumerate(optimizer._trainable_variables)}
    for state, values in states_of(optimizer).items():
        for name, kind, variable in variables(model):
            place = places.get(id(variable))
            if place is not None and place < len(values):
                yield state, name, kind, variable, values[place]


def load(model: Any, checkpoint: Checkpoint, states: bool = True) -> None:
    """Set a model's variables, and its optimizer's, from a checkpoint of its run."""
    write_weights(model, checkpoint.weights)
    if not states or model.optimizer is None:
        return
    if missing := {*states_of(model.optimizer)} - {*checkpoint.states}:
        raise InputError(
            f"optimizer: found {type(model.optimizer).__name__} and a run without "
            f"{listed(sorted(missing))}, expected the optimizer of the run that is continued"
        )
    for state, name, kind, variable, of in _states(model):
        of.assign(from_ours(kind, variable, checkpoint.states[state][name]))
    optimizer, updates = model.optimizer, checkpoint.state.updates
    optimizer._iterations.assign(updates * accumulated(optimizer))
    if hasattr(optimizer, "_u_product"):  # of Nadam
        steps = np.arange(1, updates + 1)
        optimizer._u_product.assign(np.prod(optimizer.beta_1 * (1 - 0.5 * 0.96**steps)))
