"""The run folder as the observer keeps it."""

import errno
import os
from pathlib import Path

import pytest
from tiny import prepare

from tandem.errors import InputError
from tandem.run.checkpoint import RunState
from tandem.run.config import Config, load_config
from tandem.run.observe import TrainingObserver
from tandem.run.plan import make_plan
from tandem.run.record import RecordFile, ValidationRecord, read_records

RECORD = ValidationRecord(1, 5, 2.0, 0.5, 0.25, 7)


@pytest.fixture
def observer(tmp_path: Path) -> TrainingObserver:
    config = Config(
        data_folder=str(prepare(tmp_path / "data")),
        weights_dir=str(tmp_path / "run"),
        crop_size=67,
        devices=("cpu", "cpu"),
    )
    return TrainingObserver(make_plan(config, "alex_net:AlexNet"), RunState())


def test_nothing_is_written_before_all_trainers_are_ready(
    observer: TrainingObserver, tmp_path: Path
) -> None:
    assert not (tmp_path / "run").exists()
    observer.begin()
    observer.tell(RECORD)
    observer.close()
    assert read_records(tmp_path / "run" / "record.jsonl") == [RECORD]


def test_the_saved_configuration_has_no_auto(observer: TrainingObserver, tmp_path: Path) -> None:
    observer.begin()
    observer.close()
    saved = load_config(["--config", str(tmp_path / "run" / "config.yaml")])
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert saved.threads == max(1, (cores or 1) // 2)
    assert (saved.devices, saved.compile, saved.use_data_layer) == (("cpu", "cpu"), False, False)


def test_what_a_killed_trainer_left_half_written_is_removed(
    observer: TrainingObserver, tmp_path: Path
) -> None:
    observer.begin()
    left = tmp_path / "run" / ".epoch-0001.abc.partial.safetensors"
    left.touch()
    observer.close()
    assert not left.exists()


def test_a_full_disk_is_told_in_a_sentence(
    observer: TrainingObserver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    observer.begin()
    monkeypatch.setattr(RecordFile, "append", full)
    with pytest.raises(InputError, match=r"record\.jsonl: cannot be written \(No space left"):
        observer.tell(RECORD)
    observer.close()
