"""Training runs on tiny data sets: made, and compared with each other."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tandem.artifacts.run_folder import list_checkpoints
from tests.support.tiny import read_record, run_program, settings, without_times


def train(data: Path, run: Path, timeout: float = 120, **changes: Any) -> Path:
    """Train on this machine, check that it succeeds; return `run`."""
    result = run_program("train.py", settings(data, run, **changes), timeout)
    assert result.returncode == 0, result.stderr
    return run


def weights(run: Path, index: int = -1) -> dict[str, np.ndarray]:
    """Weights and momenta of one of a run's checkpoints."""
    return load_file(list_checkpoints(run)[index])


def assert_same_weights(ours: Path, theirs: Path) -> None:
    """Compare the last checkpoints bit for bit."""
    left, right = (
        {name: value.tobytes() for name, value in weights(run).items()} for run in (ours, theirs)
    )
    assert left == right


def assert_same_bits(ours: Path, theirs: Path) -> None:
    """Compare the last checkpoints bit for bit, and the records but for times."""
    assert_same_weights(ours, theirs)
    left, right = ([without_times(line) for line in read_record(run)] for run in (ours, theirs))
    assert left == right


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
