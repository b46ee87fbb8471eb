"""The benchmark of one and two trainers: what it compares, on a tiny network."""

import pytest

from benchmarks.measure import row
from benchmarks.trainers import Sizes, answer

TINY = Sizes(batch=4, crop=67, classes=3, width=0.05)


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
