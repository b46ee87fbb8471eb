"""What trainer 0 writes for TensorBoard, beside the training, and without ever ending it."""

import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.artifacts.checkpoint import Checkpoint
from tandem.artifacts.metrics_log import Record
from tandem.processes.messages import describe

if TYPE_CHECKING:
    from PIL import Image

    from tandem.artifacts.tensorboard import EventFile


class EventLog:
    """An event file that a thread writes.

    The record and the checkpoints are what a run can't do without; this is for looking on. So when
    it can't be written, the disk being full, say, that is told once, and the run goes on without.

    Parameters
    ----------
    folder : Path
        Of the run.
    step : int
        Steps that are done.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self._thread = ThreadPoolExecutor(1, "events")
        self._file: EventFile | None = None
        self._given_up = False
        self._trouble: str | None = None
        self._checkpoint: Future[None] | None = None
        self._do(self._open, folder, step)

    def add(self, record: Record) -> None:
        """Show a line of the record. Returns at once."""
        self._do(self._add_record, record)

    def add_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Show what a checkpoint holds, unless the last one is still being looked at.

        Returns at once. The arrays must stay as they are.
        """
        if self._checkpoint is None or self._checkpoint.done():
            self._checkpoint = self._do(self._add_checkpoint, checkpoint)

    def add_picture(self, tag: str, step: int, draw: Callable[[], "Image.Image"]) -> None:
        """Show a picture, which the thread draws. Returns at once."""
        self._do(self._add_picture, tag, step, draw)

    def take_trouble(self) -> str | None:
        """Why nothing more is written, said once."""
        trouble, self._trouble = self._trouble, None
        return trouble

    def close(self) -> None:
        """Finish what is being written."""
        self._thread.shutdown(wait=True)
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()

    def _do(self, work: Callable[..., None], *arguments: Any) -> "Future[None]":
        return self._thread.submit(self._try, work, *arguments)

    def _try(self, work: Callable[..., None], *arguments: Any) -> None:
        if self._given_up:
            return
        try:
            work(*arguments)
        except Exception as error:
            self._given_up = True
            self._trouble = f"nothing more is written for TensorBoard: {describe(error)}"

    # In the thread

    def _open(self, folder: Path, step: int) -> None:
        from tandem.artifacts.tensorboard import EventFile

        self._file = EventFile(folder, step)

    def _add_record(self, record: Record) -> None:
        from tandem.artifacts.tensorboard import of_record

        self._write(record.step, of_record(record))

    def _add_checkpoint(self, checkpoint: Checkpoint) -> None:
        from tandem.artifacts.tensorboard import of_checkpoint

        self._write(checkpoint.state.step, of_checkpoint(checkpoint))

    def _add_picture(self, tag: str, step: int, draw: Callable[[], "Image.Image"]) -> None:
        from tandem.artifacts.tensorboard import of_picture

        self._write(step, [of_picture(tag, draw())])

    def _write(self, step: int, values: Any) -> None:
        if self._file is not None:
            self._file.add(step, values)
