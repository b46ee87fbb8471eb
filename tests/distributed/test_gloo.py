"""The group of torchrun's ranks, by real ones, which run `check_ranks`."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from tandem.distributed import gloo
from tandem.distributed.gloo import VARIABLES, agree, is_started_by_torchrun, machine
from tests.support.ranks import run_ranks
from tests.support.tiny import shared_memory


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
    result = run_ranks(ranks, "tests/support/check_ranks.py", by="torchrun")
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"checked {ranks}\n"
    assert shared_memory() <= before


def test_a_machine_is_identified_by_more_than_its_name() -> None:
    assert machine() == machine()
    assert all(machine())


def test_ranks_that_are_started_again_do_not_join_those_before() -> None:
    """At a store that keeps everything, of which one has called and come no further."""
    store, names = HashStore(), []
    store.set("tandem/call/2", "of a rank that was killed")
    for _ in range(2):
        with ThreadPoolExecutor() as pool:
            names.append(set(pool.map(lambda rank: agree(store, rank, 3), range(3))))
    assert [len(found) for found in names] == [1, 1]
    assert names[0] != names[1]


def test_ranks_do_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo, "_JOIN_TIMEOUT", timedelta(seconds=0.2))
    with pytest.raises(RuntimeError, match="2 of 3 ranks have not come"):
        agree(HashStore(), 0, 3)
    with pytest.raises(RuntimeError):
        agree(HashStore(), 1, 3)
