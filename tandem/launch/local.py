"""Start trainers and loaders on this machine, supervise them, end with them."""

import contextlib
import multiprocessing
from abc import ABC, abstractmethod
from collections.abc import Sequence
from multiprocessing.connection import Connection

from tandem.artifacts.run_lock import FolderLock
from tandem.config.hardware import RankInfo, available_memory
from tandem.distributed import local_groups
from tandem.memory import HostSlots
from tandem.memory.cuda import CudaSlots
from tandem.processes.fork_server import pays
from tandem.processes.signals import StopSignals
from tandem.processes.supervisor import Outcome, ProgressReporter, supervise
from tandem.processes.worker_pool import WorkerPool
from tandem.training import loader, worker
from tandem.training.memory import make_slots
from tandem.training.messages import Activity, Stage
from tandem.training.run_spec import RunSpec
from tandem.training.tracing import traced_builder


class Launcher(ABC):
    """Starts the processes of a run."""

    ranks: Sequence[RankInfo] = ()  # empty where the launcher starts all trainers itself

    @abstractmethod
    def launch(
        self, spec: RunSpec, reporter: ProgressReporter, lock: FolderLock | None = None
    ) -> Outcome:
        """Execute a run, and log why it failed if it does.

        The `reporter` receives the reports of trainer 0 and is closed at the end. The trainers hold
        the `lock` on the run folder as well.
        """


class LocalLauncher(Launcher):
    """Starts a process for each trainer and loader, all on this machine."""

    def launch(
        self, spec: RunSpec, reporter: ProgressReporter, lock: FolderLock | None = None
    ) -> Outcome:
        names = [name for rank in range(spec.trainers) for name in worker_names(spec, rank)]
        timeout = spec.config.peer_timeout_seconds
        with (
            StopSignals() as signals,
            contextlib.closing(reporter),
            WorkerPool(names, timeout, reporter.stderr) as pool,
        ):
            reporter.report(Stage(Activity.STARTING))
            _start(spec, pool, lock)
            failure = supervise(pool, reporter, signals, spec.job == "train", spec.survives)
            outcome = Outcome.of(failure, signals)
        outcome.explain()
        return outcome


def worker_names(spec: RunSpec, rank: int) -> list[str]:
    """Name the processes of one rank: its loader, if it has one, and its trainer."""
    return [f"loader {rank}"] * spec.config.para_load + [f"trainer {rank}"]


def _start(spec: RunSpec, pool: WorkerPool, lock: FolderLock | None) -> None:
    groups, available = local_groups(spec.trainers), available_memory() / spec.trainers
    are_copies = not spec.on_gpu and pays(spec.trainers)
    for rank, group in enumerate(groups):
        slots = make_slots(spec, rank)
        connection = start_loader(spec, pool, rank, slots)
        name = f"trainer {rank}"
        status = pool.status(name)
        arguments = worker.WorkerArguments(rank, group, connection, slots, status, available, lock)
        writes = rank == 0 and spec.job == "train"
        folder = spec.config.weights_path if writes else None
        pool.start(name, worker.serve, spec, arguments, folder=folder, is_copy=are_copies)
        if connection is not None:
            connection.close()
    for group in groups:
        group.close()


def start_loader(
    spec: RunSpec, pool: WorkerPool, rank: int, slots: HostSlots | CudaSlots
) -> Connection | None:
    """Start the loader of a trainer; return the trainer's connection to it, if it gets one."""
    if not spec.config.para_load:
        return None
    loader_end, trainer_end = multiprocessing.Pipe(duplex=True)
    name = f"loader {rank}"
    builder = spec.minibatch_builder()
    fills = builder if spec.config.trace == "off" else traced_builder(builder, spec, rank)
    arguments = (fills, trainer_end, slots, pool.status(name))
    pool.start(name, loader.serve, *arguments, reports=False)
    trainer_end.close()
    return loader_end
