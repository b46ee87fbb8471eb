"""The benchmark of data-parallel functions: what it compares, and what contenders do."""

from typing import Any, Self

import numpy as np
import pytest

from benchmarks import parallel, trainers
from benchmarks.measure import Figure, row
from benchmarks.parallel_contenders import CONTENDERS, PARTS, Sizes

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
