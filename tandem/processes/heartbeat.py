"""Heartbeats: every process of a pool counts in shared memory, and others watch its counter.

A pipe shows at once that a process has ended, but not that it was stopped (SIGSTOP). So a thread of
each process counts up, four times a second, whatever its main thread does: a long step, a
compilation or a disk that does not answer stops no heartbeat. A call that keeps the interpreter's
lock does; so before a process is taken for dead, the kernel is asked whether it works. The launcher
watches all others; they watch the launcher, and end by themselves when it is gone.

Ctrl-Z stops all of them together. A process that finds that it was itself suspended restarts its
clocks, instead of taking the silence of the others meanwhile for death.

Beside its counter each process shows its current activity, a number that costs nothing to set; its
meaning is the program's. It also shows whether it is writing a file that should not be lost. Before
a process is ended, it gets up to `WRITE_SECONDS` to finish such a file.
"""

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.connection import wait

import numpy as np
import numpy.typing as npt

from tandem.memory import HostBuffer
from tandem.processes.activity import ProcessSnapshot, has_worked, take_snapshot

BEAT_SECONDS = 0.25
SUSPENDED_SECONDS = 2.0  # between two looks: a longer gap means that the watcher was suspended
ASKED_PER_TIMEOUT = 4  # how often the kernel is asked about a silent process
START_SECONDS = 120.0  # for a process to begin to count
PATIENCE_SECONDS = 5.0  # for a child to end in good order when the launcher is gone
WRITE_SECONDS = 60.0  # for a process to finish what it writes before it is ended

LAUNCHER = 0  # its index in the table
ORPHANED = 75  # exit status of a child that ended itself because the launcher is gone


@dataclass(frozen=True)
class HeartbeatTable:
    """A counter, an activity and a mark of each process of a pool, in shared memory."""

    buffer: HostBuffer  # int64 (3, processes)
    names: tuple[str, ...]  # of the processes, the launcher's first
    timeout: float  # seconds without a sign of life after which a process is taken for dead

    @classmethod
    def create(cls, names: tuple[str, ...], timeout: float) -> "HeartbeatTable":
        return cls(HostBuffer.create(3 * 8 * len(names), "heartbeats"), names, timeout)

    @property
    def counters(self) -> npt.NDArray[np.int64]:
        """(processes,), in the order of `names`; shared."""
        return self._rows[0]

    @property
    def activities(self) -> npt.NDArray[np.int64]:
        """(processes,), in the order of `names`; shared."""
        return self._rows[1]

    @property
    def writing(self) -> npt.NDArray[np.int64]:
        """(processes,), in the order of `names`; shared. 1 while a process writes, else 0."""
        return self._rows[2]

    @property
    def _rows(self) -> npt.NDArray[np.int64]:
        return self.buffer.array((3, len(self.names)), np.int64)


@dataclass(frozen=True)
class StatusSlot:
    """The place in which one process shows its activity, and whether it writes."""

    table: HeartbeatTable
    index: int  # of the process in the table

    def show(self, activity: int) -> None:
        self._activities[self.index] = activity

    def show_writing(self, writes: bool) -> None:
        """Ask for time to finish what is being written from now on, or no longer; any thread."""
        self._writing[self.index] = writes

    @cached_property
    def _activities(self) -> npt.NDArray[np.int64]:
        return self.table.activities

    @cached_property
    def _writing(self) -> npt.NDArray[np.int64]:
        return self.table.writing


@dataclass
class _Watched:
    """The last signs of life of one process, as a monitor knows them."""

    pid: int | None
    count: int
    since: float  # when it last gave a sign of life
    asked: float = 0.0  # when the kernel was last asked about it
    snapshot: ProcessSnapshot | None = None

    def restart(self, count: int, now: float) -> None:
        self.count, self.since, self.asked, self.snapshot = count, now, now, None

    def ask_kernel(self, now: float) -> None:
        """Take work that the kernel has seen since it was last asked for a sign of life."""
        before, self.snapshot = self.snapshot, take_snapshot(self.pid) if self.pid else None
        if before and self.snapshot and has_worked(before, self.snapshot, now - self.asked):
            self.since = now
        self.asked = now


class HeartbeatMonitor:
    """Finds processes whose `counters`, changed by others, have stopped for `timeout` seconds.

    `watched` are their indices, each with its process id, or None where the kernel of this machine
    does not know it. With an id, a process that counts no more but works is alive.
    """

    def __init__(
        self,
        counters: npt.NDArray[np.int64],
        timeout: float,
        watched: Mapping[int, int | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._counters, self._timeout, self._clock = counters, timeout, clock
        self._looked = now = clock()
        self._watched = {index: _Watched(pid, 0, now, now) for index, pid in watched.items()}

    def silent(self) -> dict[int, float]:
        """Find the processes to be taken for dead: index -> seconds since the last sign of life."""
        now = self._clock()
        suspended = now - self._looked > SUSPENDED_SECONDS
        self._looked = now
        found = {}
        for index, process in self._watched.items():
            current = int(self._counters[index])
            if suspended or current != process.count:
                process.restart(current, now)
                continue
            if now - process.asked >= self._timeout / ASKED_PER_TIMEOUT:
                process.ask_kernel(now)
            # A process that has just been started imports first; it dies visibly if it dies.
            limit = self._timeout if process.count else max(self._timeout, START_SECONDS)
            if now - process.since > limit:
                found[index] = now - process.since
        return found


class HeartbeatThread(threading.Thread):
    """Counts for this process; in a child, ends it when the launcher is gone.

    A child gives `before_exit`, called before this thread ends the process.
    """

    def __init__(
        self, table: HeartbeatTable, index: int, before_exit: Callable[[], None] | None = None
    ) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._index, self._timeout, self._before_exit = index, table.timeout, before_exit
        self._stopped = threading.Event()
        # Now: the table may be closed before the thread runs.
        self._counters, self._writing = table.counters, table.writing
        self._counters[index] += 1

    def run(self) -> None:
        counters = self._counters
        if self._index == LAUNCHER:
            while not self._stopped.wait(BEAT_SECONDS):
                counters[LAUNCHER] += 1
            return
        parent = multiprocessing.parent_process()
        watched = {LAUNCHER: None if parent is None else parent.pid}
        launcher = HeartbeatMonitor(counters, self._timeout, watched)
        while not (_parent_ended(BEAT_SECONDS) or launcher.silent()):
            counters[self._index] += 1
        # The main thread sees a broken pipe, unless it waits for something else.
        time.sleep(PATIENCE_SECONDS)
        deadline = time.monotonic() + WRITE_SECONDS
        while self._writing[self._index] and time.monotonic() < deadline:
            time.sleep(BEAT_SECONDS)
        if self._before_exit is not None:
            self._before_exit()
        os._exit(ORPHANED)

    def stop(self) -> None:
        """Stop counting, in the launcher."""
        self._stopped.set()


def _parent_ended(seconds: float) -> bool:
    """Wait for the end of the launcher, at most `seconds`; return whether it has ended."""
    parent = multiprocessing.parent_process()
    if parent is None:
        time.sleep(seconds)
        return False
    return bool(wait([parent.sentinel], seconds))
