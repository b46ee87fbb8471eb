"""The live view: what it shows of a run, and how it fits its window."""

import contextlib
import io
import logging
import os
import re
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tandem.artifacts.metrics_log import TrainRecord, ValidationRecord
from tandem.config.schema import Config
from tandem.launch import live_view
from tandem.launch.live_view import LiveView, memory
from tandem.launch.prepare import prepare_run
from tandem.launch.status import Pace, Status, duration
from tandem.processes.heartbeat import HeartbeatTable, StatusSlot
from tandem.training.messages import Activity, CheckpointBegun, CheckpointWritten, Progress, Stage
from tandem.training.run_spec import Job, RunSpec
from tests.support.tiny import prepare

TRAIN = TrainRecord(1, 20, 2.5, 0.75, 0.01, 130.5, 18.0, 0.5, 1.5)
VALIDATION = ValidationRecord(1, 40, 2.25, 0.5, 0.125, 360)


def spec_of(folder: Path, job: Job = "train", trainers: int = 2, **changes: object) -> RunSpec:
    """13 pictures to train and 7 to validate: with two trainers 7 and 4 steps an epoch."""
    data = folder / "data"
    config = Config(
        data_folder=str(data if data.exists() else prepare(data)),
        weights_dir="runs/one",
        crop_size=67,
        batch_size=1,
        n_epochs=3,
        devices=("cpu",) * trainers,
        threads=1,
        **changes,
    )
    return prepare_run(config, job)


class Time:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("values", "expected"), [([3.0], 3), ([1.0, 2, 6, 3], 3), ([*[1.0] * 1000, 11], 1.1)]
)
def test_a_pace_is_the_mean_at_first_and_follows_slowly_later(
    values: list[float], expected: float
) -> None:
    pace = Pace()
    for value in values:
        pace.add(value)
    assert pace.seconds == pytest.approx(expected)


def advance(status: Status, clock: Time, mode: str, epoch: int, seconds: float) -> None:
    """Do all steps of a part of an epoch, each in so many seconds."""
    steps = 7 if mode == "train" else 4
    for step in range(1, steps + 1):
        clock.now += seconds
        status.update(Progress(mode, epoch, step, steps))  # type: ignore[arg-type]


def test_the_time_left_counts_the_validations_too(tmp_path: Path) -> None:
    clock = Time()
    status = Status(spec_of(tmp_path), clock)
    assert (status.done, status.seconds_left) == (0, None)
    clock.now += 1000  # of compiling
    status.update(Progress("train", 1, 1, 7))
    assert status.seconds_left is None
    clock.now += 10
    status.update(Progress("train", 1, 2, 7))
    assert status.done == pytest.approx(2 / 21)
    assert status.seconds_left == pytest.approx((19 + 12) * 10)  # a validation step as one of these
    status = Status(spec_of(tmp_path), clock)
    advance(status, clock, "train", 1, 10)
    advance(status, clock, "validation", 1, 2)
    assert status.done == pytest.approx(1 / 3)
    assert status.seconds_left == pytest.approx(14 * 10 + 8 * 2)
    clock.now += 500  # of writing a checkpoint: no step's
    advance(status, clock, "train", 2, 10)
    assert status.seconds_left == pytest.approx(7 * 10 + 8 * 2)
    advance(status, clock, "validation", 2, 2)
    advance(status, clock, "train", 3, 10)
    advance(status, clock, "validation", 3, 2)
    assert (status.done, status.seconds_left) == (1, 0)


def test_the_time_left_of_a_validation(tmp_path: Path) -> None:
    clock = Time()
    status = Status(spec_of(tmp_path, "validate"), clock)
    for step in (1, 2):
        clock.now += 5
        status.update(Progress("validation", 3, step, 4))
    assert (status.done, status.seconds_left) == (0.5, 10)


def test_durations() -> None:
    seconds = (0, 59.6, 307, 11565, 184365, 86400)
    texts = ["0:00", "1:00", "5:07", "3:12:45", "2 d 03:12:45", "1 d 00:00:00"]
    assert list(map(duration, seconds)) == texts


def test_memory_is_the_systems_number() -> None:
    text = memory(os.getpid())
    assert re.fullmatch(r"\d\.\d\d GB", text)
    resident = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert resident is not None
    assert float(text[:-3]) == pytest.approx(int(resident[1]) * 1024 / 1e9, abs=0.05)
    assert memory(2**30) == "-"  # nobody's


def shown(view: LiveView, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    view._console = console
    console.print(view._render())
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a view writes when it is started: nowhere."""
    monkeypatch.setattr(sys, "stderr", io.StringIO())


@pytest.mark.usefixtures("quiet")
def test_the_view_of_a_run(tmp_path: Path) -> None:
    names = ("launcher", "loader 0", "trainer 0", "loader 1", "trainer 1")
    table = HeartbeatTable.create(names, 60)
    with contextlib.closing(LiveView(Status(spec_of(tmp_path)))) as view:
        assert shown(view).startswith("runs/one: 0.")
        view._status.update(Stage(Activity.COMPILING_UPDATE))
        assert re.fullmatch(r"runs/one: \d+\.\d s: compiling update\n", shown(view))
        view.begin(table, dict.fromkeys(table.names[1:], os.getpid()))
        assert shown(view).count("starting") == 4
        activities = (Activity.READING, Activity.WAITING, Activity.IDLE, Activity.SAVING)
        for index, activity in enumerate(activities, 1):
            StatusSlot(table, index).show(activity)
        for message in (TRAIN, VALIDATION, Progress("train", 2, 3, 7), CheckpointBegun()):
            view._status.update(message)
        lines = [re.sub(" +", " ", line).strip() for line in shown(view).splitlines()]
        mine = memory(os.getpid())
        assert lines[0] == "runs/one: epoch 2 of 3, training"
        assert lines[1].startswith("epoch ━")
        assert lines[1].endswith(" 3 of 7 steps")
        assert lines[2].endswith(" 47.6 %, ? left")
        assert lines[3:7] == [
            "training loss 2.5000 top-1 error 75.0 % 130.5 images/s rate 0.01",
            "validation loss 2.2500 top-1 error 50.0 % top-5 error 12.5 % after epoch 1",
            "time computing 90 % waiting for loader 2 % exchanging 8 %",
            "memory memory",
        ]
        label = "waiting for loader, checkpoint"
        assert lines[7] == f"trainer 0 {label} {mine} loader 0 reading {mine}"
        assert lines[8] == f"trainer 1 writing checkpoint {mine} loader 1 slot filled {mine}"
        view._status.update(CheckpointWritten("x"))
        assert "checkpoint" not in shown(view).splitlines()[7]
        for width in (20, 40, 60, 79, 200):
            rendered = shown(view, width).splitlines()
            assert len(rendered) == 9
            assert all(len(line) <= min(width, live_view.WIDEST) for line in rendered)


@pytest.mark.usefixtures("quiet")
def test_the_view_of_trainers_that_load_by_themselves(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, trainers=3, para_load=False, print_train_error=False)
    with contextlib.closing(LiveView(Status(spec))) as view:
        table = HeartbeatTable.create(("launcher", "trainer 0", "trainer 1", "trainer 2"), 60)
        view.begin(table, dict.fromkeys(table.names[1:], os.getpid()))
        view._status.update(TrainRecord(1, 20, 2.5, None, 0.01, 130.5, 0.0, 0.0, 0.0))
        text = shown(view)
    assert "loader" not in text.replace("waiting for loader", "")
    assert "error" not in text
    assert "computing 0 %" in text
    assert text.count("memory") == 1


@pytest.mark.parametrize(
    ("name", "logger"), [("stderr", None), ("__stderr__", None), ("stderr", "tandem")]
)
def test_log_lines_go_above_the_view_and_then_where_they_went(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, logger: str | None
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, name, stream)
    monkeypatch.setattr(sys, "stderr", stream)
    spec, root = spec_of(tmp_path), logging.getLogger(logger)
    handler = logging.StreamHandler(stream)
    root.addHandler(handler)
    try:
        view = LiveView(Status(spec))
        assert handler.stream is not stream
        long = "a long line [not markup] that is wider than eighty columns, but is not wrapped " * 3
        logging.getLogger("tandem").warning("%s", long)
        view.close()
        assert handler.stream is stream
    finally:
        root.removeHandler(handler)
    assert long + "\n" in stream.getvalue()


@pytest.mark.usefixtures("quiet")
def test_what_processes_write_is_printed_line_by_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = LiveView(Status(spec_of(tmp_path)))
    printed: list[str] = []
    monkeypatch.setattr(view, "print", printed.append)
    for part in (b"one\ntw", b"o\n\xff\n\n", b"the rest"):
        os.write(view.stderr.fileno(), part)
    view.close()
    assert printed == ["one", "two", "\ufffd", "", "the rest"]
