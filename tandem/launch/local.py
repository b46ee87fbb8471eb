"""Start trainers and loaders, watch them, end with them."""

import contextlib
import logging
import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any, Literal, Protocol

from tandem.artifacts.run_lock import FolderLock
from tandem.distributed import local_groups
from tandem.files import remove_partials
from tandem.launch.console import ProgressReporter
from tandem.memory import HostSlots
from tandem.memory.cuda import CudaSlots
from tandem.processes.child import ChildContext, enter, tracker_pid
from tandem.processes.heartbeat import (
    LAUNCHER,
    ORPHANED,
    HeartbeatMonitor,
    HeartbeatTable,
    HeartbeatThread,
    StatusSlot,
)
from tandem.training import trainer
from tandem.training.memory import make_slots
from tandem.training.messages import Failed, Finished, Ready, Stop
from tandem.training.run_spec import RunSpec

log = logging.getLogger(__name__)

GRACE_SECONDS = 1.0  # to hear of the cause when a consequence of it is seen first
END_SECONDS = 5.0  # for processes to end by themselves before they are killed

REPEAT_SECONDS = 1.0  # within which a second signal is the first once more
KILL_SECONDS = 5.0  # for the system to end a process that was killed

LoaderTarget = Callable[..., None]


class Worker(Protocol):
    """What works for the launcher as a process does; see `multiprocessing.Process`."""

    @property
    def pid(self) -> int | None:
        """The system's number of the process that does it."""
        ...

    @property
    def sentinel(self) -> int:
        """Ready to be read when the work has ended."""
        ...

    @property
    def exitcode(self) -> int | None:
        """None until it has."""
        ...

    def is_alive(self) -> bool:
        """Whether it goes on."""
        ...

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end."""
        ...

    def kill(self) -> None:
        """End it."""
        ...


@dataclass
class WorkerHandle:
    """A process of the run and the launcher's pipe to it."""

    name: str
    process: "BaseProcess | Worker"
    connection: Connection
    finished: bool = False
    silent: bool = False  # it has closed its end of the pipe

    @property
    def is_trainer(self) -> bool:
        """Whether it is a trainer, which says when it has finished, or a loader."""
        return self.name.startswith("trainer")


@dataclass
class WorkerPool:
    """All processes of a run.

    Attributes
    ----------
    table : HeartbeatTable
        Their signs of life.
    folder : Path or None
        Where trainer 0 writes.
    stderr : Connection or None
        Where all write what they have to say; None is the launcher's own stderr.
    """

    table: HeartbeatTable
    folder: Path | None
    stderr: Connection | None = None
    members: list[WorkerHandle] = field(default_factory=list)

    @property
    def trainers(self) -> list[WorkerHandle]:
        """The trainers, by rank."""
        return [member for member in self.members if member.is_trainer]

    def find(self, name: str) -> WorkerHandle:
        """The member of that name."""
        return next(member for member in self.members if member.name == name)

    @property
    def pids(self) -> dict[str, int]:
        """The system's numbers of the processes, by name."""
        return {m.name: m.process.pid for m in self.members if m.process.pid is not None}

    def sign(self, name: str) -> StatusSlot:
        """Where the process of that name shows what it is doing."""
        return StatusSlot(self.table, self.table.names.index(name))

    def start(
        self, name: str, target: Callable[..., None], parcel: object, *arguments: object
    ) -> None:
        """Start a process.

        Parameters
        ----------
        name : str
            As "trainer 0", the one that writes to the folder.
        target : callable
            Called with the parcel, the arguments and a pipe to the launcher.
        parcel : object
            The first argument of `target`, of any size.
        *arguments
            What can travel only while a process is started. They must be small: the launcher writes
            them to a pipe of which it holds both ends, and would wait for ever for a process that
            dies before it has read more than fits in.
        """
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe(duplex=True)
        child = ChildContext(
            self.table,
            self.table.names.index(name),
            self.folder if name == "trainer 0" else None,
            tracker_pid(),
            self.stderr,
        )
        process = context.Process(
            target=enter, args=(child, target, *arguments, there), name=name, daemon=True
        )
        process.start()
        # A pipe tells of a process's end only when nobody else holds that end of it.
        there.close()
        self.members.append(WorkerHandle(name, process, here))
        threading.Thread(target=_send, args=(here, parcel), daemon=True).start()

    def send(self, message: object) -> None:
        """Send a message to every trainer that is still there."""
        for member in self.trainers:
            try:
                member.connection.send(message)
            except OSError:
                log.debug("%s has ended already", member.name)

    def end(self, patience: float) -> None:
        """Return when no process is left.

        Parameters
        ----------
        patience : float
            Seconds in which processes may end by themselves. Then they are killed: what they have
            is in memory without a name, or written whole or not at all.
        """
        self._join(patience)
        for member in self.members:
            if member.process.is_alive():
                member.process.kill()
        self._join(KILL_SECONDS)
        for member in self.members:
            if member.process.is_alive():
                log.error("%s can't be ended: the system holds it", member.name)
        if self.folder is not None:
            with contextlib.suppress(OSError):
                remove_partials(self.folder)

    def _join(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for member in self.members:
            member.process.join(max(0.0, deadline - time.monotonic()))


def _send(connection: Connection, parcel: object) -> None:
    """Send what may be larger than a pipe holds, to a process that may be stopped or die."""
    with contextlib.suppress(OSError):
        connection.send(parcel)


class StopSignals:
    """Count SIGINT and SIGTERM instead of being interrupted by them.

    The first asks the trainers to stop after their step and a checkpoint; the second ends the run
    at once. What comes within a second is the same wish: a wrapper that passes a signal on which
    the group has had already, say.
    """

    def __init__(self) -> None:
        self.count, self.last = 0, signal.SIGINT
        self._latest = -math.inf
        self._handlers = {s: signal.signal(s, self._note) for s in (signal.SIGINT, signal.SIGTERM)}

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        self.count += now - self._latest >= REPEAT_SECONDS
        self._latest = now
        self.last = signal.Signals(number)

    @property
    def exit_status(self) -> int:
        """130 after Ctrl-C, 143 after SIGTERM, as a shell gives it."""
        return 128 + self.last

    def restore(self) -> None:
        """Give the signals back to their former handlers."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes
    ----------
    status : int
        Exit status: 0; 1 after a fault; 2 after bad input; 130 after Ctrl-C, 143 after SIGTERM.
    failure : Failed or None
        Why, where something failed.
    stopped : bool
        Whether it was asked to end.
    """

    status: int
    failure: Failed | None = None
    stopped: bool = False


def launch(
    spec: RunSpec, loader: LoaderTarget, reporter: ProgressReporter, lock: FolderLock | None = None
) -> Outcome:
    """Run a spec in processes of its own.

    Parameters
    ----------
    spec : RunSpec
        What to do.
    loader : callable
        The target of a loader process, called with a filler, a connection to the trainer, the
        slots, a sign, and a connection to the launcher.
    reporter : ProgressReporter
        Told of every report of trainer 0.
    lock : FolderLock, optional
        On the run folder; the trainers hold it as well.

    Returns
    -------
    Outcome
        The reason of a failure has been logged.
    """
    names = ["launcher"]
    for rank in range(spec.trainers):
        names += [f"loader {rank}"] * spec.config.para_load + [f"trainer {rank}"]
    folder = spec.config.weights_path if spec.job == "train" else None
    start = partial(_start, spec, loader, lock=lock)
    return run_pool(spec, names, folder, start, reporter, explain)


def run_pool(
    spec: RunSpec,
    names: Sequence[str],
    folder: Path | None,
    start: Callable[["WorkerPool"], None],
    reporter: ProgressReporter,
    explain: Callable[[Failed], int],
) -> Outcome:
    """Start the processes of a run that are this launcher's, watch them, and end with them.

    Parameters
    ----------
    spec : RunSpec
        What is done.
    names : sequence of str
        "launcher", and then those of the processes.
    folder : Path or None
        Where one of them writes.
    start : callable
        Starts them.
    reporter : ProgressReporter
        Told of every report.
    explain : callable
        Tells the user of a failure; gives the exit status.
    """
    table = HeartbeatTable.create(tuple(names), spec.config.peer_timeout_seconds)
    heart = HeartbeatThread(table, LAUNCHER)
    signals, pool, patience = StopSignals(), WorkerPool(table, folder, reporter.stderr), 0.0
    try:
        heart.start()
        with _signals_held():
            start(pool)
        reporter.begin(table, pool.pids)
        failure = _supervise(spec, pool, reporter, signals)
        if failure is None and all(member.finished for member in pool.trainers):
            patience = END_SECONDS
    finally:
        # Whatever comes, an exception here included, no process stays behind.
        pool.end(patience)
        heart.stop()
        reporter.close()
        table.buffer.close()
        signals.restore()
    if failure is not None:
        return Outcome(explain(failure), failure, stopped=signals.count > 0)
    if signals.count:
        log.info("stopped by %s", signals.last.name)
        return Outcome(signals.exit_status, stopped=True)
    return Outcome(0)


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Hold the signals to stop back; children inherit that, so none reaches one that is new."""
    # It is started with the first child otherwise, and lets SIGINT through again.
    resource_tracker.ensure_running()
    held = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, held)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, held)


def _start(spec: RunSpec, loader: LoaderTarget, pool: WorkerPool, lock: FolderLock | None) -> None:
    groups = local_groups(spec.trainers)
    for rank, group in enumerate(groups):
        slots = make_slots(spec, rank)
        loader_end = start_loader(spec, loader, pool, rank, slots)
        name = f"trainer {rank}"
        arguments = trainer.WorkerArguments(rank, group, loader_end, slots, pool.sign(name), lock)
        pool.start(name, trainer.serve, spec, arguments)
        if loader_end is not None:
            loader_end.close()
    for group in groups:
        group.close()


def start_loader(
    spec: RunSpec, loader: LoaderTarget, pool: WorkerPool, rank: int, slots: HostSlots | CudaSlots
) -> Connection | None:
    """Start the loader of a trainer; the trainer's connection to it, if it is to have one."""
    if not spec.config.para_load:
        return None
    loader_end, trainer_end = multiprocessing.Pipe(duplex=True)
    name = f"loader {rank}"
    pool.start(name, loader, spec.filler(), trainer_end, slots, pool.sign(name))
    trainer_end.close()
    return loader_end


def _supervise(
    spec: RunSpec, pool: WorkerPool, reporter: ProgressReporter, signals: StopSignals
) -> Failed | None:
    """Pass reports on until all trainers have finished; return the cause when one fails."""
    ready: set[int] = set()
    asked, watch = False, HeartbeatMonitor(pool.table, _counting(pool))
    while not all(member.finished for member in pool.trainers):
        # Before the first step there is nothing to save, and validation writes nothing.
        training = spec.job == "train" and len(ready) == len(pool.trainers)
        if signals.count > (1 if training else 0):
            return None
        if signals.count and not asked:
            log.info("%s: stopping after this step; again to stop at once", signals.last.name)
            pool.send(Stop())
            asked = True
        failures = []
        for message in _receive(pool, timeout=0.2):
            if isinstance(message, Failed):
                failures.append(message)
            elif isinstance(message, Ready):
                ready.add(message.rank)
            elif isinstance(message, Finished):
                pool.find(f"trainer {message.rank}").finished = True
            else:
                reporter.tell(message)
        failures += _deaths(pool) or _silences(pool, watch)
        if failures and signals.count and not training:
            return None  # whatever broke, the user has asked for the end
        if failures:
            return _cause(pool, failures)
    return None


def _counting(pool: WorkerPool) -> list[int]:
    """The places of those who count by themselves; a thread of this process has no heart."""
    others = [member for member in pool.members if member.process.pid != os.getpid()]
    return [pool.table.names.index(member.name) for member in others]


def _receive(pool: WorkerPool, timeout: float) -> list[Any]:
    """Every message that is there, after waiting at most `timeout` seconds for the first."""
    listening = [member for member in pool.members if not (member.finished or member.silent)]
    sentinels = [m.process.sentinel for m in pool.members if m.process.exitcode is None]
    messages = []
    wait([*(member.connection for member in listening), *sentinels], timeout)
    for member in listening:
        try:
            while member.connection.poll():
                messages.append(member.connection.recv())
        except (EOFError, OSError):
            member.silent = True
    return messages


def _deaths(pool: WorkerPool) -> list[Failed]:
    """A failure for each process that has ended and should not have."""
    failures = []
    for member in pool.members:
        status = member.process.exitcode
        # A loader ends by itself when its trainer needs it no more, or is gone.
        expected = member.finished or (not member.is_trainer and status == 0)
        if status is not None and not expected:
            # Who exits has said why, or ends because another did; who is killed says nothing.
            kind: Literal["death", "consequence"] = "death" if status < 0 else "consequence"
            failures.append(Failed(member.name, kind, _epitaph(status), ""))
    return failures


def _silences(pool: WorkerPool, watch: HeartbeatMonitor) -> list[Failed]:
    """A failure for each process that is there, and gives no sign of life."""
    silent = {pool.table.names[place]: seconds for place, seconds in watch.silent().items()}
    return [
        Failed(
            member.name,
            "death",
            f"has given no sign of life for {silent[member.name]:.0f} s: was it stopped?",
            "",
        )
        for member in pool.members
        if member.name in silent and not member.finished and member.process.exitcode is None
    ]


def _epitaph(status: int) -> str:
    if status == ORPHANED:
        return "ended because this program gave no sign of life: it was stopped, or starved"
    if status >= 0:
        return f"ended with exit status {status}"
    name = signal.Signals(-status).name
    hint = "; the system does that when memory runs out" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"


def _cause(pool: WorkerPool, failures: list[Failed]) -> Failed:
    """The failure that the others follow from.

    The first that is seen may be a consequence: a trainer that lost its peer, an exit status
    whose message is still in the pipe. So unless one explains itself, a moment is waited. Of
    consequences, the end of a process that could not say anything is nearer to the cause.
    """
    order = ("input", "diverged", "fault", "death", "consequence")
    deadline = time.monotonic() + GRACE_SECONDS
    while not any(f.kind in order[:3] for f in failures) and time.monotonic() < deadline:
        failures += [m for m in _receive(pool, timeout=0.1) if isinstance(m, Failed)]
        failures += [f for f in _deaths(pool) if f not in failures]
    told = {failure.who for failure in failures if failure.traceback}
    return min(failures, key=lambda f: (order.index(f.kind), f.who in told, f.who))


def explain(failure: Failed) -> int:
    """Log why the run ended, in one message; return the exit status."""
    if failure.kind == "input":
        log.error("error: %s", failure.message)
        return 2
    if failure.traceback:
        log.error("%s failed:\n%s", failure.who, failure.traceback.rstrip())
    log.error("error: the run has ended: %s: %s", failure.who, failure.message)
    return 1
