"""Event files, which TensorBoard reads: ``tensorboard --logdir runs``.

Importing this module imports TensorBoard's writer, a fifth of a second: a thread does that.
"""

import io
import math
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.histogram_pb2 import HistogramProto
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from tandem.artifacts.checkpoint import Checkpoint
from tandem.artifacts.metrics_log import NotFiniteRecord, Record, TrainRecord
from tandem.artifacts.visualize import colour_filters, filter_grid

BUCKETS = 64
MOST_VALUES = 1 << 17  # of a parameter that its histogram counts

_VERSION = "brain.Event:2"
_NAME = re.compile(r"events\.out\.tfevents\.(\d+)")


class EventFile:
    """A new event file of a run.

    Each start has a file of its own, which begins with the step at which the run goes on, so that
    TensorBoard drops what an earlier start has written beyond it. TensorBoard's fast reader does so
    curve by curve, as new points come.

    Parameters
    ----------
    folder : Path
        Of the run.
    step : int
        Steps that are done.

    Raises
    ------
    OSError
        From here and from `add`: it can't be written.
    """

    def __init__(self, folder: Path, step: int) -> None:
        numbers = [int(m[1]) for path in folder.iterdir() if (m := _NAME.fullmatch(path.name))]
        path = folder / f"events.out.tfevents.{max(numbers, default=0) + 1:05}"
        self._file = path.open("xb")
        self._records = RecordWriter(self._file)
        self._write(Event(wall_time=time.time(), file_version=_VERSION))
        start = SessionLog(status=SessionLog.START)
        self._write(Event(wall_time=time.time(), step=step + 1, session_log=start))
        self._file.flush()

    def add(self, step: int, values: Iterable[Summary.Value]) -> None:
        """Append an event and hand it to the operating system."""
        self._write(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, event: Event) -> None:
        self._records.write(event.SerializeToString())


def of_record(record: Record) -> Iterator[Summary.Value]:
    """What a line of the record shows: curves. Errors and shares of the time are fractions."""
    if isinstance(record, NotFiniteRecord):
        return
    if not isinstance(record, TrainRecord):
        yield _scalar("loss/validation", record.loss)
        yield _scalar("error/validation_top1", record.top1_error)
        yield _scalar("error/validation_top5", record.top5_error)
        return
    yield _scalar("loss/training", record.loss)
    if record.top1_error is not None:
        yield _scalar("error/training_top1", record.top1_error)
    yield _scalar("run/learning_rate", record.learning_rate)
    yield _scalar("run/images_per_second", record.images_per_second)
    seconds = {
        "compute": record.compute_seconds,
        "wait_for_loader": record.load_wait_seconds,
        "exchange": record.exchange_seconds,
    }
    whole = sum(seconds.values()) or math.nan
    for name, part in seconds.items():
        yield _scalar(f"time/{name}", part / whole)


def of_checkpoint(checkpoint: Checkpoint) -> Iterator[Summary.Value]:
    """What a checkpoint shows: histograms of weights and updates, their ratio, and the filters.

    The update is the momentum, which the last step has added to the weights. (With Nesterov's
    momentum that is the velocity, and what is added is a little further on.) The ratio is of the
    Euclidean norms.
    """
    for name, weight in checkpoint.weights.items():
        yield from _histogram(f"weights/{name}", weight)
        update = checkpoint.states.get("momentum", {}).get(name)
        if update is not None:
            yield from _histogram(f"updates/{name}", update)
            norm = np.linalg.norm(weight.ravel())
            if weight.ndim > 1 and norm > 0:  # biases begin at 0
                ratio = np.linalg.norm(update.ravel()) / norm
                yield _scalar(f"update_ratio/{name}", float(ratio))
    filters = colour_filters(checkpoint.weights)
    if filters is not None:
        grid = Image.fromarray(filter_grid(filters, scale=4, gap=4))
        yield of_picture("filters", grid, "PNG")


def of_picture(tag: str, picture: Image.Image, kind: str = "JPEG") -> Summary.Value:
    """A picture, RGB; a JPEG needs a fifth of the bytes of a PNG, where pixels may blur."""
    encoded = io.BytesIO()
    picture.save(encoded, kind, quality=90)
    image = Summary.Image(
        height=picture.height,
        width=picture.width,
        colorspace=3,
        encoded_image_string=encoded.getvalue(),
    )
    return Summary.Value(tag=tag, image=image)


def _scalar(tag: str, value: float) -> Summary.Value:
    return Summary.Value(tag=tag, simple_value=value)


def _histogram(tag: str, array: npt.NDArray) -> Iterator[Summary.Value]:
    """Nothing where a value is not finite."""
    # An odd stride comes by every column of a matrix whose width is a power of two.
    values = array.reshape(-1)[:: array.size // MOST_VALUES | 1].astype(np.float64)
    if not np.isfinite(values).all():
        return
    counts, edges = np.histogram(values, BUCKETS)
    histogram = HistogramProto(
        min=values.min(),
        max=values.max(),
        num=len(values),
        sum=values.sum(),
        sum_squares=np.square(values).sum(),
        bucket=counts,
        bucket_limit=edges[1:],
    )
    yield Summary.Value(tag=tag, histo=histogram)
