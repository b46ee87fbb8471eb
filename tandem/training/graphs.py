"""Symbolic parts of the functions of a trainer: inputs, counts, and checks."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytensor.tensor as pt
from pytensor.tensor.variable import TensorVariable

from tandem.config.schema import Config
from tandem.errors import InputError
from tandem.layers import Network, label_rank
from tandem.layers.choices import Measured, Metric
from tandem.layers.metrics import true_classes
from tandem.memory import CLASS_LABEL, RowType, SlotLayout
from tandem.ops import crop_mirror

if TYPE_CHECKING:  # it imports PyTorch
    from tandem.backend import DeviceSharedVariable

Tensors = dict[str, TensorVariable]
GRADIENT = "gradient/"  # begins the name of every gradient's shared variable
TOTAL = "total"  # the number of rows of all trainers in a step, of a network that takes it
SHORT = "short "  # begins the name of a function for minibatches with rows that are not valid


@dataclass(frozen=True)
class FunctionGraph:
    """The graph of a function, which writes its results to shared variables."""

    minibatch: Tensors  # the arrays of a slot that it reads, by their names there
    numbers: Tensors  # its other arguments
    updates: list[Any]  # pairs of shared variable and new value
    # The trainer's variable of each parameter of a network that the graph is of:
    parameters: "Mapping[Any, DeviceSharedVariable]" = field(default_factory=dict)


@dataclass(frozen=True)
class Minibatch:
    """The minibatch that a network's graph is of, and what a function takes for it."""

    slot: Tensors  # the arrays of a slot, by their names there
    images: TensorVariable  # the network's input
    tensors: Tensors  # "labels", "valid" and, in training, "indices" of these images
    numbers: Tensors = field(default_factory=dict)  # further arguments


@dataclass(frozen=True)
class BackwardPass:
    """The results of a trainer's forward and backward pass of a minibatch."""

    minibatch: Minibatch
    epoch: TensorVariable
    gradients: Tensors  # and the statistics of arrays that are not trained
    counts: Tensors
    finite: TensorVariable  # whether the loss and all gradients are
    updates: list[Any]  # of further variables


def minibatch_inputs(
    config: Config,
    mean: "DeviceSharedVariable",
    kept: "DeviceSharedVariable | None" = None,
    coloured: bool = False,
) -> tuple[Tensors, TensorVariable]:
    """The arrays of a slot as symbolic variables, and the network's input that follows from them.

    A slot holds whole pictures, of the mean's size, with `use_data_layer`, and crops without. Where
    all pictures of the split are `kept` on the device, it holds only their indices. With `coloured`
    it holds colour noise as well, which is added here.
    """
    batch, whole = config.pass_rows, config.use_data_layer is True
    side = mean.type.shape[1] if whole else config.crop_size
    minibatch = {
        "pictures": pt.tensor("pictures", dtype="uint8", shape=(batch, side, side, 3)),
        "indices": pt.tensor("indices", dtype="int64", shape=(batch,)),
        "labels": pt.tensor("labels", dtype="int64", shape=(batch,)),
        "origins": pt.tensor("origins", dtype="int64", shape=(batch, 2)),
        "mirrored": pt.tensor("mirrored", dtype="uint8", shape=(batch,)),
        "valid": pt.tensor("valid", dtype="int64", shape=()),
    }
    if coloured:
        minibatch["colours"] = pt.tensor("colours", dtype="float32", shape=(batch, 3))
    pictures = minibatch["pictures"]
    if kept is not None:
        del minibatch["pictures"]
        # A row that is not valid may have an index of the other split.
        pictures = kept[pt.minimum(minibatch["indices"], kept.type.shape[0] - 1)]
    images = crop_mirror(
        pictures,
        mean,
        minibatch["origins"],
        minibatch["mirrored"],
        minibatch.get("colours"),
        crop_size=config.crop_size,
        cropped=not whole,
        dtype=config.dtype,
    )
    return minibatch, images


def array_inputs(
    config: Config,
    layout: SlotLayout,
    kept: "DeviceSharedVariable | None" = None,
    as_stored: bool = False,
) -> tuple[Tensors, TensorVariable]:
    """As `minibatch_inputs`, of rows of arrays: those of 3 axes are images, channel first.

    With `as_stored` they have the axes of the files.
    """
    batch, row, target = config.pass_rows, layout.pictures, layout.targets
    minibatch = {
        "pictures": pt.tensor("pictures", dtype=row.dtype, shape=(batch, *row.shape)),
        "indices": pt.tensor("indices", dtype="int64", shape=(batch,)),
        "labels": pt.tensor("labels", dtype=target.dtype, shape=(batch, *target.shape)),
        "valid": pt.tensor("valid", dtype="int64", shape=()),
    }
    rows = minibatch["pictures"]
    if kept is not None:
        del minibatch["pictures"]
        rows = kept[pt.minimum(minibatch["indices"], kept.type.shape[0] - 1)]
    rows = rows.astype(config.dtype)
    are_images = rows.type.ndim == 4 and not as_stored
    return minibatch, rows.dimshuffle(0, 3, 1, 2) if are_images else rows


def targets_of(minibatch: Tensors, dtype: str) -> TensorVariable:
    """The targets of losses: classes, int64 (batch,), or rows of `dtype`, (batch, k)."""
    labels = minibatch["labels"]
    if labels.type.dtype == "int64":
        return labels
    batch, *shape = labels.type.shape
    rows = labels.shape[0] if batch is None else batch
    return labels.astype(dtype).reshape((rows, math.prod(shape)))


def cost_of(network: Network, minibatch: Minibatch, outputs: Any, targets: Any) -> TensorVariable:
    """The cost of a minibatch's outputs, by the number of all trainers' rows where it is given."""
    total = [value for name, value in minibatch.numbers.items() if name == TOTAL]
    return network.cost(outputs, targets, minibatch.tensors["valid"], *total)


def counts_errors(network: Network, target: RowType) -> bool:
    """Return whether top-1 and top-5 errors mean something: of classes, or of targets by their
    largest.
    """
    if target == CLASS_LABEL:
        return True
    return network.classes > 1 and network.loss.of_classes and not network.has_own_cost


def count_minibatch(
    cost: TensorVariable,
    logits: TensorVariable,
    minibatch: Tensors,
    network: Network,
    metrics: Sequence[Metric] | None,
) -> Tensors:
    """Count one minibatch for the sums; with `metrics` None neither errors nor metrics."""
    labels, valid = minibatch["labels"], minibatch["valid"]
    found = {"loss": cost.astype("float64") * valid, "images": valid}
    if metrics is None:
        return found
    rows = labels.type.shape[0]
    counted = pt.arange(labels.shape[0] if rows is None else rows) < valid
    targets = targets_of(minibatch, logits.dtype)
    if counts_errors(network, RowType(labels.type.dtype, labels.type.shape[1:])):
        rank = label_rank(logits, true_classes(targets))
        found["top1_errors"] = pt.sum(counted & (rank >= 1), dtype="int64")
        found["top5_errors"] = pt.sum(counted & (rank >= 5), dtype="int64")
    measures = network.measures(logits, targets)
    for metric in metrics:
        if isinstance(metric, Measured):
            if metric.name not in measures:
                raise InputError(
                    f"metrics: found network.{metric.name}, expected one that the network has: "
                    f"{', '.join(measures) or 'none'}"
                )
            outputs = measures[metric.name]
        else:
            outputs = logits if metric.sees == "logits" else getattr(network, metric.sees)(logits)
        counts = metric.counts(outputs, targets, counted)
        found |= dict(zip(metric.sums, counts, strict=True))
    return found


def are_finite(values: list[TensorVariable]) -> TensorVariable:
    """Return whether all elements are finite: a sum is not, if one of its terms is not.

    A sum can overflow although its terms do not, but then they are too large in any case. Nothing
    here can fail when it runs, so the gradients may be computed in their final place. The sums are
    looked at together: for each of hundreds of parameters that would take longer than its sum.
    """
    sums = [pt.sum(value, dtype=value.dtype, acc_dtype=value.dtype) for value in values]
    return pt.isfinite(pt.stack(sums)).all()


def added(
    sums: "Mapping[str, DeviceSharedVariable]", counts: Mapping[str, TensorVariable]
) -> "list[tuple[DeviceSharedVariable, TensorVariable]]":
    """Updates that add `counts` to `sums`."""
    return [(sums[name], sums[name] + value) for name, value in counts.items()]
