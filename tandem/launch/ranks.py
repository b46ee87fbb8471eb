"""Runs whose trainers are ranks, started together by mpirun or torchrun, on one machine or many.

Each rank is a process that trains in its main thread and launches its own part of the run: its
loader is a child process as ever, and a thread supervises both. Rank 0 reads the configuration,
holds the run folder and decides; the others follow.

Whatever starts ranks ends all of them when one fails. So a rank that sees a failure reports it, and
aborts the job. Ranks also send each other heartbeats, for one may be stopped, or whatever started
it may not notice its end.
"""

import atexit
import contextlib
import faulthandler
import functools
import logging
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeVar

from tandem.artifacts.reproducibility import versions
from tandem.artifacts.run_lock import FolderLock
from tandem.cli import configure_logging
from tandem.config.hardware import RankInfo, available_memory
from tandem.distributed.group import PeerLost, RankGroup
from tandem.distributed.ranks import join
from tandem.errors import InputError
from tandem.launch.local import Launcher, start_loader, worker_names
from tandem.processes.child import show_name
from tandem.processes.rank_heartbeat import RankHeartbeat
from tandem.processes.signals import StopSignals
from tandem.processes.supervisor import Outcome, ProgressReporter, supervise
from tandem.processes.worker_pool import WorkerPool
from tandem.processor import describe_processor
from tandem.training import worker
from tandem.training.memory import make_slots
from tandem.training.messages import Activity, Stage
from tandem.training.run_spec import RunSpec

log = logging.getLogger(__name__)

Made = TypeVar("Made")

JOIN_SECONDS = 300.0  # for all ranks of a program
FIRST_TIMEOUT = 60.0  # before the configuration is known
END_SECONDS = 10.0  # for a trainer to end, once all have agreed to
SAVE_SECONDS = 60.0  # for a trainer that has lost another to save the last step
# Head start of rank 0 in reporting, where all ranks fail alike. Bad input is refused when imports
# are done, which takes one rank longer than another.
TURN_SECONDS, INPUT_TURN_SECONDS = 0.5, 3.0


def work_on_ranks(work: Callable[[Launcher], int]) -> int:
    """Do a program's `work` on rank 0, and on the others what it requests.

    The exit status that `work` returns is returned at all ranks.
    """
    configure_logging()
    try:
        with _at_once():
            world = join()
    except InputError as error:
        log.error("error: %s", error)
        return 2
    configure_logging(f"[{world.rank}] ")

    def status_of(launcher: Launcher) -> int:
        try:
            return work(launcher)
        except SystemExit as end:  # after --help
            return end.code if isinstance(end.code, int) else 0

    return _work_together(world, status_of)


@contextlib.contextmanager
def _at_once() -> Iterator[None]:
    """End this process if it does not join in time: MPI may not see that another has ended."""
    faulthandler.dump_traceback_later(JOIN_SECONDS, exit=True, file=sys.__stderr__ or 2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@functools.cache
def _ranks_of_script() -> RankGroup:
    """The ranks of this script, whose job an exception ends: others may wait for this one.

    So does the script's end at some ranks only.
    """
    world, show = join(), sys.excepthook

    def abort(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        show(kind, error, trace)
        world.abort(130 if issubclass(kind, KeyboardInterrupt) else 1)

    sys.excepthook = abort
    atexit.register(_end, world, os.getpid())
    return world


def _end(world: RankGroup, pid: int) -> None:
    if os.getpid() == pid:  # and not a child's end
        with contextlib.suppress(PeerLost):
            _agree(world, goes_on=False)


def _agree(world: RankGroup, goes_on: bool) -> None:
    """Abort the job unless all ranks go on with a run, or all end."""
    all_go_on = world.all_gather_object(goes_on)
    if any(all_go_on) and not all(all_go_on):
        log.error("error: rank %d ends before a run that others begin", all_go_on.index(False))
        world.abort(1)


def work_on_ranks_of_script(work: Callable[[Launcher], Made]) -> Made:
    """Do `work` on rank 0 of a script that all ranks execute; return its result at each.

    Every rank calls this as often as the others, and passes its time as it likes in between.
    Raises InputError at all ranks where `work` does.
    """

    def result_of(launcher: Launcher) -> Made | InputError:
        try:
            return work(launcher)
        except InputError as error:
            return InputError(str(error))

    world = _ranks_of_script()
    _agree(world, goes_on=True)
    result = _work_together(world, result_of)
    if isinstance(result, InputError):
        raise result
    return result


def _work_together(world: RankGroup, work: Callable[[Launcher], Made]) -> Made:
    """Do `work` on rank 0, and on the others the runs that it launches; return its result."""
    multiprocessing.current_process().name = f"trainer {world.rank}"
    show_name(f"trainer {world.rank}")
    here = dict(world.local.all_gather_object((world.rank, os.getpid())))
    launcher = RankLauncher(world, here)
    launcher.heartbeat.start()
    try:
        if world.rank == 0:
            result = work(launcher)
            world.all_gather_object(result)
        else:
            result = launcher.follow()
        world.barrier()
    except BaseException as error:
        if not isinstance(error, KeyboardInterrupt):
            log.exception("rank %d failed", world.rank)
        world.abort(130 if isinstance(error, KeyboardInterrupt) else 1)
    launcher.heartbeat.stop()
    return result


class RankLauncher(Launcher):
    """Executes runs in which every rank is a trainer."""

    def __init__(self, world: RankGroup, pids: Mapping[int, int]) -> None:
        self.world, self._of_beats, self._survives = world, world.split(0), False
        self.heartbeat = RankHeartbeat(self._of_beats, pids, FIRST_TIMEOUT, self._lose)
        leader = world.local.all_gather_object(world.rank)[0]
        software = tuple(f"{name} {version}" for name, version in versions().items())
        self.ranks = world.all_gather_object(
            RankInfo.here(leader, describe_processor(), software, world.starter)
        )

    def launch(
        self, spec: RunSpec, reporter: ProgressReporter, lock: FolderLock | None = None
    ) -> Outcome:
        """Execute a run on all ranks, called on rank 0.

        The user's functions are not sent: each rank has them by its own script.
        """
        spec = replace(spec, own_code=b"")
        self.world.all_gather_object(spec)
        return self._execute(spec, reporter)

    def follow(self) -> Any:
        """Execute the runs that rank 0 launches; return the result that it sends at the end."""
        while True:
            message: Any = self.world.all_gather_object(None)[0]
            if not isinstance(message, RunSpec):
                return message
            # A message may be anybody's, so it brings no code.
            self._execute(replace(message, own_code=b""), ProgressReporter())

    def _lose(self, reason: str, notices: bool) -> None:
        """Abort the job, when this rank has saved what it has to, if its main thread notices."""
        log.error("error: the run has ended: %s", reason)
        if self._survives and (self._of_beats.lose(reason) or notices):
            self.heartbeat.stopped.wait(SAVE_SECONDS)
        self._of_beats.abort(1)

    def _execute(self, spec: RunSpec, reporter: ProgressReporter) -> Outcome:
        """Execute this rank's part of a run; return the outcome for all.

        Does not return when the run fails, unless all ranks have agreed on it.
        """
        rank, timeout = self.world.rank, spec.config.peer_timeout_seconds
        self.heartbeat.expect(timeout)
        self._survives = spec.survives
        reporter.report(Stage(Activity.STARTING))
        group, name, saves = self.world.split(0), f"trainer {rank}", spec.job == "train"
        with StopSignals() as signals, ThreadPoolExecutor(1, "supervisor") as executor:
            pool = WorkerPool(worker_names(spec, rank), timeout, reporter.stderr)
            slots = make_slots(spec, rank)
            loader = start_loader(spec, pool, rank, slots)
            launcher = pool.attach(name, spec.config.weights_path if rank == 0 and saves else None)
            main_is_done = threading.Event()
            supervision = executor.submit(
                self._supervise, pool, reporter, signals, saves, main_is_done
            )
            available = available_memory() / self.world.local.size
            arguments = worker.WorkerArguments(
                rank, group, loader, slots, pool.status(name), available
            )
            with contextlib.suppress(SystemExit):  # reported, with the reason
                worker.serve(spec, arguments, launcher)
            launcher.close()
            main_is_done.set()
            outcome = supervision.result()
        outcomes = self.world.all_gather_object(outcome)
        group.close()  # a run may follow
        return Outcome(
            max(each.status for each in outcomes),
            outcome.failure,
            any(each.stopped for each in outcomes),
        )

    def _supervise(
        self,
        pool: WorkerPool,
        reporter: ProgressReporter,
        signals: StopSignals,
        saves: bool,
        main_is_done: threading.Event,
    ) -> Outcome:
        """Supervise this rank's loader and main thread, then close `reporter` and `pool`.

        Abort all ranks when the run fails and on a request to end at once: the main thread may be
        inside a call that does not return.
        """
        try:
            with contextlib.closing(reporter), pool:
                failure = supervise(pool, reporter, signals, saves)
            outcome = Outcome.of(failure, signals)
            agreed = pool.finished if failure is None else failure.kind == "agreed"
            if self.world.rank == 0 or failure is None:
                outcome.explain()
            elif not agreed:  # where all know why, rank 0 explains
                time.sleep(INPUT_TURN_SECONDS if failure.kind == "input" else TURN_SECONDS)
                outcome.explain()
            # A trainer that has reported its end may still be giving back its memory.
            if not (agreed and main_is_done.wait(END_SECONDS)):
                self.world.abort(outcome.status)
            return outcome
        except BaseException:
            log.exception("rank %d can't be supervised", self.world.rank)
            self.world.abort(1)
