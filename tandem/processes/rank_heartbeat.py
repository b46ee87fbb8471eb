"""Heartbeats between the ranks of a job, on one machine or several."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Mapping

import numpy as np

from tandem.distributed import PeerLost
from tandem.distributed.group import RankGroup
from tandem.processes.heartbeat import HeartbeatMonitor

BEAT_SECONDS = 0.5


class RankHeartbeat(threading.Thread):
    """Exchanges heartbeats of the master and each other rank; ends the job where one sends none.

    Parameters
    ----------
    group : RankGroup
        For this thread alone.
    pids : mapping of int to int
        Process ids of the ranks of this machine.
    timeout : float
        Seconds of silence after which a rank is dead.
    end : callable
        Gets the reason, and whether a silent process of this machine was killed, by which its
        peers notice; ends the job.
    master : int
        The rank with which all others exchange heartbeats.
    kind : str
        Of the ranks, in messages.
    """

    def __init__(
        self,
        group: RankGroup,
        pids: Mapping[int, int],
        timeout: float,
        end: Callable[[str, bool], object],
        master: int = 0,
        kind: str = "trainer",
    ) -> None:
        super().__init__(name="rank heartbeat", daemon=True)
        ranks = set(range(group.size)) - {master} if group.rank == master else {master}
        self._group, self._partners = group, {rank: pids.get(rank) for rank in sorted(ranks)}
        # One each: these processes have met, and are given no time to start.
        self._counters, self._end, self._kind = np.ones(group.size, np.int64), end, kind
        self.stopped = threading.Event()
        self.expect(timeout)

    def expect(self, timeout: float) -> None:
        """From now on take a rank for dead that has been silent for `timeout` seconds."""
        self._monitor = HeartbeatMonitor(self._counters, timeout, self._partners)

    def run(self) -> None:
        while not self.stopped.wait(BEAT_SECONDS):
            try:
                for rank in self._partners:
                    self._group.beat(rank)
                for rank in self._group.beats():
                    self._counters[rank] += 1
            except PeerLost as error:
                self._end(str(error), False)
            for rank, seconds in self._monitor.silent().items():
                pid = self._partners[rank]
                kills = pid is not None and self._group.starter == "torchrun"
                if pid is not None and kills:
                    # A stopped process hears no SIGTERM: torchrun would give it half a minute.
                    with contextlib.suppress(OSError):
                        os.kill(pid, signal.SIGKILL)
                silence = f"has given no sign of life for {seconds:.0f} s"
                self._end(f"{self._kind} {rank}: {silence}: was it stopped?", kills)

    def stop(self) -> None:
        self.stopped.set()
        self.join()
