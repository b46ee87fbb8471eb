"""Event files for TensorBoard, written by a thread: ``tensorboard --logdir runs``.

TensorBoard's writer takes a fifth of a second to import; the thread does that too.
"""

import contextlib
import io
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

import numpy as np
import numpy.typing as npt

from tandem.artifacts.checkpoint import Checkpoint
from tandem.artifacts.metrics_log import NotFiniteRecord, Record, TrainRecord
from tandem.processes.messages import describe

if TYPE_CHECKING:
    from PIL import Image

Value = Union[float, npt.NDArray, "Image.Image"]
"""A point of a curve, an array to count in a histogram, or a picture (RGB)."""

BUCKETS = 64
MOST_VALUES = 1 << 17  # of a parameter that its histogram counts

_VERSION = "brain.Event:2"
_NAME = re.compile(r"events\.out\.tfevents\.(\d+)")
_LOSSLESS = "filters"  # as PNG; other pictures are JPEGs, of a fifth of the bytes


class EventLog:
    """A new event file of a run, written by a thread.

    Each start has a file of its own. It begins with the step at which the run continues, so that
    TensorBoard drops what an earlier start has written beyond it. TensorBoard's fast reader does so
    curve by curve, as new points arrive.

    A run needs its record and its checkpoints; this is for watching only. When the file cannot be
    written, this is reported once and the run continues without it.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self._thread = ThreadPoolExecutor(1, "events")
        self._file: io.BufferedWriter | None = None
        self._records: Any = None
        self._failed = False
        self._trouble: str | None = None
        self._checkpoint: Future[None] | None = None
        self._submit(lambda: self._open(folder, step))

    def add(self, record: Record) -> None:
        self._submit(lambda: self._write(record.step, of_record(record)))

    def add_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Show a checkpoint, unless the last one is still being processed.

        Returns at once. The arrays must not change.
        """
        if self._checkpoint is None or self._checkpoint.done():
            self._checkpoint = self._submit(
                lambda: self._write(checkpoint.state.step, of_checkpoint(checkpoint))
            )

    def add_picture(self, tag: str, step: int, draw: Callable[[], "Image.Image"]) -> None:
        """Show a picture, which the thread draws. Returns at once."""
        self._submit(lambda: self._write(step, [(tag, draw())]))

    def take_trouble(self) -> str | None:
        """Why nothing more is written; returned once."""
        trouble, self._trouble = self._trouble, None
        return trouble

    def close(self) -> None:
        self._thread.shutdown(wait=True)
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()

    def _submit(self, work: Callable[[], None]) -> "Future[None]":
        return self._thread.submit(self._try, work)

    # In the thread

    def _try(self, work: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            work()
        except Exception as error:
            self._failed = True
            self._trouble = f"nothing more is written for TensorBoard: {describe(error)}"

    def _open(self, folder: Path, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        numbers = [int(m[1]) for path in folder.iterdir() if (m := _NAME.fullmatch(path.name))]
        path = folder / f"events.out.tfevents.{max(numbers, default=0) + 1:05}"
        self._file = path.open("xb")
        self._records = RecordWriter(self._file)
        self._append(file_version=_VERSION)
        self._append(step=step + 1, session_log=SessionLog(status=SessionLog.START))
        self._file.flush()

    def _write(self, step: int, values: Iterable[tuple[str, Value]]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        shown = [_to_summary(tag, value) for tag, value in values]
        self._append(step=step, summary=Summary(value=[value for value in shown if value]))
        if self._file is not None:
            self._file.flush()

    def _append(self, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._records.write(Event(wall_time=time.time(), **content).SerializeToString())


def of_record(record: Record) -> Iterator[tuple[str, Value]]:
    """Points of curves for a line of the record. Errors and shares of the time are fractions."""
    if isinstance(record, NotFiniteRecord):
        return
    if not isinstance(record, TrainRecord):
        if not record.images:
            return
        yield "loss/validation", record.loss
        if not math.isnan(record.top1_error):  # of targets that are no classes
            yield "error/validation_top1", record.top1_error
            yield "error/validation_top5", record.top5_error
        for name, value in record.metrics.items():
            yield f"metrics/validation_{name}", value
        return
    yield "loss/training", record.loss
    if record.top1_error is not None:
        yield "error/training_top1", record.top1_error
    for name, value in record.metrics.items():
        yield f"metrics/training_{name}", value
    yield "run/learning_rate", record.learning_rate
    yield "run/images_per_second", record.images_per_second
    seconds = {
        "compute": record.compute_seconds,
        "wait_for_loader": record.load_wait_seconds,
        "exchange": record.exchange_seconds,
    }
    whole = sum(seconds.values()) or math.nan
    for name, part in seconds.items():
        yield f"time/{name}", part / whole


def of_checkpoint(checkpoint: Checkpoint) -> Iterator[tuple[str, Value]]:
    """Histograms of weights, averages and updates, ratios of norms, and the first filters.

    The update is SGD's momentum, which the last step has added to the weights. (With Nesterov's
    momentum that is the velocity, and the step adds a little more.) Norms are Euclidean.
    """
    is_sgd = checkpoint.config.get("optimizer", "sgd") == "sgd"
    steps = checkpoint.states.get("momentum", {}) if is_sgd else {}
    for name, weight in checkpoint.weights.items():
        yield f"{'averages' if name in checkpoint.untrained else 'weights'}/{name}", weight
        update = steps.get(name)
        if update is not None:
            yield f"updates/{name}", update
            norm = np.linalg.norm(weight.ravel())
            if weight.ndim > 1 and norm > 0:  # biases begin at 0
                yield f"update_ratio/{name}", float(np.linalg.norm(update.ravel()) / norm)

    from PIL import Image

    from tandem.artifacts.visualize import colour_filters, filter_grid

    filters = colour_filters(checkpoint.weights)
    if filters is not None:
        yield _LOSSLESS, Image.fromarray(filter_grid(filters, scale=4, gap=4))


def _to_summary(tag: str, value: Value) -> Any:
    """TensorBoard's Summary.Value; None for an array with values that are not finite."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    if isinstance(value, (int, float, np.number)):
        return Summary.Value(tag=tag, simple_value=value)
    if isinstance(value, np.ndarray):
        histogram = _histogram(value)
        return None if histogram is None else Summary.Value(tag=tag, histo=histogram)
    encoded = io.BytesIO()
    value.save(encoded, "PNG" if tag == _LOSSLESS else "JPEG", quality=90)
    image = Summary.Image(
        height=value.height,
        width=value.width,
        colorspace=3,
        encoded_image_string=encoded.getvalue(),
    )
    return Summary.Value(tag=tag, image=image)


def _histogram(array: npt.NDArray) -> Any:
    from tensorboard.compat.proto.histogram_pb2 import HistogramProto

    # An odd stride visits every column of a matrix whose width is a power of two.
    values = array.reshape(-1)[:: array.size // MOST_VALUES | 1].astype(np.float64)
    if not np.isfinite(values).all():
        return None
    counts, edges = np.histogram(values, BUCKETS)
    return HistogramProto(
        min=values.min(),
        max=values.max(),
        num=len(values),
        sum=values.sum(),
        sum_squares=np.square(values).sum(),
        bucket=counts,
        bucket_limit=edges[1:],
    )
