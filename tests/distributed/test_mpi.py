"""The group of MPI's ranks and its collectives, by real ones, which run `check_ranks`."""

import mmap
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tandem.distributed import mpi
from tandem.distributed.mpi import is_started_by_mpi
from tests.support.fake_cuda import FakeDriver, FakeMachine
from tests.support.ranks import leaves_no_memory, mpich_memory, need_ranks, run_ranks
from tests.support.tiny import ROOT


@pytest.fixture(autouse=True, scope="module")
def _ranks() -> None:
    need_ranks()


def is_started(environment: dict[str, str]) -> bool:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        return is_started_by_mpi()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        ({"PMI_SIZE": "1"}, True),
        ({"PMIX_RANK": "0"}, True),
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, False),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, False),  # a batch script
        ({"SLURM_STEP_NUM_TASKS": "2"}, True),
    ],
)
def test_a_rank_knows_that_it_is_one(environment: dict[str, str], expected: bool) -> None:
    assert is_started(environment) is expected


@pytest.mark.parametrize(
    "ranks",
    [2, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (1, 3, 4))],
)
def test_every_collective_agrees_with_numpy(ranks: int) -> None:
    before = mpich_memory()
    result = run_ranks(ranks, "tests/support/check_ranks.py")
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"checked {ranks}\n"
    assert leaves_no_memory(before)


def test_parts_have_pages_of_their_own_wherever_memory_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The standard does not say where; MPICH begins with a page."""
    memory = np.zeros(1 << 16, np.uint8)

    def allocate(size: int, unit: int, comm: Any) -> Any:
        def part(rank: int) -> tuple[np.ndarray, int]:
            return memory[100 + rank * size : 100 + (rank + 1) * size], unit

        return SimpleNamespace(Shared_query=part)

    library = SimpleNamespace(Win=SimpleNamespace(Allocate_shared=allocate))
    monkeypatch.setattr(mpi, "_import_mpi", lambda: library)
    monkeypatch.setattr(mpi.MpiGroup, "barrier", lambda self: None)
    group, driver = mpi.MpiGroup(SimpleNamespace(rank=1, size=3)), FakeDriver(FakeMachine())
    for part in group.shared_memory(mmap.PAGESIZE):
        assert part.nbytes == mmap.PAGESIZE
        driver.lock_pages(part)


@pytest.mark.parametrize("variable", ["OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_a_starter_of_another_mpi_is_found_out(variable: str) -> None:
    """Each process would train by itself, and write over the others."""
    program = "from tandem.distributed.mpi import join; join()"
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, variable: "4"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert is_started({variable: "4"})
    assert "4 processes were started together, but the MPI that mpi4py uses sees 1" in result.stderr
