"""Training runs on tiny data sets: made, and compared with each other."""

import os
import signal
import time
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tandem.artifacts.run_folder import list_checkpoints
from tests.support.ranks import Starter, need_ranks, run_ranks
from tests.support.tiny import (
    find_process,
    is_gone,
    read_record,
    run_program,
    settings,
    shared_memory,
    start_program,
    wait_for_steps,
    without_times,
)


def train(data: Path, run: Path, timeout: float = 120, **changes: Any) -> Path:
    """Train on this machine, check that it succeeds; return `run`."""
    train_log(data, run, timeout, **changes)
    return run


def train_log(data: Path, run: Path, timeout: float = 120, **changes: Any) -> str:
    """Train on this machine, check that it succeeds; return the log."""
    result = run_program("train.py", settings(data, run, **changes), timeout)
    assert result.returncode == 0, result.stderr
    return result.stderr


def train_ranks(data: Path, run: Path, ranks: int, by: Starter = "mpirun", **changes: Any) -> Path:
    """Train as ranks, check that it succeeds; return `run`."""
    train_ranks_log(data, run, ranks, by, **changes)
    return run


def train_ranks_log(
    data: Path,
    run: Path,
    ranks: int,
    by: Starter = "mpirun",
    program: tuple[str, ...] = ("train.py",),
    timeout: float = 120,
    **changes: Any,
) -> str:
    """Train as ranks, check that it succeeds; return the log. Skip where there is no mpirun."""
    need_ranks(by)
    arguments = [*program[1:], *settings(data, run, **changes)]
    result = run_ranks(ranks, program[0], arguments, timeout, by)
    assert result.returncode == 0, result.stderr
    return result.stderr


class RunningJob:
    """A training run in a process group of its own, to be disturbed.

    It is started when its record has `steps` lines.
    """

    def __init__(self, data: Path, run: Path, steps: int = 2, **changes: Any) -> None:
        self.run, self._shared = run, shared_memory()
        self.process = start_program("train.py", settings(data, run, **changes))
        self.pid = self.process.pid
        if steps:
            self.wait_for(steps)

    def wait_for(self, steps: int) -> None:
        """Wait for so many lines of the record."""
        wait_for_steps(self.run, self.process, steps)

    def find(self, name: str, seconds: float = 0.0) -> int:
        """Return the process ID of a trainer or loader, which may begin within `seconds`."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                return find_process(self.pid, name)
            except LookupError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)

    def signal(self, number: signal.Signals, name: str = "launcher") -> None:
        """Send a signal to a process, or to the "group", as a terminal does."""
        if name == "group":
            os.killpg(self.pid, number)
        else:
            os.kill(self.pid if name == "launcher" else self.find(name), number)

    def end(self, *statuses: int, timeout: float = 30) -> str:
        """Wait for its end with one of the exit statuses, and with nothing left; return stderr."""
        _, errors = self.process.communicate(timeout=timeout)
        assert self.process.returncode in statuses, errors
        assert is_gone(self.pid)
        assert shared_memory() <= self._shared
        return errors


def forget_after(run: Path, name: str) -> None:
    """Delete checkpoints after that of an epoch, as if the run had been stopped in the next."""
    for later in list_checkpoints(run):
        if later.name >= f"{name}-":
            later.unlink()


def weights(run: Path, index: int = -1) -> dict[str, np.ndarray]:
    """Weights and momenta of one of a run's checkpoints."""
    return load_file(list_checkpoints(run)[index])


def assert_same_weights(ours: Path, theirs: Path) -> None:
    """Compare the last checkpoints, names included, bit for bit."""
    names = [list_checkpoints(run)[-1].name for run in (ours, theirs)]
    assert names[0] == names[1], f"the runs end with {names[0]} and {names[1]}"
    left, right = weights(ours), weights(theirs)
    assert left.keys() == right.keys()
    differing = [name for name in left if left[name].tobytes() != right[name].tobytes()]
    assert not differing, f"{differing} differ"


def assert_same_bits(ours: Path, theirs: Path) -> None:
    """Compare the last checkpoints bit for bit, and the records but for times."""
    assert_same_weights(ours, theirs)
    left, right = ([without_times(line) for line in read_record(run)] for run in (ours, theirs))
    differing = [pair for pair in zip_longest(left, right) if pair[0] != pair[1]]
    counts = f"{len(left)} and {len(right)}"
    assert not differing, f"records of {counts} lines differ: {differing[:2]}"


def assert_close(ours: Path, theirs: Path, tolerance: float) -> None:
    """Compare every checkpoint relative to each array's largest value, and the losses."""
    names = [path.name for path in list_checkpoints(ours)]
    assert names == [path.name for path in list_checkpoints(theirs)]
    for index in range(len(names)):
        left, right = weights(ours, index), weights(theirs, index)
        assert left.keys() == right.keys()
        for name, value in left.items():
            atol = tolerance * np.abs(right[name]).max()
            np.testing.assert_allclose(value, right[name], rtol=0, atol=atol, err_msg=name)
    for mine, other in zip(read_record(ours), read_record(theirs), strict=True):
        assert mine["event"] == other["event"]
        assert mine["loss"] == pytest.approx(other["loss"], rel=tolerance)
        if tolerance < 1e-6:
            assert mine["top1_error"] == other["top1_error"]
        if mine["event"] == "validation":
            assert mine["images"] == other["images"]
