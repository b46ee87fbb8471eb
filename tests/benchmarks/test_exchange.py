"""The benchmark of exchanges: what it compares, and that it exchanges."""

import json

import pytest

from benchmarks import exchange
from benchmarks.measure import row


@pytest.mark.slow
def test_it_compares_what_it_says() -> None:
    rows = [row(comparison) for comparison in exchange.answer(1, parameters=5_000, most=1)]
    assert [(r["name"], r["peer"]) for r in rows] == [
        ("average", "one copy"),
        ("average", "one copy into allocated memory"),
        ("average", "both copy at once"),
        ("gradients", "one copy"),
        ("shared", "one copy"),
        ("plain NumPy", "one copy"),
        ("1 trainer", "one copy"),
    ]
    assert [r["target"] for r in rows] == [0.6] + [None] * 6
    assert all(r["kind"] == "time" and r["rounds"] == 1 for r in rows)
    assert json.dumps(rows)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["average", "plain NumPy"])
def test_its_trainers_exchange(task: str) -> None:
    with exchange.trainers_team(3, parameters=2_000) as team:
        assert team.do("sum") == [0, 4_000, 8_000]
        team.do(task)
        assert team.do("sum") == pytest.approx([4_000] * 3, rel=1e-6)
