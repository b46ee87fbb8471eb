"""The progress of a run from its reports, and estimates of what is left and what it takes."""

import contextlib
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from tandem.artifacts.metrics_log import TrainRecord, ValidationRecord
from tandem.training.messages import (
    STAGES,
    CheckpointBegun,
    CheckpointWritten,
    Progress,
    Stage,
)
from tandem.training.run_spec import RunSpec
from tandem.validation import shown_size

MEASURED = 9  # steps after the first, whose mean is the first estimate


class Pace:
    """Mean seconds per step: of up to a hundred steps, then exponentially weighted."""

    def __init__(self) -> None:
        self.seconds: float | None = None
        self.count = 0

    def add(self, seconds: float) -> None:
        self.count += 1
        before = seconds if self.seconds is None else self.seconds
        self.seconds = before + max(1 / self.count, 0.01) * (seconds - before)


class Status:
    """The latest reports of a run, and estimates from them."""

    def __init__(self, spec: RunSpec, clock: Callable[[], float] = time.monotonic) -> None:
        self.spec = spec
        self.progress: Progress | None = None
        self.train: TrainRecord | None = None
        self.validation: ValidationRecord | None = None
        self.saving = False
        self.stage = ""  # what is done before the first step
        self._clock, self._since = clock, clock()
        self._begun = spec.begun or self._since
        self._paces = {"train": Pace(), "validation": Pace()}

    def update(self, message: object) -> None:
        """Add a report of trainer 0."""
        if isinstance(message, Stage):
            self.stage = STAGES[message.activity]
        elif isinstance(message, Progress):
            now, old = self._clock(), self.progress
            # The very first step compiles; between the parts of an epoch lies other work.
            if old is not None and replace(old, step=old.step + 1) == message:
                self._paces[message.mode].add(now - self._since)
            self._since, self.progress = now, message
        elif isinstance(message, TrainRecord):
            self.train = message
        elif isinstance(message, ValidationRecord):
            self.validation = message
        elif isinstance(message, CheckpointBegun | CheckpointWritten):
            self.saving = isinstance(message, CheckpointBegun)

    @property
    def starting(self) -> str:
        """Say what is done before the first step, and how long after the run was begun."""
        return stage_line(self._clock() - self._begun, self.stage)

    @property
    def pace(self) -> Pace:
        """Return the pace of the steps that the run is about."""
        return self._paces["train" if self.spec.job == "train" else "validation"]

    def estimate(self, pids: Iterable[int]) -> str:
        """Say how much memory processes of this machine take, and how long an epoch and the run."""
        parts = []
        if nbytes := total_memory(pids := [*pids]):
            where = "host memory" if self.spec.on_gpu else "memory"
            processes = f"{len(pids)} process{'es' * (len(pids) > 1)}"
            parts.append(f"{shown_size(nbytes)} of {where} in {processes} here")
        if self.spec.job == "train" and self.pace.seconds is not None:
            epoch = self.pace.seconds * self.spec.steps("train")
            parts.append(f"{duration(epoch)} for the training of an epoch")
        if self.seconds_left is not None:
            parts.append(f"{duration(self.seconds_left)} left")
        return f"about {', '.join(parts)}"

    @property
    def done(self) -> float:
        """Fraction of the run that is done."""
        now = self.progress
        if now is None:
            return 0.0
        if self.spec.job == "validate":
            return now.step / now.steps
        within = now.step / now.steps if now.mode == "train" else 1.0
        return (now.epoch - 1 + within) / self.spec.config.n_epochs

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds until the end of the run; None where unknown."""
        now, spec = self.progress, self.spec
        train, validation = (self._paces[mode].seconds for mode in ("train", "validation"))
        if now is None:
            return None
        left = now.steps - now.step
        if spec.job == "validate":
            return None if validation is None else validation * left
        if train is None:
            return None
        to_train = spec.steps("train")
        to_validate = spec.steps("validation")
        epochs = spec.config.n_epochs - now.epoch
        steps, checks = epochs * to_train, epochs * to_validate
        if now.mode == "train":
            steps, checks = steps + left, checks + to_validate
        else:
            checks += left
        return steps * train + checks * (train if validation is None else validation)


def duration(seconds: float) -> str:
    """Format a duration, as 5:07, 3:12:45 or 2 d 03:12:45."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour:02}:{minute:02}:{second:02}"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


def stage_line(seconds: float, stage: str) -> str:
    """Say what is begun so many seconds after the command."""
    return f"{seconds:5.1f} s: {stage}"


def total_memory(pids: Iterable[int]) -> int:
    """Return the bytes that processes have in memory, what they share counted once; 0: unknown."""
    total = 0
    for pid in set(pids):
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
            total += sum(1024 * int(size) for size in re.findall(r"^Pss:\s+(\d+) kB", text, re.M))
    return total
