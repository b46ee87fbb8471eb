"""A trial reports what would fail, and leaves nothing behind."""

import math
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import train
from tandem.artifacts.checkpoint import Checkpoint, RunState, save_checkpoint
from tandem.artifacts.metrics_log import TrainRecord, ValidationRecord
from tandem.config.schema import Config
from tandem.errors import InputError
from tandem.launch import trial
from tandem.launch.local import Launcher
from tandem.launch.prepare import prepare_run
from tandem.launch.trial import Disk, TrialReporter, epochs_left, run_trial, shown_time
from tandem.processes.messages import Failed
from tandem.processes.supervisor import Outcome, ProgressReporter
from tandem.training.messages import Progress
from tandem.training.run_spec import RunSpec
from tandem.validation import shown_size
from tests.support.picture_files import contents
from tests.support.ranks import need_ranks, run_ranks
from tests.support.runs import train as run
from tests.support.tiny import run_program, settings

Value = Callable[[int], float]


class FakeLauncher(Launcher):
    """Leaves checkpoints whose one weight is `value` of the number of the launch."""

    load_wait = 0.0  # seconds of five steps
    loss: float | None = 1.0

    def __init__(self, value: Value = lambda launch: 1.0, fails: int = 0) -> None:
        self.specs: list[RunSpec] = []
        self._value, self._fails = value, fails

    def launch(self, spec: RunSpec, reporter: ProgressReporter, *_: Any) -> Outcome:
        self.specs.append(spec)
        launch = len(self.specs)
        if launch == self._fails:
            return Outcome(1, Failed("loader 0", "fault", "broken", ""))
        reporter.begin(SimpleNamespace(), {"trainer 0": os.getpid()})  # type: ignore[arg-type]
        for epoch in (1, 2) if spec.resumed is None else (2,):
            seconds = 1.0, self.load_wait, 0.0
            if self.loss is not None:
                record = TrainRecord(epoch, 5 * epoch, self.loss, None, 0.1, 13.0, *seconds)
                reporter.report(record)
            for step in (1, 2):
                reporter.report(Progress("validation", epoch, step, 2))
            reporter.report(ValidationRecord(epoch, 5 * epoch, self._value(launch), 0.5, 0.5, 4))
            weights = {"fc8.weight": np.full((1, 3), self._value(launch), np.float32)}
            path = spec.config.weights_path / f"epoch-{epoch:04}.safetensors"
            state = RunState(epoch)
            save_checkpoint(path, Checkpoint(weights, {}, spec.description, state))
        return Outcome(0)


@pytest.fixture
def config(data: Path, tmp_path: Path) -> Config:
    own = {"data_folder": str(data), "weights_dir": str(tmp_path / "runs" / "new")}
    return Config(**own, crop_size=67, batch_size=2, devices=("cpu",), threads=1)


def changed(config: Config, **changes: Any) -> Config:
    return config.model_copy(update=changes)


def test_what_a_run_takes(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launcher = FakeLauncher()
    assert run_trial(config, launcher) == 0
    first, second = launcher.specs
    assert (first.steps("train"), first.steps("validation")) == (5, 4)
    assert first.config.n_epochs == 2
    assert first.resumed is None
    assert second.resumed == first.config.weights_path / "epoch-0001.safetensors"
    assert first.config.weights_path.parent == tmp_path
    assert [*tmp_path.iterdir()] == []
    text = capsys.readouterr().out
    assert "resume       the same bits" in text
    assert "speed        13.0 images per second" in text
    assert "an epoch     1.0 seconds of training, " in text
    assert "the run      " in text
    assert "for 60 epochs" in text
    assert "trainer 0    " in text
    assert "launcher     " in text
    assert "for the last 3, the best and one being written" in text


def test_a_trial_does_not_end_early_and_writes_in_its_own_folder(
    config: Config, tmp_path: Path
) -> None:
    launcher = FakeLauncher()
    written = {"csv_file": str(tmp_path / "a.csv"), "tensorboard_dir": str(tmp_path / "events")}
    assert run_trial(changed(config, stop_patience=1, stop_at=9.0, **written), launcher) == 0
    for spec in launcher.specs:
        assert (spec.config.stop_patience, spec.config.stop_at) == (0, None)
        assert (spec.config.csv_file, spec.config.tensorboard_dir) == (None, None)


@pytest.mark.parametrize("loss", [math.nan, math.inf, None])
def test_steps_that_are_all_left_out_are_a_failure(
    config: Config,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    loss: float | None,
) -> None:
    """Of an epoch without any step that counts there may be no record."""
    launcher = FakeLauncher()
    launcher.loss = loss
    assert run_trial(changed(config, on_nan="skip"), launcher) == 1
    assert "error: found no finite loss in an epoch of the trial" in caplog.text
    assert "images per second" not in capsys.readouterr().out


def test_the_minibatch_that_is_loaded_ahead_does_not_count_as_fast(
    config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of five steps that wait for the loader, the first found its minibatch loaded before."""
    launcher = FakeLauncher()
    launcher.load_wait = 4.0  # with 1 s of computing: one second for each other step
    assert run_trial(config, launcher) == 0
    assert f"speed        {13 * 5 / 6:.1f} images per second" in capsys.readouterr().out


def test_the_time_of_the_whole_run(
    config: Config, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrialReporter, "hours", lambda reporter, spec: (2.0, 1.0))
    assert run_trial(changed(config, n_epochs=10), FakeLauncher()) == 0
    lines = dict(line.split(maxsplit=2)[1:] for line in capsys.readouterr().out.splitlines()[2:5])
    assert lines["epoch"] == "2.0 hours of training, 60.0 minutes of validation"
    assert lines["run"] == "30.0 hours for 10 epochs"


def test_hours_are_those_of_all_pictures(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """From some steps of each: 13 pictures of training, four steps of validation."""
    spec, now = prepare_run(config), 0.0
    monkeypatch.setattr(trial, "time", SimpleNamespace(monotonic=lambda: now))
    reporter = TrialReporter(spec)
    reporter.report(TrainRecord(1, 5, 1.0, None, 0.1, 0.5, 1.0, 0.0, 0.0))
    for step in (1, 2, 3):
        now = 10.0 + 3 * step
        reporter.report(Progress("validation", 1, step, 3))
    reporter.report(ValidationRecord(1, 5, 1.0, 0.5, 0.5, 6))
    seconds = [hours * 3600 for hours in reporter.hours(spec)]
    assert seconds == pytest.approx([13 / 0.5, 4 * 3.0])


def test_epochs_that_are_left_of_a_resumed_run(config: Config) -> None:
    header = SimpleNamespace(state=RunState(4))
    spec = SimpleNamespace(config=config, resumed=Path("epoch-0004.safetensors"), header=header)
    assert epochs_left(spec) == 56  # type: ignore[arg-type]


def test_the_disk_of_checkpoints(config: Config) -> None:
    """Of all in 30 hours every half an hour, or a few that replace those of before."""
    every = {"keep_snapshots": "all", "snapshot_minutes": 30.0, "snapshot_freq": 5}
    few, many = prepare_run(config), prepare_run(changed(config, n_epochs=10, **every))
    config.weights_path.mkdir(parents=True)
    (config.weights_path / "epoch-0001.safetensors").write_bytes(bytes(150))
    disk = Disk.of(few, 100, (2.0, 1.0))
    assert (disk.count, disk.needed) == (5, 350)
    disk = Disk.of(many, 100, (2.0, 1.0))
    assert (disk.count, disk.needed) == (2 + 2 + 60, 6400)


def test_sigterm_between_its_two_runs_leaves_nothing(config: Config, tmp_path: Path) -> None:
    def terminate(launch: int) -> float:
        if launch == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return 1.0

    before = signal.signal(signal.SIGTERM, lambda *_: pytest.fail("the trial does not end"))
    try:
        with pytest.raises(SystemExit) as end:
            run_trial(config, FakeLauncher(terminate))
        assert end.value.code == 143
        assert [*tmp_path.iterdir()] == []
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        assert run_trial(config, FakeLauncher()) == 0
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


def test_what_a_run_may_not_do_is_not_blamed_on_the_folder(config: Config) -> None:
    def refuse(launch: int) -> float:
        raise PermissionError("of a process")

    with pytest.raises(PermissionError, match="of a process"):
        run_trial(config, FakeLauncher(refuse))


def test_other_bits_after_a_resume_are_an_error(
    config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    assert run_trial(config, FakeLauncher(float)) == 1
    assert caplog.messages[-1].startswith("error: resume: found other bits than without an inter")
    assert "fc8.weight and 0 other arrays of the checkpoint differ" in caplog.messages[-1]
    assert caplog.messages[-1].endswith("validation loss 2.0, without 1.0")


def test_bits_that_nobody_promises_are_none(
    config: Config, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "is_exact", lambda spec: False)
    assert run_trial(config, FakeLauncher(float)) == 0
    assert "resume       works; the same bits take rule: bsp" in capsys.readouterr().out


def test_rounding_errors_that_no_checkpoint_has_are_no_same_bits(config: Config) -> None:
    asa16 = {"collective": "asa16", "error_feedback": True}
    for changes in ({}, asa16):
        spec: Any = SimpleNamespace(config=config.model_copy(update=changes), on_gpu=False)
        assert trial.is_exact(spec) == (not changes)


@pytest.mark.parametrize("fails", [1, 2])
def test_a_failure_ends_the_trial(config: Config, tmp_path: Path, fails: int) -> None:
    launcher = FakeLauncher(fails=fails)
    assert run_trial(config, launcher) == 1
    assert len(launcher.specs) == fails
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({}, "5 checkpoints of 0.0"),
        ({"keep_snapshots": "all", "n_epochs": 7, "snapshot_freq": 2}, "6 checkpoints of 0.0"),
    ],
)
def test_a_disk_that_is_too_small(
    config: Config, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], count: str
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100))
    with pytest.raises(InputError, match=r"weights_dir .*/new: found 0\.00 MB of free") as caught:
        run_trial(changed(config, **changes), FakeLauncher())
    assert count in str(caught.value)


def test_what_the_run_would_refuse_is_refused_before_any_step(
    config: Config, tmp_path: Path
) -> None:
    launcher = FakeLauncher()
    data = shutil.copytree(config.data_path, tmp_path / "data")
    (data / "train_hkl" / "0002.hkl").unlink()
    with pytest.raises(InputError, match=r"0002\.hkl"):
        run_trial(changed(config, data_folder=str(data)), launcher)
    config.weights_path.mkdir(parents=True)
    (config.weights_path / "config.yaml").touch()
    with pytest.raises(InputError, match="a run that left no checkpoint"):
        run_trial(config, launcher)
    assert launcher.specs == []


def test_the_folder_is_inside_where_nothing_can_be_written_beside(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.weights_path.mkdir(parents=True)
    beside = config.weights_path.parent
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != beside and access(path, mode))
    launcher = FakeLauncher()
    assert run_trial(config, launcher) == 0
    assert launcher.specs[0].config.weights_path.parent == config.weights_path
    assert [*config.weights_path.iterdir()] == []


def test_durations_and_sizes() -> None:
    shown = [shown_time(hours) for hours in (200, 40, 1.5, 0.01, 0.0001)]
    assert shown == ["8.3 days", "40.0 hours", "90.0 minutes", "36.0 seconds", "0.4 seconds"]
    assert [shown_size(n) for n in (262e9, 1_500_000)] == ["262.00 GB", "1.50 MB"]


slow = pytest.mark.slow


@slow
@pytest.mark.parametrize(
    "changes",
    [
        {"devices": ["cpu", "cpu"]},
        {"devices": ["cpu", "cpu"], "exchange": "gradients", "shuffle": "images"},
        {"devices": ["cpu", "cpu"], "exchange": "shared", "para_load": False},
        {"batch_size": 13, "use_data_layer": True, "precision": "float64"},
    ],
)
def test_a_trial_of_real_processes(data: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    arguments = settings(data, tmp_path / "runs" / "new", n_epochs=9, **changes)
    result = run_program("train.py", ["--try", *arguments])
    assert result.returncode == 0, result.stderr
    lines = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert lines["resume"] == "the same bits as without an interruption"
    assert ("loader" in lines) == changes.get("para_load", True)
    assert [*tmp_path.iterdir()] == []


@slow
def test_a_trial_does_not_touch_a_run_that_it_would_continue(data: Path, tmp_path: Path) -> None:
    there = run(data, tmp_path / "run", n_epochs=2)
    before = contents(tmp_path)
    changes = {"n_epochs": 3, "resume_train": True}
    result = run_program("train.py", ["--try", *settings(data, there, **changes)])
    assert result.returncode == 0, result.stderr
    assert "for 1 epochs" in result.stdout
    assert contents(tmp_path) == before


@slow
def test_a_trial_of_ranks(data: Path, tmp_path: Path) -> None:
    need_ranks()
    arguments = settings(data, tmp_path / "runs" / "new")
    result = run_ranks(2, "train.py", ["--try", *arguments])
    assert result.returncode == 0, result.stderr
    lines = [line.split(maxsplit=1) for line in result.stdout.splitlines()]
    assert lines.count(["resume", "the same bits as without an interruption"]) == 1
    assert [*tmp_path.iterdir()] == []
    arguments = settings(data, tmp_path / "runs" / "new", rule="gosgd")
    result = run_ranks(2, "train.py", ["--try", *arguments])
    assert result.returncode == 0, result.stderr
    assert "resume     " in result.stdout


@slow
def test_a_run_that_would_diverge_ends_the_trial(data: Path, tmp_path: Path) -> None:
    arguments = ["--try", *settings(data, tmp_path / "run"), "--network"]
    result = run_program("train.py", [*arguments, "tests.support.broken_network:NanAlexNet"])
    assert result.returncode == 1
    assert "not finite" in result.stderr
    assert [*tmp_path.iterdir()] == []


def test_the_option_is_the_programs_own(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Config] = []
    monkeypatch.setattr("tandem.launch.train.run_trial", lambda config, _: tried.append(config))
    assert train.main(["--try", *settings(data, data / "run")]) == 0
    assert type(tried[0]) is Config
    assert tried[0].crop_size == 67
