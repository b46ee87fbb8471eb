"""Scripts that use the front as users start them: without a guard, killed, over ranks."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tandem.artifacts.checkpoint import read_checkpoint
from tandem.artifacts.run_folder import list_checkpoints
from tests.support.tiny import ROOT, is_gone, python_path

SCRIPT = ROOT / "tests" / "support" / "nn_script.py"


def start(command: list[str], folder: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def run(command: list[str], folder: Path, seconds: float = 150) -> str:
    process = start(command, folder)
    try:
        output, _ = process.communicate(timeout=seconds)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output
    return output


def script(folder: Path, devices: str, epochs: int = 3) -> list[str]:
    return [sys.executable, str(SCRIPT), str(folder / "run"), devices, str(epochs)]


def last_weights(folder: Path) -> dict[str, np.ndarray]:
    return read_checkpoint(list_checkpoints(folder / "run")[-1]).weights


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a script that has trained with one trainer."""
    folder = tmp_path_factory.mktemp("one")
    run(script(folder, "cpu"), folder)
    return folder


@pytest.mark.slow
def test_a_script_without_a_guard_trains_with_two_processes(tmp_path: Path) -> None:
    """It is read from standard input, as a notebook's cells are: there is no file of it."""
    arguments = script(tmp_path, "cpu,cpu", epochs=1)
    line = f"{sys.executable} - {' '.join(arguments[2:])} < {SCRIPT}"
    output = run(["bash", "-c", line], tmp_path)
    assert "Epoch 1/1\n5/5 - " in output
    assert " - accuracy: " in output
    assert " - val_loss: " in output
    assert output.count("last 0 ") == 1


@pytest.mark.slow
def test_two_trainers_learn_what_one_does(one: Path, tmp_path: Path) -> None:
    """With batch normalisation and dropout."""
    run(script(tmp_path, "cpu,cpu"), tmp_path)
    ours, theirs = last_weights(tmp_path), last_weights(one)
    for name, value in theirs.items():
        np.testing.assert_allclose(ours[name], value, atol=1e-9, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("starter", ["mpirun", "torchrun"])
def test_ranks_learn_what_one_process_does(one: Path, tmp_path: Path, starter: str) -> None:
    """Averages of batch normalisation included, which are the same on all ranks."""
    ranks = {
        "mpirun": ["mpirun", "-n", "2", sys.executable],
        "torchrun": [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"
        ],
    }[starter]  # fmt: skip
    output = run([*ranks, *script(tmp_path, "cpu")[1:]], tmp_path)
    assert output.count("last 2 ") == 2  # every rank has the history
    assert output.count("Epoch 3/3") == 1  # and rank 0 shows the progress
    ours, theirs = last_weights(tmp_path), last_weights(one)
    for name, value in theirs.items():
        np.testing.assert_allclose(ours[name], value, atol=1e-9, err_msg=name)


@pytest.mark.slow
def test_a_killed_script_ends_with_the_same_bits(one: Path, tmp_path: Path) -> None:
    process = start(script(tmp_path, "cpu"), tmp_path)
    deadline = time.monotonic() + 100
    while not list_checkpoints(tmp_path / "run") and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert is_gone(process.pid, 20)
    assert len(list_checkpoints(tmp_path / "run")) < 3
    run(script(tmp_path, "cpu"), tmp_path)
    ours, theirs = (read_checkpoint(list_checkpoints(f / "run")[-1]) for f in (tmp_path, one))
    for name, value in theirs.weights.items():
        np.testing.assert_array_equal(ours.weights[name], value, err_msg=name)
    for state, values in theirs.states.items():
        for name, value in values.items():
            np.testing.assert_array_equal(ours.states[state][name], value, err_msg=name)


@pytest.mark.slow
def test_bad_input_is_one_sentence_on_every_rank(tmp_path: Path) -> None:
    command = ["mpirun", "-n", "3", *script(tmp_path, "cpu")]
    process = start(command, tmp_path)
    output, _ = process.communicate(timeout=100)
    assert process.returncode != 0
    assert "batch_size: found 32 for 3 trainers, expected a multiple of their number" in output
