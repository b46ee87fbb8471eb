"""A trial of a run: a few steps, a short validation, a checkpoint and its resume.

It starts the processes that the run would start, with its settings, in a folder that is removed at
the end, and reports how long an epoch takes and how much memory and disk the run needs.
"""

import contextlib
import logging
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tandem.artifacts.checkpoint import Checkpoint, read_checkpoint, read_header
from tandem.artifacts.metrics_log import TrainRecord, ValidationRecord
from tandem.artifacts.run_folder import find_checkpoint, list_checkpoints
from tandem.config.hardware import gpu_memory
from tandem.config.schema import Config
from tandem.data.order import minibatch_count
from tandem.distributed import RULES
from tandem.errors import InputError, explained
from tandem.files import existing_folder, free_bytes
from tandem.launch.keras_models import with_keras_model
from tandem.launch.local import Launcher
from tandem.launch.prepare import prepare_run
from tandem.launch.programs import announce, begin
from tandem.launch.status import Status
from tandem.processes.heartbeat import HeartbeatTable
from tandem.processes.signals import exits_at
from tandem.processes.supervisor import ProgressReporter
from tandem.training.messages import Notice, Progress, Stage
from tandem.training.run_spec import RunSpec
from tandem.validation import shown_size

log = logging.getLogger(__name__)

STEPS = 5  # of each of two epochs, and of each validation
_EPOCHS = 2  # the first compiles and fills caches, the second is measured
_OTHER_BITS = (
    "works; the same bits take rule: bsp, no error_feedback, and on GPUs deterministic: true"
)


def run_trial(config: Config, launcher: Launcher) -> int:
    """Try a run, and print what it needs; return the exit status.

    Nothing is written to its folder. Raises InputError, as for the run itself, if something cannot
    be used, or if there is too little space for its checkpoints.
    """
    # Between its two runs, which are stopped by signals in good order, nothing else notices one.
    stops = exits_at(signal.SIGTERM, signal.SIGHUP)
    with stops, tempfile.TemporaryDirectory() as folder:
        return _run_trial(with_keras_model(config, Path(folder)), launcher)


def _run_trial(config: Config, launcher: Launcher) -> int:
    began = begin()
    spec = replace(prepare_run(config, ranks=launcher.ranks), begun=began)
    if spec.is_complete:
        log.info("%s: %s", spec.resumed, spec.reason_complete)
        return 0
    announce(spec)
    first, again = TrialReporter(spec), TrialReporter(spec)
    with _folder_beside(spec.config.weights_path) as folder:
        trial = _trial_of(spec, folder)
        log.info("trial: %d epochs of %d steps", _EPOCHS, trial.steps("train"))
        if status := _run_first(trial, launcher, first):
            return status
        newest = list_checkpoints(folder)[-1]
        nbytes, whole = newest.stat().st_size, read_checkpoint(newest)
        newest.unlink()
        log.info("trial: the last of these epochs again, from the checkpoint before it")
        if status := launcher.launch(_resumed(trial), again).status:
            return status
        differing = _differing(whole, read_checkpoint(newest))
    if differing and is_exact(spec):
        _tell_other_bits(differing, first, again)
        return 1
    disk = Disk.of(spec, nbytes, first.hours(spec))
    _print_table(
        {
            "trial": f"all worked, in {shown_time((time.monotonic() - began) / 3600)}",
            "resume": _OTHER_BITS if differing else "the same bits as without an interruption",
            **_times(spec, first),
            **_memory(first, again),
            "checkpoints": disk.describe(spec),
            "batch files": f"{shown_size(data_bytes(spec))} in {spec.config.data_folder}",
        }
    )
    disk.check(spec)
    return 0


class TrialReporter(ProgressReporter):
    """Keeps the reports of a trial, and the most memory that its processes and GPUs had in use."""

    def __init__(self, spec: RunSpec) -> None:
        self.train: list[TrainRecord] = []
        self.validation: list[ValidationRecord] = []
        self.memory: dict[str, int] = {}  # bytes, by the name of a process
        self.gpu_memory: dict[str, int] = {}  # bytes of this run, by device
        self._pids: Mapping[str, int] = {}
        self._status = Status(spec)
        self._devices = [d for d in dict.fromkeys(spec.devices) if d != "cpu"]
        self._used_before = self._gpus()
        self._waits = min(STEPS, spec.steps("train")) - 1 if spec.config.para_load else math.inf
        self._checks = 0  # steps of the last validation
        self._first_check = time.monotonic()  # when the first of them was done
        self._checking = 0.0  # seconds from then to its result

    def begin(self, table: HeartbeatTable, pids: Mapping[str, int]) -> None:
        self._pids = pids

    def report(self, message: object) -> None:
        if isinstance(message, Progress) and message.mode == "validation":
            self._checks = message.step
            if message.step == 1:
                self._first_check = time.monotonic()
        elif isinstance(message, TrainRecord):
            self.train.append(message)
        elif isinstance(message, ValidationRecord):
            self.validation.append(message)
            # A GPU may have all of the work before it still when the last step is reported.
            self._checking = time.monotonic() - self._first_check
        elif isinstance(message, Notice):
            log.info("%s", message.text)
        elif isinstance(message, Stage):
            self._status.update(message)
            log.info("%s", self._status.starting)
        for name, pid in self._pids.items():
            self.memory[name] = max(self.memory.get(name, 0), peak_memory(pid))
        for device, used in self._gpus().items():
            grown = used - self._used_before.get(device, 0)
            self.gpu_memory[device] = max(self.gpu_memory.get(device, 0), grown)

    @property
    def is_finite(self) -> bool:
        """Return whether each epoch had a step whose loss was finite."""
        return len(self.train) == _EPOCHS and all(math.isfinite(r.loss) for r in self.train)

    @property
    def images_per_second(self) -> float:
        """The images per second of all trainers together, in the steps after the first epoch's.

        Loaders load one minibatch ahead: the first of these during the validation before. What a
        trainer would have waited for it is taken to be what it waited for each other.
        """
        if not self.train or not (speed := self.train[-1].images_per_second):
            return math.nan
        last = self.train[-1]
        seconds = last.compute_seconds + last.load_wait_seconds + last.exchange_seconds
        ahead = last.load_wait_seconds / max(self._waits, 1)
        return speed * seconds / (seconds + ahead)

    def hours(self, spec: RunSpec) -> tuple[float, float]:
        """Estimate the hours of an epoch's training, and of its validation."""
        train = spec.train.size / self.images_per_second
        step = spec.global_batch / self.images_per_second  # where a validation has one step
        if self._checks > 1:
            step = self._checking / (self._checks - 1)
        validation = step * minibatch_count(spec.validation.size, spec.global_batch)
        return train / 3600, validation / 3600

    def _gpus(self) -> dict[str, int]:
        found = {device: gpu_memory(int(device[5:])) for device in self._devices}
        return {device: memory[0] for device, memory in found.items() if memory is not None}


def peak_memory(pid: int) -> int:
    """Return the most bytes that a process had in memory, shared ones too; 0 if unknown."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


@dataclass(frozen=True)
class Disk:
    """The seconds and bytes that the checkpoints of a run need."""

    each: int  # bytes
    count: int  # the most at a time
    present: int  # bytes of those that the run will replace
    free: int  # bytes

    @classmethod
    def of(cls, spec: RunSpec, nbytes: int, hours: tuple[float, float]) -> "Disk":
        """Measure the space of a run's folder, for checkpoints of `nbytes`."""
        config, folder = spec.config, spec.config.weights_path
        present = sum(path.stat().st_size for path in list_checkpoints(folder))
        count = 2 if config.keep_snapshots == "all" else config.keep_snapshots + 2
        if config.keep_snapshots == "all":
            count += math.ceil(epochs_left(spec) / config.snapshot_freq)
            present = 0
            if config.snapshot_minutes and math.isfinite(sum(hours)):
                count += int(epochs_left(spec) * sum(hours) * 60 / config.snapshot_minutes)
        return cls(nbytes, count, present, free_bytes(folder))

    @property
    def needed(self) -> int:
        """Bytes beyond those of present checkpoints."""
        return max(0, self.each * self.count - self.present)

    def describe(self, spec: RunSpec) -> str:
        kept = "all"
        if spec.config.keep_snapshots != "all":
            kept = f"the last {spec.config.keep_snapshots}, the best and one being written"
        return (
            f"{shown_size(self.each)} each, {shown_size(self.each * self.count)} for {kept}; "
            f"{shown_size(self.free)} free"
        )

    def check(self, spec: RunSpec) -> None:
        """Raise InputError if there is too little space."""
        if self.needed > self.free:
            raise InputError(
                f"weights_dir {spec.config.weights_dir}: found {shown_size(self.free)} of free "
                f"space, expected {shown_size(self.needed)} for {self.count} checkpoints of "
                f"{shown_size(self.each)} (keep_snapshots: {spec.config.keep_snapshots})"
            )


def is_exact(spec: RunSpec) -> bool:
    """Return whether a resumed run computes the same bits."""
    in_step = RULES[spec.config.rule].is_synchronous and not dict(spec.config)["error_feedback"]
    return in_step and (spec.config.deterministic or not spec.on_gpu)


def epochs_left(spec: RunSpec) -> int:
    done = 0 if spec.resumed is None or spec.header is None else spec.header.state.epoch
    return spec.config.n_epochs - done


def data_bytes(spec: RunSpec) -> int:
    """Bytes of all batch files."""
    return sum(Path(path).stat().st_size for path in (*spec.train.paths, *spec.validation.paths))


def _trial_of(spec: RunSpec, folder: Path) -> RunSpec:
    """The same run, from its initial weights, in a folder of its own, with a few steps."""
    trial = replace(spec, resumed=None, weights=spec.resumed or spec.weights, most_steps=STEPS)
    changes: dict[str, Any] = {
        "weights_dir": str(folder),
        "n_epochs": _EPOCHS,
        "stop_patience": 0,
        "stop_at": None,
        "resume_train": False,
        "snapshot_freq": 1,
        "snapshot_minutes": 0.0,
        "keep_snapshots": "all",
        "print_freq": trial.steps("train"),
        "trace": "off",
        "csv_file": None,
        "tensorboard_dir": None,
    }
    if spec.resumed is not None:
        changes["init_weights_skip"] = ()
    return replace(trial, config=spec.config.model_copy(update=changes))


def _run_first(trial: RunSpec, launcher: Launcher, reporter: TrialReporter) -> int:
    """Run the trial from its beginning; return its exit status, not 0 without a finite loss."""
    if status := launcher.launch(trial, reporter).status:
        return status
    if not reporter.is_finite:
        log.error(
            "error: found no finite loss in an epoch of the trial, expected one; "
            "on_nan: %s left out its %d steps",
            trial.config.on_nan,
            trial.steps("train"),
        )
        return 1
    if not launcher.ranks:  # otherwise it is a trainer as well
        reporter.memory["launcher"] = peak_memory(os.getpid())  # before it reads a checkpoint
    return 0


def _resumed(trial: RunSpec) -> RunSpec:
    """The trial again, from its newest checkpoint."""
    path = find_checkpoint(trial.config.weights_path, "latest")
    if path is None:
        raise RuntimeError("the trial has left no checkpoint")
    config = trial.config.model_copy(update={"resume_train": True})
    return replace(trial, config=config, resumed=path, weights=None, header=read_header(path))


def _differing(ours: Checkpoint, theirs: Checkpoint) -> list[str]:
    """Names of the arrays that differ in a bit."""
    groups = {"": (ours.weights, theirs.weights)}
    groups |= {f"{name}/": (ours.states[name], theirs.states[name]) for name in ours.states}
    return [
        f"{prefix}{name}"
        for prefix, (mine, others) in groups.items()
        for name in mine
        if mine[name].tobytes() != others[name].tobytes()
    ]


def _tell_other_bits(differing: Sequence[str], first: TrialReporter, again: TrialReporter) -> None:
    log.error(
        "error: resume: found other bits than without an interruption, expected the same: %s "
        "and %d other arrays of the checkpoint differ; validation loss %r, without %r",
        differing[0],
        len(differing) - 1,
        again.validation[-1].loss,
        first.validation[-1].loss,
    )


def _times(spec: RunSpec, reporter: TrialReporter) -> dict[str, str]:
    train, validation = reporter.hours(spec)
    left = epochs_left(spec)
    whole = shown_time(left * (train + validation))
    return {
        "speed": f"{reporter.images_per_second:,.1f} images per second, of all trainers",
        "an epoch": f"{shown_time(train)} of training, {shown_time(validation)} of validation",
        "the run": f"{whole} for {left} epochs",
    }


def _memory(*reporters: TrialReporter) -> dict[str, str]:
    """The most memory of each process and GPU."""
    lines = {}
    for name in reporters[0].memory:
        most = max(reporter.memory.get(name, 0) for reporter in reporters)
        lines[name] = f"{shown_size(most)} of memory, shared included" if most else "unknown"
    for device in reporters[0].gpu_memory:
        used = max(reporter.gpu_memory.get(device, 0) for reporter in reporters)
        _, whole = gpu_memory(int(device[5:])) or (0, 0)
        lines[device] = f"{shown_size(used)} of its {shown_size(whole)}"
    return lines


def _print_table(lines: Mapping[str, str]) -> None:
    width = max(map(len, lines)) + 2
    sys.stdout.write("".join(f"{name:{width}}{text}\n" for name, text in lines.items()))


def shown_time(hours: float) -> str:
    """A duration in days, hours, minutes or seconds."""
    units = {"days": 1 / 24, "hours": 1, "minutes": 60, "seconds": 3600}
    found = (f"{hours * n:,.1f} {unit}" for unit, n in units.items() if hours * n >= 2)
    return next(found, f"{hours * 3600:.1f} seconds")


@contextlib.contextmanager
def _folder_beside(folder: Path) -> Iterator[Path]:
    """A temporary folder on the file system of a run's folder, which may not exist yet.

    It lies beside the run's folder or, where that is on another file system or nothing can be
    written beside it, inside.
    """
    existing = existing_folder(folder)
    beside = existing if existing != folder.absolute() else existing.parent
    same = beside.stat().st_dev == existing.stat().st_dev
    parent = beside if same and os.access(beside, os.W_OK | os.X_OK) else existing
    with explained(f"weights_dir {folder}", f"{parent} cannot be written"):
        temporary = tempfile.TemporaryDirectory(prefix=".trial-", dir=parent)
    with temporary as name:
        yield Path(name)
