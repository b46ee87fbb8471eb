"""The worker processes of one launcher, and its pipes to them."""

import contextlib
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Self

from tandem.files import remove_partials
from tandem.processes.child import ChildContext, enter
from tandem.processes.fork_server import begin, start_copy
from tandem.processes.heartbeat import LAUNCHER, HeartbeatTable, HeartbeatThread, StatusSlot
from tandem.processes.signals import STOPPING
from tandem.processes.spawn import start_new

log = logging.getLogger(__name__)

END_SECONDS = 5.0  # for processes to end by themselves before they are killed
KILL_SECONDS = 5.0  # for the system to end a process that was killed


@dataclass
class WorkerHandle:
    """A worker, as its launcher sees it.

    One that `reports` must report `Ready`, and `Finished` before it ends; others may end with exit
    status 0 at any time.
    """

    name: str
    connection: Connection
    process: BaseProcess | None  # None: the main thread of the launcher's own process
    reports: bool = True
    folder: Path | None = None  # where it writes
    ready: bool = False
    finished: bool = False
    closed: bool = False  # its end of the pipe is, or it has ended, and all messages are read

    def send(self, message: object) -> None:
        """Send a message, unless the worker has ended."""
        _send(self.connection, message)

    @property
    def exit_status(self) -> int | None:
        """None while it works; negative after a signal."""
        if self.process is None:
            return 1 if self.closed else None
        return self.process.exitcode


class WorkerPool:
    """All workers of a launcher; a context manager that leaves no process behind.

    They write to `stderr`, where it is given, instead of to the terminal.
    """

    def __init__(
        self, names: Sequence[str], timeout: float, stderr: Connection | None = None
    ) -> None:
        self.table = HeartbeatTable.create(("launcher", *names), timeout)
        self.handles: list[WorkerHandle] = []
        self._stderr = stderr
        self._heartbeat = HeartbeatThread(self.table, LAUNCHER)
        self._heartbeat.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._end(END_SECONDS if self.finished else 0.0)
        finally:
            self._heartbeat.stop()
            self.table.buffer.close()

    @property
    def reporting(self) -> list[WorkerHandle]:
        return [handle for handle in self.handles if handle.reports]

    @property
    def closed(self) -> list[WorkerHandle]:
        return [handle for handle in self.handles if handle.closed]

    @property
    def finished(self) -> bool:
        return all(handle.finished for handle in self.reporting)

    @property
    def pids(self) -> dict[str, int]:
        return {h.name: (h.process and h.process.pid) or os.getpid() for h in self.handles}

    @property
    def writing(self) -> list[str]:
        """Names of the workers that are alive and write a file that should not be lost."""
        marks = dict(zip(self.table.names, self.table.writing, strict=True))
        return [h.name for h in self.handles if h.exit_status is None and marks[h.name]]

    def status(self, name: str) -> StatusSlot:
        """Return where a worker shows what it does."""
        return StatusSlot(self.table, self.table.names.index(name))

    def start(
        self,
        name: str,
        target: Callable[..., None],
        message: object,
        *arguments: object,
        reports: bool = True,
        folder: Path | None = None,
        is_copy: bool = False,
    ) -> threading.Thread:
        """Start a process that calls `target` with `message`, `arguments` and a connection.

        One that `is_copy` has PyTorch and PyTensor from the beginning, see `fork_server`.

        The `arguments`, which can be passed only while a process is started, must be small: the
        launcher writes them to a pipe of which it holds both ends, and would wait for ever for a
        process that dies before it has read more than fits in. The `message` may be of any size: it
        is sent by a thread, which is returned, and whose end others await before they send more.
        """
        here, there = multiprocessing.Pipe(duplex=True)
        held_by_caller = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        # Started with the first child otherwise, when it would let SIGINT through again.
        resource_tracker.ensure_running()
        tracker = getattr(resource_tracker._resource_tracker, "_pid", None)
        index = self.table.names.index(name)
        child = ChildContext(self.table, index, folder, tracker, self._stderr)
        if is_copy:
            begin()  # here: it may wait
        start = start_copy if is_copy else start_new
        # None may reach a child before it ignores them.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
        try:
            process = start(enter, (child, target, *arguments, there), name)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held_by_caller)
        # A pipe shows the end of a process only when nobody else holds that end of it.
        there.close()
        self.handles.append(WorkerHandle(name, here, process, reports, folder))
        sender = threading.Thread(target=_send, args=(here, message), daemon=True)
        sender.start()
        return sender

    def attach(self, name: str, folder: Path | None = None) -> Connection:
        """Add the main thread of this process as a worker; return its connection."""
        here, there = multiprocessing.Pipe(duplex=True)
        self.handles.append(WorkerHandle(name, here, None, folder=folder))
        return there

    def send(self, message: object) -> None:
        """Send a message to every worker that reports and is still alive."""
        for handle in self.reporting:
            handle.send(message)

    def receive(self, timeout: float) -> list[tuple[WorkerHandle, Any]]:
        """Receive every waiting message, after at most `timeout` seconds for the first."""
        open_ones = [h for h in self.handles if not (h.finished or h.closed)]
        running = [h.process for h in self.handles if h.process and h.exit_status is None]
        wait([*(h.connection for h in open_ones), *(p.sentinel for p in running)], timeout)
        messages = []
        for handle in open_ones:
            has_ended = handle.exit_status is not None  # before the last look for messages
            try:
                while handle.connection.poll():
                    messages.append((handle, handle.connection.recv()))
                handle.closed = has_ended
            except (EOFError, OSError):
                handle.closed = True
        return messages

    def _end(self, patience: float) -> None:
        """Wait for all processes to end; kill the rest after `patience` seconds."""
        processes = [handle.process for handle in self.handles if handle.process]
        try:
            _join(processes, patience)
        finally:  # an interrupt ends the patience
            for process in processes:
                if process.is_alive():
                    process.kill()
        _join(processes, KILL_SECONDS)
        for process in processes:
            if process.is_alive():
                log.error("%s can't be ended: the system holds it", process.name)
        for handle in self.handles:
            if handle.folder is not None:
                with contextlib.suppress(OSError):
                    remove_partials(handle.folder)


def _join(processes: Sequence[BaseProcess], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))


def _send(connection: Connection, message: object) -> None:
    """Send a message to a worker that may have ended."""
    with contextlib.suppress(OSError):
        connection.send(message)
