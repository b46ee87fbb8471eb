"""Training and validation from checked settings to their outcome, and the frame of programs."""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tandem.artifacts.metrics_log import ValidationRecord
from tandem.artifacts.run_folder import list_checkpoints
from tandem.artifacts.run_lock import FolderLock
from tandem.cli import configure_logging, exit_status
from tandem.config.schema import Config
from tandem.distributed.ranks import is_rank
from tandem.errors import InputError
from tandem.launch.callbacks import CallbackReporter, Callbacks
from tandem.launch.console import TrainingReporter, ValidationReporter
from tandem.launch.keras_models import with_keras_model
from tandem.launch.local import Launcher, LocalLauncher
from tandem.launch.prepare import changed_settings, prepare_run
from tandem.launch.ranks import work_on_ranks
from tandem.launch.status import stage_line
from tandem.launch.validation_report import PAGE, check_reportable, write_report
from tandem.layers.choices import metrics_of
from tandem.processes.messages import Failed
from tandem.processes.supervisor import Outcome, ProgressReporter
from tandem.trace.merge import remove_traces
from tandem.training.messages import Diverged
from tandem.training.run_spec import RunSpec

log = logging.getLogger(__name__)

MOST_ROLLBACKS = 10  # from one checkpoint


def run(work: Callable[[Launcher], int]) -> int:
    """Run a program, possibly as one rank of many; return its exit status."""
    if is_rank():
        return work_on_ranks(lambda launcher: exit_status(partial(work, launcher)))
    configure_logging()
    return exit_status(partial(work, LocalLauncher()))


def execute_training(
    config: Config,
    lock: FolderLock,
    launcher: Launcher,
    callbacks: Callbacks | None = None,
    make_reporter: Callable[[RunSpec], ProgressReporter] = TrainingReporter,
    adapt: Callable[[RunSpec], RunSpec] = lambda spec: spec,
    way_on: str = "--resume_train true",
) -> Outcome:
    """Train, with the callbacks, restarts and rollbacks that the configuration names.

    Parameters
    ----------
    callbacks
        Of a caller that has callbacks of its own, beside those of the configuration.
    make_reporter
        Makes what shows the progress, anew at each start.
    adapt
        Completes a run by what no setting says, at each start, after callbacks have begun.
    way_on
        What continues a run that has failed, for the log.
    """
    callbacks = callbacks or Callbacks()
    config = with_keras_model(config, config.weights_path)
    try:
        outcome = _execute_training(config, lock, launcher, callbacks, make_reporter, adapt)
    except BaseException as error:
        statuses = {InputError: 2, KeyboardInterrupt: 130}
        status = next((statuses[kind] for kind in statuses if isinstance(error, kind)), 1)
        callbacks.end(config, Outcome(status))
        raise
    if outcome.failure is not None and (found := list_checkpoints(config.weights_path)):
        log.error("the newest checkpoint is %s; continue with %s", found[-1], way_on)
    return callbacks.end(config, outcome)


def _execute_training(
    config: Config,
    lock: FolderLock,
    launcher: Launcher,
    callbacks: Callbacks,
    make_reporter: Callable[[RunSpec], ProgressReporter],
    adapt: Callable[[RunSpec], RunSpec],
) -> Outcome:
    restarts, skipped, losses = 0, Rollbacks(), Losses()
    while True:
        begun = begin()
        spec = prepare_run(config, skipped=skipped.minibatches, ranks=launcher.ranks)
        spec = replace(spec, waits=callbacks.are_awaited(config), begun=begun)
        if ended := callbacks.end_missed(spec):
            return ended
        if not spec.is_complete:
            announce(spec)
        if failed := callbacks.begin(spec):
            return failed
        if spec.is_complete:
            log.info("%s: %s", spec.resumed, spec.reason_complete)
            return Outcome(0)
        if spec.config.trace != "off":
            remove_traces(spec.config.weights_path)
        spec = adapt(spec)
        reporter = CallbackReporter(spec, make_reporter(spec), callbacks)
        outcome = launcher.launch(spec, reporter, lock)
        failure = outcome.failure
        if outcome.stopped or callbacks.failure is not None:
            return outcome
        if isinstance(failure, Diverged):
            if config.on_nan != "rollback" or not skipped.note(failure, spec.resumed):
                return outcome
            log.warning("going back to the newest checkpoint, to skip that minibatch")
        elif failure is None or failure.kind == "input":
            return outcome
        elif changes := losses.changes(spec, failure):
            config = config.model_copy(update=changes)
        elif restarts == config.restarts:
            return outcome
        else:
            restarts += 1
            log.warning("starting again: %d of %d restarts", restarts, config.restarts)
        config = config.model_copy(update={"resume_train": True, "load_epoch": "latest"})


class Losses:
    """Decides with which trainers a run goes on when some are lost, by `min_trainers`."""

    def __init__(self) -> None:
        self._in_vain = 0  # starts since the last that made a step

    def changes(self, spec: RunSpec, failure: Failed) -> dict[str, Any]:
        """Return the settings that change for the next start; none: the run does not go on.

        A new trainer takes the place of a lost one. If it is lost too, before a step was saved, the
        run goes on without its device: that may be what is broken.
        """
        config, devices = spec.config, list(spec.devices)
        if config.min_trainers is None or failure.kind not in ("death", "consequence"):
            return {}  # a fault of the program would recur
        newest = next(iter(list_checkpoints(config.weights_path)[::-1]), None)
        self._in_vain = self._in_vain + 1 if newest == spec.resumed else 0
        if self._in_vain > 1:
            rank = failure.who.rpartition(" ")[2]
            del devices[int(rank) if rank.isdecimal() else -1]
        if len(devices) < config.min_trainers:
            return {}
        log.warning("starting again with %d trainers: %s", len(devices), ", ".join(devices))
        changes: dict[str, Any] = {"devices": tuple(devices), "threads": spec.threads}
        if len(devices) < spec.trainers:
            rows, whole = config.group_rows, spec.global_batch
            fits = rows is not None and whole % rows == 0
            changes |= {"global_batch": whole, "norm_rows": rows if fits else "auto"}
            changes["exact"] = config.exact and config.summed_rows is not None
        return changes


class Rollbacks:
    """The minibatches that made a run go back to a checkpoint, up to a limit."""

    def __init__(self) -> None:
        self.minibatches: tuple[tuple[int, int], ...] = ()
        self._from: Path | None = None
        self._count = 0

    def note(self, failure: Diverged, resumed: Path | None) -> bool:
        """Remember the minibatch of a run from `resumed`; return whether to go back once more."""
        self._count = self._count + 1 if resumed == self._from else 1
        self._from = resumed
        self.minibatches += ((failure.epoch, failure.minibatch),)
        if self._count <= MOST_ROLLBACKS:
            return True
        log.error(
            "error: going back did not help: %d minibatches after %s were skipped already",
            MOST_ROLLBACKS,
            "the beginning" if resumed is None else resumed.name,
        )
        return False


def execute_validation(
    weights: Path,
    config: Config,
    launcher: Launcher,
    ten_crops: bool = False,
    report: Path | None = None,
) -> tuple[Outcome, ValidationRecord | None]:
    """Validate a checkpoint, and write the report into a folder; the record is None if it fails."""
    begun = begin()
    spec = prepare_run(config, "validate", weights, ranks=launcher.ranks)
    if ten_crops and spec.train.pictures is None:
        raise InputError("ten_crops: the data are rows of arrays, which have no crops")
    spec = replace(spec, crops=10 if ten_crops else 1, begun=begun)
    if report is not None:
        check_reportable(spec)
        spec = replace(spec, predicts=True)
    for metric in metrics_of(config.metrics):
        if ten_crops and metric.of_outputs:
            raise InputError(
                f"metrics: {metric.name} is of the network's outputs, of which ten crops average "
                "the probabilities; leave it out"
            )
    announce(spec)
    reporter = ValidationReporter(spec)
    outcome = launcher.launch(spec, reporter)
    record = next(iter(reporter.records), None)
    if report is not None and record is not None and reporter.predictions is not None:
        write_report(report, spec, record, reporter.predictions)
        log.info("wrote %s", report / PAGE)
    return outcome, record


def begin() -> float:
    """Say that the data are being checked; return the time, by the clock of `RunSpec.begun`."""
    log.info("%s", stage_line(0.0, "checking data"))
    return time.monotonic()


def announce(spec: RunSpec) -> None:
    """Log where a run continues, the values that ``auto`` stands for, and slow batch files."""
    if spec.resumed is not None and spec.header is not None:
        log.info("continuing from %s", spec.resumed)
        # A converted checkpoint has no settings.
        if spec.header.config and (changes := changed_settings(spec.header.config, spec.config)):
            log.info("settings differ from the checkpoint's: %s", "; ".join(changes))
    stored = spec.validation.pictures
    crops, noun = "", "rows"
    if stored is not None:
        noun = "pictures"
        crops = f"; crops made by the {'device' if spec.device_crops else 'loader'}"
    rows = f"{spec.validation.size} validation {noun}"
    if spec.job == "train":
        rows = f"{spec.train.size} training and {rows}"
    log.info(
        "%d trainer%s on %s, %d thread%s each; %s of %d classes%s%s",
        spec.trainers,
        "s" * (spec.trainers > 1),
        ", ".join(spec.devices),
        spec.threads,
        "s" * (spec.threads > 1),
        rows,
        spec.classes,
        crops,
        "; compiled" if spec.config.compile else "",
    )
    if spec.job == "train" and (idle := sum(own.start == own.stop for own in spec.shares)):
        name = "sum_rows" if spec.config.summed_rows else "norm_rows"
        log.warning(
            "%d of %d trainers get none of the %d rows of a minibatch: %s rows stay together; set"
            " %s lower, or global_batch higher",
            *(idle, spec.trainers, spec.global_batch, getattr(spec.config, name), name),
        )
    if stored is not None and stored.layout == "c01b":
        log.info(
            "the batch files have the original's layout c01b: whole files are read and transposed, "
            "which is slower%s",
            ", and with shuffle: images one file for each picture"
            if spec.config.shuffle == "images"
            else "",
        )
