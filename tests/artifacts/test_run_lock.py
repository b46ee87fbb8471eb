"""A run folder belongs to one run at a time, and to no dead one."""

import contextlib
import multiprocessing
import os
import pickle
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tandem.artifacts.run_lock import FolderLock, locked
from tandem.errors import InputError
from tandem.files import LOCK_NAME

CONTEXT = multiprocessing.get_context("spawn")


def refuse(folder: Path, wait_seconds: float = 0) -> None:
    with pytest.raises(InputError, match="is in use by another run"), locked(folder, wait_seconds):
        pytest.fail("two runs hold one folder")


def test_a_folder_that_is_in_use_is_refused_after_a_while(tmp_path: Path) -> None:
    with locked(tmp_path):
        begun = time.monotonic()
        refuse(tmp_path, wait_seconds=0.5)
        assert time.monotonic() - begun >= 0.5
    with locked(tmp_path, wait_seconds=0):
        pass


def test_a_folder_that_was_created_and_left_empty_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "a"
    with locked(folder):
        assert folder.is_dir()
    assert tmp_path.is_dir()  # which was there before
    assert not (tmp_path / "runs").exists()
    with locked(folder):
        (folder / "config.yaml").touch()
    assert (folder / "config.yaml").exists()


def test_a_folder_that_its_user_has_removed_is_not_held_twice(tmp_path: Path) -> None:
    """Else one who waited would hold what is gone, and the next the folder of that name."""
    folder = tmp_path / "run"
    with contextlib.ExitStack() as first:
        first.enter_context(locked(folder))
        waiting = ThreadPoolExecutor(1).submit(hold_for_a_moment, folder)
        time.sleep(0.5)
        first.close()
        begin, end = waiting.result(timeout=20)
        assert end > begin


def hold_for_a_moment(folder: Path) -> tuple[float, float]:
    with locked(folder):
        begin = time.monotonic()
        assert (folder / LOCK_NAME).exists()
        refuse(folder)
        return begin, time.monotonic()


def test_a_lock_that_a_killed_launcher_left_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / LOCK_NAME).touch()
    with locked(tmp_path, wait_seconds=0):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.touch()
    for folder in (file, file / "b" / "c"):
        with pytest.raises(InputError, match=f"{file} is a file, not a folder"), locked(folder):
            pytest.fail("a file was locked as a folder")


def hold(folder: Path, told: Connection) -> None:
    """A launcher that passes its lock to a trainer."""
    with locked(folder) as lock:
        here, there = CONTEXT.Pipe()
        trainer = CONTEXT.Process(target=keep, args=(lock, there))
        trainer.start()
        assert here.recv() == "holding"
        told.send(trainer.pid)
        time.sleep(600)


def keep(lock: FolderLock, connection: Connection) -> None:
    connection.send("holding")
    time.sleep(600)


def test_a_lock_outlives_the_launcher_and_not_the_trainer(tmp_path: Path) -> None:
    """A trainer whose launcher was killed may still be writing."""
    here, there = CONTEXT.Pipe()
    launcher = CONTEXT.Process(target=hold, args=(tmp_path, there))
    launcher.start()
    assert here.poll(60)
    trainer = here.recv()
    try:
        launcher.kill()
        launcher.join()
        refuse(tmp_path)
    finally:
        os.kill(trainer, signal.SIGKILL)
    with locked(tmp_path, wait_seconds=5):
        pass


def test_a_lock_is_passed_to_no_one_else(tmp_path: Path) -> None:
    with locked(tmp_path) as lock, pytest.raises(TypeError, match="being started"):
        pickle.dumps(lock)
