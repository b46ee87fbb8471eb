"""Runs on a GPU whose processes are killed; they look at free memory, so nothing runs beside."""

import os
import re
import signal
from pathlib import Path

import pytest
import torch

from tests.support.tiny import (
    find_process,
    is_gone,
    settings,
    start_program,
    wait_for_steps,
    wait_until,
)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

CHANGES = {
    "devices": ["cuda:0", "cuda:0"],
    "batch_size": 2,
    "n_epochs": 100_000,
    "check_every": 1,
    "precision": "float32",
    "deterministic": True,
    "compile": False,
}


def free_memory() -> int:
    return torch.cuda.mem_get_info(0)[0]


@pytest.mark.parametrize("victim", ["trainer 0", "trainer 1", "loader 0", "launcher"])
def test_a_killed_process_leaves_no_process_and_no_memory(
    data: Path, tmp_path: Path, victim: str
) -> None:
    before, run = free_memory(), tmp_path / "run"
    process = start_program("train.py", settings(data, run, **CHANGES))
    wait_for_steps(run, process, 3, seconds=80)
    pid = process.pid if victim == "launcher" else find_process(process.pid, victim)
    os.kill(pid, signal.SIGKILL)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == (-signal.SIGKILL if victim == "launcher" else 1)
    assert victim == "launcher" or re.search(f"{victim}: was killed by SIGKILL", errors), errors
    assert is_gone(process.pid, seconds=15)
    allowed = 64 << 20  # what other programs take meanwhile
    is_free = wait_until(lambda: free_memory() >= before - allowed, 15)
    assert is_free, f"{before - free_memory()} bytes are left"
