"""Models from checkpoints, a run's or a model's own."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.artifacts.checkpoint import read_checkpoint
from tandem.artifacts.run_folder import list_checkpoints
from tandem.config.schema import Config, make_config
from tandem.errors import InputError
from tandem.layers.network import GRAPH_NETWORK
from tandem.nn.compilation import Compilation
from tandem.nn.graph import Graph
from tandem.nn.losses import loss_of_run
from tandem.nn.model import Model
from tandem.optim import OPTIMIZERS


def read_model(path: str | os.PathLike[str], layers: Sequence[type], compile: bool) -> Model:
    """Read a model, see `tandem.nn.load_model`."""
    file = Path(path)
    if file.is_dir():
        found = list_checkpoints(file)
        if not found:
            raise InputError(f"{file}: found no checkpoint, expected the folder of a run")
        file = found[-1]
    checkpoint = read_checkpoint(file)
    description = checkpoint.network
    if description.network != GRAPH_NETWORK:
        raise InputError(
            f"{file}: found the network {description.network}, expected a model of tandem.nn: "
            "for others see tandem.validate and tandem.classify"
        )
    graph = Graph.from_json(description.options.get("graph"), layers)
    model = Model.of_graph(graph, "model")
    try:
        model.load_weights(checkpoint.weights)
    except InputError as error:
        raise InputError(f"{file}: {error}") from error
    model.trained = description
    if compile and checkpoint.config and not description.options.get("loss"):
        model.compilation = _compilation(checkpoint.config, description.options, graph)
    return model


def _compilation(
    config: Mapping[str, Any], options: Mapping[str, Any], graph: Graph
) -> Compilation:
    """The compilation of a run's settings."""
    from_logits = graph.output != options.get("output")
    settings = dict(make_config({k: v for k, v in config.items() if k in Config.model_fields}))
    chosen = OPTIMIZERS.chosen(settings)
    names = [*vars(chosen), "optimizer", "learning_rate", "bias_rate", "decay_kinds"]
    # Functions of the user's own are left out: a file does not decide what is imported.
    metrics = {name: name for name in settings["metrics"] if ":" not in name}
    loss = loss_of_run(settings, from_logits)
    return Compilation({name: settings[name] for name in names if name in settings}, loss, metrics)
