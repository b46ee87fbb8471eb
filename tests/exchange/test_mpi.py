"""The engine and the collectives, by real ranks; `check_ranks` says what each checks."""

import os
import subprocess
import sys

import pytest
from ranks import missing, run_ranks
from tiny import ROOT, shared_memory

if reason := missing():
    pytest.skip(reason, allow_module_level=True)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_collective_agrees_with_numpy(ranks: int) -> None:
    before = shared_memory()
    result = run_ranks(ranks, "tests/exchange/check_ranks.py")
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"checked {ranks}\n"
    assert shared_memory() <= before


def test_an_mpirun_of_another_mpi_is_found_out() -> None:
    """Each process would train by itself, and write over the others."""
    program = "from tandem.exchange.mpi import join; join()"
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "OMPI_COMM_WORLD_SIZE": "4"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "4 processes were started together, but the MPI that mpi4py uses sees 1" in result.stderr
