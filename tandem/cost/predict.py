"""Predicted steps of several trainers: computing, exchange, how much of it is exposed, loading."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from tandem.config.resolve import run_facts
from tandem.config.schema import CHOICES, Config
from tandem.cost.exchange import LOCAL, Layout, Load, load, seconds
from tandem.cost.machine import KnownRates, Machine, Speed
from tandem.cost.overlap import Average, exposed_seconds
from tandem.errors import InputError
from tandem.registry import check
from tandem.validation import shown

if TYPE_CHECKING:
    from tandem.cost.steps import TrainerStep


@dataclass(frozen=True)
class Exchange:
    """The exchange of trainers, and its all-reduce."""

    what: str  # "average", "gradients" or "shared"
    collective: str = "auto"  # "auto": by memory on one machine, else asa
    bucket_mb: float = 0.0

    def strategy(self, layout: Layout) -> str:
        """Return which of `tandem.cost.exchange`'s strategies it is. InputError if it is none."""
        if self.what == "shared":
            if layout.machines > 1:
                raise InputError(
                    f"exchange: shared is one copy of the weights on one machine, and "
                    f"{layout.ranks} ranks are on {layout.machines}: use average or gradients"
                )
            return "shared"
        if self.collective != "auto":
            return self.collective
        return "asa" if layout.machines > 1 or self.bucket_mb else "memory"


@dataclass(frozen=True)
class Prediction:
    """Seconds of a step of each of `ranks` trainers."""

    ranks: int
    machines: int
    compute: float  # of gradients and update
    exchange: float
    exposed: float  # of the exchange, what lengthens the step
    load: float  # in which a loader fills a minibatch, beside the rest
    images: int  # of all trainers
    speedup: float = 1.0  # images a second over those of one trainer alone on a machine

    @property
    def step(self) -> float:
        return max(self.compute + self.exposed, self.load)

    @property
    def images_per_second(self) -> float:
        return self.images / self.step

    @property
    def efficiency(self) -> float:
        """The speed-up for each rank."""
        return self.speedup / self.ranks


@dataclass(frozen=True)
class Predictor:
    """Predicts steps of a network on machines of one kind.

    Attributes
    ----------
    step : TrainerStep
        What a trainer computes.
    machine : Machine
        How fast it does.
    exchange : Exchange
        Between trainers.
    ranks_each : int
        Trainers on each machine, at most.
    """

    step: "TrainerStep"
    machine: Machine
    exchange: Exchange
    ranks_each: int

    def layout(self, ranks: int) -> Layout:
        """Return the layout of the ranks. Raises InputError if machines would differ."""
        each = min(ranks, self.ranks_each)
        if ranks % each:
            raise InputError(
                f"ranks: found {ranks}, expected a multiple of ranks_each, {each}, as every "
                "machine has as many"
            )
        return Layout(ranks // each, each, self.machine.cores)

    def speed(self, ranks: int) -> Speed:
        """Return how fast each of the ranks computes."""
        return self.machine.speed(self.layout(ranks).ranks_each)

    def load(self, ranks: int, parameters: int) -> Load:
        """Return the load of averaging a vector of `parameters` elements."""
        layout = self.layout(ranks)
        return load(self.exchange.strategy(layout), parameters, layout)

    def predict(self, ranks: int) -> Prediction:
        """Predict the step of `ranks` trainers."""
        found, alone = self._predict(ranks), self._predict(1)
        return replace(found, speedup=found.images_per_second / alone.images_per_second)

    def _predict(self, ranks: int) -> Prediction:
        layout, step = self.layout(ranks), self.step
        speed = self.speed(ranks)
        gradients, update = step.seconds(speed)
        if self.exchange.what == "shared":  # each trainer updates a part
            update /= ranks
        known = self.machine.exchange_rates(layout.ranks_each)
        vote = seconds(known.rates, self._vote(layout))
        averages = [self._average(self.load(ranks, size), known) for size in self.sizes]
        exchange = exposed = sum(average.seconds for average in averages)
        if step.buckets and ranks > 1:
            exposed = exposed_seconds(gradients, step.ready(speed), averages)
        pixels = self.machine.load
        return Prediction(
            ranks=ranks,
            machines=layout.machines,
            compute=gradients + update,
            exchange=exchange + vote,
            exposed=exposed + vote,
            load=0.0 if pixels is None else step.pixel_bytes / pixels,
            images=ranks * step.batch_size,
        )

    def _vote(self, layout: Layout) -> Load:
        """Return the load of agreeing on a step: two messages of each with trainer 0, or of MPI."""
        if self.exchange.strategy(layout) in LOCAL:
            return Load(messages=2 * (layout.ranks_each - 1))
        return load("ar", 0, layout)

    @property
    def sizes(self) -> list[int]:
        """The vectors that are averaged in a step, in float32 numbers: a float64 is two."""
        layout = self.step.layout
        each = np.dtype(layout.dtype).itemsize // 4
        if self.step.buckets:
            extents = (bucket.extent for bucket in self.step.buckets)
            return [each * (extent.stop - extent.start) for extent in extents]
        return [each * (layout.parameters_size if self.exchange.what == "average" else layout.size)]

    def _average(self, asked: Load, known: KnownRates) -> Average:
        """Divide the seconds of an average by what it occupies; GPUs compute beside all of it."""
        whole = seconds(known.rates, asked)
        links = whole
        if not self.machine.devices:
            between = Load(steps_between=asked.steps_between, bytes_between=asked.bytes_between)
            links = seconds(known.rates, between)
        return Average(whole - links, links)

    def assumptions(self, ranks: Sequence[int]) -> list[str]:
        """Return the names of the rates that predictions take as assumed, not as measured."""
        found: dict[str, None] = {}
        for number in ranks:
            layout = self.layout(number)
            known = self.machine.exchange_rates(layout.ranks_each)
            for asked in (self.load(number, 1), self._vote(layout)):
                found |= dict.fromkeys(known.assumptions(asked))
        return [*found]


def check_modelled(config: Config, on_gpus: bool = False) -> None:
    """Refuse settings that have no model here, or that no run can have.

    Trainers are ranks where a setting is of ranks alone; else one launcher may start them.
    """
    reasons = {
        ("collective", "nccl"): "it depends on the links between GPUs; predict asa, which moves as "
        "many bytes, or hierarchical",
        ("rule", "easgd"): "its trainers are not in step; predict bsp",
        ("rule", "gosgd"): "its trainers are not in step; predict bsp",
        ("fully_connected", "sharded"): "see tandem placement for what trainers pass to each other",
        ("fully_connected", "single"): "see tandem placement for what trainers pass to each other",
        ("norm_rows", "global"): "see tandem placement for what trainers pass to each other",
        ("para_load", False): "its trainers load between steps; predict true",
    }
    for (key, value), reason in reasons.items():
        if (found := getattr(config, key)) == value:
            raise InputError(f"{key}: {shown(found, False)} has no model: {reason}")
    if config.global_batch is not None:
        raise InputError(
            f"global_batch: found {config.global_batch}, expected null: a prediction is of "
            "batch_size images for each trainer, whatever their number"
        )
    are_ranks = config.collective != "auto" or dict(config)["bucket_mb"] > 0
    devices = ("cuda:0",) if on_gpus else ("cpu",)
    facts = run_facts(config.model_copy(update={"devices": devices}))
    facts = replace(facts, starter="mpirun" if are_ranks else None)
    for registry in CHOICES:
        check(registry.setting, registry.chosen(dict(config)), facts)
