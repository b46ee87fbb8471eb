"""Runs whose trainers are ranks, started together by mpirun or torchrun, on one machine or many.

Each rank is a process that launches its own part of the run: its loader is a child process as ever,
its trainer is a thread, since it is the process that was started which talks to the others. Rank 0
reads the configuration, holds the run folder and decides; the others do as it says.

What starters do when a process fails is simple: all end. So a rank that sees a failure tells it,
and aborts the job. They do so too when a rank is killed; and ranks send each other signs of life,
for one may be stopped, or another starter may not look.
"""

import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from tandem.artifacts.reproducibility import processor, versions
from tandem.artifacts.run_lock import FolderLock
from tandem.cli import configure_logging
from tandem.config.hardware import RankInfo
from tandem.distributed import PeerLost, gloo, mpi
from tandem.distributed.group import RankGroup
from tandem.errors import InputError
from tandem.launch.console import ProgressReporter, SilentReporter
from tandem.launch.local import (
    LoaderTarget,
    Outcome,
    WorkerHandle,
    WorkerPool,
    explain,
    run_pool,
    start_loader,
)
from tandem.processes.heartbeat import HeartbeatMonitor, HeartbeatTable
from tandem.training import trainer
from tandem.training.memory import make_slots
from tandem.training.messages import Diverged, Failed
from tandem.training.run_spec import RunSpec

log = logging.getLogger(__name__)

BEAT_SECONDS = 0.5
FIRST_TIMEOUT = 60.0  # before the configuration is known
END_SECONDS = 10.0  # that a trainer has to end in, once all have agreed on it
TURN_SECONDS = 0.5  # that rank 0 is given to speak first where all ranks fail alike


class Start(Protocol):
    """How a run is started.

    Attributes
    ----------
    places : sequence of RankInfo
        Where each rank is, by rank; none where the run starts its own processes.
    """

    places: Sequence[RankInfo]

    def launch(
        self,
        spec: RunSpec,
        loader: LoaderTarget,
        reporter: ProgressReporter,
        lock: FolderLock | None = None,
    ) -> Outcome:
        """Run a spec; see `tandem.launch.local.launch`."""
        ...


@dataclass(frozen=True)
class End:
    """From rank 0 to all: there is nothing more to do. `status` is the exit status."""

    status: int


def is_rank() -> bool:
    """Whether this process has been started as a rank."""
    return gloo.is_started_by_torchrun() or mpi.is_started_by_mpi()


def join() -> RankGroup:
    """Become a rank among all that were started together, by whatever has started them.

    Raises
    ------
    InputError
        They can't be joined.
    """
    # Slurm's srun may have started torchrun, and then its variables are there too.
    return gloo.join() if gloo.is_started_by_torchrun() else mpi.join()


def work_on_ranks(work: Callable[[Start], int], loader: LoaderTarget) -> int:
    """Be a rank: do a program's work on rank 0, and on the others what it says.

    Parameters
    ----------
    work : callable
        Called on rank 0 with what starts the run; gives the exit status.
    loader : callable
        Target of the loader processes.

    Returns
    -------
    int
        Exit status, the same at all ranks.
    """
    configure_logging()
    try:
        world = join()
    except InputError as error:
        log.error("error: %s", error)
        return 2
    configure_logging(f"[{world.rank}] ")
    _take_name(f"trainer {world.rank}")
    pulse = RankHeartbeat(world.split(0))
    pulse.start()
    ranks = Ranks(world, pulse)
    try:
        status = _lead(ranks, work) if world.rank == 0 else _follow(ranks, loader)
        world.barrier()
    except BaseException as error:
        if not isinstance(error, KeyboardInterrupt):
            log.exception("rank %d failed", world.rank)
        world.abort(130 if isinstance(error, KeyboardInterrupt) else 1)
    pulse.stop()
    return status


def _lead(ranks: "Ranks", work: Callable[[Start], int]) -> int:
    try:
        status = work(ranks)
    except SystemExit as end:  # after --help
        status = end.code if isinstance(end.code, int) else 0
    ranks.world.all_gather_object(End(status))
    return status


def _follow(ranks: "Ranks", loader: LoaderTarget) -> int:
    while True:
        word: Any = ranks.world.all_gather_object(None)[0]
        if isinstance(word, End):
            return word.status
        ranks.take_part(word, loader, SilentReporter())


class Ranks:
    """Starts runs in which every rank is a trainer. A `Start`.

    Parameters
    ----------
    world : RankGroup
        All ranks.
    pulse : RankHeartbeat
        Their signs of life.

    Attributes
    ----------
    places : tuple of RankInfo
        Where each rank is, by rank.
    """

    def __init__(self, world: RankGroup, pulse: "RankHeartbeat") -> None:
        self.world, self._pulse = world, pulse
        leader = world.local.all_gather_object(world.rank)[0]
        software = tuple(f"{name} {version}" for name, version in versions().items())
        self.places: Sequence[RankInfo] = world.all_gather_object(
            RankInfo.here(leader, processor(), software, world.starter)
        )

    def launch(
        self,
        spec: RunSpec,
        loader: LoaderTarget,
        reporter: ProgressReporter,
        lock: FolderLock | None = None,
    ) -> Outcome:
        """On rank 0: have all ranks take part in a run."""
        self.world.all_gather_object(spec)
        return self.take_part(spec, loader, reporter)

    def take_part(self, spec: RunSpec, loader: LoaderTarget, reporter: ProgressReporter) -> Outcome:
        """Run this rank's part of a spec; the outcome for all.

        Does not return when the run fails, unless all ranks have agreed on it.
        """
        rank = self.world.rank
        self._pulse.expect(spec.config.peer_timeout_seconds)
        names = ["launcher"] + [f"loader {rank}"] * spec.config.para_load + [f"trainer {rank}"]
        writes = rank == 0 and spec.job == "train"
        team, threads = self.world.split(0), list[TrainerThread]()
        outcome = run_pool(
            spec,
            names,
            spec.config.weights_path if writes else None,
            partial(_start, spec, loader, team, threads),
            reporter,
            partial(_explain, rank),
        )
        agreed = outcome.failure is None or isinstance(outcome.failure, Diverged)
        if agreed:
            for thread in threads:
                thread.await_end()
        if not agreed or any(thread.goes_on for thread in threads):
            self.world.abort(outcome.status)
        outcomes = self.world.all_gather_object(outcome)
        team.close()  # a run may follow
        return Outcome(
            max(each.status for each in outcomes),
            outcome.failure,
            any(each.stopped for each in outcomes),
        )


def _start(
    spec: RunSpec,
    loader: LoaderTarget,
    team: RankGroup,
    threads: "list[TrainerThread]",
    pool: WorkerPool,
) -> None:
    slots = make_slots(spec, team.rank)
    connection = start_loader(spec, loader, pool, team.rank, slots)
    name = f"trainer {team.rank}"
    arguments = trainer.WorkerArguments(team.rank, team, connection, slots, pool.sign(name))
    here, there = multiprocessing.Pipe(duplex=True)
    thread = TrainerThread(partial(trainer.serve, spec, arguments, there), here)
    thread.start()
    threads.append(thread)
    pool.members.append(WorkerHandle(name, thread, here))


def _explain(rank: int, failure: Failed) -> int:
    """Tell why the run ends. Where all ranks know, one tells."""
    if rank > 0:
        if isinstance(failure, Diverged):
            return 1
        time.sleep(TURN_SECONDS)
    return explain(failure)


class TrainerThread:
    """A trainer in this process, which its launcher watches as if it were another one.

    Parameters
    ----------
    work : callable
        Raises SystemExit to end with another status than 0.
    connection : Connection
        The launcher's to the trainer: it has not ended while there is something to read.
    """

    def __init__(self, work: Callable[[], None], connection: Connection) -> None:
        self._work, self._connection = work, connection
        self._end, self._ended = multiprocessing.Pipe(duplex=False)
        self._status: int | None = None
        self._is_given_up = False
        self._thread = threading.Thread(target=self._run, name="trainer", daemon=True)

    def start(self) -> None:
        """Begin the work."""
        self._thread.start()

    def _run(self) -> None:
        status = 1
        try:
            self._work()
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
        finally:
            self._status = status
            self._ended.close()

    @property
    def pid(self) -> int:
        """See `tandem.launch.local.Worker`."""
        return os.getpid()

    @property
    def sentinel(self) -> int:
        """See `tandem.launch.local.Worker`."""
        return self._end.fileno()

    @property
    def exitcode(self) -> int | None:
        """See `tandem.launch.local.Worker`. The last message comes before the end."""
        status = self._status  # before the look: what is sent until then is seen by it
        return None if self._connection.poll() else status

    @property
    def goes_on(self) -> bool:
        """Whether it works still, given up or not."""
        return self._thread.is_alive()

    def await_end(self) -> None:
        """Wait a moment, though it is given up: it may have said its last word, and be tidying."""
        self._thread.join(END_SECONDS)

    def is_alive(self) -> bool:
        """Whether it works still and has not been given up."""
        return self.goes_on and not self._is_given_up

    def join(self, timeout: float | None = None) -> None:
        """See `tandem.launch.local.Worker`."""
        if not self._is_given_up:
            self._thread.join(timeout)

    def kill(self) -> None:
        """Give it up: a thread ends with its process only."""
        self._is_given_up = True


class RankHeartbeat(threading.Thread):
    """Sends signs of life to other ranks, and ends the job when one of them sends none.

    Rank 0 hears from all and all hear from rank 0.

    Parameters
    ----------
    engine : RankGroup
        The ranks, for this thread alone.
    """

    def __init__(self, engine: RankGroup) -> None:
        super().__init__(name="pulse", daemon=True)
        self._engine = engine
        self._partners = range(1, engine.size) if engine.rank == 0 else range(1)
        self._stopped = threading.Event()
        self.expect(FIRST_TIMEOUT)

    def expect(self, timeout: float) -> None:
        """From now on take a rank for dead that has been silent for so many seconds."""
        names = tuple(f"trainer {rank}" for rank in range(self._engine.size))
        table = HeartbeatTable.create(names, timeout)
        self._looks = table, HeartbeatMonitor(table, self._partners)

    def run(self) -> None:
        """Send and listen until `stop`, or until another rank is silent."""
        while not self._stopped.wait(BEAT_SECONDS):
            table, watch = self._looks
            try:
                for rank in self._partners:
                    self._engine.beat(rank)
                for rank in self._engine.heard():
                    table.counters[rank] += 1
            except PeerLost as error:
                log.error("error: the run has ended: %s", error)
                self._engine.abort(1)
            for rank, seconds in watch.silent().items():
                log.error(
                    "error: the run has ended: %s: has given no sign of life for %.0f s: "
                    "was it stopped?",
                    table.names[rank],
                    seconds,
                )
                self._engine.abort(1)

    def stop(self) -> None:
        """Send and listen no more."""
        self._stopped.set()
        self.join()


def _take_name(name: str) -> None:
    """Show in the list of processes which rank this is."""
    multiprocessing.current_process().name = name
    comm = Path("/proc/self/comm")
    if comm.exists():
        comm.write_text(name.replace(" ", "-"))
