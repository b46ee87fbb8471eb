"""Networks of the configuration that are models of Keras: ``network: model.keras``.

A process of its own imports Keras and converts the model; the launcher reads what it has written.
"""

import importlib.util
import json
import subprocess
import sys

from tandem.artifacts.checkpoint import read_header
from tandem.config.schema import KERAS_APPLICATIONS, KERAS_SUFFIX, Config
from tandem.data.manifest import read_any_manifest
from tandem.errors import InputError
from tandem.files import make_folder

INITIAL = "initial.safetensors"  # the converted model, with which a run begins


def with_keras_model(config: Config) -> Config:
    """The settings with a model of Keras as our network, converted in the run folder once.

    `network_options` are arguments of the function of `keras.applications`; by default ``classes``
    and ``input_shape`` are those of the data. Raises InputError where the model cannot be had.
    """
    name = config.network
    if not name.endswith(KERAS_SUFFIX) and not name.startswith(KERAS_APPLICATIONS):
        return config
    target = config.weights_path / INITIAL
    if not target.exists():
        if importlib.util.find_spec("keras") is None:
            raise InputError(f"network: {name} needs Keras: pip install 'tandem-train[keras]'")
        options = dict(config.network_options)
        if name.startswith(KERAS_APPLICATIONS):
            side = config.crop_size
            classes = read_any_manifest(config.manifest_path).classes
            options = {"classes": classes, "input_shape": [side, side, 3], **options}
        make_folder(config.weights_path)
        command = [sys.executable, "-m", "tandem.keras.loading", name, str(target)]
        done = subprocess.run(
            [*command, json.dumps(options)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
            raise InputError(last[0] if done.returncode == 2 else f"network: {name}: {last[0]}")
    found = read_header(target).network
    changes = {
        "network": found.network,
        "network_options": dict(found.options),
        "crop_size": found.crop_size or config.crop_size,
        "init_weights": config.init_weights or str(target),
    }
    return config.model_copy(update=changes)
