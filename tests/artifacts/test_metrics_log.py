"""The record of a run: what its lines say, and what a reader makes of a damaged one."""

import errno
import json
import math
import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tandem.artifacts.checkpoint import RunState
from tandem.artifacts.metrics_log import (
    MetricsLog,
    NotFiniteRecord,
    Record,
    TrainRecord,
    ValidationRecord,
    from_json,
    read_records,
    to_json,
    truncate_after,
)
from tandem.errors import InputError

TRAIN = TrainRecord(1, 20, 2.5, 0.75, 0.01, 130.5, 18.25, 0.5, 1.25)
VALIDATION = ValidationRecord(1, 40, 2.25, 0.5, 0.125, 360)
NOT_FINITE = NotFiniteRecord(2, 47, 7, "skip", ("a/1.JPEG", "b/\N{SNOWMAN} 2.JPEG"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "record.jsonl"


def write(path: Path, *records: Record) -> None:
    with MetricsLog(path) as file:
        for record in records:
            file.append(record)


def test_a_line_holds_exactly_the_fields_in_their_order() -> None:
    assert to_json(TRAIN) == (
        '{"event": "train", "epoch": 1, "step": 20, "loss": 2.5, "top1_error": 0.75, '
        '"learning_rate": 0.01, "images_per_second": 130.5, "compute_seconds": 18.25, '
        '"load_wait_seconds": 0.5, "exchange_seconds": 1.25}'
    )
    assert to_json(VALIDATION) == (
        '{"event": "validation", "epoch": 1, "step": 40, "loss": 2.25, "top1_error": 0.5, '
        '"top5_error": 0.125, "images": 360}'
    )


def test_records_read_back_equal(path: Path) -> None:
    odd = replace(TRAIN, step=60, top1_error=None)
    write(path, TRAIN, VALIDATION)
    write(path, NOT_FINITE, odd)
    assert read_records(path) == [TRAIN, VALIDATION, NOT_FINITE, odd]


def test_each_line_is_there_as_soon_as_it_is_appended(path: Path) -> None:
    with MetricsLog(path) as file:
        file.append(TRAIN)
        assert read_records(path) == [TRAIN]
        file.append(VALIDATION)
        assert read_records(path) == [TRAIN, VALIDATION]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_null_in_the_file(path: Path, value: float) -> None:
    write(path, replace(TRAIN, loss=value))
    assert json.loads(path.read_text())["loss"] is None
    (found,) = read_records(path)
    assert math.isnan(found.loss)


def test_numbers_of_numpy_are_written_as_numbers(path: Path) -> None:
    record = ValidationRecord(np.int64(2), np.int32(3), np.float32(0.5), np.float64(0.25), 0, 7)  # type: ignore[arg-type]
    write(path, record)
    assert read_records(path) == [ValidationRecord(2, 3, 0.5, 0.25, 0.0, 7)]


@pytest.mark.parametrize("before", [[], [TRAIN]])
@pytest.mark.parametrize("length", [0, 1, 10, len(to_json(VALIDATION)) - 1])
def test_a_torn_last_line_is_left_out_and_not_appended_to(
    path: Path, before: list[Record], length: int
) -> None:
    write(path, *before)
    whole = path.read_bytes()
    path.write_bytes(whole + to_json(VALIDATION)[:length].encode())
    assert read_records(path) == before
    write(path, VALIDATION)
    assert read_records(path) == [*before, VALIDATION]
    assert path.read_bytes().startswith(whole)


def test_a_last_line_that_lacks_only_its_end_is_kept(path: Path) -> None:
    path.write_text(to_json(TRAIN))
    assert read_records(path) == [TRAIN]
    write(path, VALIDATION)
    assert read_records(path) == [TRAIN, VALIDATION]


def changed(**values: object) -> str:
    return json.dumps({**json.loads(to_json(TRAIN)), **values})


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", "line 2: not a record"),
        ("not JSON", "line 2: not a record"),
        ('{"event": "tr', "line 2: not a record"),
        ("[1]", "holds [1], expected a JSON object"),
        ('{"epoch": 1}', "event is null, expected one of train, validation"),
        ('{"event": []}', "event is [], expected one of"),
        ('{"event": "train"}', "epoch is missing; it must be set; step is missing"),
        (changed(extra=1), "unknown key extra; known are epoch, step"),
        (changed(step="20"), 'step is "20": input should be a valid integer'),
        (changed(step=2.5), "step is 2.5: input should be a valid integer"),
        (changed(step=True), "step is true: input should be a valid integer"),
        (changed(epoch=None), "epoch is null: input should be a valid integer"),
        (changed(loss="low"), 'loss is "low": input should be a valid number'),
        (changed(loss=False), "loss is false: input should be a valid number"),
        (changed(loss=10**400), "input should be a valid number"),
        ("[" * 100_000, "line 2: not a record"),
    ],
)
def test_a_damaged_line_is_named(path: Path, line: str, expected: str) -> None:
    path.write_text(f"{to_json(TRAIN)}\n{line}\n{to_json(VALIDATION)}\n")
    with pytest.raises(InputError) as caught:
        read_records(path)
    assert str(caught.value).startswith(f"{path}, line 2: ")
    assert expected in str(caught.value)


def test_a_record_that_is_not_there(path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_records(path)
    with pytest.raises(InputError, match="cannot be written"):
        MetricsLog(path / "missing" / "record.jsonl")


@pytest.mark.parametrize(
    ("epoch", "step", "kept"),
    [(0, 0, 0), (0, 19, 0), (0, 20, 1), (0, 40, 1), (1, 40, 2), (1, 59, 2), (1, 60, 4), (2, 99, 4)],
)
def test_what_lies_after_a_checkpoint_is_dropped(
    path: Path, epoch: int, step: int, kept: int
) -> None:
    records = [TRAIN, VALIDATION, replace(NOT_FINITE, step=60), replace(TRAIN, step=60)]
    write(path, *records)
    path.write_bytes(path.read_bytes() + b'{"torn')
    truncate_after(path, RunState(epoch=epoch, step=step))
    assert read_records(path) == records[:kept]
    assert b"torn" not in path.read_bytes()
    write(path, replace(TRAIN, step=100))
    assert read_records(path) == [*records[:kept], replace(TRAIN, step=100)]
    assert [entry.name for entry in path.parent.iterdir()] == ["record.jsonl"]


def test_minibatches_that_are_left_out_in_a_row_have_a_line_each(path: Path) -> None:
    """Their steps have one number; what was written twice for one is dropped."""
    records = [TRAIN, replace(NOT_FINITE, minibatch=3), replace(NOT_FINITE, minibatch=4)]
    write(path, *records, records[2])
    truncate_after(path, RunState(epoch=9, step=99))
    assert read_records(path) == records


def test_lines_that_are_owed_are_added(path: Path) -> None:
    latest = [TRAIN, replace(TRAIN, step=TRAIN.step + 1), VALIDATION]
    write(path, *latest[:1])
    with MetricsLog(path) as log:
        log.complete(latest)
        log.complete(latest)
        log.complete([])
    assert read_records(path) == latest


def test_a_damaged_record_is_not_rewritten(path: Path) -> None:
    path.write_bytes(before := b"\xff\xfe\n" + to_json(TRAIN).encode() + b"\n")
    with pytest.raises(InputError, match="line 1"):
        truncate_after(path, RunState())
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"action": 3}, "action is 3: input should be a valid string"),
        ({"pictures": "a"}, 'pictures is "a": input should be a valid tuple'),
        ({"pictures": ["a", 1]}, "input should be a valid string"),
    ],
)
def test_a_line_about_pictures_is_checked(changes: dict[str, object], expected: str) -> None:
    values = {**json.loads(to_json(NOT_FINITE)), **changes}
    with pytest.raises(InputError, match=re.escape(expected)):
        from_json(json.dumps(values))


def test_a_full_disk_is_told_in_a_sentence(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def write(self, line: bytes) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with MetricsLog(path) as file, monkeypatch.context() as patch:
        patch.setattr(file, "_file", Full())
        with pytest.raises(InputError, match=r"record\.jsonl: cannot be written: No space"):
            file.append(TRAIN)


def test_a_line_that_is_taken_in_parts_is_whole(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is nearly full takes the beginning of a line without complaint."""

    class Slow:
        def __init__(self) -> None:
            self.content = b""

        def write(self, line: bytes) -> int:
            self.content += line[:5]
            return len(line[:5])

    with MetricsLog(path) as file, monkeypatch.context() as patch:
        patch.setattr(file, "_file", slow := Slow())
        file.append(TRAIN)
    assert slow.content == to_json(TRAIN).encode() + b"\n"
