"""The conversions by which trainers that divide a network pass each other tensors in a step.

AlexNet over four trainers:   tandem placement --ranks 4
One has all fully connected:  tandem placement --ranks 4 --fully_connected single
Another network:              tandem placement --network tandem.models.vgg:VGG19 --crop_size 224
A network of yours:           tandem placement --network my_network:MyNet --strict

The graph is that of `train.py --fully_connected`: loss, counts and gradients. Nothing is computed.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import pytensor.tensor as pt

from tandem.cli import CommandLine, Options, option, run_program
from tandem.config.resolve import resolve_norm_rows
from tandem.config.schema import Config, make_config
from tandem.errors import InputError
from tandem.layers.choices import metrics_of
from tandem.layers.network import (
    ALEXNET,
    FullyConnected,
    Network,
    NetworkDescription,
    build_network,
)
from tandem.nested import PlainMapping
from tandem.optim import OPTIMIZERS
from tandem.placement import Partitioned, explain
from tandem.placement.explanation import megabytes, received_by_rank
from tandem.placement.placements import Shape
from tandem.training.divided_graphs import GlobalMinibatch, partition_training
from tandem.training.division import Division, divide
from tandem.training.setup import with_frozen
from tandem.training.whole_graphs import WholePass, whole_pass

STRATEGIES: tuple[Literal["gradients", "average"], ...] = ("gradients", "average")
_ARGUMENTS = ("ranks", "classes", "strict")  # options that are no settings of a run


class PlacementOptions(Options):
    """Options of ``tandem placement``."""

    network: str = option(ALEXNET, "class of the network", "module:class", "text")
    ranks: int = option(2, "trainers that divide it", "a whole number of at least 2", ge=2)
    fully_connected: FullyConnected = option(
        "sharded",
        "where trainers have the weights of these layers",
        "sharded, single or replicated",
        "text",
    )
    batch_size: int = option(128, "images per trainer and step", "at least 1", ge=1)
    crop_size: int = option(227, "pixels on each side of the input", "at least 1", ge=1)
    classes: int = option(1000, "number of classes", "at least 1", ge=1)
    width: float = option(1.0, "factor on all filter and unit counts", "a number above 0", gt=0)
    network_options: PlainMapping = option(
        {}, "further arguments of the network's class", "names and values", "mapping"
    )
    norm_rows: int | str = option(
        "auto", "images that batch norm normalises together", "a whole number, auto or global"
    )
    precision: str = option("float32", "of all numbers", "float32 or float64", "text")
    optimizer: str = option("sgd", "whose states count", f"one of {', '.join(OPTIMIZERS)}", "text")
    strict: bool = option(False, "refuse Ops without a rule", "true or false")

    @property
    def configuration(self) -> Config:
        """The settings of a run with these options. Raises InputError if it refuses one."""
        return make_config(self.model_dump(exclude={*_ARGUMENTS}))


def run_placement(
    arguments: Sequence[str] | None, description: str | None, program: str | None = None
) -> int:
    """Explain the placements that a command line asks for; return the exit status."""

    def work(options: PlacementOptions) -> None:
        sys.stdout.write(report(DividedNetwork.of(options)))

    return run_program(PlacementOptions, work, CommandLine(arguments, description, program))


@dataclass(frozen=True)
class DividedNetwork:
    """A network, and how trainers divide its training."""

    network: Network
    config: Config
    ranks: int
    strict: bool = False

    @classmethod
    def of(cls, options: PlacementOptions) -> "DividedNetwork":
        """Make the network. Raises InputError if something cannot be used."""
        config = options.configuration
        description = NetworkDescription(
            config.crop_size,
            options.classes,
            config.width,
            network=config.network,
            options=config.options,
        )
        network = build_network(description, config.dtype)
        config = with_frozen(config, network)
        if config.parameter_groups.averages(network.parameters.declared):
            config = resolve_norm_rows(config)
        return cls(network, config, options.ranks, options.strict)

    @cached_property
    def division(self) -> Division:
        """Return which parts of parameters trainers have; of `replicated`, all of them."""
        found = divide(self.network, self.config, self.ranks, 0)
        return found or Division(self.ranks, 0)

    @cached_property
    def whole(self) -> WholePass:
        """The graph of the global minibatch, as a run builds it."""
        batch, shape = self.config.batch_size, self.network.shapes["input"]
        slot = {
            "indices": pt.tensor("indices", dtype="int64", shape=(batch,)),
            "labels": pt.tensor("labels", dtype="int64", shape=(batch,)),
        }
        images = pt.tensor("images", dtype=self.config.dtype, shape=(batch, *shape))
        minibatch = GlobalMinibatch.of(slot, images, self.ranks, "train")
        return whole_pass(self.network, self.config, minibatch, metrics_of(self.config.metrics))

    def partitioned(self, rank: int = 0) -> Partitioned:
        """A trainer's part of that graph.

        Raises InputError with `strict` if an Op has no rule.
        """
        whole, placements = self.whole, self.division.placements
        assert isinstance(whole.minibatch, GlobalMinibatch)
        if not placements and self.config.norm_rows != "global":  # each has a graph of its own
            return Partitioned([*whole.outputs.values()], {})
        try:
            return partition_training(
                whole.outputs,
                whole.wanted(placements),
                {self.network.parameters[name]: p for name, p in placements.items()},
                [*whole.minibatch.sources],
                self.ranks,
                rank,
                self.strict,
            )
        except NotImplementedError as error:
            raise InputError(f"--strict: {error}") from error

    def received(self, partitioned: Partitioned) -> list[int]:
        """Bytes that each trainer receives in the conversions of a step."""
        found = [received_by_rank(c, self.ranks) for c in partitioned.conversions]
        return [sum(column) for column in zip(*found, strict=True)] or [0] * self.ranks

    def exchanged(self) -> int:
        """Bytes that a trainer receives as gradients of what all have a copy of are added up."""
        return self._all_reduced(sum(self._nbytes(self.division.replicated(self._shapes)).values()))

    def exchanged_if_replicated(self, strategy: Literal["gradients", "average"]) -> int:
        """As `exchanged`, where trainers have copies of all parameters."""
        sizes = self._nbytes(self._shapes)
        if strategy == "average":  # weights, and states of those that are trained
            sizes = {name: (1 + self._states(name)) * nbytes for name, nbytes in sizes.items()}
        return self._all_reduced(sum(sizes.values()))

    def memory(self) -> list[int]:
        """Bytes of each trainer's weights, optimizer states and gradients."""
        return [
            self._memory(
                {
                    name: part
                    for name, shape in self._shapes.items()
                    if (part := self.division.shape(name, shape, rank)) is not None
                }
            )
            for rank in range(self.ranks)
        ]

    def memory_if_replicated(self) -> int:
        """As `memory`, where trainers have copies of all parameters."""
        return self._memory(self._shapes)

    @property
    def _shapes(self) -> dict[str, Shape]:
        declared = self.network.parameters.declared
        return {name: parameter.shape for name, parameter in declared.items()}

    def _nbytes(self, shapes: Mapping[str, Shape]) -> dict[str, int]:
        size = np.dtype(self.network.dtype).itemsize
        return {name: math.prod(shape) * size for name, shape in shapes.items()}

    def _memory(self, shapes: Mapping[str, Shape]) -> int:
        return sum((2 + self._states(n)) * nbytes for n, nbytes in self._nbytes(shapes).items())

    def _states(self, name: str) -> int:
        """States that the optimizer has of a parameter; of an average, none."""
        trained = self.network.parameters.declared[name].trainable
        return len(OPTIMIZERS[self.config.optimizer]().states) if trained else 0

    def _all_reduced(self, nbytes: int) -> int:
        return 2 * nbytes * (self.ranks - 1) // self.ranks


def report(divided: DividedNetwork) -> str:
    """All conversions of a step, and megabytes received and kept by each trainer."""
    config, parted = divided.config, divided.partitioned()
    conversions, exchanged = divided.received(parted), divided.exchanged()
    kind = config.fully_connected
    rows = [
        ("conversions", megabytes(conversions)),
        ("exchange of replicated parameters", megabytes([exchanged])),
        ("together", megabytes([nbytes + exchanged for nbytes in conversions])),
    ]
    rows += [
        (f"replicated, exchange: {each}", megabytes([divided.exchanged_if_replicated(each)]))
        for each in STRATEGIES
    ]
    kept = [
        (kind, megabytes(divided.memory())),
        ("replicated", megabytes([divided.memory_if_replicated()])),
    ]
    shape = "x".join(map(str, divided.network.shapes["input"]))
    lines = [
        f"{config.network}, {divided.network.classes:,} classes, input {shape}, "
        f"{divided.network.dtype}; fully_connected: {kind}",
        f"{divided.ranks} trainers of {config.batch_size} images each",
        "",
        explain(parted, divided.ranks),
        "MB received by each trainer in a step",
        *_listed(rows),
        "",
        "MB of each trainer's weights, optimizer states and gradients",
        *_listed(kept if kind != "replicated" else kept[1:]),
    ]
    return "\n".join(lines) + "\n"


def _listed(rows: Sequence[tuple[str, str]]) -> list[str]:
    width = max(len(name) for name, _ in rows) + 2
    return [f"  {name:{width}}{text}" for name, text in rows]
