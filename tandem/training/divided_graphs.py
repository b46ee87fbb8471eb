"""One graph of a global minibatch, of which each trainer computes its part."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import pytensor.tensor as pt
from pytensor.graph.basic import Variable
from pytensor.graph.replace import graph_replace
from pytensor.tensor.variable import TensorVariable

from tandem.data.augment import Mode
from tandem.placement import Partitioned, Placement, Shard, partition
from tandem.training.graphs import Minibatch, Tensors

ALL_VALID, ALL_INDICES = "all_valid", "all_indices"  # numbers of every trainer's minibatch


@dataclass(frozen=True)
class GlobalMinibatch(Minibatch):
    """The rows of all trainers, in rank order, of which each has those in its slot.

    How many are valid, and their indices in the dataset, are known to all trainers without a
    message.
    """

    # What this trainer has of global variables of rows:
    sources: dict[TensorVariable, TensorVariable] = field(default_factory=dict)

    @classmethod
    def of(cls, slot: Tensors, images: TensorVariable, ranks: int, mode: Mode) -> "GlobalMinibatch":
        """Make the global variables of a slot's arrays and of the images that follow from them."""
        own = {"images": images, "labels": slot["labels"]}
        rows = {
            name: pt.tensor(
                f"all {name}",
                dtype=variable.type.dtype,
                shape=(ranks * slot["indices"].type.shape[0], *variable.type.shape[1:]),
            )
            for name, variable in own.items()
        }
        numbers = {ALL_VALID: pt.tensor(ALL_VALID, dtype="int64", shape=())}
        if mode == "train":  # dropout masks depend on them
            count = rows["labels"].type.shape[:1]
            numbers[ALL_INDICES] = pt.tensor(ALL_INDICES, dtype="int64", shape=count)
        tensors = {"labels": rows["labels"], "valid": numbers[ALL_VALID]}
        if mode == "train":
            tensors["indices"] = numbers[ALL_INDICES]
        sources = {rows[name]: own[name] for name in rows}
        return cls(slot, rows["images"], tensors, numbers, sources)


def partition_training(
    outputs: Tensors,
    wanted: Mapping[str, Placement],
    parameters: Mapping[Any, Placement],
    rows: Collection[Variable],
    ranks: int,
    rank: int,
    strict: bool = False,
) -> Partitioned:
    """Partition a graph of all trainers' rows, whose parameters stay where they are.

    Parameters
    ----------
    outputs, wanted : mapping
        By any names, and the placement of each.
    parameters : mapping
        Placements of the network's parameters that are not replicated.
    rows : collection of Variable
        What has a row for each row of the global minibatch, in rank order.
    """
    sharded: dict[Any, Placement] = dict.fromkeys(rows, Shard(0))
    return partition(
        list(outputs.values()),
        given={**parameters, **sharded},
        wanted={outputs[name]: placement for name, placement in wanted.items()},
        ranks=ranks,
        rank=rank,
        strict=strict,
        fixed=parameters,
    )


def own_part(
    outputs: Tensors, parted: Partitioned, sources: Mapping[Any, TensorVariable]
) -> tuple[Tensors, TensorVariable | None]:
    """Put what a trainer has into its part of a graph.

    Parameters
    ----------
    outputs : dict
        Of the whole graph, by any names.
    parted : Partitioned
        Of these outputs, in this order.
    sources : mapping
        What this trainer has of each variable; one that is left out stands for itself.

    Returns
    -------
    dict and variable or None
        What the trainer has of the outputs, and what has to be computed with them, so that all
        trainers meet in every conversion; None where there is none.
    """
    replaced: dict[Variable, Variable] = {
        own: sources[whole]
        for whole, own in parted.inputs.items()
        if whole in sources and own is not sources[whole]
    }
    pairs = zip(outputs, parted.outputs, strict=True)
    found = {name: own for name, own in pairs if own is not None}
    computed = [*found.values(), *([] if parted.token is None else [parted.token])]
    results = cast(list[TensorVariable], graph_replace(computed, replaced, strict=False))
    token = None if parted.token is None else results.pop()
    return dict(zip(found, results, strict=True)), token
