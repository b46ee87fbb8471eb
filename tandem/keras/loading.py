"""Keras models from our checkpoints, and checkpoints from them; imports Keras.

In a process of its own: python -m tandem.keras.loading model.keras model.safetensors '{}' '{}'
"""

import json
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras

from tandem.artifacts.checkpoint import Checkpoint, read_checkpoint, save_checkpoint
from tandem.artifacts.run_folder import list_checkpoints
from tandem.config.schema import KERAS_APPLICATIONS
from tandem.errors import InputError
from tandem.keras.compilation import check_model, without_keras
from tandem.keras.graph import read_graph
from tandem.keras.variables import untrained
from tandem.keras.weights import read_weights, write_weights
from tandem.layers.network import KERAS_NETWORK, NetworkDescription, build_network
from tandem.nested import plain
from tandem.validation import shown

log = logging.getLogger(__name__)


def read_model(path: str | os.PathLike[str], options: Mapping[str, Any]) -> Any:
    """Read a Keras model, see `tandem.keras.load_model`."""
    path = Path(path)
    if path.is_dir():
        found = list_checkpoints(path)
        if not found:
            raise InputError(f"{path}: found no checkpoint, expected the folder of a run")
        path = found[-1]
    if path.suffix != ".safetensors":
        return keras.saving.load_model(path, **options)
    checkpoint = read_checkpoint(path)
    if checkpoint.network.network != KERAS_NETWORK:
        raise InputError(
            f"{path}: found the network {checkpoint.network.network}, expected a Keras model"
        )
    values, custom = checkpoint.network.options.get("model"), options.get("custom_objects") or {}
    read_graph(values)
    _check_modules(values, path, {*custom})
    model = keras.saving.deserialize_keras_object(values, custom_objects=custom)
    write_weights(model, checkpoint.weights)
    return model


def _check_modules(values: Any, path: Path, known: set[str]) -> None:
    """Refuse names of a file by which Keras would import code that the caller does not give."""
    if isinstance(values, Mapping):
        module, name = values.get("module"), values.get("class_name")
        is_code = name in ("__lambda__", "function") or (
            isinstance(module, str) and module.partition(".")[0] not in ("keras", "builtins")
        )
        if "class_name" in values and is_code and name not in known:
            raise InputError(
                f"{path}: found {shown(name)} of {shown(module)}, expected it in custom_objects: a "
                "file does not decide what code is run"
            )
        values = list(values.values())
    for value in values if isinstance(values, list | tuple) else ():
        _check_modules(value, path, known)


def find_model(source: str, options: Mapping[str, Any]) -> Any:
    """A model of a ``.keras`` file, or of `keras.applications` by its name and arguments."""
    if not source.startswith(KERAS_APPLICATIONS):
        if not Path(source).is_file():
            raise InputError(f"network: found no file {source}, expected a model of Keras")
        return keras.saving.load_model(source, compile=False)
    name = source.removeprefix(KERAS_APPLICATIONS)
    make = getattr(keras.applications, name, None)
    if not callable(make):
        raise InputError(f"network: found no {name} in keras.applications")
    try:
        return make(**{"weights": None, **options})
    except (TypeError, ValueError) as error:
        raise InputError(f"network_options: {name} cannot be made: {error}") from error


def write_checkpoint(
    source: str, target: Path, options: Mapping[str, Any], conditions: Mapping[str, str] = {}
) -> None:
    """Convert a model of Keras, see `find_model`, to a checkpoint with such `conditions`."""
    model = find_model(source, options)
    check_model(model)
    (first, *others), outputs = model.inputs, model.outputs
    shape, classes = first.shape[1:], sum(int(keras.ops.size(_one_row(y))) for y in outputs)
    is_picture = not others and len(shape) == 3 and shape[0] == shape[1] and shape[2] in (1, 3)
    values = plain({"model": without_keras(model)})
    side = int(shape[0]) if is_picture else None
    network = build_network(
        NetworkDescription(side, classes, 1.0, network=KERAS_NETWORK, options=values)
    )
    values["output"] = network.own_activation[0]  # type: ignore[attr-defined]
    described = NetworkDescription(side, classes, 1.0, network=KERAS_NETWORK, options=values)
    checkpoint = Checkpoint(
        read_weights(model),
        {},
        described,
        conditions=dict(conditions),
        untrained=untrained(model),
    )
    save_checkpoint(target, checkpoint)
    log.info("wrote %s: %s, %d parameters", target, model.name, model.count_params())


def _one_row(output: Any) -> Any:
    if None in output.shape[1:]:
        raise InputError(
            f"network: found an output of shape {output.shape}, expected known lengths"
        )
    return keras.ops.zeros((1, *output.shape[1:]))


def write_keras(source: Path, target: Path) -> None:
    """Write the model of a checkpoint as a ``.keras`` file."""
    read_model(source, {}).save(target)
    log.info("wrote %s", target)


def main(source: str, target: str, options: str, conditions: str) -> int:
    """Convert a model to a checkpoint; a sentence to standard error says what cannot be."""
    try:
        write_checkpoint(source, Path(target), json.loads(options), json.loads(conditions))
    except InputError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
