"""What do two trainers gain that divide the fully connected layers?

    python -m benchmarks.placement                  all, about ten minutes on two cores
    python -m benchmarks.placement --only AlexNet   or VGG-19, dense

Two trainers of one thread make steps by every exchange, with all parameters replicated, and with
the fully connected layers sharded and at a single trainer; beside them one trainer of two threads,
which computes the same minibatch. Memory, exchange, channel and compiled network are those of a
run; the minibatch is constant noise. Forward is a validation step, backward what a step's gradients
take beyond it. The fully connected layers alone are compared with PyTorch's DTensor over gloo, of
the same placements, in `benchmarks.dense`.

Time in conversions is that of the trainer which waits the shortest for the other.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.dense import compare_dense
from benchmarks.measure import Comparison, Figure, Found, Measured, Part, compare, measure, run
from benchmarks.team import Team, serve

if TYPE_CHECKING:  # torch is imported in the processes that are measured
    from tandem.config.schema import Config
    from tandem.distributed import LocalGroup
    from tandem.layers import Network
    from tandem.memory.parameters import HostMemory

RATE = 1e-4
ONE = "one trainer of two threads"
DIVIDED = ("sharded", "single")  # by `fully_connected`; other strategies are exchanges
TOGETHER = (("average", "gradients"), ("shared",), ("sharded",), ("single",))  # of one memory
UPDATE, MEMORY = 1.3, 0.6  # targets: at most


@dataclass(frozen=True)
class Case:
    """A network, its sizes, and how two trainers make its steps."""

    name: str
    network: str
    batch: int  # pictures of each of two trainers
    crop: int
    rounds: int  # at most
    strategies: tuple[str, ...]
    classes: int = 1000
    width: float = 1.0


CASES = (
    Case(
        "AlexNet",
        "alex_net:AlexNet",
        32,
        227,
        5,
        ("average", "gradients", "shared", "sharded", "single"),
    ),
    Case("VGG-19", "tandem.models.vgg:VGG19", 4, 224, 3, ("gradients", "sharded")),
)


@dataclass(frozen=True)
class Parts:
    """Seconds of the parts of one trainer's step."""

    gradients: float  # conversions included
    conversions: float
    exchange: float
    update: float

    @property
    def rest(self) -> float:
        """Return what follows the backward pass."""
        return self.exchange + self.update


def answer(rounds: int, only: str | None = None, cases: Sequence[Case] = CASES) -> Iterator[Found]:
    """Compare strategies of the networks, then the fully connected layers alone."""
    for case in cases:
        if only in (None, case.name):
            yield from compare_strategies(case, min(rounds, case.rounds))
    if only in (None, "dense"):
        yield from compare_dense(rounds)


def compare_strategies(case: Case, rounds: int) -> Iterator[Found]:
    """Measure whole steps and forward passes in turn, of one trainer and of two."""
    names = (ONE, *case.strategies)
    parts: dict[str, list[Parts]] = {name: [] for name in names}
    with trainers(case, 1, 2, ("average",)) as one, trainers(case, 2, 1, case.strategies) as two:

        def ask(name: str, task: str = "") -> list[Any]:
            return one.do("average" + task) if name == ONE else two.do(name + task)

        def step(name: str) -> None:
            parts[name].append(slowest(ask(name)))

        steps = {name: partial(step, name) for name in names}
        apart = {f"{name} forward": partial(ask, name, " forward") for name in names}
        found = {m.name: m for m in measure(steps | apart, rounds)}
        nbytes = {name: max(ask(name, " nbytes")) for name in names}
    # Without the first round.
    last = {name: some[-rounds:] for name, some in parts.items()}
    yield from whole_steps(case, found)
    yield from after_backward(case, last)
    for name in names:
        yield from three_parts(case, name, found, last[name])
    yield from kept(case, nbytes)


def slowest(ranks: Sequence[Parts]) -> Parts:
    """The parts of the slowest trainer, for which the others wait in conversions and exchange."""
    return Parts(
        max(part.gradients for part in ranks),
        min(part.conversions for part in ranks),
        min(part.exchange for part in ranks),
        max(part.update for part in ranks),
    )


def whole_steps(case: Case, found: Mapping[str, Measured]) -> Iterator[Comparison]:
    """Each strategy beside one trainer; sharded layers beside the best of the others."""
    pictures = f"{case.name}: {2 * case.batch} pictures of {case.crop} pixels"
    for name in case.strategies:
        question = f"{pictures}, whole steps of two trainers of one thread"
        yield compare(question, found[name], found[ONE])
    others = [found[name] for name in case.strategies if name not in DIVIDED]
    best = min(others, key=lambda measured: measured.median)
    yield compare(f"{pictures}, sharded beside the best of the others", found["sharded"], best,
                  target=1.0)  # fmt: skip


def after_backward(case: Case, parts: Mapping[str, Sequence[Parts]]) -> Iterator[Comparison]:
    """Exchange and update of two trainers beside the update of one."""

    def seconds(name: str, label: str, of: Callable[[Parts], float]) -> Measured:
        return Measured(label, tuple(map(of, parts[name])))

    question = f"{case.name}: exchange and update of two trainers"
    peer = seconds(ONE, "update of one trainer", lambda part: part.update)
    for name in case.strategies:
        target = UPDATE if name == "sharded" else None
        ours = seconds(name, name, lambda part: part.rest)
        yield compare(question, ours, peer, "time", target)
    for name in [name for name in case.strategies if name in DIVIDED]:
        label = f"{name}, conversions included"
        ours = seconds(name, label, lambda part: part.conversions + part.rest)
        yield compare(question, ours, peer, "time")


def three_parts(
    case: Case, name: str, found: Mapping[str, Measured], parts: Sequence[Parts]
) -> Iterator[Part]:
    """Forward, backward and the rest of a step, apart."""

    def median(of: Callable[[Parts], float]) -> float:
        return Measured("", tuple(map(of, parts))).median

    whole, forward = found[name].median, found[f"{name} forward"].median
    gradients = median(lambda part: part.gradients)
    who = name if name == ONE else f"two trainers, {name}"
    question = f"{case.name}: parts of a step, {who}"
    seconds = {
        "forward": forward,
        "backward": max(gradients - forward, 0.0),
        "conversions, within these": median(lambda part: part.conversions),
        "exchange": median(lambda part: part.exchange),
        "update": median(lambda part: part.update),
        "whole": whole,
    }
    for label, value in seconds.items():
        yield Part(question, label, value, whole, 0, 0.0)


def kept(case: Case, nbytes: Mapping[str, int]) -> Iterator[Figure]:
    """Megabytes of weights, momenta and gradients of the trainer that has most."""
    question = f"{case.name}: weights, momenta and gradients of a trainer"
    limit = MEMORY * nbytes["gradients"] / 1e6
    yield Figure(question, "sharded", nbytes["sharded"] / 1e6, "MB", limit)


# Of one trainer


def trainers(case: Case, count: int, threads: int, strategies: Sequence[str]) -> Team:
    """Trainers that make steps by strategies."""
    return Team.of_group(train, count, case, case.batch * 2 // count, threads, strategies)


def train(
    group: "LocalGroup",
    case: Case,
    batch: int,
    threads: int,
    strategies: Sequence[str],
    pipe: Connection,
) -> None:
    """Serve as the process of one trainer."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    from tandem.backend import keep_freed_memory, set_threads

    set_threads(threads)
    keep_freed_memory()
    serve(pipe, tasks(case, batch, threads, strategies, group))


def tasks(
    case: Case, batch: int, threads: int, strategies: Sequence[str], group: "LocalGroup"
) -> dict[str, Callable[[], Any]]:
    """By strategy a whole step, a forward pass, and the bytes that a trainer keeps."""
    from tandem.config.schema import make_config
    from tandem.layers.network import NetworkDescription, build_network

    description = NetworkDescription(case.crop, case.classes, case.width, network=case.network)
    found: dict[str, Callable[[], Any]] = {}
    for several in TOGETHER:
        wanted = [name for name in several if name in strategies]
        if not wanted:
            continue
        divided = wanted[0] in DIVIDED
        values = {"crop_size": case.crop, "width": case.width, "batch_size": batch}
        values |= {"network": case.network, "threads": threads, "compile": False}
        values |= {"exchange": "gradients" if divided else wanted[0]}
        values |= {"fully_connected": wanted[0]} if divided else {}
        trainer = Trainer(build_network(description), make_config(values), group)
        for name in wanted:
            exchange = "gradients" if divided else name
            found[name] = trainer.step_by(exchange)
            found[f"{name} forward"] = trainer.forward
            found[f"{name} nbytes"] = trainer.nbytes
    return found


class Trainer:
    """A trainer's memory and compiled network, as in a run."""

    def __init__(self, network: "Network", config: "Config", group: "LocalGroup") -> None:
        from tandem.cost.loading import write_noise
        from tandem.distributed import ExchangeSettings, make_channel, open_host_memory
        from tandem.memory import HostSlots, SlotLayout
        from tandem.optim import SGD
        from tandem.training.compiled_network import CompiledNetwork
        from tandem.training.division import divide
        from tandem.training.setup import parameter_layout

        self.group = group
        division = divide(network, config, group.size, group.rank)
        layout = parameter_layout(
            network, SGD(), select=dict if division is None else division.replicated
        )
        slots = HostSlots.create(
            SlotLayout.of_pictures(config.batch_size, config.crop_size), group.rank
        )
        settings = ExchangeSettings.of({"exchange": config.exchange})
        self.memory: HostMemory = open_host_memory(settings, slots, group, layout)
        self.channel: TimedChannel | None = None
        if division is not None:
            self.memory.add_shards(parameter_layout(network, SGD(), select=division.own))
            self.channel = TimedChannel(make_channel(self.memory, group))
        mean = np.full((3, config.crop_size, config.crop_size), 120, np.float32)
        self.model: CompiledNetwork = CompiledNetwork(
            network, config, SGD(), mean, self.memory, division=division, channel=self.channel
        )
        self.model.load(dict(network.initial_values(seed=1)))
        self.slot = self.memory.slots[0]
        write_noise(self.slot, network.classes, group.rank)
        rows = config.batch_size * group.size
        self.global_rows = None if division is None else np.arange(rows)
        self.shares = [1 / group.size if division is None else 1.0] * group.size

    def step_by(self, strategy: str) -> Callable[[], Parts]:
        """A step, as `tandem.training.trainer` makes it, by one of the exchanges of its memory."""
        from tandem.distributed import ExchangeSettings, make_exchange

        settings = ExchangeSettings.of({"exchange": strategy})
        exchange = make_exchange(settings, self.memory, self.group)

        def step() -> Parts:
            waited = self._in_conversions()
            begun = time.perf_counter()
            self.model.compute_gradients(self.slot, epoch=0, global_rows=self.global_rows)
            self.model.is_finite()
            computed = time.perf_counter()
            exchange.before_update(self.shares)
            exchanged = time.perf_counter()
            self.model.update(RATE)
            updated = time.perf_counter()
            exchange.after_update(self.shares)
            ended = time.perf_counter()
            return Parts(
                computed - begun,
                self._in_conversions() - waited,
                exchanged - computed + ended - updated,
                updated - exchanged,
            )

        return step

    def _in_conversions(self) -> float:
        return 0.0 if self.channel is None else self.channel.seconds

    def forward(self) -> None:
        """Validate the minibatch."""
        self.model.validate(self.slot, None if self.global_rows is None else len(self.global_rows))

    def nbytes(self) -> int:
        """Bytes of the trainer's weights, momenta and gradients."""
        vectors = [v for v in (self.memory.vectors, self.memory.shards) if v is not None]
        groups = [g for v in vectors for g in (v.weights, *v.states.values(), v.gradients)]
        return sum(array.nbytes for arrays in groups for array in arrays.values())


class TimedChannel:
    """A channel that adds up the seconds of its calls."""

    def __init__(self, channel: Any) -> None:
        self.channel, self.seconds = channel, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.channel, name)

    def all_gather(self, *arguments: Any) -> Any:
        """As of the channel."""
        return self._timed(self.channel.all_gather, arguments)

    def all_to_all(self, *arguments: Any) -> Any:
        """As of the channel."""
        return self._timed(self.channel.all_to_all, arguments)

    def _timed(self, call: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        begun = time.perf_counter()
        result = call(*arguments)
        self.seconds += time.perf_counter() - begun
        return result


if __name__ == "__main__":
    raise SystemExit(run(__doc__, answer, rounds=5, only=[*(case.name for case in CASES), "dense"]))
