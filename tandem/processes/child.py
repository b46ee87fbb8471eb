"""What every child process of a run does first."""

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tandem.errors import InputError
from tandem.files import remove_partials
from tandem.processes.heartbeat import HeartbeatTable, HeartbeatThread, wake_when_parent_ends


@dataclass(frozen=True)
class ChildContext:
    """What a process needs to be a member of a run.

    Attributes
    ----------
    table : HeartbeatTable
        The signs of life.
    place : int
        This process's on the table.
    folder : Path or None
        Where it writes, if it does: what it leaves half written there when it has to end at once is
        removed.
    tracker : int or None
        The process in which Python's multiprocessing keeps track of resources.
    stderr : Connection or None
        What takes the place of a terminal that this process would write to.
    """

    table: HeartbeatTable
    place: int
    folder: Path | None = None
    tracker: int | None = None
    stderr: Connection | None = None


def enter(context: ChildContext, target: Callable[..., None], *arguments: Any) -> None:
    """Make this process a member of a run, then do its work: the target of every child process.

    Parameters
    ----------
    context : ChildContext
        Its place in the run.
    target : callable
        The work, called with the first message of the launcher and then `arguments`.
    *arguments
        The last is the connection to the launcher.
    """
    settle(context)
    try:
        parcel = arguments[-1].recv()
    except (EOFError, OSError):
        raise SystemExit(1) from None  # the launcher is gone
    target(parcel, *arguments)


def tracker_pid() -> int | None:
    """The process in which Python's multiprocessing keeps track of resources, once it runs."""
    return getattr(resource_tracker._resource_tracker, "_pid", None)


def settle(context: ChildContext) -> None:
    """Make this process a member of a run.

    Ctrl-C reaches the whole group of processes, and a cluster's SIGTERM all of a job, but the
    launcher alone decides what follows. The process takes its name, as ``trainer-0``, where the
    system shows it (``ps -o comm``).
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if context.stderr is not None:
        _leave_terminal(context.stderr)
    wake_when_parent_ends()
    HeartbeatThread(context.table, context.place, partial(_leave, context)).start()
    comm = Path("/proc/self/comm")
    if comm.exists():
        comm.write_text(multiprocessing.current_process().name.replace(" ", "-"))


def _leave_terminal(stderr: Connection) -> None:
    """Write what would go to the terminal to another place instead, whoever writes it."""
    for descriptor in (1, 2):
        if os.isatty(descriptor):
            os.dup2(stderr.fileno(), descriptor)
    stderr.close()


def _leave(context: ChildContext) -> None:
    """Leave nothing behind in a run whose launcher is gone."""
    if context.folder is not None:
        with contextlib.suppress(OSError):
            remove_partials(context.folder)
    if context.tracker is not None:
        # It ends with the launcher, unless it was stopped with it, by Ctrl-Z say.
        with contextlib.suppress(OSError):
            os.kill(context.tracker, signal.SIGCONT)


def describe(error: BaseException) -> str:
    """An exception in one line: its message where the user can put it right, else its type too."""
    text = " ".join(str(error).split())
    if isinstance(error, InputError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
