"""The benchmark of one and two trainers: what it compares, on a tiny network."""

from typing import Any

import numpy as np
import pytest

from alex_net import AlexNet
from benchmarks.measure import row
from benchmarks.trainers import Parts, Sizes, _slowest, _tasks, answer
from tandem.config.schema import Config
from tandem.distributed import local_groups, open_host_memory
from tandem.memory.parameters import HostMemory

TINY = Sizes(batch=4, crop=67, classes=3, width=0.05)


def test_a_step_computes_exchanges_and_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(crop_size=67, width=0.05, batch_size=2, threads=1, compile=False)
    (group,), memories = local_groups(1), []

    def note(*arguments: Any) -> HostMemory:
        memories.append(open_host_memory(*arguments))
        return memories[-1]

    monkeypatch.setattr("benchmarks.trainers.open_host_memory", note)
    tasks = _tasks(config, AlexNet(67, 3, 0.05), group, ["shared"])
    weights = memories[0].flat["parameters"][0]
    before = weights.copy()
    parts = tasks["shared"]()
    assert min(parts.gradients, parts.exchange, parts.update) > 0
    assert np.isfinite(weights).all()
    assert (weights != before).any()


@pytest.mark.slow
def test_it_compares_what_it_says() -> None:
    rows = [row(comparison) for comparison in answer(2, TINY)]
    one = "one trainer of two threads"
    strategies = [f"exchange: {name}" for name in ("average", "gradients", "shared")]
    assert [(r["name"], r["peer"], r["target"]) for r in rows] == [
        ("gradients alone", f"{one}, gradients alone", 0.95),
        *zip(strategies, [one] * 3, [1.0, None, None], strict=True),
        *((name, "update of one trainer", None) for name in strategies),
    ]
    assert {r["rounds"] for r in rows} == {2}
    # A whole step takes longer than the gradients in it.
    assert all(r["seconds"] > rows[0]["seconds"] for r in rows[1:2])


def test_a_step_is_as_slow_as_its_slowest_trainer() -> None:
    assert _slowest([Parts(1.0, 2.5, 0.5), Parts(3.0, 0.5, 0.4)]) == Parts(3.0, 0.5, 0.5)
