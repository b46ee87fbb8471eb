"""Predictions for a few validation pictures, the same after every epoch."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tandem.data.class_names import short_names
from tandem.data.dataset import Dataset
from tandem.data.reader import PictureReader
from tandem.training.run_spec import RunSpec

if TYPE_CHECKING:
    from PIL import Image

SIZE = 8  # pictures

Predictions = npt.NDArray[np.floating]


class SamplePredictions:
    """Collects what the network predicts of its pictures during validation, and draws it."""

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        batch = spec.config.pass_rows
        seen = min(spec.validation.size, spec.steps("validation") * spec.global_batch)
        self._rows = sample_rows(seen, spec.global_batch, batch)
        self._predictions: list[Predictions] = []
        self._crops: npt.NDArray[np.uint8] | None = None
        self._labels: list[int] = []

    @property
    def indices(self) -> list[int]:
        """Dataset indices of its pictures."""
        minibatches = self._rows.items()
        return [k * self._spec.global_batch + row for k, rows in minibatches for row in rows]

    def collect(self, minibatch: int, predictions: Callable[[], Predictions]) -> None:
        """Collect the predictions of a minibatch, by its number in the validation from 0.

        `predictions` returns them, (row, class); it is called only if needed.
        """
        if rows := self._rows.get(minibatch):
            self._predictions.append(predictions()[rows])

    def take(self) -> Predictions:
        """Return what was collected, (picture, class), and start again."""
        predictions, self._predictions = np.concatenate(self._predictions), []
        return predictions

    def draw(self, predictions: Predictions) -> "Image.Image":
        """Draw the pictures with the predictions that were collected."""
        from tandem.artifacts.visualize import prediction_sheet  # which imports Pillow

        if self._crops is None:
            self._crops = self._read()
        names = short_names(self._spec.wnids or ())
        return prediction_sheet(self._crops, self._labels, predictions, names)

    def _read(self) -> npt.NDArray[np.uint8]:
        """The centre crops, as the network sees them, (picture, row, column, RGB)."""
        indices, dataset = np.array(self.indices), self._spec.validation
        with PictureReader(dataset) as reader:
            self._labels = reader.labels(indices).tolist()
        return centre_crops(dataset, indices, self._spec.config.crop_size)


def centre_crops(
    dataset: Dataset, indices: npt.NDArray[np.int64], crop_size: int
) -> npt.NDArray[np.uint8]:
    """Read the centre crops of pictures, uint8 (picture, row, column, RGB)."""
    with PictureReader(dataset) as reader:
        pictures = np.empty((len(indices), *reader.picture_shape), np.uint8)
        reader.read(indices, pictures)
    start = (pictures.shape[1] - crop_size) // 2
    window = slice(start, start + crop_size)
    return pictures[:, window, window].copy()


def sample_rows(
    size: int, global_batch: int, batch: int, count: int = SIZE
) -> dict[int, list[int]]:
    """Choose pictures that are spread evenly over a split, among those that trainer 0 sees.

    The first `batch` of a minibatch of `global_batch` pictures are trainer 0's. Returns its rows by
    minibatch: at most `count`, of a split of `size` pictures.
    """
    rows: dict[int, list[int]] = {}
    for number in range(count):
        minibatch, row = divmod(number * size // count, global_batch)
        chosen = rows.setdefault(minibatch, [])
        if row % batch not in chosen:
            chosen.append(row % batch)
    return rows
