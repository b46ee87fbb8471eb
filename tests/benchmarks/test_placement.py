"""The benchmark of divided layers: its steps and what it compares, on tiny networks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.dense import OURS, PEER, PROCESSES, compare_dense, dense_rank
from benchmarks.dense import Sizes as DenseSizes
from benchmarks.measure import row
from benchmarks.placement import (
    ONE,
    Case,
    Parts,
    answer,
    slowest,
    tasks,
)
from benchmarks.team import Team
from tandem.distributed import local_groups, open_host_memory
from tandem.memory.parameters import HostMemory
from tests.support.threads import run_threads

TINY = Case(
    "AlexNet",
    "alex_net:AlexNet",
    2,
    67,
    2,
    ("average", "gradients", "shared", "sharded", "single"),
    classes=6,
    width=0.05,
)
DENSE = DenseSizes(rows=4, units=(24, 10, 6), repeats=1)


def test_a_step_computes_exchanges_and_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    (group,), memories = local_groups(1), []

    def note(*arguments: Any) -> HostMemory:
        memories.append(open_host_memory(*arguments))
        return memories[-1]

    monkeypatch.setattr("tandem.distributed.open_host_memory", note)
    step = tasks(TINY, 2, 1, ("shared",), group)["shared"]
    weights = memories[0].flat["parameters"][0]
    before = weights.copy()
    parts = step()
    assert min(parts.gradients, parts.exchange, parts.update) > 0
    assert np.isfinite(weights).all()
    assert (weights != before).any()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["sharded", "single"])
def test_two_trainers_make_steps(strategy: str) -> None:
    groups = local_groups(2)
    found: list[list[Any]] = [[], []]

    def work(rank: int) -> None:
        own = tasks(TINY, 2, 1, (strategy,), groups[rank])
        own[f"{strategy} forward"]()
        found[rank] = [own[strategy](), own[strategy](), own[f"{strategy} nbytes"]()]

    run_threads([lambda rank=rank: work(rank) for rank in range(2)], seconds=120)  # type: ignore[misc]
    for first, second, nbytes in found:
        for parts in (first, second):
            assert min(parts.gradients, parts.exchange, parts.update) > 0
            assert 0 < parts.conversions < parts.gradients
        assert nbytes > 0
    weights = [nbytes for *_, nbytes in found]
    assert (weights[0] > weights[1]) == (strategy == "single")


def test_a_step_is_as_slow_as_its_slowest_trainer() -> None:
    ranks = [Parts(1.0, 0.3, 2.5, 0.5), Parts(3.0, 0.2, 0.5, 0.4)]
    assert slowest(ranks) == Parts(3.0, 0.2, 0.5, 0.5)
    assert slowest(ranks).rest == 1.0


@pytest.mark.slow
def test_both_compute_the_same_losses(tmp_path: Path) -> None:
    """The losses of three steps, of which the last two follow updates."""
    with Team.of_group(dense_rank, PROCESSES, tmp_path / "store", DENSE) as team:
        for _ in range(3):
            ours, theirs = (sum(team.do(f"{name} loss")) for name in (OURS, PEER))
            np.testing.assert_allclose(ours, theirs, rtol=1e-5)


@pytest.mark.slow
def test_it_compares_what_it_says() -> None:
    (found,) = [row(comparison) for comparison in compare_dense(2, DENSE)]
    assert (found["name"], found["peer"], found["target"]) == (OURS, PEER, 1.0)
    rows = [row(each) for each in answer(2, "AlexNet", [TINY])]
    questions = list(dict.fromkeys(r["question"] for r in rows))
    assert questions == [
        "AlexNet: 4 pictures of 67 pixels, whole steps of two trainers of one thread",
        "AlexNet: 4 pictures of 67 pixels, sharded beside the best of the others",
        "AlexNet: exchange and update of two trainers",
        f"AlexNet: parts of a step, {ONE}",
        *(f"AlexNet: parts of a step, two trainers, {name}" for name in TINY.strategies),
        "AlexNet: weights, momenta and gradients of a trainer",
    ]
    assert [r["target"] for r in rows if r["question"] == questions[2]] == [
        *(1.3 if name == "sharded" else None for name in TINY.strategies),
        None,
        None,
    ]
    assert rows[-1]["unit"] == "MB"
