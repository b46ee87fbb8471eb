"""The benchmark of one and two trainers: what it compares, on a tiny network."""

import numpy as np
import pytest

from alex_net import AlexNet
from benchmarks.measure import row
from benchmarks.trainers import Parts, Sizes, _slowest, _tasks, answer
from tandem.config.schema import Config
from tandem.distributed import local_groups
from tandem.memory import SlotLayout
from tandem.training.memory import host_sites

TINY = Sizes(batch=4, crop=67, classes=3, width=0.05)


def test_a_step_computes_exchanges_and_updates() -> None:
    config = Config(crop_size=67, width=0.05, batch_size=2, threads=1, compile=False)
    (site,), (place,) = host_sites(SlotLayout(2, 67), 1, "shared"), local_groups(1)
    tasks = _tasks(config, AlexNet(67, 3, 0.05), place, site, ["shared"])
    weights = site.parameters[0].array(1000, "float32")
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
        *((name, one, None) for name in strategies),
        *((name, "update of one trainer", None) for name in strategies),
    ]
    assert {r["rounds"] for r in rows} == {2}
    # A whole step takes longer than the gradients in it.
    assert all(r["seconds"] > rows[0]["seconds"] for r in rows[1:2])


def test_a_step_is_as_slow_as_its_slowest_trainer() -> None:
    assert _slowest([Parts(1.0, 2.5, 0.5), Parts(3.0, 0.5, 0.4)]) == Parts(3.0, 0.5, 0.5)
