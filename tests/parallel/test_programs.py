"""Programs as users write them, without a guard for `__main__`, on several numbers of workers."""

import ast
import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tandem.parallel as synk
from tests.support.tiny import python_path

PROGRAMS = sorted((Path(__file__).parent / "programs").glob("*.py"))
BY_RANK = {"batch": "scatter", "master_rank": "fork"}


def run(program: Path, workers: int, folder: Path) -> None:
    """Run a program, which checks itself, and have no process of it left."""
    result = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", str(program), str(workers)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": python_path()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0, result.stdout
    assert result.stdout.splitlines()[-1].endswith(f": {workers}"), result.stdout


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_with_two_workers(program: Path, tmp_path: Path) -> None:
    run(program, 2, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3, 4])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_a_program(program: Path, workers: int, tmp_path: Path) -> None:
    run(program, workers, tmp_path)
