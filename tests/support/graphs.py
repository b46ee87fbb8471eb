"""Checkpoints of networks whose graph is data."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytensor

from tandem.artifacts.checkpoint import Checkpoint, RunState, save_checkpoint
from tandem.layers.network import GRAPH_NETWORK, Network, NetworkDescription
from tandem.nn.graph import Graph
from tandem.nn.network import GraphNetwork
from tests.support.op_checks import MODE, plain_python


def describe_graph(
    layers: Sequence[Any], crop_size: int | None = None, **fields: Any
) -> NetworkDescription:
    """The description of layers one after another, of which the first is an `Input`."""
    graph = Graph.chained(layers)
    options = {"graph": graph.to_json(), "output": graph.output, **fields.pop("options", {})}
    classes = int(np.prod(graph.output_shape))
    return NetworkDescription(
        crop_size, classes, 1.0, network=GRAPH_NETWORK, options=options, **fields
    )


def save_graph(
    path: Path,
    description: NetworkDescription,
    config: dict[str, Any] | None = None,
    state: RunState | None = None,
) -> Path:
    """Write a checkpoint of random weights; return `path`."""
    options = {key: description.options[key] for key in ("graph", "output")}
    network = GraphNetwork(description.crop_size, description.classes, 1.0, "float32", **options)
    rng = np.random.default_rng(5)
    weights = {
        name: rng.uniform(-0.5, 0.5, variable.type.shape).astype(np.float32)
        + np.float32(name.endswith("running_var"))
        for name, variable in network.parameters.items()
    }
    save_checkpoint(path, Checkpoint(weights, {}, description, state or RunState(), config or {}))
    return path


def predicted(network: Network, images: np.ndarray) -> np.ndarray:
    """What a network predicts, by the Ops' NumPy, for (batch, channel, row, column) or rows."""
    variable = network.images()
    with plain_python():
        outputs = network.predictions(network.logits(variable, None))
        return pytensor.function([variable], outputs, mode=MODE)(images)
