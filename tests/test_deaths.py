"""Trainers that die, and the run that goes on without losing a step."""

import os
import random
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tandem.artifacts.checkpoint import read_header
from tandem.artifacts.run_folder import list_checkpoints
from tests.support.runs import (
    RunningJob,
    assert_close,
    assert_same_bits,
    assert_same_weights,
    train,
    train_log,
)
from tests.support.tiny import ROOT, read_record

KILLS = int(os.environ.get("KILLS", "6"))
COMMON: dict[str, Any] = {
    "batch_size": 2,
    "devices": ["cpu"] * 3,
    "width": 0.02,
    "shuffle": "images",
    "exchange": "gradients",
    "n_epochs": 4,
    "print_freq": 2,
    "check_every": 3,
    "metrics": ["f1"],
    "peer_timeout_seconds": 10,
}
DYING = {"network": "tests.support.dying_network:DyingAlexNet"}
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run."""
    return train(data, tmp_path_factory.mktemp("whole") / "run", **COMMON)


def train_dying(
    monkeypatch: pytest.MonkeyPatch, data: Path, run: Path, most: int, **changes: Any
) -> str:
    """Train while trainers die at most so often; return the log."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("DEATHS", str(run.with_name("deaths")))
    monkeypatch.setenv("MOST", str(most))
    return train_log(data, run, 60 + 30 * most, **DYING, **{**COMMON, **changes})


def last_step(run: Path) -> int:
    return read_header(list_checkpoints(run)[-1]).state.step


def test_survivors_save_the_last_step(data: Path, tmp_path: Path) -> None:
    """Nobody saves otherwise; trainer 0 is the one that is gone, with the record in its hands."""
    changes = {**COMMON, "devices": ["cpu"] * 2, "n_epochs": 10_000, "print_freq": 1}
    job = RunningJob(data, tmp_path / "run", 12, **changes, snapshot_freq=10_000)
    job.signal(signal.SIGKILL, "trainer 0")
    assert "trainer 0: was killed by SIGKILL" in job.end(1)
    steps = [line["step"] for line in read_record(job.run) if line["event"] == "train"]
    assert steps == [*range(1, last_step(job.run) + 1)]


@slow
def test_deaths_between_any_two_messages_change_no_bit(
    monkeypatch: pytest.MonkeyPatch, data: Path, tmp_path: Path
) -> None:
    """Of one trainer or two at once, killed or stopped, in steps, validations and checkpoints.

    Three trainers, then two, then four, against one that is undisturbed.
    """
    run = tmp_path / "run"
    changes: dict[str, Any] = {"global_batch": 6, "sum_rows": 2, "resume_train": True}
    alone = {**COMMON, **changes, "devices": ["cpu"], "n_epochs": 3 * KILLS}
    whole = train(data, tmp_path / "whole", 600, **alone)
    for part, trainers in enumerate((3, 2, 4), start=1):
        changes |= {"devices": ["cpu"] * trainers, "n_epochs": KILLS * part}
        most = KILLS * part // 3
        log = train_dying(monkeypatch, data, run, most, **changes, min_trainers=trainers)
        assert f"starting again with {trainers} trainers" in log
    assert (tmp_path / "deaths").stat().st_size >= KILLS
    assert_same_bits(run, whole)
    assert not list(run.glob(".*.partial*"))


@slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("victims", [("trainer 0",), ("trainer 1", "trainer 2"), ("loader 1",)])
def test_a_run_goes_on(
    data: Path, tmp_path: Path, whole: Path, number: signal.Signals, victims: tuple[str, ...]
) -> None:
    job = RunningJob(data, tmp_path / "run", 3, **COMMON, min_trainers=3)
    time.sleep(random.uniform(0, 0.2))
    for victim in victims:
        job.signal(number, victim)
    assert "starting again with 3 trainers" in job.end(0, timeout=90)
    assert_same_bits(job.run, whole)


@slow
def test_a_stopped_trainer_ends_although_another_was_killed(
    data: Path, tmp_path: Path, whole: Path
) -> None:
    """Trainer 0, for which all others wait, is noticed after its timeout."""
    job = RunningJob(data, tmp_path / "run", 3, **COMMON, min_trainers=3)
    job.signal(signal.SIGSTOP, "trainer 0")
    job.signal(signal.SIGKILL, "trainer 1")
    assert "starting again with 3 trainers" in job.end(0, timeout=90)
    assert_same_bits(job.run, whole)


@slow
def test_a_trainer_that_dies_again_and_again_is_left_out(
    monkeypatch: pytest.MonkeyPatch, data: Path, tmp_path: Path
) -> None:
    """Before the first step, as where a device is broken; the global minibatch stays."""
    monkeypatch.setenv("DEATHS_OF", "2")
    changes = {"precision": "float64"}
    log = train_dying(monkeypatch, data, tmp_path / "run", 99, **changes, min_trainers=2)
    counts = re.findall(r"starting again with (\d) trainers", log)
    assert counts == ["3", "2"]
    assert_close(tmp_path / "run", train(data, tmp_path / "whole", **{**COMMON, **changes}), 1e-9)


@slow
def test_too_few_are_left(monkeypatch: pytest.MonkeyPatch, data: Path, tmp_path: Path) -> None:
    monkeypatch.setenv("DEATHS_OF", "2")
    with pytest.raises(AssertionError, match="the run has ended: trainer 2: was killed"):
        train_dying(monkeypatch, data, tmp_path / "run", 99, min_trainers=3)


@slow
@pytest.mark.parametrize("exchange", ["average", "shared"])
def test_other_exchanges_go_back_to_the_last_checkpoint(
    monkeypatch: pytest.MonkeyPatch, data: Path, tmp_path: Path, exchange: str
) -> None:
    changes = {"exchange": exchange, "snapshot_freq": 1}
    log = train_dying(monkeypatch, data, tmp_path / "run", 2, **changes, min_trainers=3)
    assert "starting again" in log
    whole = train(data, tmp_path / "whole", **{**COMMON, **changes})
    assert_same_weights(tmp_path / "run", whole)
