"""Networks of the configuration that are models of Keras: ``network: model.keras``.

A process of its own imports Keras and converts the model; the launcher reads what it has written.
"""

import hashlib
import importlib.util
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

from tandem.artifacts.checkpoint import read_header
from tandem.artifacts.run_folder import list_checkpoints
from tandem.config.schema import KERAS_APPLICATIONS, Config, is_keras_model
from tandem.data.manifest import read_any_manifest
from tandem.errors import InputError
from tandem.files import make_folder

log = logging.getLogger(__name__)

INITIAL = "initial.safetensors"  # the converted model, with which a run begins
_ORIGIN = "keras"  # the condition that says what it was converted from


def with_keras_model(config: Config, folder: Path) -> Config:
    """The settings with a model of Keras as our network, converted once in a folder.

    `network_options` are arguments of the function of `keras.applications`; by default ``classes``
    and ``input_shape`` are those of the data. A folder with checkpoints keeps the model of which
    they are. Raises InputError where the model cannot be had, or is another of the applications.
    """
    name = config.network
    if not is_keras_model(name):
        return config
    target, options = folder / INITIAL, dict(config.network_options)
    if name.startswith(KERAS_APPLICATIONS):
        side, classes = config.crop_size, read_any_manifest(config.manifest_path).classes
        options = {"classes": classes, "input_shape": [side, side, 3], **options}
    origin = _origin(name, options)
    found = read_header(target).conditions.get(_ORIGIN) if target.exists() else None
    if not target.exists() or (origin not in (None, found) and not list_checkpoints(folder)):
        _convert(name, target, options, {} if origin is None else {_ORIGIN: origin})
    elif None not in (origin, found) and origin != found:
        if name.startswith(KERAS_APPLICATIONS):
            raise InputError(
                f"network: {folder} holds checkpoints of {found}, expected that model, or another "
                "weights_dir"
            )
        log.warning(  # Keras saves no model twice with the same bytes
            "network: %s is not the file of which the checkpoints in %s are, which go on",
            name,
            folder,
        )
    header = read_header(target).network
    changes = {
        "network": header.network,
        "network_options": dict(header.options),
        "crop_size": header.crop_size or config.crop_size,
        "init_weights": config.init_weights or str(target),
    }
    return config.model_copy(update=changes)


def _origin(name: str, options: dict[str, Any]) -> str | None:
    """What decides on a model: its function and arguments, or the file; None without the file."""
    if name.startswith(KERAS_APPLICATIONS):
        return f"{name} {json.dumps(options, sort_keys=True)}"
    path = Path(name)
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def _convert(name: str, target: Path, options: dict[str, Any], conditions: dict[str, str]) -> None:
    if importlib.util.find_spec("keras") is None:
        raise InputError(f"network: {name} needs Keras: pip install 'tandem-train[keras]'")
    make_folder(target.parent)
    command = [sys.executable, "-m", "tandem.keras.loading", name, str(target)]
    done = subprocess.run(
        [*command, json.dumps(options), json.dumps(conditions)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise InputError(last[0] if done.returncode == 2 else f"network: {name}: {last[0]}")
