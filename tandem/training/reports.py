"""A trainer's reports: to the launcher and, from trainer 0, to the run folder."""

import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from tandem.artifacts.checkpoint import Checkpoint, RunState
from tandem.artifacts.metrics_log import Record, ValidationRecord
from tandem.artifacts.run_folder import RunFolder, rescue
from tandem.data.augment import Mode
from tandem.training.messages import (
    Activity,
    CheckpointBegun,
    CheckpointWritten,
    EpochEnded,
    Notice,
    Progress,
    Stage,
)
from tandem.training.predictions import Predictions
from tandem.training.run_spec import RunSpec
from tandem.training.sample_predictions import SamplePredictions

if TYPE_CHECKING:
    from tandem.training.worker import WorkerArguments

_OWED = 4  # lines of the record that trainer 0 may be behind the others


class Reports:
    """The reports of trainer 0 on a run. Those of other trainers do nothing.

    `nbytes` are those of a checkpoint's arrays, each on a 64-byte boundary.
    """

    def __init__(
        self,
        spec: RunSpec,
        arguments: "WorkerArguments",
        state: RunState,
        launcher: Connection,
        nbytes: int,
    ) -> None:
        rank, self._status = arguments.rank, arguments.status
        self._launcher, self._is_first = launcher, rank == 0
        self._every = 60 * spec.config.snapshot_minutes
        self._nbytes = nbytes
        self.folder: RunFolder | None = None
        self.samples: SamplePredictions | None = None  # shown after each validation
        if rank == 0 and spec.job == "train":
            self.folder = RunFolder(spec.config, state, spec.resumed)
            if spec.validation.pictures is not None and spec.validation.size:
                self.samples = SamplePredictions(spec)
        self._last_save = time.monotonic()
        self._unwritten, self._marking = 0, threading.Lock()
        self._runs_in = spec.config.weights_path
        self._latest: deque[Record | Callable[[], Record]] = deque(maxlen=_OWED)

    def record(self, record: Record | Callable[[], Record]) -> None:
        """Write a line to the log, then show it: the user sees nothing that is not recorded.

        One that takes time to make is made where it is written.
        """
        if self.folder is None:
            self._latest.append(record)
            return
        record = _made(record)
        self._latest.append(record)
        self.folder.append(record)
        self._launcher.send(record)

    def result(self, record: ValidationRecord | Predictions) -> None:
        """Report the result of a run that only validates."""
        if self._is_first:
            self._launcher.send(record)

    def progress(self, mode: Mode, epoch: int, step: int, steps: int) -> None:
        """Report a step; epochs count from 0, steps from 1."""
        if self._is_first:
            self._launcher.send(Progress(mode, epoch + 1, step, steps))

    def ended(self, epoch: int) -> bool:
        """Report the end of an epoch, counted from 1, when its checkpoint is on disk.

        Returns whether the launcher will answer, which only trainer 0 expects.
        """
        self.check_written(wait=True)
        if self._is_first:
            self._launcher.send(EpochEnded(epoch))
        return self._is_first

    def stage(self, activity: Activity) -> None:
        """Show an activity of `STAGES`, and report it."""
        self._status.show(activity)
        if self._is_first:
            self._launcher.send(Stage(activity))

    def notice(self, text: str) -> None:
        """Report a text for the user."""
        if self._is_first:
            self._launcher.send(Notice(text))

    def show_samples(self, step: int) -> None:
        """Show the sample predictions of the validation that has just ended."""
        if self.folder is not None and self.samples is not None:
            draw = partial(self.samples.draw, self.samples.take())
            self.folder.show("predictions", step, draw)

    # Checkpoints

    def prepare_checkpoint(self) -> bool:
        """Prepare memory for a checkpoint in the background; whether it is ready."""
        return self.folder is not None and self.folder.prepare(self._nbytes)

    def snapshot_is_due(self) -> bool:
        """Return whether trainer 0's clock asks for a checkpoint, and it can be copied at once."""
        if self.folder is None:
            return False
        self.check_written()
        due = self._every > 0 and time.monotonic() - self._last_save >= self._every
        return due and not self.folder.busy and self.prepare_checkpoint()

    def save(self, checkpoint: Checkpoint) -> None:
        """Copy a checkpoint and write it in the background; the process is not ended meanwhile."""
        if self.folder is not None:
            self._launcher.send(CheckpointBegun())
            self._mark(1)
            writing = self.folder.save(checkpoint)
            writing.add_done_callback(lambda _: self._mark(-1))

    def rescue(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint at any trainer, and the last lines that trainer 0 owes."""
        self._mark(1)
        try:
            if self.folder is not None:
                self.folder.written(wait=True)
            if path := rescue(self._runs_in, checkpoint, lambda: [*map(_made, self._latest)]):
                self._launcher.send(CheckpointWritten(str(path)))
        finally:
            self._mark(-1)

    def _mark(self, begun: int) -> None:
        """Count checkpoints: one's callback may run when another has already begun."""
        with self._marking:
            self._unwritten += begun
            self._status.show_writing(self._unwritten > 0)

    def begin_save(self) -> None:
        """Finish the last checkpoint before another one; the next is due from now."""
        self._last_save = time.monotonic()
        self.check_written(wait=True)

    def check_written(self, wait: bool = False) -> None:
        """Report a checkpoint that has been written since, and wait for one if asked to."""
        if self.folder is not None and (path := self.folder.written(wait)):
            self._launcher.send(CheckpointWritten(str(path)))
        self._report_trouble()

    def close(self) -> None:
        """Finish what is being written."""
        if self.folder is not None:
            self.folder.close()
            self._report_trouble()

    def _report_trouble(self) -> None:
        if self.folder is not None and (text := self.folder.take_trouble()):
            self._launcher.send(Notice(text))


def _made(record: Record | Callable[[], Record]) -> Record:
    return record() if callable(record) else record
