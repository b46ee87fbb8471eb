"""Progress of a run for the user: one live view on a terminal, lines elsewhere."""

import logging
import math
import os
import sys
from collections.abc import Mapping

from tandem.artifacts.metrics_log import TrainRecord, ValidationRecord, describe_metrics
from tandem.launch.status import MEASURED, Status, duration
from tandem.processes.heartbeat import HeartbeatTable
from tandem.processes.supervisor import ProgressReporter
from tandem.training.messages import CheckpointWritten, Notice, Stage
from tandem.training.predictions import Predictions
from tandem.training.run_spec import RunSpec

log = logging.getLogger(__name__)


class TerminalReporter(ProgressReporter):
    """Shows the live view of a run, if stderr is a terminal that can show one; or else lines."""

    def __init__(self, spec: RunSpec) -> None:
        self.is_live = spec.config.live_view and can_show()
        self.status = Status(spec)
        self._pids: Mapping[str, int] = {}
        self._view = ProgressReporter()
        if self.is_live:
            from tandem.launch.live_view import LiveView

            self._view = LiveView(self.status)
        self.stderr = self._view.stderr

    def begin(self, table: HeartbeatTable, pids: Mapping[str, int]) -> None:
        self._pids = pids
        self._view.begin(table, pids)

    def report(self, message: object) -> None:
        measured = self.status.pace.count
        self.status.update(message)
        if isinstance(message, Notice):
            log.info("%s", message.text)
        elif isinstance(message, Stage) and self.status.progress is None and not self.is_live:
            log.info("%s", self.status.starting)
        elif measured < self.status.pace.count == MEASURED:
            log.info("%s", self.status.estimate(self._pids.values()))

    def close(self) -> None:
        self._view.close()


class TrainingReporter(TerminalReporter):
    """Reports a training run to the user."""

    def report(self, message: object) -> None:
        super().report(message)
        if isinstance(message, TrainRecord):
            if not self.is_live:
                log.info("%s", describe_training(message, self.status.seconds_left))
        elif isinstance(message, ValidationRecord):
            log.info("%s", describe_validation(message))
        elif isinstance(message, CheckpointWritten):
            log.info("wrote %s", message.path)


class ValidationReporter(TerminalReporter):
    """Keeps the one result of a validation run, `records`, and its predictions."""

    def __init__(self, spec: RunSpec) -> None:
        super().__init__(spec)
        self.records: list[ValidationRecord] = []
        self.predictions: Predictions | None = None

    def report(self, message: object) -> None:
        super().report(message)
        if isinstance(message, ValidationRecord):
            self.records.append(message)
        elif isinstance(message, Predictions):
            self.predictions = message


def can_show() -> bool:
    """Return whether stderr is a terminal that can do more than lines."""
    return sys.stderr.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")


def describe_training(record: TrainRecord, seconds_left: float | None = None) -> str:
    """Say what a record has, in one line, and how long the run still takes."""
    error = "" if record.top1_error is None else f"top-1 error {100 * record.top1_error:.1f} %, "
    return (
        f"epoch {record.epoch} step {record.step}: loss {record.loss:.4f}, {error}"
        + (f"{describe_metrics(record.metrics)}, " if record.metrics else "")
        + f"{record.images_per_second:.1f} images/s, rate {record.learning_rate:.3g}; "
        f"seconds: compute {record.compute_seconds:.2f}, "
        f"load {record.load_wait_seconds:.2f}, exchange {record.exchange_seconds:.2f}"
        + ("" if seconds_left is None else f"; {duration(seconds_left)} left")
    )


def describe_validation(record: ValidationRecord) -> str:
    if not record.images:
        return f"epoch {record.epoch} done; there are no validation pictures"
    both = {"top-1": record.top1_error, "top-5": record.top5_error}
    errors = [f"{name} error {100 * e:.2f} %" for name, e in both.items() if not math.isnan(e)]
    return (
        f"epoch {record.epoch} validation: "
        f"{', '.join([f'loss {record.loss:.4f}', *errors])} of {record.images} images"
        + (f"; {describe_metrics(record.metrics)}" if record.metrics else "")
        + (f", averaged over {record.crops} crops of each" if record.crops > 1 else "")
    )
