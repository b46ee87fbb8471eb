"""Supervise the workers of a pool, and find the root cause when one fails."""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

from tandem.processes.fork_server import UNKNOWN
from tandem.processes.heartbeat import ORPHANED, WRITE_SECONDS, HeartbeatMonitor, HeartbeatTable
from tandem.processes.messages import Failed, Finished, Kind, Ready, Stop
from tandem.processes.signals import StopSignals, signal_name
from tandem.processes.worker_pool import END_SECONDS, WorkerHandle, WorkerPool

log = logging.getLogger(__name__)

WRITE_POLL_SECONDS = 0.05
GRACE_SECONDS = 1.0  # to receive the root cause after one of its consequences


class ProgressReporter:
    """Receives all that the workers of a pool report. This base class shows nothing."""

    stderr: Connection | None = None  # where the workers write instead of to the terminal

    @property
    def failure(self) -> Failed | None:
        """A failure of the reporter itself, which ends the work of the pool."""
        return None

    def begin(self, table: HeartbeatTable, pids: Mapping[str, int]) -> None:
        """Called when all workers have been started, with their process ids by name."""

    def report(self, message: object) -> object:
        """Called with every message of a worker, but those of `tandem.processes.messages`.

        What it returns is sent to the worker, which has asked for it; None is no answer.
        """
        return None

    def close(self) -> None:
        """Called at the end, however it came."""


@dataclass(frozen=True)
class Outcome:
    """The end of a pool's work."""

    status: int  # 0; 1 after a fault; 2 after bad input; 128 and its number after a signal
    failure: Failed | None = None  # the root cause
    stopped: bool = False  # whether a signal asked it to stop

    @classmethod
    def of(cls, failure: Failed | None, signals: StopSignals) -> "Outcome":
        if failure is not None:
            return cls(2 if failure.kind == "input" else 1, failure, signals.count > 0)
        return cls(signals.exit_status if signals.count else 0, None, signals.count > 0)

    def explain(self) -> None:
        """Log why the work ended before it was done, if it did."""
        failure = self.failure
        if failure is None:
            if self.stopped:
                log.info("stopped by %s", signal_name(self.status - 128))
        elif failure.kind == "input":
            log.error("error: %s", failure.message)
        else:
            if failure.traceback:
                log.error("%s failed:\n%s", failure.who, failure.traceback.rstrip())
            log.error("error: the run has ended: %s: %s", failure.who, failure.message)


def supervise(
    pool: WorkerPool,
    reporter: ProgressReporter,
    signals: StopSignals,
    saves: bool = False,
    survives: bool = False,
) -> Failed | None:
    """Pass reports on until all workers have finished; return the root cause of a failure.

    The first request to stop goes to the workers; the second ends the call, as does the first
    where there is nothing to save: with `saves`, workers that are `Ready` save their work. The call
    also ends, and their step is lost, when for the pool's timeout after a request no worker has
    gone on to another activity, reported or written. A failure of the `reporter` is such a request
    too; in the main thread the second request ends also what that is doing. After a worker's
    failure the call ends when no worker is writing any more, at most a minute later. With
    `survives`, the others have something to save when they notice it too: the call ends when all
    have, unless there is a further request, or none does anything else for the timeout, and at the
    latest when that and a minute have passed.
    """
    failures: list[Failed] = []
    try:
        return _supervise(pool, reporter, signals, saves, survives, failures)
    except KeyboardInterrupt:
        if signals.count < 2:  # raised by the reporter itself
            raise
        return _root_cause(pool, failures) if failures else None


def _supervise(
    pool: WorkerPool,
    reporter: ProgressReporter,
    signals: StopSignals,
    saves: bool,
    survives: bool,
    failures: list[Failed],
) -> Failed | None:
    with signals.interrupting():
        reporter.begin(pool.table, pool.pids)
    others = {pool.table.names.index(h.name): h.process.pid for h in pool.handles if h.process}
    monitor = HeartbeatMonitor(pool.table.counters, pool.table.timeout, others)
    asked, patience, latest = False, Patience(pool), math.inf
    while not pool.finished:
        can_save = saves and all(handle.ready for handle in pool.reporting)
        if signals.poll() > (1 if can_save else 0):
            return _root_cause(pool, failures) if failures else None
        if signals.count and not asked:
            log.info("%s: stopping after this step; again to stop at once", signals.last.name)
            pool.send(Stop())
            asked = True
        if reporter.failure is not None and not asked:
            if not can_save:
                return reporter.failure
            log.info("%s failed: stopping after this step", reporter.failure.who)
            pool.send(Stop())
            asked = True
        if asked and patience.is_over:
            log.error("no step has ended for %g s: the last is lost", pool.table.timeout)
            return reporter.failure
        received = pool.receive(timeout=0.2)
        for handle, message in received:
            handle.ready |= isinstance(message, Ready)
            handle.finished |= isinstance(message, Finished)
            if isinstance(message, Failed):
                failures.append(message)
            elif isinstance(message, Ready | Finished):
                continue
            else:
                with signals.interrupting():
                    answer = reporter.report(message)
                if answer is not None:
                    handle.send(answer)
        if not (asked or failures) or received:
            patience.restart()
        known = {failure.who for failure in failures}
        found = [f for f in _deaths(pool.closed) if f.who not in known]
        found = found or [f for f in _silences(pool, monitor) if f.who not in known]
        failures += found
        if failures and latest == math.inf:
            latest = time.monotonic() + pool.table.timeout + WRITE_SECONDS
        if failures and signals.poll() and not can_save:
            return None  # whatever broke, the user has asked for the end
        if failures and survives and can_save:
            for handle in pool.handles:  # so that those who wait for it see an end
                if handle.process and handle.name in {f.who for f in found}:
                    handle.process.kill()
            is_over = patience.is_over or time.monotonic() > latest
            if _are_working(pool, failures) and not is_over and signals.count < 2:
                continue
        if failures:
            failure = _root_cause(pool, failures)
            _await_writers(pool, failure, signals)
            return failure
    return reporter.failure and replace(reporter.failure, kind="agreed")


def _are_working(pool: WorkerPool, failures: list[Failed]) -> bool:
    """Return whether workers that report have neither failed nor ended."""
    failed = {failure.who for failure in failures}
    working = (h for h in pool.reporting if not (h.finished or h.closed or h.name in failed))
    return any(handle.exit_status is None for handle in working)


class Patience:
    """Measures how long workers have done one and the same thing, and written nothing."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self.restart()

    def restart(self) -> None:
        self._since, self._seen = time.monotonic(), self._pool.table.activities.tolist()

    @property
    def is_over(self) -> bool:
        """Return whether that is longer than the pool's timeout."""
        if self._pool.writing or self._pool.table.activities.tolist() != self._seen:
            self.restart()
        return time.monotonic() - self._since > self._pool.table.timeout


def _await_writers(pool: WorkerPool, failure: Failed, signals: StopSignals) -> None:
    """Let workers finish what they write, until the next request to stop.

    Not one that has died: if it lives, it is stopped, and killed, so that a writer who gathers its
    part sees an end.
    """
    lost = failure.who if failure.kind == "death" else ""
    for handle in pool.handles:
        if handle.process and handle.name == lost:
            handle.process.kill()
    requests, deadline, named = signals.poll(), time.monotonic() + WRITE_SECONDS, ""
    while writers := [name for name in pool.writing if name != lost]:
        if signals.poll() > requests or time.monotonic() > deadline:
            return
        if writers[0] != named:
            named = writers[0]
            log.info("%s: waiting for its file to be written; interrupt to end at once", named)
        time.sleep(WRITE_POLL_SECONDS)


def find_end(pool: WorkerPool, killed: Mapping[str, float]) -> Failed:
    """Find which worker has ended, and how, after its pipe has broken.

    `killed` are the workers that were killed after so many seconds without a sign of life.
    """
    deadline = time.monotonic() + END_SECONDS  # a process ends after its pipes
    while not (failures := _deaths(pool.handles)) and time.monotonic() < deadline:
        time.sleep(WRITE_POLL_SECONDS)
    failures = [_silent(f.who, killed[f.who]) if f.who in killed else f for f in failures]
    unseen = Failed("a worker", "death", "has closed its pipe", "")
    return min(failures, key=lambda f: (f.kind != "death", f.who), default=unseen)


def _deaths(handles: Sequence[WorkerHandle]) -> list[Failed]:
    """Describe each worker that has ended and should not have."""
    failures = []
    for handle in handles:
        status = handle.exit_status
        expected = handle.finished or (status == 0 and not handle.reports)
        if status is not None and not expected:
            # A worker that exits has reported why, or follows another; a killed one cannot.
            kind: Kind = "death" if status < 0 else "consequence"
            failures.append(Failed(handle.name, kind, _describe_exit(status), ""))
    return failures


def _silences(pool: WorkerPool, monitor: HeartbeatMonitor) -> list[Failed]:
    """Describe each worker that is alive and sends no heartbeats."""
    silent = {pool.table.names[index]: seconds for index, seconds in monitor.silent().items()}
    return [
        _silent(handle.name, silent[handle.name])
        for handle in pool.handles
        if handle.name in silent and not handle.finished and handle.exit_status is None
    ]


def _silent(who: str, seconds: float) -> Failed:
    message = f"has given no sign of life for {seconds:.0f} s: was it stopped?"
    return Failed(who, "death", message, "")


def _describe_exit(status: int) -> str:
    if status == ORPHANED:
        return "ended because this program gave no sign of life: it was stopped, or starved"
    if status == UNKNOWN:
        return "ended; how, only the process 'libraries' knew, which has ended before"
    if status >= 0:
        return f"ended with exit status {status}"
    name = signal_name(-status)
    hint = "; the system does that when memory runs out" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"


def _root_cause(pool: WorkerPool, failures: list[Failed]) -> Failed:
    """Choose the failure that the others follow from.

    The first that is seen may be a consequence: a worker that lost its peer, or an exit status
    whose message is still in the pipe. If no failure is a root cause, wait one second for it. Of
    consequences, the end of a worker that reported nothing is nearer to the cause.
    """
    order = ("input", "agreed", "fault", "death", "consequence")
    deadline = time.monotonic() + GRACE_SECONDS
    while not any(f.kind in order[:3] for f in failures) and time.monotonic() < deadline:
        for handle, message in pool.receive(timeout=0.1):
            handle.finished |= isinstance(message, Finished)
            failures += [message] if isinstance(message, Failed) else []
        failures += [f for f in _deaths(pool.closed) if f not in failures]
    reported = {failure.who for failure in failures if failure.traceback}
    return min(failures, key=lambda f: (order.index(f.kind), f.who in reported, f.who))
