"""Trainers that wait for callbacks at the end of epochs, in runs of processes."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tandem.artifacts.epochs import epochs_of, logs_of
from tandem.artifacts.metrics_log import read_records
from tandem.artifacts.run_folder import list_checkpoints
from tests.support.ranks import Job, need_ranks
from tests.support.runs import (
    RunningJob,
    assert_same_bits,
    assert_same_weights,
    train,
    train_ranks,
)
from tests.support.tiny import kill, settings, wait_until

pytestmark = pytest.mark.slow

HERE = "tests.support.callbacks"
COMMON = {"batch_size": 2, "n_epochs": 5, "print_freq": 2, "print_epochs": True}


def run(data: Path, folder: Path, ranks: int, **changes: Any) -> None:
    if ranks:
        train_ranks(data, folder, ranks, **{"devices": "cpu", **COMMON, **changes})
    else:
        train(data, folder, **{"devices": ["cpu", "cpu"], **COMMON, **changes})


@pytest.mark.parametrize("ranks", [0, 2], ids=["local", "ranks"])
def test_trainers_wait_and_callbacks_end_training(data: Path, tmp_path: Path, ranks: int) -> None:
    """Resumed, the run goes on to the bits of one without callbacks."""
    if ranks:
        need_ranks()
    folder = tmp_path / "run"
    common = {"snapshot_freq": 2, "csv_file": tmp_path / "log.csv"}
    run(data, folder, ranks, callbacks=f"{HERE}:Waits", **common)
    seen = [json.loads(line) for line in (folder / "seen").read_text().splitlines()]
    assert [epoch for epoch, *_ in seen] == [1, 2, 3]
    # Nothing happens meanwhile, and a checkpoint that is due is there.
    for _, before, after, _ in seen:
        assert before == after
    assert [before[0] for _, before, *_ in seen] == [
        *([], ["epoch-0002.safetensors"], ["epoch-0002.safetensors"])
    ]
    assert list_checkpoints(folder)[-1].name == "epoch-0003.safetensors"
    epochs = epochs_of(read_records(folder / "record.jsonl"))
    assert [logs for *_, logs in seen] == [logs_of(*epoch) for epoch in epochs]
    # 13 pictures by 2 trainers of 2: reports of 8 and of 5.
    assert [[each.images for each in reports] for _, reports in epochs] == [[8, 5]] * 3

    run(data, folder, ranks, resume_train=True, **common)
    run(data, tmp_path / "whole", ranks, **common | {"csv_file": tmp_path / "whole.csv"})
    assert_same_bits(folder, tmp_path / "whole")
    assert (tmp_path / "log.csv").read_text() == (tmp_path / "whole.csv").read_text()


def started(data: Path, folder: Path, **changes: Any) -> RunningJob:
    job = RunningJob(
        data,
        folder,
        0,
        **{"devices": ["cpu", "cpu"], **COMMON, "callbacks": f"{HERE}:Hangs", **changes},
    )
    assert wait_until((folder / "waiting").exists, 90, job.process), kill(job.process)
    return job


@pytest.mark.parametrize("victim", ["launcher", "trainer 0", "trainer 1"])
def test_no_wait_outlives_a_process(data: Path, tmp_path: Path, victim: str) -> None:
    folder = tmp_path / "run"
    job = started(data, folder)
    job.signal(signal.SIGKILL, victim)
    if victim == "launcher":
        job.end(-9)
    else:
        (folder / "go").touch()
        assert f"{victim}: was killed by SIGKILL" in job.end(1)
    assert [path.name for path in list_checkpoints(folder)] == ["epoch-0001.safetensors"]


def test_a_restart_goes_on_after_the_epoch_whose_end_was_reported(
    data: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    job = started(data, folder, restarts=1)
    job.signal(signal.SIGKILL, "trainer 1")
    (folder / "go").touch()
    job.end(0, timeout=90)
    assert (folder / "waiting").read_text().split() == [*"12345"]
    whole = train(data, tmp_path / "whole", **COMMON, devices=["cpu", "cpu"])
    assert_same_weights(folder, whole)


def test_a_request_to_stop_while_trainers_wait_stops_after_the_epoch(
    data: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    job = started(data, folder)
    job.signal(signal.SIGTERM)
    (folder / "go").touch()
    job.end(143)
    assert list_checkpoints(folder)[-1].name.startswith("epoch-0001")
    assert (folder / "waiting").read_text().split() == ["1"]
    train(data, folder, resume_train=True, **COMMON, devices=["cpu", "cpu"])
    assert_same_weights(folder, train(data, tmp_path / "whole", **COMMON, devices=["cpu", "cpu"]))


@pytest.mark.parametrize("victim", ["trainer 0", "trainer 1"])
def test_no_wait_outlives_a_rank(data: Path, tmp_path: Path, victim: str) -> None:
    need_ranks()
    folder = tmp_path / "run"
    changes = {**COMMON, "callbacks": f"{HERE}:Hangs", "devices": "cpu"}
    job = Job(2, "train.py", settings(data, folder, **changes))
    job.wait_until((folder / "waiting").exists, 90)
    os.kill(job.find(victim), signal.SIGKILL)
    assert job.finish().returncode != 0
    assert [path.name for path in list_checkpoints(folder)] == ["epoch-0001.safetensors"]
