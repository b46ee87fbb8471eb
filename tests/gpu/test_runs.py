"""Whole runs on one GPU, as a user makes them: against the host, resumed, and killed."""

import os
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.runs import assert_same_weights, weights
from tests.support.runs import train as train_tiny
from tests.support.tiny import (
    find_process,
    is_gone,
    read_record,
    run_program,
    settings,
    start_program,
    wait_for_steps,
)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

COMMON = {"precision": "float64", "batch_size": 2, "n_epochs": 2, "check_every": 1}
EXACT = {"precision": "float32", "deterministic": True, "compile": False}
SECONDS = 400  # a first compilation takes minutes


def train(data: Path, run: Path, **changes: object) -> Path:
    return train_tiny(data, run, SECONDS, **{**COMMON, **changes})


@pytest.fixture(scope="module")
def on_host(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(data, tmp_path_factory.mktemp("host") / "run", devices=["cpu"], batch_size=4)


@pytest.mark.parametrize(
    "changes",
    [
        {"devices": ["cuda:0"], "batch_size": 4},
        {"devices": ["cuda:0"], "batch_size": 4, "compile": False, "use_data_layer": False},
        {"devices": ["cuda:0", "cuda:0"], "compile": False},
        {"devices": ["cuda:0", "cuda:0"], "compile": False, "exchange": "gradients"},
        {"devices": ["cuda:0", "cuda:0"], "compile": False, "para_load": False},
    ],
    ids=["one, compiled", "one, loader crops", "average", "gradients", "without loaders"],
)
def test_trainers_on_a_gpu_compute_what_one_does_on_the_host(
    data: Path, tmp_path: Path, on_host: Path, changes: dict[str, object]
) -> None:
    run = train(data, tmp_path / "run", **changes)
    ours, theirs = weights(run), weights(on_host)
    for name, value in theirs.items():
        np.testing.assert_allclose(ours[name], value, rtol=1e-7, atol=1e-10, err_msg=name)
    for line, expected in zip(read_record(run), read_record(on_host), strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-7)
        assert line["top1_error"] == expected["top1_error"]


@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16"])
def test_each_precision_learns(data: Path, tmp_path: Path, precision: str) -> None:
    changes = {"devices": ["cuda:0"], "compile": False, "n_epochs": 20, "width": 0.25}
    run = train(data, tmp_path / "run", **changes, precision=precision)
    losses = [line["loss"] for line in read_record(run) if line["event"] == "train"]
    assert np.mean(losses[-10:]) < np.mean(losses[:10])


@pytest.mark.parametrize("devices", [["cuda:0"], ["cuda:0", "cuda:0"]])
def test_a_resumed_run_has_the_same_bits(data: Path, tmp_path: Path, devices: list[str]) -> None:
    common = {**EXACT, "devices": devices, "shuffle": "images"}
    whole = train(data, tmp_path / "whole", **common)
    train(data, tmp_path / "parts", **{**common, "n_epochs": 1})
    parts = train(data, tmp_path / "parts", **common, resume_train=True)
    assert_same_weights(parts, whole)


def free_memory() -> int:
    return torch.cuda.mem_get_info(0)[0]


@pytest.mark.parametrize("victim", ["trainer 0", "trainer 1", "loader 0", "launcher"])
def test_a_killed_process_leaves_no_process_and_no_memory(
    data: Path, tmp_path: Path, victim: str
) -> None:
    before, run = free_memory(), tmp_path / "run"
    changes = {**COMMON, **EXACT, "devices": ["cuda:0", "cuda:0"], "n_epochs": 100_000}
    process = start_program("train.py", settings(data, run, **changes))
    wait_for_steps(run, process, 3, seconds=SECONDS)
    pid = process.pid if victim == "launcher" else find_process(process.pid, victim)
    os.kill(pid, signal.SIGKILL)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == (-signal.SIGKILL if victim == "launcher" else 1)
    assert victim == "launcher" or re.search(f"{victim}: was killed by SIGKILL", errors), errors
    assert is_gone(process.pid, seconds=15)
    deadline = time.monotonic() + 15
    while free_memory() < before - (64 << 20):  # what other programs take meanwhile
        assert time.monotonic() < deadline, f"{before - free_memory()} bytes are left"
        time.sleep(0.2)


def test_more_than_the_memory_is_refused_in_a_sentence(data: Path, tmp_path: Path) -> None:
    changes = {**EXACT, "devices": ["cuda:0"], "width": 40.0, "batch_size": 512}
    result = run_program("train.py", settings(data, tmp_path / "run", **changes), SECONDS)
    assert result.returncode == 2, result.stderr
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("error: cuda:0 has too little memory"), last
    assert "batch_size" in last
