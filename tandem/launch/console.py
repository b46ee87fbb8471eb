"""What a person sees of a run: one live view on a terminal, lines elsewhere."""

import logging
import os
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Protocol

from tandem.artifacts.metrics_log import TrainRecord, ValidationRecord
from tandem.processes.heartbeat import HeartbeatTable
from tandem.training.messages import CheckpointWritten, Notice
from tandem.training.run_spec import RunSpec

if TYPE_CHECKING:
    from tandem.launch.live_view import LiveView

log = logging.getLogger(__name__)


class ProgressReporter(Protocol):
    """Told by the launcher how a run goes."""

    @property
    def stderr(self) -> Connection | None:
        """Where the processes of the run are to write; None is the launcher's own stderr."""

    def begin(self, table: HeartbeatTable, processes: Mapping[str, int]) -> None:
        """The processes have been started: their names and numbers, and where they show what they
        are doing."""

    def tell(self, message: object) -> None:
        """A report of trainer 0 has come."""

    def close(self) -> None:
        """The run is over, however it ended."""


class HeartbeatMonitor:
    """A live view of a run, if there is a terminal that can show one. An `ProgressReporter`.

    Parameters
    ----------
    spec : RunSpec
        The run.
    """

    def __init__(self, spec: RunSpec) -> None:
        self.view = _open_view(spec) if spec.config.live_view and can_show() else None

    @property
    def stderr(self) -> Connection | None:
        """See `ProgressReporter`."""
        return None if self.view is None else self.view.stderr

    def begin(self, table: HeartbeatTable, processes: Mapping[str, int]) -> None:
        """See `ProgressReporter`."""
        if self.view is not None:
            self.view.begin(table, processes)

    def tell(self, message: object) -> None:
        """See `ProgressReporter`."""
        if self.view is not None:
            self.view.note(message)

    def close(self) -> None:
        """See `ProgressReporter`."""
        if self.view is not None:
            self.view.close()


class TrainingReporter(HeartbeatMonitor):
    """Tells the user how a training run goes."""

    def tell(self, message: object) -> None:
        """Show a report."""
        super().tell(message)
        if isinstance(message, TrainRecord):
            if self.view is None:
                log.info("%s", describe_training(message))
        elif isinstance(message, ValidationRecord):
            log.info("%s", describe_validation(message))
        elif isinstance(message, CheckpointWritten):
            log.info("wrote %s", message.path)
        elif isinstance(message, Notice):
            log.info("%s", message.text)


class SilentReporter:
    """Tells nobody: trainer 0 reports elsewhere. An `ProgressReporter`."""

    stderr: Connection | None = None

    def begin(self, table: HeartbeatTable, processes: Mapping[str, int]) -> None:
        """Nothing."""

    def tell(self, message: object) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class ValidationReporter(HeartbeatMonitor):
    """Keeps the one result of a validation run."""

    def __init__(self, spec: RunSpec) -> None:
        super().__init__(spec)
        self.records: list[ValidationRecord] = []

    def tell(self, message: object) -> None:
        """Show progress; keep the result."""
        super().tell(message)
        if isinstance(message, ValidationRecord):
            self.records.append(message)


def _open_view(spec: RunSpec) -> "LiveView":
    from tandem.launch.live_view import LiveView

    return LiveView(spec)


def can_show() -> bool:
    """Whether stderr is a terminal that can do more than lines."""
    return sys.stderr.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")


def describe_training(record: TrainRecord) -> str:
    """One line that says how training goes."""
    figures = [f"loss {record.loss:.4f}", f"images/s {record.images_per_second:.1f}"]
    if record.top1_error is not None:
        figures.append(f"error {100 * record.top1_error:.1f}%")
    return (
        f"epoch {record.epoch} step {record.step}: {', '.join(figures)}, "
        f"rate {record.learning_rate:.3g}; seconds: compute {record.compute_seconds:.2f}, "
        f"load {record.load_wait_seconds:.2f}, exchange {record.exchange_seconds:.2f}"
    )


def describe_validation(record: ValidationRecord) -> str:
    """One line that says how good the network is."""
    return (
        f"epoch {record.epoch} validation: loss {record.loss:.4f}, "
        f"top-1 error {100 * record.top1_error:.2f} %, top-5 error {100 * record.top5_error:.2f} % "
        f"of {record.images} images"
    )
