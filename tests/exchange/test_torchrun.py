"""The engine of torchrun's ranks, by real ones; `check_ranks` says what each checks."""

import pytest
from ranks import run_ranks
from tiny import shared_memory

from tandem.exchange.torchrun import VARIABLES, is_started_by_torchrun, machine


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ((), False),
        (("TORCHELASTIC_RUN_ID",), True),
        (VARIABLES, True),
        (VARIABLES[:-1], False),
        (("PMI_SIZE", "SLURM_PROCID"), False),
    ],
)
def test_a_rank_knows_that_it_is_one(
    monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], expected: bool
) -> None:
    for name in names:
        monkeypatch.setenv(name, "1")
    assert is_started_by_torchrun() is expected


@pytest.mark.parametrize(
    "ranks",
    [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)],
)
def test_every_collective_agrees_with_numpy(ranks: int) -> None:
    before = shared_memory()
    result = run_ranks(ranks, "tests/exchange/check_ranks.py", by="torchrun")
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"checked {ranks}\n"
    assert shared_memory() <= before


def test_a_machine_is_told_by_more_than_its_name() -> None:
    assert machine() == machine()
    assert all(machine())
