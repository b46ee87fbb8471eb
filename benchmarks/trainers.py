"""Are two trainers of one thread as fast as one trainer of two threads?

    python -m benchmarks.trainers

Both compute the same global minibatch: 64 pictures of 227 pixels, 32 for each of the two, with the
whole network. Two trainers also exchange, and both update the weights; so their gradients are
compared alone, and then whole steps with each exchange. Memory, exchange and compiled network are
those of a run; the minibatch is constant noise.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.measure import Comparison, Measured, compare, measure, run
from benchmarks.placement import ONE, Case, Parts, slowest, trainers
from benchmarks.team import Team

STRATEGIES = ("average", "gradients", "shared")


@dataclass(frozen=True)
class Sizes:
    """Sizes of a step: pictures of all trainers, their side, classes and network width."""

    batch: int = 64
    crop: int = 227
    classes: int = 1000
    width: float = 1.0


def answer(rounds: int, sizes: Sizes = Sizes()) -> Iterator[Comparison]:
    """Compare two trainers with one, by gradients alone and by whole steps."""
    parts: dict[str, list[list[Parts]]] = {name: [] for name in ("one", *STRATEGIES)}
    with trainers_team(1, 2, sizes) as one, trainers_team(2, 1, sizes) as two:

        def step(name: str) -> None:
            team, task = (one, "average") if name == "one" else (two, name)
            parts[name].append(team.do(task))

        steps = {name: lambda name=name: step(name) for name in parts}
        whole = {m.name: m for m in measure(steps, rounds)}
    last = {name: [slowest(ranks) for ranks in parts[name][-rounds:]] for name in parts}

    def seconds(name: str, of: Callable[[Parts], float], label: str) -> Measured:
        return Measured(label, tuple(of(part) for part in last[name]))

    question = f"two trainers of one thread, {sizes.batch} pictures of {sizes.crop} pixels in all"
    alone = [
        seconds(name, lambda part: part.gradients, label)
        for name, label in (("average", "gradients alone"), ("one", f"{ONE}, gradients alone"))
    ]
    yield compare(question, *alone, target=0.95)
    for name in STRATEGIES:
        ours = Measured(f"exchange: {name}", whole[name].seconds)
        target = 1.0 if name == "average" else None
        yield compare(question, ours, Measured(ONE, whole["one"].seconds), target=target)
    question = "exchange and update of two trainers"
    update = seconds("one", lambda part: part.update, "update of one trainer")
    for name in STRATEGIES:
        ours = seconds(name, lambda part: part.rest, f"exchange: {name}")
        yield compare(question, ours, update, "time")


def trainers_team(count: int, threads: int, sizes: Sizes) -> Team:
    """One trainer, which averages, or two, which make steps with each strategy."""
    strategies = STRATEGIES if count > 1 else STRATEGIES[:1]
    case = Case(
        "AlexNet",
        "alex_net:AlexNet",
        sizes.batch // 2,
        sizes.crop,
        0,
        strategies,
        sizes.classes,
        sizes.width,
    )
    return trainers(case, count, threads, strategies)


if __name__ == "__main__":
    raise SystemExit(run(__doc__, answer, rounds=5))
