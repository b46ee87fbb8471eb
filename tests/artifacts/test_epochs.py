"""Values of epochs from the record of a run, against those over its single pictures."""

import csv
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.artifacts.checkpoint import RunState
from tandem.artifacts.epochs import epochs_of, logs_of, write_csv
from tandem.artifacts.metrics_log import Record, TrainRecord, ValidationRecord, to_json
from tandem.artifacts.run_folder import RunFolder
from tandem.config.schema import Config
from tandem.errors import InputError


def train(epoch: int, step: int, loss: float, accuracy: float, images: int = 0) -> TrainRecord:
    seconds = (1.0, 0.0, 0.0)
    metrics = {"accuracy": accuracy}
    return TrainRecord(epoch, step, loss, None, 0.5 / step, 10.0, *seconds, metrics, images)


def validation(epoch: int, step: int, loss: float, images: int = 7) -> ValidationRecord:
    return ValidationRecord(epoch, step, loss, 0.5, 0.25, images, {"accuracy": 1 - loss / 4})


@pytest.mark.parametrize("seed", range(5))
def test_means_are_those_over_the_pictures_of_each_epoch(seed: int) -> None:
    source = random.Random(seed)
    records: list[Record] = []
    expected: list[tuple[float, float]] = []
    step = 0
    for epoch in (1, 2, 3):
        pictures = [(source.random(), source.choice([0, 1])) for _ in range(23)]
        begin = 0
        while begin < len(pictures):  # some steps, and what is left at the end of the epoch
            part = pictures[begin : begin + source.choice([4, 8])]
            begin, step = begin + len(part), step + 1
            losses, right = zip(*part, strict=True)
            n = len(part)
            records.append(train(epoch, step, sum(losses) / n, sum(right) / n, n))
        losses, right = zip(*pictures, strict=True)
        expected.append((sum(losses) / 23, sum(right) / 23))
        records.append(validation(epoch, step, 0.5 * epoch))
    found = [logs_of(*epoch) for epoch in epochs_of(records)]
    for number, (logs, (loss, accuracy)) in enumerate(zip(found, expected, strict=True), 1):
        assert [*logs] == ["loss", "accuracy", "val_loss", "val_accuracy", "learning_rate"]
        assert logs["loss"] == pytest.approx(loss, rel=1e-12)
        assert logs["accuracy"] == pytest.approx(accuracy, rel=1e-12)
        assert (logs["val_loss"], logs["val_accuracy"]) == (0.5 * number, 1 - 0.125 * number)
    assert found[-1]["learning_rate"] == 0.5 / step


def test_what_was_not_measured_is_missing() -> None:
    nothing = ValidationRecord(1, 3, math.nan, math.nan, math.nan, 0)
    assert logs_of(nothing, []) == {}
    assert [*logs_of(nothing, [train(1, 3, 1.0, 0.5)])] == ["loss", "accuracy", "learning_rate"]


def test_reports_without_counts_count_alike() -> None:
    found = logs_of(validation(1, 4, 1.0), [train(1, 3, 1.0, 0.5), train(1, 4, 2.0, 0.0, 3)])
    assert (found["loss"], found["accuracy"]) == (1.5, 0.25)


def test_a_metric_that_a_report_lacks_is_none_of_the_epoch() -> None:
    """As after a resume with other metrics."""
    reports = [train(1, 1, 2.0, 0.5), replace(train(1, 2, 1.0, 0.5), metrics={})]
    for order in (reports, reports[::-1]):
        assert "accuracy" not in logs_of(validation(1, 2, 1.0), order)


def test_reports_of_an_epoch_that_was_not_validated_are_of_none() -> None:
    records = [train(1, 1, 1.0, 0.5, 2), validation(1, 1, 1.0), train(2, 2, 3.0, 0.5, 2)]
    assert [len(reports) for _, reports in epochs_of(records)] == [1]


def test_a_record_counts_pictures_only_where_it_is_asked_to() -> None:
    assert "images" not in to_json(train(1, 1, 1.0, 0.5)).split("images_per_second")[1]
    assert '"images": 3' in to_json(train(1, 1, 1.0, 0.5, 3))


def test_the_table_has_keras_s_columns(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    write_csv(path, [train(1, 1, 2.0, 0.25, 4), validation(1, 1, 1.0), validation(2, 2, 0.5)])
    assert path.read_text() == (
        "epoch,accuracy,loss,val_accuracy,val_loss\n0,0.25,2.0,0.75,1.0\n1,NA,NA,0.875,0.5\n"
    )


def test_a_resumed_run_continues_the_table(tmp_path: Path) -> None:
    """What the first run has written beyond the checkpoint is no part of it."""
    path = tmp_path / "logs" / "table.csv"
    config = Config(weights_dir=str(tmp_path), csv_file=str(path), tensorboard=False)
    first = RunFolder(config, RunState(), None)
    assert path.read_text() == "epoch\n"
    for epoch in (1, 2):
        first.append(train(epoch, 4 * epoch, 1.0, 0.5, 4))
        first.append(validation(epoch, 4 * epoch, 1.0 / epoch))
    first.close()
    second = RunFolder(config, RunState(epoch=1, step_in_epoch=2, step=6), None)
    assert [row["epoch"] for row in csv.DictReader(path.open())] == ["0"]
    second.append(train(2, 8, 3.0, 0.5, 4))
    second.append(validation(2, 8, 0.25))
    second.close()
    rows = [*csv.DictReader(path.open())]
    assert [(row["epoch"], row["loss"], row["val_loss"]) for row in rows] == [
        ("0", "1.0", "1.0"),
        ("1", "3.0", "0.25"),
    ]


def test_a_table_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = Config(weights_dir=str(tmp_path), csv_file=str(tmp_path / "file" / "log.csv"))
    with pytest.raises(InputError, match=r"csv_file .*log.csv: cannot be written"):
        RunFolder(config, RunState(), None)


def test_event_files_lie_in_their_own_folder(tmp_path: Path) -> None:
    events = tmp_path / "events" / "first"
    config = Config(weights_dir=str(tmp_path), tensorboard_dir=str(events))
    folder = RunFolder(config, RunState(), None)
    folder.append(train(1, 1, 1.0, 0.5))
    folder.close()
    assert [path.name for path in events.iterdir()] == ["events.out.tfevents.00001"]
    assert not [*tmp_path.glob("events.out*")]
    (tmp_path / "file").write_text("")
    config = Config(weights_dir=str(tmp_path), tensorboard_dir=str(tmp_path / "file" / "events"))
    with pytest.raises(InputError, match="events: the folder cannot be made"):
        RunFolder(config, RunState(), None)
