"""Checks that the parts of a network agree: its declarations, initial values and graphs.

What one part lacks would otherwise be trained from zeros, or not at all, without a word.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from tandem.errors import InputError
from tandem.layers.choices import CrossEntropy, Loss
from tandem.layers.network import Network
from tandem.layers.training_pass import Training

if TYPE_CHECKING:
    from pytensor.tensor.variable import TensorVariable


def checked_initial_values(network: Network, seed: int) -> Iterator[tuple[str, np.ndarray]]:
    """A network's initial values, one at a time; InputError unless there is one of each parameter.

    A network may compute them by itself.
    """
    kind, missing = type(network).__name__, dict.fromkeys(network.parameters.declared)
    for name, value in network.initial_values(seed):
        if name not in network.parameters.declared:
            raise InputError(
                f"network: {kind} has an initial value of {name}, which it does not declare"
            )
        missing.pop(name, None)
        yield name, value
    for name in missing:
        raise InputError(f"network: {kind} has no initial value of {name}")


def check_graph(
    network: Network,
    images: "TensorVariable",
    cost: "TensorVariable",
    training: Training | None = None,
) -> None:
    """Refuse a graph of a network that does not fit the parameters that it declares.

    Parameters
    ----------
    images : dtype (batch, RGB, crop_size, crop_size)
        What the graph is built on; what they come from is not looked at.
    cost : dtype scalar
        Of all heads, auxiliary ones included.
    training : Training or None
        What the graph was built with, and the statistics that it reports; None for validation.

    Raises
    ------
    InputError
        The cost depends on a shared variable that is no parameter, or, in training, not on a
        parameter that is trained; or the statistics are not those of the arrays that are not,
        but for frozen layers, which need none.
    """
    from pytensor.compile.sharedvalue import SharedVariable
    from pytensor.graph.traversal import ancestors

    kind, parameters = f"network: {type(network).__name__}", network.parameters
    used = set(ancestors([cost], blockers=[images]))
    known = set(parameters.values())
    for variable in used:
        if isinstance(variable, SharedVariable) and variable not in known:
            raise InputError(
                f"{kind} uses {variable}, a shared variable that is not among its parameters, so "
                "that it would be neither trained nor saved; declare it, or make it a constant"
            )
    if training is None:
        return
    statistics = training.statistics
    for name, parameter in parameters.declared.items():
        if parameter.trainable and parameters[name] not in used:
            raise InputError(f"{kind} has a loss that does not depend on {name}, which is trained")
        if not (parameter.trainable or name in statistics or training.is_frozen(name)):
            raise InputError(f"{kind} reports no statistic of {name}, which is not trained")
    for name, value in statistics.items():
        if name not in parameters.declared or parameters.declared[name].trainable:
            raise InputError(
                f"{kind} reports a statistic of {name}, which is no array that it declares as not"
                " trained"
            )
        expected = parameters[name].type
        if value.type.ndim != expected.ndim or value.type.dtype != expected.dtype:
            raise InputError(
                f"{kind} ({name}): found a statistic of {value.type}, expected {expected}"
            )


def choose_loss(network: Network, loss: Loss) -> None:
    """Let a network's `Network.cost` be a mean of `loss`; InputError if it is one of its own."""
    if network.has_own_cost and loss != CrossEntropy():
        raise InputError(
            f"loss is {loss.name}, or smoothed, and {type(network).__name__} has a cost of its own,"
            " which this does not change: leave loss at cross_entropy and label_smoothing at 0"
        )
    network.loss = loss
