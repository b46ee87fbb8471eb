"""Are two trainers of one thread as fast as one trainer of two threads?

    python -m benchmarks.trainers

Both compute the same global minibatch: 64 pictures of 227 pixels, 32 for each of the two, with the
whole network. Two trainers also exchange, and both update the weights; so their gradients are
compared alone, and then whole steps with each exchange. Memory, exchange and compiled network are
those of a run; the minibatch is constant noise.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from benchmarks.measure import Comparison, Measured, compare, measure, run
from benchmarks.team import Team, serve
from tandem.config.schema import Config
from tandem.distributed import (
    EXCHANGES,
    Exchange,
    ExchangeSettings,
    LocalGroup,
    local_groups,
    make_exchange,
    open_host_memory,
)
from tandem.memory import HostSlots, Slot, SlotLayout
from tandem.memory.flat import FlatLayout

RATE = 1e-4
STRATEGIES = tuple(name for name in EXCHANGES if name != "auto")


@dataclass(frozen=True)
class Sizes:
    """Sizes of a step: pictures of all trainers, their side, classes and network width."""

    batch: int = 64
    crop: int = 227
    classes: int = 1000
    width: float = 1.0


@dataclass(frozen=True)
class Parts:
    """Seconds of the parts of one trainer's step."""

    gradients: float
    exchange: float
    update: float


def main() -> int:
    """Run the benchmark; return the exit status."""
    return run(__doc__, answer, rounds=5)


def answer(rounds: int, sizes: Sizes = Sizes()) -> Iterator[Comparison]:
    """Compare two trainers with one, by gradients alone and by whole steps."""
    parts: dict[str, list[list[Parts]]] = {name: [] for name in ("one", *STRATEGIES)}
    with trainers_team(1, 2, sizes) as one, trainers_team(2, 1, sizes) as two:

        def step(name: str) -> None:
            team, task = (one, "average") if name == "one" else (two, name)
            parts[name].append(team.do(task))

        steps = {name: lambda name=name: step(name) for name in parts}
        whole = {m.name: m for m in measure(steps, rounds)}
    slowest = {name: [_slowest(ranks) for ranks in parts[name][-rounds:]] for name in parts}

    def seconds(name: str, of: Callable[[Parts], float], label: str) -> Measured:
        return Measured(label, tuple(of(part) for part in slowest[name]))

    question = f"two trainers of one thread, {sizes.batch} pictures of {sizes.crop} pixels in all"
    peer = "one trainer of two threads"
    alone = [
        seconds(name, lambda part: part.gradients, label)
        for name, label in (("average", "gradients alone"), ("one", f"{peer}, gradients alone"))
    ]
    yield compare(question, *alone, target=0.95)
    for name in STRATEGIES:
        ours = Measured(f"exchange: {name}", whole[name].seconds)
        target = 1.0 if name == "average" else None
        yield compare(question, ours, Measured(peer, whole["one"].seconds), target=target)
    question = "exchange and update of two trainers"
    update = seconds("one", lambda part: part.update, "update of one trainer")
    for name in STRATEGIES:
        ours = seconds(name, lambda part: part.exchange + part.update, f"exchange: {name}")
        yield compare(question, ours, update, "time")


def _slowest(ranks: Sequence[Parts]) -> Parts:
    """Return the parts of the slowest trainer; the others wait for it in the exchange."""
    return Parts(
        max(part.gradients for part in ranks),
        min(part.exchange for part in ranks),
        max(part.update for part in ranks),
    )


def trainers_team(trainers: int, threads: int, sizes: Sizes) -> Team:
    """Trainers that make steps with each strategy."""
    config = Config(
        crop_size=sizes.crop,
        width=sizes.width,
        batch_size=sizes.batch // trainers,
        threads=threads,
        compile=False,
    )
    groups = local_groups(trainers)
    team = Team(train_alone, [(config, sizes.classes, group) for group in groups])
    for group in groups:  # whose ends are to be the processes' alone
        group.close()
    return team


def train_alone(
    config: Config,
    classes: int,
    group: LocalGroup,
    pipe: Connection,
) -> None:
    """Serve as the process of one trainer."""
    os.environ["OMP_NUM_THREADS"] = str(config.threads)
    from alex_net import AlexNet
    from tandem.backend import keep_freed_memory, set_threads

    set_threads(int(config.threads))
    keep_freed_memory()
    net = AlexNet(config.crop_size, classes, config.width)
    tasks: dict[str, Callable[[], Parts]] = {}
    for strategies in (STRATEGIES[:2], STRATEGIES[2:]):  # a copy each, one that all share
        tasks |= _tasks(config, net, group, strategies)
    serve(pipe, tasks)


def _tasks(
    config: Config, net: Any, group: LocalGroup, strategies: Sequence[str]
) -> dict[str, Callable[[], Parts]]:
    """A step with each strategy over one memory."""
    from tandem.optim import SGD
    from tandem.training.compiled_network import CompiledNetwork

    shapes = {name: variable.type.shape for name, variable in net.parameters.items()}
    layout = FlatLayout.of(shapes, config.dtype, states=("momentum",))
    settings = [ExchangeSettings.of({"exchange": strategy}) for strategy in strategies]
    slots = HostSlots.create(
        SlotLayout.of_pictures(config.batch_size, config.crop_size), group.rank
    )
    memory = open_host_memory(settings[0], slots, group, layout)
    mean = np.full((3, config.crop_size, config.crop_size), 120, np.float32)
    model = CompiledNetwork(net, config, SGD(), mean, memory)
    model.load(dict(net.initial_values(seed=1)))
    slot = memory.slots[0]
    _fill(slot, net, group.rank)
    shares = [1 / group.size] * group.size

    def task(chosen: ExchangeSettings) -> Callable[[], Parts]:
        exchange = make_exchange(chosen, memory, group)
        return lambda: _step(model, slot, exchange, shares)

    return {chosen.exchange.name: task(chosen) for chosen in settings}


def _fill(slot: Slot, net: Any, rank: int) -> None:
    """Write noise: on zeros a few kernels are faster than on pictures."""
    rng = np.random.default_rng(rank)
    slot.pictures[...] = rng.integers(0, 256, slot.pictures.shape, np.uint8)
    slot.labels[...] = rng.integers(0, net.classes, slot.labels.shape)
    slot.indices[...] = rng.integers(0, 100_000, slot.indices.shape)
    slot.valid[...] = len(slot.labels)


def _step(model: Any, slot: Slot, exchange: Exchange, shares: Sequence[float]) -> Parts:
    """Make a step as `tandem.training.trainer` does."""
    begun = time.perf_counter()
    model.compute_gradients(slot, epoch=0)
    model.is_finite()
    computed = time.perf_counter()
    exchange.before_update(shares)
    exchanged = time.perf_counter()
    model.update(RATE)
    updated = time.perf_counter()
    exchange.after_update(shares)
    ended = time.perf_counter()
    return Parts(computed - begun, exchanged - computed + ended - updated, updated - exchanged)


if __name__ == "__main__":
    raise SystemExit(main())
