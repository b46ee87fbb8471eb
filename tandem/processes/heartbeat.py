"""Heartbeats: every process of a pool counts in shared memory, and others watch its counter.

A pipe shows at once that a process has ended, but not that it was stopped (SIGSTOP). So a thread of
each process counts up, four times a second, whatever its main thread does: a long step, a
compilation or a disk that does not answer stops no heartbeat. The launcher watches all others;
they watch the launcher, and end by themselves when it is gone.

Ctrl-Z stops all of them together. A process that finds that it was itself suspended restarts its
clocks, instead of taking the silence of the others meanwhile for death.

Beside its counter each process shows its current activity, a number that costs nothing to set; its
meaning is the program's.
"""

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.connection import wait

import numpy as np
import numpy.typing as npt

from tandem.memory import HostBuffer

BEAT_SECONDS = 0.25
SUSPENDED_SECONDS = 2.0  # between two looks: a longer gap means that the watcher was suspended
START_SECONDS = 120.0  # for a process to begin to count
PATIENCE_SECONDS = 5.0  # for a child to end in good order when the launcher is gone

LAUNCHER = 0  # its index in the table
ORPHANED = 75  # exit status of a child that ended itself because the launcher is gone


@dataclass(frozen=True)
class HeartbeatTable:
    """A counter and an activity of each process of a pool, in shared memory."""

    buffer: HostBuffer  # int64 (2, processes)
    names: tuple[str, ...]  # of the processes, the launcher's first
    timeout: float  # seconds without a beat after which a process is taken for dead

    @classmethod
    def create(cls, names: tuple[str, ...], timeout: float) -> "HeartbeatTable":
        return cls(HostBuffer.create(2 * 8 * len(names), "heartbeats"), names, timeout)

    @property
    def counters(self) -> npt.NDArray[np.int64]:
        """(processes,), in the order of `names`; shared."""
        return self.buffer.array((2, len(self.names)), np.int64)[0]

    @property
    def activities(self) -> npt.NDArray[np.int64]:
        """(processes,), in the order of `names`; shared."""
        return self.buffer.array((2, len(self.names)), np.int64)[1]


@dataclass(frozen=True)
class StatusSlot:
    """Where one process shows its activity."""

    table: HeartbeatTable
    index: int  # of the process in the table

    def show(self, activity: int) -> None:
        self._activities[self.index] = activity

    @cached_property
    def _activities(self) -> npt.NDArray[np.int64]:
        return self.table.activities


class HeartbeatMonitor:
    """Finds processes whose `counters`, changed by others, have stopped for `timeout` seconds."""

    def __init__(
        self,
        counters: npt.NDArray[np.int64],
        timeout: float,
        watched: Sequence[int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._counters, self._timeout, self._clock = counters, timeout, clock
        self._looked = clock()
        self._seen = dict.fromkeys(watched, (0, self._looked))

    def silent(self) -> dict[int, float]:
        """Find the processes to be taken for dead: index -> seconds since the last beat."""
        now = self._clock()
        suspended = now - self._looked > SUSPENDED_SECONDS
        self._looked = now
        found = {}
        for index, (count, since) in self._seen.items():
            current = int(self._counters[index])
            if suspended or current != count:
                self._seen[index] = (current, now)
                continue
            # A process that has just been started imports first; it dies visibly if it dies.
            limit = self._timeout if count else max(self._timeout, START_SECONDS)
            if now - since > limit:
                found[index] = now - since
        return found


class HeartbeatThread(threading.Thread):
    """Counts for this process; in a child, ends it when the launcher is gone.

    A child gives `before_exit`, called before this thread ends the process.
    """

    def __init__(
        self, table: HeartbeatTable, index: int, before_exit: Callable[[], None] | None = None
    ) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._table, self._index, self._before_exit = table, index, before_exit
        self._stopped = threading.Event()
        table.counters[index] += 1

    def run(self) -> None:
        counters = self._table.counters
        if self._index == LAUNCHER:
            while not self._stopped.wait(BEAT_SECONDS):
                counters[LAUNCHER] += 1
            return
        launcher = HeartbeatMonitor(counters, self._table.timeout, [LAUNCHER])
        while not (_parent_ended(BEAT_SECONDS) or launcher.silent()):
            counters[self._index] += 1
        # The main thread sees a broken pipe, unless it waits for something else.
        time.sleep(PATIENCE_SECONDS)
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
