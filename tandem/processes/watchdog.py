"""Kill workers that give no sign of life, so that whoever waits for them sees an end."""

import threading
from collections.abc import Mapping

from tandem.processes.heartbeat import BEAT_SECONDS, HeartbeatMonitor
from tandem.processes.worker_pool import WorkerPool


class Watchdog(threading.Thread):
    """Watches the heartbeats of a pool's workers while its launcher waits in a call.

    A wait on a pipe ends when the process at its other end dies, but not when that is stopped
    (SIGSTOP). `killed` has how long each worker was silent that was killed for it, by name.
    """

    def __init__(self, pool: WorkerPool) -> None:
        super().__init__(name="watchdog", daemon=True)
        self._pool, self._stopped = pool, threading.Event()
        watched = {pool.table.names.index(h.name): h.process.pid for h in pool.handles if h.process}
        # Now: the table may be closed before the thread runs.
        self._monitor = HeartbeatMonitor(pool.table.counters, pool.table.timeout, watched)
        self._killed: dict[str, float] = {}

    @property
    def killed(self) -> Mapping[str, float]:
        return self._killed

    def run(self) -> None:
        names = self._pool.table.names
        processes = {handle.name: handle.process for handle in self._pool.handles}
        while not self._stopped.wait(BEAT_SECONDS):
            for index, seconds in self._monitor.silent().items():
                process = processes[names[index]]
                if process is not None and process.is_alive() and names[index] not in self._killed:
                    self._killed[names[index]] = seconds
                    process.kill()

    def stop(self) -> None:
        """End the watch; the thread ends by itself."""
        self._stopped.set()
