"""The process of a trainer: what it is given, and how it ends.

Importing this module is cheap; PyTensor and PyTorch are imported when a trainer starts to work.
"""

import contextlib
import logging
import math
from dataclasses import dataclass
from multiprocessing.connection import Connection

from tandem.artifacts.run_lock import FolderLock
from tandem.distributed import Group, PeerLost
from tandem.garbage import uncollected
from tandem.memory import HostSlots
from tandem.memory.cuda import CudaSlots
from tandem.processes.heartbeat import StatusSlot
from tandem.processes.messages import Failed, Finished
from tandem.processor import set_openmp
from tandem.training.agreement import LauncherLost
from tandem.training.input_pipeline import LoaderError
from tandem.training.kept_pictures import describe_kept
from tandem.training.messages import Diverged
from tandem.training.not_finite import NotFinite
from tandem.training.run_spec import RunSpec
from tandem.training.tracing import trace_trainer
from tandem.training.trainer import StopAgreed, Trainer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerArguments:
    """The arguments of a trainer when it starts."""

    rank: int
    group: Group  # all trainers
    loader: Connection | None  # None where the trainer loads by itself
    slots: HostSlots | CudaSlots  # for minibatches; its loader has them too
    status: StatusSlot  # shows a `tandem.training.messages.Activity`
    available: float = math.inf  # bytes of this machine's memory that the trainer may take
    lock: FolderLock | None = None  # the run folder stays locked while a trainer is alive


def serve(spec: RunSpec, arguments: WorkerArguments, launcher: Connection) -> None:
    """Work as a trainer, then report `Finished` or `Failed`; exit after a failure."""
    set_openmp(spec.threads)
    try:
        _train(spec, arguments, launcher)
        launcher.send(Finished())
    except (LauncherLost, BrokenPipeError):
        raise SystemExit(1) from None
    except BaseException as error:
        try:
            launcher.send(_failure(f"trainer {arguments.rank}", error))
        except OSError:
            log.exception("trainer %d failed and cannot reach the launcher", arguments.rank)
        raise SystemExit(1) from None


def _train(spec: RunSpec, arguments: WorkerArguments, launcher: Connection) -> None:
    """Do the job of the run until it is done, or all trainers agree to stop or that it failed."""
    with uncollected():
        trainer = Trainer(spec, arguments, launcher)
    if spec.config.trace != "off":
        trace_trainer(trainer)
    try:
        if kept := describe_kept(spec, trainer.memory):
            trainer.reports.notice(kept)
        with contextlib.suppress(StopAgreed):
            trainer.validate_only() if spec.job == "validate" else trainer.train()
        trainer.finish()
    except NotFinite:
        trainer.finish()  # all have agreed, so all give back their memory together
        raise
    except (PeerLost, LoaderError):
        trainer.rescue()
        raise
    finally:
        trainer.close()


def _failure(who: str, error: BaseException) -> Failed:
    if isinstance(error, NotFinite):
        return Diverged(who, "agreed", str(error), "", error.epoch, error.minibatch)
    is_consequence = isinstance(error, PeerLost | LoaderError)
    return Failed.of(who, error, "consequence" if is_consequence else None)
