"""What the workers of a pool do in tests: functions that a new process imports quickly."""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

from tandem.processes import heartbeat
from tandem.processes.messages import Failed, Finished, Ready, Stop


def add(numbers: list[int], launcher: Connection) -> None:
    """Report the sum of the numbers so far, over and over, until asked to stop; then finish."""
    launcher.send(Ready())
    total = 0
    for number in numbers:
        total += number
    launcher.send(total)
    while not isinstance(launcher.recv(), Stop):
        pass
    launcher.send("saved")
    launcher.send(Finished())


def ask(number: int, launcher: Connection) -> None:
    """Report a number, and each answer as the next, twice; then finish."""
    launcher.send(number)
    launcher.send(launcher.recv())
    launcher.send(launcher.recv())
    launcher.send(Finished())


def add_and_finish(numbers: list[int], launcher: Connection) -> None:
    launcher.send(sum(numbers))
    launcher.send(Finished())


def finish_at_once(path: Path, launcher: Connection) -> None:
    """Finish when told to, and end as quickly as a process can."""
    launcher.send(0)
    while not path.exists():
        time.sleep(0.05)
    launcher.send(Finished())
    os._exit(0)


def fail(error: Exception, launcher: Connection) -> None:
    launcher.send(Failed.of(multiprocessing.current_process().name, error))
    raise SystemExit(1)


def fail_when_told(path: Path, launcher: Connection) -> None:
    launcher.send(Ready())
    while not path.exists():
        time.sleep(0.05)
    fail(ZeroDivisionError("no sum"), launcher)


def save_when_told(path: Path, launcher: Connection) -> None:
    """Work until asked to stop, as a survivor does until it notices; then save and fail."""
    launcher.send(Ready())
    launcher.send(0)
    while not path.with_suffix(".go").exists():
        time.sleep(0.05)
    path.touch()
    launcher.send(Failed(multiprocessing.current_process().name, "consequence", "lost", ""))
    raise SystemExit(1)


def exit_with(status: int, launcher: Connection) -> None:
    raise SystemExit(status)


def compute_with_lock(seconds: float, launcher: Connection) -> None:
    """Compute in one call that does not release the interpreter's lock."""
    begin = time.process_time()
    sum(range(2_000_000))
    speed = 2_000_000 / (time.process_time() - begin)
    launcher.send(sum(range(int(seconds * speed))) > 0)
    launcher.send(Finished())


def sleep_with_lock(seconds: int, launcher: Connection) -> None:
    ctypes.PyDLL(None).sleep(seconds)


def write_and_wait(folder: Path, launcher: Connection) -> None:
    launcher.send(Ready())
    (folder / ".sum.x.partial.txt").touch()
    launcher.send(0)
    time.sleep(600)


def hang(_: object, launcher: Connection) -> None:
    launcher.send(Ready())
    launcher.send(0)
    time.sleep(600)


def write_slowly(
    message: tuple[Path, float, bool], status: heartbeat.StatusSlot, launcher: Connection
) -> None:
    """Write a file for the given seconds, in a thread, while the main thread hangs."""
    path, seconds, stops = message

    def write() -> None:
        status.show_writing(True)
        launcher.send("begun")
        if stops:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(seconds)
        path.touch()
        status.show_writing(False)

    threading.Thread(target=write).start()
    time.sleep(600)


def write_with_another(
    _: object, status: heartbeat.StatusSlot, other: Connection, launcher: Connection
) -> None:
    """Write until another has sent its part, or is gone."""
    launcher.send(Ready())
    status.show_writing(True)
    launcher.send("begun")
    with contextlib.suppress(EOFError):
        other.recv()
    status.show_writing(False)
    time.sleep(600)


def stop_before_its_part(_: object, writer: Connection, launcher: Connection) -> None:
    launcher.send(Ready())
    os.kill(os.getpid(), signal.SIGSTOP)
