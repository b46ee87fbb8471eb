"""What the programs do: settings in, exit status out."""

import logging
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from tandem.artifacts.checkpoint import read_header
from tandem.artifacts.metrics_log import to_json
from tandem.artifacts.run_lock import FolderLock, locked
from tandem.cli import configure_logging, exit_status
from tandem.config.command_line import load_config, load_weights_and_config
from tandem.config.hardware import RankInfo
from tandem.config.schema import Config
from tandem.launch.console import (
    ProgressReporter,
    TrainingReporter,
    ValidationReporter,
    describe_validation,
)
from tandem.launch.local import LoaderTarget, Outcome, launch
from tandem.launch.prepare import prepare_run
from tandem.launch.ranks import Start, is_rank, work_on_ranks
from tandem.training.messages import Diverged
from tandem.training.run_spec import RunSpec

log = logging.getLogger(__name__)

MOST_ROLLBACKS = 10  # from one checkpoint


def run_training(
    arguments: Sequence[str] | None, loader: LoaderTarget, description: str | None
) -> int:
    """Train.

    Parameters
    ----------
    arguments : sequence of str or None
        The command line; None is the process's own.
    loader : callable
        Target of the loader processes, see `launch`.
    description : str or None
        For ``--help``.

    Returns
    -------
    int
        Exit status, see `launch`.
    """

    def work(start: Start) -> int:
        config = load_config(arguments, description)
        with locked(config.weights_path) as lock:
            return _train(config, loader, lock, start)

    return _run(work, loader)


def _run(work: Callable[[Start], int], loader: LoaderTarget) -> int:
    """Do the work of a program, which may be one rank of many; the exit status."""
    if is_rank():
        return work_on_ranks(lambda start: exit_status(partial(work, start)), loader)
    configure_logging()
    return exit_status(partial(work, Here()))


class Here:
    """Starts trainers and loaders on this machine."""

    places: Sequence[RankInfo] = ()

    def launch(
        self,
        spec: RunSpec,
        loader: LoaderTarget,
        reporter: ProgressReporter,
        lock: FolderLock | None = None,
    ) -> Outcome:
        """See `tandem.launch.local.launch`."""
        return launch(spec, loader, reporter, lock)


def _train(config: Config, loader: LoaderTarget, lock: FolderLock, start: Start) -> int:
    """Train, as often as the configuration permits to go on after a fault; the exit status."""
    restarts, skipped = 0, Rollbacks()
    while True:
        spec = prepare_run(config, skipped=skipped.minibatches, ranks=start.places)
        if spec.resumed is not None and read_header(spec.resumed).state.epoch >= config.n_epochs:
            log.info("%s: all %d epochs are done already", spec.resumed, config.n_epochs)
            return 0
        announce(spec)
        outcome = start.launch(spec, loader, TrainingReporter(spec), lock)
        failure = outcome.failure
        if outcome.stopped:
            return outcome.status
        if isinstance(failure, Diverged):
            if config.on_nan != "rollback" or not skipped.note(failure, spec.resumed):
                return outcome.status
            log.warning("going back to the newest checkpoint, to pass over that minibatch")
        elif failure is None or failure.kind == "input" or restarts == config.restarts:
            return outcome.status
        else:
            restarts += 1
            log.warning("starting again: %d of %d restarts", restarts, config.restarts)
        config = config.model_copy(update={"resume_train": True, "load_epoch": "latest"})


class Rollbacks:
    """Which minibatches a run has gone back for. It gives up when that doesn't help."""

    def __init__(self) -> None:
        self.minibatches: tuple[tuple[int, int], ...] = ()
        self._from: Path | None = None
        self._count = 0

    def note(self, failure: Diverged, resumed: Path | None) -> bool:
        """Remember a minibatch; whether it makes sense to go back once more.

        Parameters
        ----------
        failure : Diverged
            Which minibatch it was.
        resumed : Path or None
            Where the run began that met it.
        """
        self._count = self._count + 1 if resumed == self._from else 1
        self._from = resumed
        self.minibatches += ((failure.epoch, failure.minibatch),)
        if self._count <= MOST_ROLLBACKS:
            return True
        log.error(
            "error: going back did not help: %d minibatches after %s were passed over already",
            MOST_ROLLBACKS,
            "the beginning" if resumed is None else resumed.name,
        )
        return False


def run_validation(
    arguments: Sequence[str] | None, loader: LoaderTarget, description: str | None
) -> int:
    """Validate one checkpoint and print its loss and errors. Parameters as in `run_training`."""

    def work(start: Start) -> int:
        weights, config = load_weights_and_config(arguments, description)
        spec = prepare_run(config, "validate", weights, ranks=start.places)
        announce(spec)
        reporter = ValidationReporter(spec)
        status = start.launch(spec, loader, reporter).status
        if status == 0:
            (record,) = reporter.records
            log.info("%s", describe_validation(record))
            sys.stdout.write(to_json(record) + "\n")
        return status

    return _run(work, loader)


def announce(spec: RunSpec) -> None:
    """Say what every ``auto`` has become, and what will be slow."""
    pictures = f"{spec.validation.size} validation pictures"
    if spec.job == "train":
        pictures = f"{spec.train.size} training and {pictures}"
    log.info(
        "%d trainer%s on %s, %d thread%s each; %s of %d classes; crops made by the %s%s",
        spec.trainers,
        "s" * (spec.trainers > 1),
        ", ".join(spec.devices),
        spec.threads,
        "s" * (spec.threads > 1),
        pictures,
        spec.classes,
        "device" if spec.device_crops else "loader",
        "; compiled" if spec.config.compile else "",
    )
    if spec.validation.layout == "c01b":
        log.info(
            "the batch files have the original's layout c01b: whole files are read and transposed, "
            "which is slower%s",
            ", and with shuffle: images one file for each picture"
            if spec.config.shuffle == "images"
            else "",
        )
