"""The benchmark of data-parallel functions: what it compares, and what contenders do."""

from typing import Any, Self

import numpy as np
import pytest

from benchmarks import parallel, trainers
from benchmarks.measure import Figure, row
from benchmarks.parallel_contenders import CONTENDERS, PARTS, Sizes, passed_rows, pool, seconds
from tandem.errors import InputError

TINY = Sizes(
    rows=8,
    units=16,
    passed=10,
    columns=6,
    step=trainers.Sizes(batch=4, crop=67, classes=3, width=0.05),
    minibatches=2,
)
PLAIN = (  # question, name, peer and target of each row
    ("calls", "tandem.parallel", "multiprocessing.Pool", 1.0),
    ("calls", "tandem.parallel", "joblib", 1.0),
    ("calls", "tandem.parallel", "mpi4py", 1.0),
    ("calls", "tandem.parallel", "torch.distributed", 1.0),
    ("products", "tandem.parallel", "one process", 1.85),
    ("passed", "tandem.parallel", "multiprocessing.Pool, pickled", 5.0),
    ("ablations", "two workers", "one worker", None),
    ("ablations", "two workers", "one worker, half the batch", None),
    ("ablations", "two workers, shuffled rows", "two workers", None),
    ("ablations", "two workers, no all-reduce", "two workers", None),
)
STEPS = (
    ("train.py's trainers, exchange: gradients", 0.97),
    ("one process of two threads", 0.95),
    ("DDP, eager", 1.0),
    ("DDP, channels-last, fused SGD", 1.0),
)


class Fake:
    """A contender that is as slow as its name is long."""

    def __init__(self, name: str, sizes: Sizes) -> None:
        self._seconds = 1e-5 * len(name)

    def do(self, task: str, times: int = 1) -> Any:
        parts = dict.fromkeys(PARTS, self._seconds)
        return {"gradients": parts, "update": parts} if task == "times" else self._seconds

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        pass


def test_it_compares_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "Contender", Fake)
    found = []
    for part in ("calls", "products", "passed", "ablations"):
        rows = [row(one) for one in parallel.answer(2, TINY, only=part)]
        found += [(part, r["name"], r["peer"], r["target"]) for r in rows if "peer" in r]
    assert tuple(found) == PLAIN
    figure = next(iter(parallel.answer(2, TINY, only="calls")))
    assert isinstance(figure, Figure)
    assert (figure.value, figure.unit, figure.target) == (pytest.approx(150), "microseconds", 100)


def test_scaled_batches_are_compared_by_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "Contender", Fake)
    fixed, scaled, *_ = parallel.answer(2, TINY, only="ablations")
    assert scaled.peer_seconds == pytest.approx(2 * fixed.peer_seconds)


def test_each_part_of_each_function_has_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "Contender", Fake)
    rows = [row(one) for one in parallel.answer(2, TINY, only="times")]
    assert [r["name"] for r in rows] == [*PARTS, *PARTS]
    assert [r["seconds"] / r["whole_seconds"] for r in rows] == pytest.approx([0.25] * 8)


def test_contenders_take_turns() -> None:
    turns: list[str] = []

    def contender(name: str) -> float:
        turns.append(name)
        return float(len(turns))

    names = "ab"
    found = parallel.interleave({n: lambda n=n: contender(n) for n in names}, rounds=2)
    assert turns == ["a", "b"] * 3
    assert {name: one.seconds for name, one in found.items()} == {"a": (3, 5), "b": (4, 6)}


def test_sizes_reach_a_program() -> None:
    option, text = TINY.arguments()
    assert option == "--sizes"
    assert Sizes.parse(text) == TINY


def test_seconds_are_of_one_call() -> None:
    calls: list[int] = []
    assert 0 < seconds(lambda: calls.append(1), 5) < 1
    assert len(calls) == 5


def test_a_pool_gets_the_rows_in_their_order() -> None:
    rows, order = passed_rows(TINY)
    assert sorted(order) == list(range(len(rows)))
    with pool(TINY) as tasks:
        assert tasks["empty"](2) > 0
        assert tasks["passed rows"](1) > 0


def test_a_contender_that_ends_is_reported() -> None:
    with pytest.raises(InputError, match="the processes of nobody have ended"):
        parallel.Contender("nobody", TINY)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTENDERS)
def test_a_contender_does_its_tasks_and_ends(name: str) -> None:
    with parallel.Contender(name, TINY) as contender:
        assert contender.tasks
        for task in contender.tasks:
            found = contender.do(task, 2)
            assert task == "times" or found > 0
    assert contender._process.returncode == 0


@pytest.mark.slow
def test_steps_are_compared_with_every_way_of_making_them() -> None:
    rows = [row(one) for one in parallel.answer(1, TINY, only="steps")]
    assert [(r["peer"], r["target"]) for r in rows] == list(STEPS)
    assert all(r["name"] == "tandem.parallel" and np.isfinite(r["ratio"]) for r in rows)
