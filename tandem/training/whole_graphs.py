"""The forward and the backward pass of a network over a minibatch, before it is divided.

Nothing here needs a device: `tandem placement` explains the graph that a run divides.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import pytensor.tensor as pt
from pytensor.tensor.variable import TensorVariable

from tandem.config.schema import Config
from tandem.layers import Network, Training
from tandem.layers.checks import check_graph
from tandem.layers.choices import Metric
from tandem.placement.placements import Partial, Placement
from tandem.training.graphs import Minibatch, Tensors, cost_of, count_minibatch, targets_of


@dataclass(frozen=True)
class WholePass:
    """The results of a minibatch of training: gradients, counts and the cost that is minimised."""

    minibatch: Minibatch
    epoch: TensorVariable
    gradients: Tensors  # and the statistics of arrays that are not trained
    counts: Tensors  # but for the number of pictures, which each trainer counts for itself
    total: TensorVariable

    @property
    def outputs(self) -> Tensors:
        """All of it by name, see `gradient` and `count`."""
        return {
            "total": self.total,
            **{gradient(name): value for name, value in self.gradients.items()},
            **{count(name): value for name, value in self.counts.items()},
        }

    def wanted(self, placements: Mapping[str, Placement]) -> dict[str, Placement]:
        """Return where trainers need the outputs, of parameters that have these placements.

        Gradients of what all have a copy of are terms, which the exchange adds up.
        """
        found: dict[str, Placement] = dict.fromkeys(self.outputs, Partial())
        found |= {gradient(n): p for n, p in placements.items() if n in self.gradients}
        return found


def gradient(name: str) -> str:
    """The name of a parameter's gradient among the outputs."""
    return f"gradient {name}"


def count(name: str) -> str:
    """The name of a count among the outputs."""
    return f"count {name}"


def whole_pass(
    network: Network,
    config: Config,
    minibatch: Minibatch,
    metrics: Sequence[Metric],
    short: bool = False,
) -> WholePass:
    """Build the forward and the backward pass, of a minibatch that is short or is not.

    What is trained is the cost with those of auxiliary heads; what is counted, without.
    """
    tensors, images = minibatch.tensors, minibatch.images
    declared, groups = network.parameters.declared, config.parameter_groups
    epoch = pt.tensor("epoch", dtype="int64", shape=())
    seed = pt.constant(np.int64(config.seed))
    labels = targets_of(tensors, config.dtype)
    training = Training(
        seed,
        epoch,
        tensors["indices"],
        tensors["valid"] if short else None,
        config.group_rows,
        config.freeze,
    )
    logits = network.logits(images, training)
    cost = total = cost_of(network, minibatch, logits, labels)
    for outputs, weight in training.auxiliary:
        part = cost_of(network, minibatch, outputs, labels)
        total = total + np.asarray(weight, part.dtype) * part
    check_graph(network, images, total, training)
    learned = [*groups.learned(declared)]
    gradients = cast(
        list[TensorVariable], pt.grad(total, [network.parameters[name] for name in learned])
    )
    found = dict(zip(learned, gradients, strict=True))
    found |= {name: training.statistics[name] for name in groups.averages(declared)}
    measured = metrics if config.print_train_error else None
    counts = counts_of(network, minibatch, cost, logits, measured)
    return WholePass(minibatch, epoch, found, counts, total)


def counts_of(
    network: Network,
    minibatch: Minibatch,
    cost: TensorVariable,
    outputs: TensorVariable,
    metrics: Sequence[Metric] | None,
) -> Tensors:
    """Return what a minibatch adds to the sums, but for the number of its pictures."""
    counts = count_minibatch(cost, outputs, minibatch.tensors, network, metrics)
    return {name: value for name, value in counts.items() if name != "images"}
