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
from safetensors.numpy import load_file

import train
from tandem.artifacts.checkpoint import read_header
from tandem.artifacts.run_folder import list_checkpoints
from tandem.artifacts.run_lock import locked
from tandem.data.order import epoch_order
from tandem.errors import InputError
from tests.support.broken_network import PICTURE
from tests.support.tiny import (
    find_process,
    group_members,
    is_gone,
    prepare,
    read_record,
    run_program,
    settings,
    start_program,
    start_run,
    wait_for_steps,
    without_times,
)

COMMON = {"batch_size": 2, "devices": ["cpu", "cpu"], "n_epochs": 3, "shuffle": "images"}


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run."""
    run = tmp_path_factory.mktemp("whole") / "run"
    result = run_program("train.py", settings(data, run, **COMMON))
    assert result.returncode == 0, result.stderr
    return run


def assert_same(ours: Path, theirs: Path) -> None:
    """Compare the last weights and momenta bit for bit, and the record but its times."""
    left, right = (load_file(list_checkpoints(run)[-1]) for run in (ours, theirs))
    assert {name: value.tobytes() for name, value in left.items()} == {
        name: value.tobytes() for name, value in right.items()
    }
    lines = [[without_times(line) for line in read_record(run)] for run in (ours, theirs)]
    assert lines[0] == lines[1]


# Faults of the program


@pytest.mark.slow
def test_a_run_starts_again_by_itself_as_often_as_it_may(
    monkeypatch: pytest.MonkeyPatch, data: Path, tmp_path: Path, whole: Path
) -> None:
    """The fault comes back each time, so that a limit is needed."""
    run = tmp_path / "run"
    arguments = settings(data, run, **COMMON, restarts=1, snapshot_minutes=0.0001)
    result = run_program("tests/support/broken_train.py", ["LateAlexNet", *arguments])
    assert result.returncode == 1
    assert "starting again: 1 of 1 restarts" in result.stderr
    last = result.stderr.strip().splitlines()[-1]
    assert re.match(r"error: the run has ended: trainer [01]: ZeroDivisionError: broken late", last)
    assert read_header(list_checkpoints(run)[-1]).state.epoch == 2
    # Fixed, it continues and loses nothing.
    monkeypatch.setenv("MENDED", "1")
    result = run_program(
        "tests/support/broken_train.py", ["LateAlexNet", *arguments, "--resume_train", "true"]
    )
    assert result.returncode == 0, result.stderr
    assert_same(run, whole)


def test_bad_input_is_no_reason_to_start_again(tmp_path: Path) -> None:
    data, run = prepare(tmp_path / "data"), tmp_path / "run"
    arguments = settings(data, run, batch_size=1, n_epochs=10_000, restarts=3)
    process = start_program("train.py", arguments)
    wait_for_steps(run, process, 3)
    for file in (data / "train_hkl").iterdir():
        os.truncate(file, 100)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 2, errors
    assert "starting again" not in errors
    assert is_gone(process.pid)


def test_a_trainer_without_memory_is_named(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start_run(data, run, 2, **{**COMMON, "n_epochs": 10_000})
    victim = find_process(process.pid, "trainer 1")
    status = Path(f"/proc/{victim}/status").read_text()
    now = 1024 * int(re.findall(r"VmData:\s+(\d+) kB", status)[0])
    resource.prlimit(victim, resource.RLIMIT_AS, (now, now))
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1, errors
    assert "error: the run has ended: trainer 1" in errors
    assert is_gone(process.pid)


@pytest.mark.parametrize("victim", ["trainer 1", pytest.param("loader 0", marks=pytest.mark.slow)])
def test_a_process_that_is_stopped_alone_is_dead_after_its_time(
    data: Path, tmp_path: Path, victim: str
) -> None:
    run = tmp_path / "run"
    changes = {**COMMON, "n_epochs": 10_000, "peer_timeout_seconds": 3}
    process = start_run(data, run, 2, **changes)
    os.kill(find_process(process.pid, victim), signal.SIGSTOP)
    _, errors = process.communicate(timeout=3 + 20)
    assert process.returncode == 1, errors
    assert re.search(f"{victim}: has given no sign of life for [345] s", errors), errors
    assert is_gone(process.pid)


@pytest.mark.slow
def test_a_suspended_run_goes_on(data: Path, tmp_path: Path) -> None:
    """Ctrl-Z for longer than a process may be silent, then fg."""
    run = tmp_path / "run"
    changes = {**COMMON, "n_epochs": 10_000, "peer_timeout_seconds": 3}
    process = start_run(data, run, 2, **changes)
    os.killpg(process.pid, signal.SIGSTOP)
    time.sleep(4)
    lines = len(read_record(run))
    os.killpg(process.pid, signal.SIGCONT)
    wait_for_steps(run, process, lines + 20)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 143


@pytest.mark.slow
def test_a_launcher_that_was_stopped_says_so_when_it_goes_on(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    changes = {**COMMON, "n_epochs": 10_000, "peer_timeout_seconds": 3}
    process = start_run(data, run, 2, **changes)
    os.kill(process.pid, signal.SIGSTOP)
    trainers = [find_process(process.pid, f"trainer {rank}") for rank in (0, 1)]
    deadline = time.monotonic() + 30
    while set(trainers) & set(group_members(process.pid)):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGCONT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "ended because this program gave no sign of life" in errors
    assert is_gone(process.pid)


@pytest.mark.slow
def test_trainers_hold_the_folder_until_they_have_ended(data: Path, tmp_path: Path) -> None:
    """One whose launcher was killed may still be writing."""
    run = tmp_path / "run"
    process = start_run(data, run, 2, **{**COMMON, "n_epochs": 10_000})
    trainer = find_process(process.pid, "trainer 0")
    os.kill(trainer, signal.SIGSTOP)  # the kernel continues it when the launcher ends
    process.kill()
    with pytest.raises(InputError, match="in use"), locked(run, wait_seconds=0):
        pytest.fail("the folder is held by nobody, and a trainer is there")
    process.communicate()
    with locked(run, wait_seconds=20):
        assert is_gone(process.pid)


@pytest.mark.slow
def test_a_request_to_stop_is_not_forgotten_over_a_fault(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    changes = {**COMMON, "n_epochs": 10_000, "restarts": 3}
    process = start_run(data, run, 2, **changes)
    victim = find_process(process.pid, "trainer 1")
    os.kill(victim, signal.SIGSTOP)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    os.kill(victim, signal.SIGKILL)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "starting again" not in errors


@pytest.mark.slow
def test_a_launcher_does_not_wait_for_a_process_that_died_as_it_was_started(
    tmp_path: Path,
) -> None:
    """Its first message may be larger than a pipe, and nobody reads it then."""
    data = prepare(tmp_path / "data", train=3_000, per_file=1, image_size=67)
    run = tmp_path / "run"
    process = start_program("train.py", settings(data, run, devices=["cpu"] * 2))
    deadline = time.monotonic() + 60
    while len(children := [pid for pid in group_members(process.pid) if pid != process.pid]) < 2:
        assert time.monotonic() < deadline
    os.kill(max(children), signal.SIGKILL)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 1, errors
    assert "was killed by SIGKILL" in errors
    assert is_gone(process.pid)


# Resuming


def test_a_damaged_checkpoint_is_reported_and_the_run_goes_on_from_the_one_before(
    data: Path, tmp_path: Path, whole: Path
) -> None:
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    newest = list_checkpoints(run)[-1]
    content = bytearray(newest.read_bytes())
    content[-5] ^= 16
    newest.write_bytes(content)
    result = run_program("train.py", settings(data, run, **COMMON, resume_train=True))
    assert result.returncode == 0, result.stderr
    assert f"{newest}: the checkpoint is damaged" in result.stderr
    assert_same(run, whole)


def resume(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = train.main([*arguments, "--resume_train", "true"])
    return status, capsys.readouterr().err


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
    result = run_program("train.py", settings(data, run, **changed, resume_train=True))
    assert result.returncode == 0, result.stderr
    assert read_header(list_checkpoints(run)[-1]).state.epoch == 4


def test_a_finished_run_is_finished_under_any_condition(
    data: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, errors = resume(capsys, *settings(data, whole, **{**COMMON, "threads": 2}))
    assert status == 0
    assert "all 3 epochs are done already" in errors


@pytest.mark.slow
def test_a_run_that_was_ended_before_its_first_checkpoint_begins_again(
    data: Path, tmp_path: Path, whole: Path
) -> None:
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    for path in list_checkpoints(run):
        path.unlink()
    result = run_program("train.py", settings(data, run, **COMMON, resume_train=True))
    assert result.returncode == 0, result.stderr
    assert "there is no checkpoint to resume from: the run begins at its start" in result.stderr
    assert_same(run, whole)


def test_a_folder_that_another_run_uses_is_refused(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.artifacts.run_lock.WAIT_SECONDS", 0.0)
    run = tmp_path / "run"
    process = start_run(data, run, 1, **{**COMMON, "n_epochs": 10_000})
    status, errors = resume(capsys, *settings(data, run, **COMMON))
    assert status == 2
    assert f"error: weights_dir {run} is in use by another run" in errors
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 143


# Losses that are not finite


def names_in(epoch: int) -> set[str]:
    """Names of the pictures in the minibatch of the bad picture."""
    order = epoch_order([13], "images", 1, epoch)
    begin = int(np.flatnonzero(order == PICTURE)[0]) // 4 * 4
    return {f"{index}.JPEG" for index in order[begin : begin + 4].tolist()}


def train_nan(data: Path, run: Path, name: str = "NanAlexNet", **changes: object) -> str:
    """Train such a network; return its exit status and stderr."""
    arguments = settings(data, run, **{**COMMON, **changes})
    result = run_program("tests/support/broken_train.py", [name, *arguments])
    return f"{result.returncode}\n{result.stderr}"


def not_finite(run: Path) -> list[dict[str, object]]:
    return [line for line in read_record(run) if line["event"] == "not_finite"]


def test_a_loss_that_is_nan_stops_the_run_before_any_weight_changes(
    data: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    errors = train_nan(data, run, "SlowlyRecordedNanAlexNet")
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
    assert list_checkpoints(run)[-1].name == "epoch-0001.safetensors"


@pytest.mark.slow
def test_the_minibatch_is_left_out_by_skip_and_by_rollback_alike(
    data: Path, tmp_path: Path
) -> None:
    skipped, back = tmp_path / "skipped", tmp_path / "back"
    # Trainers that share their weights must agree before any of them changes one.
    assert "5.JPEG" in train_nan(data, skipped, on_nan="skip", exchange="shared")
    errors = train_nan(data, back, on_nan="rollback", exchange="shared")
    assert "going back to the newest checkpoint" in errors
    ours, theirs = (load_file(list_checkpoints(run)[-1]) for run in (skipped, back))
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in ours)
    assert all(np.isfinite(value).all() for value in ours.values())
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
    train_nan(data, whole, on_nan="rollback")
    train_nan(data, run, on_nan="rollback", n_epochs=2)
    # With `stop` it would stop at that minibatch if it came to it once more.
    errors = train_nan(data, run, on_nan="stop", n_epochs=3, resume_train=True)
    assert errors.startswith("0\n"), errors
    assert_same(run, whole)


# Disks


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tandem-test", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this user may not mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.slow
def test_a_full_disk_loses_nothing_but_time(data: Path, small_disk: Path, whole: Path) -> None:
    run = small_disk / "run"
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(900_000))
    # Room for two checkpoints of 430 kB, not for three.
    result = run_program("train.py", settings(data, run, **COMMON, tensorboard=False))
    assert result.returncode == 2, result.stderr
    last = result.stderr.strip().splitlines()[-1]
    assert re.match(r"error: .*epoch-0003\.safetensors.*No space left on device", last), last
    assert [path.name for path in list_checkpoints(run)] == [
        "epoch-0001.safetensors",
        "epoch-0002.safetensors",
    ]
    assert list(run.glob(".*")) == []
    ballast.unlink()
    result = run_program("train.py", settings(data, run, **COMMON, resume_train=True))
    assert result.returncode == 0, result.stderr
    assert_same(run, whole)


def test_a_run_folder_that_is_read_only_is_refused(
    data: Path, small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for run in (small_disk, small_disk / "run"):
        assert train.main(settings(data, run, **COMMON)) == 2
        errors = capsys.readouterr().err
        assert errors.startswith(f"error: weights_dir {run}: ")
        assert "Read-only" in errors or "not writable" in errors
        assert errors.count("\n") == 1
