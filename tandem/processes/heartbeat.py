"""Signs of life. Every process of a run counts in shared memory, and each watches another's count.

A pipe tells of a process's end at once, but not that it was stopped (SIGSTOP). So a thread of each
process counts up, four times a second, whatever its main thread does: a long step, a compilation or
a disk that doesn't answer is no sign of death. The launcher watches all others; they watch the
launcher, and end by themselves when it is gone.

Ctrl-Z stops all of them together. A process that finds that it was itself suspended takes nobody's
silence meanwhile for death: it restarts its clocks.

Beside its count each process shows what it is doing, a number that costs nothing to set, for the
launcher to show the user.
"""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from multiprocessing.connection import wait

import numpy as np
import numpy.typing as npt

from tandem.memory import HostBuffer

BEAT_SECONDS = 0.25
SUSPENDED_SECONDS = 2.0  # who has not looked for so long was suspended, or starved
START_SECONDS = 120.0  # for a process to begin to count
PATIENCE_SECONDS = 5.0  # for a child to end in good order when the launcher is gone

LAUNCHER = 0  # its place on the table
ORPHANED = 75  # exit status of a child that was ended because the launcher is gone

Clock = Callable[[], float]


class Activity(IntEnum):
    """What a process is doing."""

    STARTING = 0
    COMPUTING = 1
    WAITING = 2  # for its loader
    EXCHANGING = 3
    VALIDATING = 4
    SAVING = 5
    READING = 6
    IDLE = 7  # a loader that has filled its slot


@dataclass(frozen=True)
class HeartbeatTable:
    """A counter for each process of a run, and what each is doing, in shared memory.

    Parameters
    ----------
    buffer : HostBuffer
        Holds the numbers, int64.
    names : tuple of str
        Of the processes, the launcher's first.
    timeout : float
        Seconds without a beat after which a process is taken for dead.
    """

    buffer: HostBuffer
    names: tuple[str, ...]
    timeout: float

    @classmethod
    def create(cls, names: tuple[str, ...], timeout: float) -> "HeartbeatTable":
        """A new table, all counters at 0."""
        return cls(HostBuffer.create(2 * 8 * len(names), "heartbeats"), names, timeout)

    @property
    def counters(self) -> npt.NDArray[np.int64]:
        """(processes,), in the order of `names`; seen by all."""
        return self._numbers[0]

    @property
    def activities(self) -> npt.NDArray[np.int64]:
        """(processes,), each an `Activity`; seen by all."""
        return self._numbers[1]

    @property
    def _numbers(self) -> npt.NDArray[np.int64]:
        return self.buffer.array((2, len(self.names)), np.int64)


@dataclass(frozen=True)
class StatusSlot:
    """Where one process shows what it is doing.

    Parameters
    ----------
    table : HeartbeatTable
        Of the run.
    place : int
        The process's on the table.
    """

    table: HeartbeatTable
    place: int

    def show(self, activity: Activity) -> None:
        """From now on it does this."""
        self._activities[self.place] = activity

    @cached_property
    def _activities(self) -> npt.NDArray[np.int64]:
        return self.table.activities


class HeartbeatMonitor:
    """Notices whose counter has stopped.

    Parameters
    ----------
    table : HeartbeatTable
        The counters.
    places : sequence of int
        Whom to watch.
    clock : callable
        Seconds that never go back.
    """

    def __init__(
        self, table: HeartbeatTable, places: Sequence[int], clock: Clock = time.monotonic
    ) -> None:
        self._counters, self._timeout = table.counters, table.timeout
        self._places, self._clock = places, clock
        self._looked = clock()
        self._seen = dict.fromkeys(places, (0, self._looked))

    def silent(self) -> dict[int, float]:
        """Who is to be taken for dead: its place, and the seconds since it was seen to count."""
        now = self._clock()
        suspended = now - self._looked > SUSPENDED_SECONDS
        self._looked = now
        found = {}
        for place in self._places:
            count, since = self._seen[place]
            current = int(self._counters[place])
            if suspended or current != count:
                self._seen[place] = (current, now)
                continue
            # A process that is being started imports first; it dies visibly if it dies.
            limit = self._timeout if count else max(self._timeout, START_SECONDS)
            if now - since > limit:
                found[place] = now - since
        return found


class HeartbeatThread(threading.Thread):
    """Counts for this process; in a child, ends it when the launcher is gone.

    Parameters
    ----------
    table : HeartbeatTable
        Where to count.
    place : int
        This process's.
    before_exit : callable, optional
        In a child: called before it is ended from here.
    """

    def __init__(
        self, table: HeartbeatTable, place: int, before_exit: Callable[[], None] | None = None
    ) -> None:
        super().__init__(name="heart", daemon=True)
        self._board, self._place, self._before_exit = table, place, before_exit
        self._stopped = threading.Event()
        table.counters[place] += 1

    def run(self) -> None:
        """Count until `stop`, or until the launcher is gone."""
        counters = self._board.counters
        if self._place == LAUNCHER:
            while not self._stopped.wait(BEAT_SECONDS):
                counters[LAUNCHER] += 1
            return
        watch = HeartbeatMonitor(self._board, range(LAUNCHER, LAUNCHER + 1))
        while not (_parent_ended(BEAT_SECONDS) or watch.silent()):
            counters[self._place] += 1
        self._end()

    def stop(self) -> None:
        """Count no more, in the launcher."""
        self._stopped.set()

    def _end(self) -> None:
        # The main thread learns of it from a broken pipe, unless it waits for something else.
        time.sleep(PATIENCE_SECONDS)
        if self._before_exit is not None:
            self._before_exit()
        os._exit(ORPHANED)


def _parent_ended(seconds: float) -> bool:
    """Wait so long for the launcher's end; whether it came."""
    parent = multiprocessing.parent_process()
    if parent is None:
        time.sleep(seconds)
        return False
    return bool(wait([parent.sentinel], seconds))


def wake_when_parent_ends() -> None:
    """Have the kernel continue this process, should it be stopped, when its parent ends.

    It could not notice by itself, and would stay for ever. Linux only; see prctl(2).
    """
    if sys.platform == "linux":
        set_parent_death_signal = 1
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGCONT)
