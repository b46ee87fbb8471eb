"""Faults in a run, and how the run handles them."""

import os
import re
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import train as program
from tandem.artifacts.checkpoint import read_header, verify_checkpoint
from tandem.artifacts.run_folder import list_checkpoints
from tandem.artifacts.run_lock import locked
from tandem.data.order import epoch_order
from tandem.errors import InputError
from tests.support.broken_network import PICTURE
from tests.support.disks import mounted
from tests.support.runs import (
    RunningJob,
    assert_same_bits,
    assert_same_weights,
    train,
    train_log,
    weights,
)
from tests.support.tiny import (
    group_members,
    is_gone,
    prepare,
    read_record,
    run_program,
    settings,
    wait_until,
    without_times,
)

COMMON = {"batch_size": 2, "devices": ["cpu", "cpu"], "n_epochs": 3, "shuffle": "images"}
ENDLESS = {**COMMON, "n_epochs": 10_000}
TIMEOUT = {**ENDLESS, "peer_timeout_seconds": 3}


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run."""
    return train(data, tmp_path_factory.mktemp("whole") / "run", **COMMON)


def train_broken(data: Path, run: Path, name: str, **changes: object) -> str:
    """Train a network of `broken_network`; return its exit status and stderr."""
    arguments = settings(data, run, **{**COMMON, **changes})
    result = run_program("tests/support/broken_train.py", [name, *arguments])
    return f"{result.returncode}\n{result.stderr}"


# Faults of the program


@pytest.mark.slow
def test_a_run_restarts_by_itself_as_often_as_it_may(
    monkeypatch: pytest.MonkeyPatch, data: Path, tmp_path: Path, whole: Path
) -> None:
    """The fault recurs each time, so that a limit is needed."""
    run, changes = tmp_path / "run", {"restarts": 1, "snapshot_minutes": 0.0001}
    errors = train_broken(data, run, "LateAlexNet", **changes)
    assert errors.startswith("1\n")
    assert "starting again: 1 of 1 restarts" in errors
    *_, last, hint = errors.strip().splitlines()
    assert re.match(r"error: the run has ended: trainer [01]: ZeroDivisionError: broken late", last)
    assert hint.startswith(f"the newest checkpoint is {list_checkpoints(run)[-1]}; continue with")
    assert read_header(list_checkpoints(run)[-1]).state.epoch == 2
    # Fixed, it continues and loses nothing.
    monkeypatch.setenv("FIXED", "1")
    errors = train_broken(data, run, "LateAlexNet", **changes, resume_train=True)
    assert errors.startswith("0\n"), errors
    assert_same_bits(run, whole)


@pytest.mark.slow
def test_a_damaged_batch_file_is_named_and_no_reason_to_restart(tmp_path: Path) -> None:
    data = prepare(tmp_path / "data")
    job = RunningJob(data, tmp_path / "run", 3, batch_size=1, n_epochs=10_000, restarts=3)
    os.truncate(data / "train_hkl" / "0001.hkl", 100)
    errors = job.end(2)
    assert re.search(r"^error: .*0001\.hkl", errors, re.MULTILINE), errors
    assert "Traceback" not in errors
    assert "starting again" not in errors


@pytest.mark.slow
def test_a_trainer_without_memory_is_named(data: Path, tmp_path: Path) -> None:
    job = RunningJob(data, tmp_path / "run", 0, **ENDLESS)
    victim = job.find("trainer 1", seconds=30)  # before it compiles, for which it needs memory
    status = Path(f"/proc/{victim}/status").read_text()
    now = 1024 * int(re.findall(r"VmData:\s+(\d+) kB", status)[0])
    resource.prlimit(victim, resource.RLIMIT_AS, (now, now))
    errors = job.end(1, 2, timeout=60)
    assert re.search("error: (the run has ended: trainer 1|crop_size, width: Unable to)", errors)


@pytest.mark.parametrize(
    ("trainers", "victim"),
    [
        (1, "loader 0"),
        pytest.param(2, "trainer 0", marks=pytest.mark.slow),
        pytest.param(2, "loader 1", marks=pytest.mark.slow),
    ],
)
def test_a_killed_process_ends_the_run(
    data: Path, tmp_path: Path, trainers: int, victim: str
) -> None:
    job = RunningJob(data, tmp_path / "run", 3, **{**ENDLESS, "devices": ["cpu"] * trainers})
    job.signal(signal.SIGKILL, victim)
    assert f"{victim}: was killed by SIGKILL" in job.end(1)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["trainer 1", pytest.param("loader 0", marks=pytest.mark.slow)])
def test_a_process_that_is_stopped_alone_is_dead_after_its_timeout(
    data: Path, tmp_path: Path, victim: str
) -> None:
    job = RunningJob(data, tmp_path / "run", **TIMEOUT)
    job.signal(signal.SIGSTOP, victim)
    errors = job.end(1, timeout=3 + 20)
    assert re.search(f"{victim}: has given no sign of life for [345] s", errors), errors


@pytest.mark.slow
def test_a_suspended_run_continues(data: Path, tmp_path: Path) -> None:
    """Ctrl-Z for longer than a process may be silent, then fg."""
    job = RunningJob(data, tmp_path / "run", **TIMEOUT)
    job.signal(signal.SIGSTOP, "group")
    time.sleep(4)
    lines = len(read_record(job.run))
    job.signal(signal.SIGCONT, "group")
    job.wait_for(lines + 20)
    job.signal(signal.SIGTERM)
    job.end(143)


@pytest.mark.slow
def test_a_launcher_that_was_stopped_reports_it_when_it_continues(
    data: Path, tmp_path: Path
) -> None:
    job = RunningJob(data, tmp_path / "run", **TIMEOUT)
    job.signal(signal.SIGSTOP)
    trainers = {job.find(f"trainer {rank}") for rank in (0, 1)}
    assert wait_until(lambda: not trainers & set(group_members(job.pid)), 30)
    job.signal(signal.SIGCONT)
    assert "ended because this program gave no sign of life" in job.end(1)


@pytest.mark.slow
def test_trainers_hold_the_folder_until_they_have_ended(data: Path, tmp_path: Path) -> None:
    """One whose launcher was killed may still be writing."""
    job = RunningJob(data, tmp_path / "run", **ENDLESS)
    job.signal(signal.SIGSTOP, "trainer 0")  # the kernel continues it when the launcher ends
    job.process.kill()
    with pytest.raises(InputError, match="in use"), locked(job.run, wait_seconds=0):
        pytest.fail("nobody holds the folder although a trainer lives")
    job.process.communicate()
    with locked(job.run, wait_seconds=20):
        assert is_gone(job.pid)


@pytest.mark.slow
def test_a_request_to_stop_is_not_forgotten_over_a_fault(data: Path, tmp_path: Path) -> None:
    job = RunningJob(data, tmp_path / "run", **ENDLESS, restarts=3)
    job.signal(signal.SIGSTOP, "trainer 1")
    job.signal(signal.SIGTERM)
    time.sleep(0.5)
    job.signal(signal.SIGKILL, "trainer 1")
    assert "starting again" not in job.end(1)


@pytest.mark.slow
def test_a_launcher_does_not_wait_for_a_process_that_died_at_its_start(tmp_path: Path) -> None:
    """Its first message may be larger than a pipe, and nobody reads it then."""
    data = prepare(tmp_path / "data", train=3_000, per_file=1, image_size=67)
    job = RunningJob(data, tmp_path / "run", 0, devices=["cpu"] * 2)
    deadline = time.monotonic() + 60
    while len(children := [pid for pid in group_members(job.pid) if pid != job.pid]) < 2:
        assert time.monotonic() < deadline
    os.kill(max(children), signal.SIGKILL)
    assert "was killed by SIGKILL" in job.end(1)


# Requests to stop


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "to", "status"),
    [
        (signal.SIGINT, "group", 130),  # as a terminal sends Ctrl-C
        (signal.SIGTERM, "launcher", 143),
    ],
)
def test_an_interrupted_run_writes_a_checkpoint_and_continues_exactly(
    data: Path, tmp_path: Path, whole: Path, number: signal.Signals, to: str, status: int
) -> None:
    job = RunningJob(data, tmp_path / "run", 1, **COMMON)
    job.signal(number, to)
    assert "Traceback" not in job.end(status)
    assert not (job.run / "epoch-0003.safetensors").exists()
    train(data, job.run, resume_train=True, **COMMON)
    assert_same_weights(job.run, whole)


@pytest.mark.parametrize("seconds", [pytest.param(0.5, marks=pytest.mark.slow), 2.0])
def test_ctrl_c_before_the_first_step(data: Path, tmp_path: Path, seconds: float) -> None:
    job = RunningJob(data, tmp_path / "run", 0, devices=["cpu", "cpu"])
    time.sleep(seconds)
    job.signal(signal.SIGINT, "group")
    # A fast machine may have finished; and Python may still be starting, without a handler.
    errors = job.end(0, 130, *([-signal.SIGINT] if seconds < 2 else []))
    assert "Traceback" not in errors or job.process.returncode < 0


@pytest.mark.slow
def test_ctrl_c_twice_ends_at_once(data: Path, tmp_path: Path) -> None:
    job = RunningJob(data, tmp_path / "run", 3, batch_size=1, n_epochs=10_000)
    job.signal(signal.SIGSTOP, "trainer 0")  # so that the first can have no effect
    job.signal(signal.SIGINT, "group")
    time.sleep(1.5)
    job.signal(signal.SIGINT, "group")
    assert "Traceback" not in job.end(130, timeout=20)


# Resuming


@pytest.mark.slow
def test_a_run_that_is_killed_within_the_patience_ends_with_the_same_bits(
    data: Path, tmp_path: Path
) -> None:
    """With an optimizer, a rate and an end that follow from what the run has done before."""
    common = {
        **COMMON,
        "n_epochs": 40,
        "optimizer": "nadam",
        "learning_rate": 0.001,
        "metrics": ["f1", "top2"],
        "lr_policy": "plateau",
        "lr_monitor": "top5_error",  # always 0, of three classes
        "lr_patience": 1,
        "stop_monitor": "top5_error",
        "stop_patience": 5,
        "snapshot_minutes": 0.0001,
    }
    whole = train(data, tmp_path / "whole", **common)
    assert list_checkpoints(whole)[-1].name == "epoch-0006.safetensors"
    job = RunningJob(data, tmp_path / "run", 14, **common)
    job.signal(signal.SIGKILL, "trainer 1")
    job.end(1)
    assert read_header(list_checkpoints(job.run)[-1]).state.epoch < 6
    train(data, job.run, **common, resume_train=True)
    assert_same_bits(job.run, whole)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_reported_and_the_previous_one_used(
    data: Path, tmp_path: Path, whole: Path
) -> None:
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    newest = list_checkpoints(run)[-1]
    content = bytearray(newest.read_bytes())
    content[-5] ^= 16
    newest.write_bytes(content)
    log = train_log(data, run, **COMMON, resume_train=True)
    assert f"{newest}: the checkpoint is damaged" in log
    assert_same_bits(run, whole)


def resume(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = program.main([*arguments, "--resume_train", "true"])
    return status, capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"threads": 2}, "threads 1 in the checkpoint, now 2"),
        ({"devices": ["cpu"], "batch_size": 4}, "trainers 2 in the checkpoint, now 1"),
        ({"exchange": "gradients"}, "exchange average in the checkpoint, now gradients"),
    ],
)
def test_what_would_give_other_bits_is_refused(
    data: Path,
    whole: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, object],
    expected: str,
) -> None:
    arguments = settings(data, whole, **{**COMMON, "n_epochs": 4, **changes})
    before = {path: path.read_bytes() for path in whole.iterdir()}
    status, errors = resume(capsys, *arguments)
    assert status == 2
    assert expected in errors
    assert "exact: false" in errors
    assert {path: path.read_bytes() for path in whole.iterdir()} == before


@pytest.mark.slow
def test_other_bits_are_permitted_on_request(data: Path, tmp_path: Path, whole: Path) -> None:
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    changed = {**COMMON, "n_epochs": 4, "devices": ["cpu"], "batch_size": 4, "exact": False}
    train(data, run, **changed, resume_train=True)
    assert read_header(list_checkpoints(run)[-1]).state.epoch == 4


@pytest.mark.slow
def test_a_finished_run_is_finished_under_any_condition(
    data: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, errors = resume(capsys, *settings(data, whole, **{**COMMON, "threads": 2}))
    assert status == 0
    assert "all 3 epochs are done already" in errors


@pytest.mark.slow
def test_a_run_that_was_ended_before_its_first_checkpoint_starts_from_the_beginning(
    data: Path, tmp_path: Path, whole: Path
) -> None:
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    for path in list_checkpoints(run):
        path.unlink()
    log = train_log(data, run, **COMMON, resume_train=True)
    assert "no checkpoint to resume from: the run starts from the beginning" in log
    assert_same_bits(run, whole)


@pytest.mark.slow
def test_a_folder_that_another_run_uses_is_refused(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.artifacts.run_lock.WAIT_SECONDS", 0.0)
    job = RunningJob(data, tmp_path / "run", 1, **ENDLESS)
    status, errors = resume(capsys, *settings(data, job.run, **COMMON))
    assert status == 2
    assert f"error: weights_dir {job.run} is in use by another run" in errors
    assert job.process.poll() is None
    job.signal(signal.SIGTERM)
    job.end(143)


# Losses that are not finite


def names_in(epoch: int) -> set[str]:
    """Names of the pictures in the minibatch of the bad picture."""
    order = epoch_order([13], "images", 1, epoch)
    begin = int(np.flatnonzero(order == PICTURE)[0]) // 4 * 4
    return {f"{index}.JPEG" for index in order[begin : begin + 4].tolist()}


def not_finite(run: Path) -> list[dict[str, object]]:
    return [line for line in read_record(run) if line["event"] == "not_finite"]


@pytest.mark.slow
def test_a_loss_that_is_nan_stops_the_run_before_any_weight_changes(
    data: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    errors = train_broken(data, run, "SlowNanAlexNet")
    assert errors.startswith("1\n")
    (line,) = not_finite(run)
    assert line["action"] == "stop"
    assert set(line["pictures"]) <= names_in(1)
    assert "5.JPEG" in line["pictures"]
    expected = f"not finite in step {line['step']} (epoch 2, minibatch {line['minibatch']})"
    assert expected in errors
    assert "5.JPEG" in errors
    assert "Traceback" not in errors
    assert "starting again" not in errors
    # It was being written while the run ended.
    (checkpoint,) = list_checkpoints(run)
    assert checkpoint.name == "epoch-0001.safetensors"
    verify_checkpoint(checkpoint)


@pytest.mark.slow
def test_skip_and_rollback_leave_out_the_same_minibatch(data: Path, tmp_path: Path) -> None:
    skipped, back = tmp_path / "skipped", tmp_path / "back"
    # Trainers that share their weights must agree before any of them changes one.
    assert "5.JPEG" in train_broken(data, skipped, "NanAlexNet", on_nan="skip", exchange="shared")
    errors = train_broken(data, back, "NanAlexNet", on_nan="rollback", exchange="shared")
    assert "going back to the newest checkpoint" in errors
    assert_same_weights(skipped, back)
    assert all(np.isfinite(value).all() for value in weights(back).values())
    (one,), (other,) = not_finite(skipped), not_finite(back)
    assert (one["step"], one["action"], other["action"]) == (other["step"], "skip", "rollback")
    assert set(other["pictures"]) == names_in(1)
    state = read_header(list_checkpoints(back)[-1]).state
    assert state.skipped == ((1, one["minibatch"] - 1),)
    assert (state.step, state.epoch) == (12, 3)
    # No other figures change.
    rest = [
        [without_times(line) for line in read_record(run) if line["event"] != "not_finite"]
        for run in (skipped, back)
    ]
    assert rest[0] == rest[1]
    assert all(line["loss"] is not None for line in rest[0])


@pytest.mark.slow
def test_a_rollback_is_remembered_by_the_checkpoint(data: Path, tmp_path: Path) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    train_broken(data, whole, "NanAlexNet", on_nan="rollback")
    train_broken(data, run, "NanAlexNet", on_nan="rollback", n_epochs=2)
    # With `stop` it would stop at that minibatch if it came to it once more.
    errors = train_broken(data, run, "NanAlexNet", on_nan="stop", n_epochs=3, resume_train=True)
    assert errors.startswith("0\n"), errors
    assert_same_bits(run, whole)


# Disks


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", "2m") as folder:
        yield folder


@pytest.mark.slow
def test_a_full_disk_loses_nothing_but_time(data: Path, small_disk: Path, whole: Path) -> None:
    run = small_disk / "run"
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(900_000))
    # Room for two checkpoints of 430 kB, not for three.
    result = run_program("train.py", settings(data, run, **COMMON, tensorboard=False))
    assert result.returncode == 2, result.stderr
    last = result.stderr.strip().splitlines()[-2]
    assert re.match(
        r"error: .*epoch-0003\.safetensors.*No space left on device: found .* free, expected ", last
    ), last
    assert [path.name for path in list_checkpoints(run)] == [
        "epoch-0001.safetensors",
        "epoch-0002.safetensors",
    ]
    assert list(run.glob(".*")) == []
    ballast.unlink()
    train(data, run, **COMMON, resume_train=True)
    assert_same_bits(run, whole)


@pytest.mark.slow
def test_a_run_folder_that_is_read_only_is_refused(
    data: Path, small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for run in (small_disk, small_disk / "run"):
        assert program.main(settings(data, run, **COMMON)) == 2
        errors = capsys.readouterr().err
        assert errors.startswith(f"error: weights_dir {run}: ")
        assert "Read-only" in errors or "not writable" in errors
        assert errors.count("\n") == 1
