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

from tandem.exchange import meetings
from tandem.files import remove_partials
from tandem.run import trainer
from tandem.run.heartbeat import LAUNCHER, ORPHANED, Board, Heart, Sign, Watch
from tandem.run.lock import FolderLock
from tandem.run.messages import Failed, Finished, Ready, Stop
from tandem.run.observe import Observer
from tandem.run.plan import Plan
from tandem.run.process import Membership, enter, tracker_pid
from tandem.run.site import Site, make_sites

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
class Member:
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
class Crew:
    """All processes of a run.

    Attributes
    ----------
    board : Board
        Their signs of life.
    folder : Path or None
        Where trainer 0 writes.
    stderr : Connection or None
        Where all write what they have to say; None is the launcher's own stderr.
    """

    board: Board
    folder: Path | None
    stderr: Connection | None = None
    members: list[Member] = field(default_factory=list)

    @property
    def trainers(self) -> list[Member]:
        """The trainers, by rank."""
        return [member for member in self.members if member.is_trainer]

    def find(self, name: str) -> Member:
        """The member of that name."""
        return next(member for member in self.members if member.name == name)

    @property
    def pids(self) -> dict[str, int]:
        """The system's numbers of the processes, by name."""
        return {m.name: m.process.pid for m in self.members if m.process.pid is not None}

    def sign(self, name: str) -> Sign:
        """Where the process of that name shows what it is doing."""
        return Sign(self.board, self.board.names.index(name))

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
        membership = Membership(
            self.board,
            self.board.names.index(name),
            self.folder if name == "trainer 0" else None,
            tracker_pid(),
            self.stderr,
        )
        process = context.Process(
            target=enter, args=(membership, target, *arguments, there), name=name, daemon=True
        )
        process.start()
        # A pipe tells of a process's end only when nobody else holds that end of it.
        there.close()
        self.members.append(Member(name, process, here))
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
    plan: Plan, loader: LoaderTarget, observer: Observer, lock: FolderLock | None = None
) -> Outcome:
    """Run a plan in processes of its own.

    Parameters
    ----------
    plan : Plan
        What to do.
    loader : callable
        The target of a loader process, called with a filler, a connection to the trainer, the
        slots, a sign, and a connection to the launcher.
    observer : Observer
        Told of every report of trainer 0.
    lock : FolderLock, optional
        On the run folder; the trainers hold it as well.

    Returns
    -------
    Outcome
        The reason of a failure has been logged.
    """
    names = ["launcher"]
    for rank in range(plan.trainers):
        names += [f"loader {rank}"] * plan.config.para_load + [f"trainer {rank}"]
    folder = plan.config.weights_path if plan.job == "train" else None
    start = partial(_start, plan, loader, lock=lock)
    return run_crew(plan, names, folder, start, observer, explain)


def run_crew(
    plan: Plan,
    names: Sequence[str],
    folder: Path | None,
    start: Callable[["Crew"], None],
    observer: Observer,
    explain: Callable[[Failed], int],
) -> Outcome:
    """Start the processes of a run that are this launcher's, watch them, and end with them.

    Parameters
    ----------
    plan : Plan
        What is done.
    names : sequence of str
        "launcher", and then those of the processes.
    folder : Path or None
        Where one of them writes.
    start : callable
        Starts them.
    observer : Observer
        Told of every report.
    explain : callable
        Tells the user of a failure; gives the exit status.
    """
    board = Board.create(tuple(names), plan.config.peer_timeout_seconds)
    heart = Heart(board, LAUNCHER)
    signals, crew, patience = StopSignals(), Crew(board, folder, observer.stderr), 0.0
    try:
        heart.start()
        with _signals_held():
            start(crew)
        observer.begin(board, crew.pids)
        failure = _supervise(plan, crew, observer, signals)
        if failure is None and all(member.finished for member in crew.trainers):
            patience = END_SECONDS
    finally:
        # Whatever comes, an exception here included, no process stays behind.
        crew.end(patience)
        heart.stop()
        observer.close()
        board.buffer.close()
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


def _start(plan: Plan, loader: LoaderTarget, crew: Crew, lock: FolderLock | None) -> None:
    places = meetings(plan.trainers)
    sites = make_sites(plan)
    for rank, site in enumerate(sites):
        loader_end = start_loader(plan, loader, crew, rank, site)
        name = f"trainer {rank}"
        seat = trainer.Seat(rank, places[rank], loader_end, site, crew.sign(name), lock)
        crew.start(name, trainer.serve, plan, seat)
        if loader_end is not None:
            loader_end.close()
    for place, site in zip(places, sites, strict=True):
        place.close()
        site.release()


def start_loader(
    plan: Plan, loader: LoaderTarget, crew: Crew, rank: int, site: Site
) -> Connection | None:
    """Start the loader of a trainer; the trainer's connection to it, if it is to have one."""
    if not plan.config.para_load:
        return None
    loader_end, trainer_end = multiprocessing.Pipe(duplex=True)
    name = f"loader {rank}"
    crew.start(name, loader, plan.filler(), trainer_end, site.loader_side(), crew.sign(name))
    trainer_end.close()
    return loader_end


def _supervise(plan: Plan, crew: Crew, observer: Observer, signals: StopSignals) -> Failed | None:
    """Pass reports on until all trainers have finished; return the cause when one fails."""
    ready: set[int] = set()
    asked, watch = False, Watch(crew.board, _counting(crew))
    while not all(member.finished for member in crew.trainers):
        # Before the first step there is nothing to save, and validation writes nothing.
        training = plan.job == "train" and len(ready) == len(crew.trainers)
        if signals.count > (1 if training else 0):
            return None
        if signals.count and not asked:
            log.info("%s: stopping after this step; again to stop at once", signals.last.name)
            crew.send(Stop())
            asked = True
        failures = []
        for message in _receive(crew, timeout=0.2):
            if isinstance(message, Failed):
                failures.append(message)
            elif isinstance(message, Ready):
                ready.add(message.rank)
            elif isinstance(message, Finished):
                crew.find(f"trainer {message.rank}").finished = True
            else:
                observer.tell(message)
        failures += _deaths(crew) or _silences(crew, watch)
        if failures and signals.count and not training:
            return None  # whatever broke, the user has asked for the end
        if failures:
            return _cause(crew, failures)
    return None


def _counting(crew: Crew) -> list[int]:
    """The places of those who count by themselves; a thread of this process has no heart."""
    others = [member for member in crew.members if member.process.pid != os.getpid()]
    return [crew.board.names.index(member.name) for member in others]


def _receive(crew: Crew, timeout: float) -> list[Any]:
    """Every message that is there, after waiting at most `timeout` seconds for the first."""
    listening = [member for member in crew.members if not (member.finished or member.silent)]
    sentinels = [m.process.sentinel for m in crew.members if m.process.exitcode is None]
    messages = []
    wait([*(member.connection for member in listening), *sentinels], timeout)
    for member in listening:
        try:
            while member.connection.poll():
                messages.append(member.connection.recv())
        except (EOFError, OSError):
            member.silent = True
    return messages


def _deaths(crew: Crew) -> list[Failed]:
    """A failure for each process that has ended and should not have."""
    failures = []
    for member in crew.members:
        status = member.process.exitcode
        # A loader ends by itself when its trainer needs it no more, or is gone.
        expected = member.finished or (not member.is_trainer and status == 0)
        if status is not None and not expected:
            # Who exits has said why, or ends because another did; who is killed says nothing.
            kind: Literal["death", "consequence"] = "death" if status < 0 else "consequence"
            failures.append(Failed(member.name, kind, _epitaph(status), ""))
    return failures


def _silences(crew: Crew, watch: Watch) -> list[Failed]:
    """A failure for each process that is there, and gives no sign of life."""
    silent = {crew.board.names[place]: seconds for place, seconds in watch.silent().items()}
    return [
        Failed(
            member.name,
            "death",
            f"has given no sign of life for {silent[member.name]:.0f} s: was it stopped?",
            "",
        )
        for member in crew.members
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


def _cause(crew: Crew, failures: list[Failed]) -> Failed:
    """The failure that the others follow from.

    The first that is seen may be a consequence: a trainer that lost its peer, an exit status
    whose message is still in the pipe. So unless one explains itself, a moment is waited. Of
    consequences, the end of a process that could not say anything is nearer to the cause.
    """
    order = ("input", "diverged", "fault", "death", "consequence")
    deadline = time.monotonic() + GRACE_SECONDS
    while not any(f.kind in order[:3] for f in failures) and time.monotonic() < deadline:
        failures += [m for m in _receive(crew, timeout=0.1) if isinstance(m, Failed)]
        failures += [f for f in _deaths(crew) if f not in failures]
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
