"""The graphs of a trainer's functions, over the global minibatch, with placements."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytensor.tensor as pt

from tandem.config.schema import Config
from tandem.layers import Network, Training
from tandem.layers.choices import metrics_of
from tandem.optim.parameter_groups import ParameterGroups
from tandem.placement import Partial, Partitioned, Placement, Shard, partition
from tandem.training.graphs import count_minibatch, minibatch_inputs, targets_of

# All that networks of classes can have
METRICS = (
    "accuracy",
    "top3",
    "mse",
    "mae",
    "precision",
    "f1",
    "binary_accuracy",
    "categorical_hinge",
)


@dataclass(frozen=True)
class PlacedGraph:
    """Outputs by name, inputs by name, and where they are."""

    outputs: dict[str, Any]
    inputs: dict[str, Any]
    given: dict[Any, Placement]
    wanted: dict[Any, Placement]

    def partition(self, ranks: int, rank: int = 0, **options: Any) -> Partitioned:
        """A rank's part of the graph."""
        placed = {"given": self.given, "wanted": self.wanted, "fixed": [*self.given]}
        return partition([*self.outputs.values()], ranks=ranks, rank=rank, **placed, **options)

    def values(self, network: Network, valid: int) -> dict[Any, Any]:
        """Random values of all inputs, and those of the network's parameters."""
        rng = np.random.default_rng(0)
        found = {variable: variable.get_value() for variable in network.parameters.values()}
        for name, variable in self.inputs.items():
            limit = {"pictures": 256, "labels": network.classes, "indices": 1000}.get(name, 2)
            value = rng.integers(0, limit, variable.type.shape).astype(variable.type.dtype)
            found[variable] = np.int64(valid) if name == "valid" else value
        return found


def _of_pictures(
    config: Config, network: Network, batch: int, mode: str
) -> tuple[dict[str, Any], Any, dict[Any, Placement]]:
    """The minibatch of all trainers, the images, and the placements of what is not replicated."""
    side = config.crop_size + 3
    mean = pt.tensor("mean", dtype=config.dtype, shape=(3, side, side))
    whole = config.model_copy(update={"batch_size": batch})
    minibatch, images = minibatch_inputs(whole, mean, coloured=mode == "train")
    names = ("pictures", "labels", "origins", "mirrored", "colours")
    given = {v: Shard(0) for name, v in minibatch.items() if name in names}
    return {**minibatch, "mean": mean}, images, given


def training_graph(
    network: Network, config: Config, batch: int, kind: str, is_short: bool = False
) -> PlacedGraph:
    """Gradients, statistics and counts, as a trainer computes them, of `batch` rows of all."""
    minibatch, images, given = _of_pictures(config, network, batch, "train")
    epoch = pt.tensor("epoch", dtype="int64", shape=())
    labels, valid = targets_of(minibatch, config.dtype), minibatch["valid"]
    rows = config.group_rows
    seed = pt.constant(np.int64(config.seed))
    training = Training(
        seed, epoch, minibatch["indices"], valid if is_short else None, rows, config.freeze
    )
    logits = network.logits(images, training)
    cost = total = network.cost(logits, labels, valid)
    for outputs, weight in training.auxiliary:
        part = network.cost(outputs, labels, valid)
        total = total + np.asarray(weight, part.dtype) * part
    declared = network.parameters.declared
    learned = list(ParameterGroups(config.freeze).learned(declared))
    gradients = pt.grad(total, [network.parameters[name] for name in learned])
    found = {"gradient/" + name: g for name, g in zip(learned, gradients, strict=True)}
    found |= training.statistics
    counts = count_minibatch(cost, logits, minibatch, network, metrics_of(config.metrics))
    placements = network.placements(kind)
    given |= {network.parameters[name]: placement for name, placement in placements.items()}
    wanted: dict[Any, Placement] = dict.fromkeys([*found.values(), *counts.values()], Partial())
    wanted |= {found["gradient/" + name]: placement for name, placement in placements.items()}
    return PlacedGraph(found | counts, minibatch | {"epoch": epoch}, given, wanted)


def validation_graph(network: Network, config: Config, batch: int, kind: str) -> PlacedGraph:
    """Counts and scores, as a trainer computes them, of `batch` rows of all."""
    minibatch, images, given = _of_pictures(config, network, batch, "validation")
    logits = network.logits(images, None)
    cost = network.cost(logits, targets_of(minibatch, config.dtype), minibatch["valid"])
    counts = count_minibatch(cost, logits, minibatch, network, metrics_of(config.metrics))
    placements = network.placements(kind)
    given |= {network.parameters[name]: placement for name, placement in placements.items()}
    wanted = dict.fromkeys(counts.values(), Partial()) | {logits: Shard(0)}
    return PlacedGraph(counts | {"logits": logits}, minibatch, given, wanted)
