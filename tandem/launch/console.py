"""Progress of a run for the user: one live view on a terminal, lines elsewhere."""

import logging
import math
import os
import sys
from collections.abc import Mapping

from tandem.artifacts.metrics_log import TrainRecord, ValidationRecord, describe_metrics
from tandem.processes.heartbeat import HeartbeatTable
from tandem.processes.supervisor import ProgressReporter
from tandem.training.messages import CheckpointWritten, Notice
from tandem.training.run_spec import RunSpec

log = logging.getLogger(__name__)


class TerminalReporter(ProgressReporter):
    """Shows the live view of a run, if stderr is a terminal that can show one."""

    def __init__(self, spec: RunSpec) -> None:
        self.is_live = spec.config.live_view and can_show()
        self._view = ProgressReporter()
        if self.is_live:
            from tandem.launch.live_view import LiveView

            self._view = LiveView(spec)
        self.stderr = self._view.stderr

    def begin(self, table: HeartbeatTable, pids: Mapping[str, int]) -> None:
        self._view.begin(table, pids)

    def report(self, message: object) -> None:
        self._view.report(message)
        if isinstance(message, Notice):
            log.info("%s", message.text)

    def close(self) -> None:
        self._view.close()


class TrainingReporter(TerminalReporter):
    """Reports a training run to the user."""

    def report(self, message: object) -> None:
        super().report(message)
        if isinstance(message, TrainRecord):
            if not self.is_live:
                log.info("%s", describe_training(message))
        elif isinstance(message, ValidationRecord):
            log.info("%s", describe_validation(message))
        elif isinstance(message, CheckpointWritten):
            log.info("wrote %s", message.path)


class ValidationReporter(TerminalReporter):
    """Keeps the one result of a validation run, `records`."""

    def __init__(self, spec: RunSpec) -> None:
        super().__init__(spec)
        self.records: list[ValidationRecord] = []

    def report(self, message: object) -> None:
        super().report(message)
        if isinstance(message, ValidationRecord):
            self.records.append(message)


def can_show() -> bool:
    """Return whether stderr is a terminal that can do more than lines."""
    return sys.stderr.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")


def describe_training(record: TrainRecord) -> str:
    error = "" if record.top1_error is None else f"top-1 error {100 * record.top1_error:.1f} %, "
    return (
        f"epoch {record.epoch} step {record.step}: loss {record.loss:.4f}, {error}"
        + (f"{describe_metrics(record.metrics)}, " if record.metrics else "")
        + f"{record.images_per_second:.1f} images/s, rate {record.learning_rate:.3g}; "
        f"seconds: compute {record.compute_seconds:.2f}, "
        f"load {record.load_wait_seconds:.2f}, exchange {record.exchange_seconds:.2f}"
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
