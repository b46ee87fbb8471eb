"""The first steps of every child process of a pool."""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tandem.files import remove_partials
from tandem.processes.heartbeat import HeartbeatTable, HeartbeatThread
from tandem.processes.signals import STOPPING


@dataclass(frozen=True)
class ChildContext:
    """The context that a child process gets from its pool."""

    table: HeartbeatTable
    index: int  # of this process in the table
    folder: Path | None = None  # partly written files in it are removed at an early end
    tracker: int | None = None  # process id of multiprocessing's resource tracker
    stderr: Connection | None = None  # replaces a terminal that the process would write to


def enter(context: ChildContext, target: Callable[..., None], *arguments: Any) -> None:
    """Set up this process, then do its work: the target of every child process.

    Ctrl-C and the SIGHUP of a closed terminal reach the whole group of processes, and a cluster's
    SIGTERM all of a job, but the launcher alone decides what follows: they are ignored here.
    `target` is called with the first message of the launcher, then `arguments`, of which the last
    is the connection to it.
    """
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)
    if context.stderr is not None:
        _leave_terminal(context.stderr)
    continue_when_parent_ends()
    HeartbeatThread(context.table, context.index, partial(_clean_up, context)).start()
    show_name(multiprocessing.current_process().name)
    try:
        first_message = arguments[-1].recv()
    except (EOFError, OSError):
        raise SystemExit(1) from None  # the launcher is gone
    target(first_message, *arguments)


def show_name(name: str) -> None:
    """Name this process in the list of processes (``ps -o comm``), spaces replaced by hyphens."""
    comm = Path("/proc/self/comm")
    if comm.exists():
        comm.write_text(name.replace(" ", "-"))


def _leave_terminal(stderr: Connection) -> None:
    """Redirect output to a terminal, Python's or a library's, to `stderr`."""
    for descriptor in (1, 2):
        if os.isatty(descriptor):
            os.dup2(stderr.fileno(), descriptor)
    stderr.close()


def continue_when_parent_ends() -> None:
    """Have the kernel continue this process, should it be stopped, when its parent ends.

    A stopped process could not notice by itself, and would stay for ever. Linux only; see prctl(2).
    """
    if sys.platform == "linux":
        set_parent_death_signal = 1
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGCONT)


def _clean_up(context: ChildContext) -> None:
    """Leave nothing behind when the launcher is gone."""
    if context.folder is not None:
        with contextlib.suppress(OSError):
            remove_partials(context.folder)
    if context.tracker is not None:
        # It ends with the launcher, unless it was stopped with it, by Ctrl-Z for example.
        with contextlib.suppress(OSError):
            os.kill(context.tracker, signal.SIGCONT)
