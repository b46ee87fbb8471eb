"""The predictions of a validation, picture by picture."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from tandem.data.reader import PictureReader
from tandem.training.run_spec import RunSpec

MOST = 5  # classes of a picture


@dataclass(frozen=True, eq=False)
class Predictions:
    """The predictions for pictures of the validation split. From trainer 0 to the launcher."""

    indices: npt.NDArray[np.int64]  # (picture,), in the data set
    labels: npt.NDArray[np.int64]  # (picture,): the true classes
    classes: npt.NDArray[np.int64]  # (picture, up to MOST), the most probable first
    probabilities: npt.NDArray[np.float64]  # of `classes`, (picture, up to MOST)
    of_labels: npt.NDArray[np.float64]  # (picture,): probability of the true class

    @classmethod
    def joined(cls, parts: "Sequence[Predictions]") -> "Predictions":
        """Join the pictures of several, sorted by index."""
        columns = [np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(cls)]
        order = np.argsort(columns[0], kind="stable")
        return cls(*(column[order] for column in columns))

    @property
    def is_right(self) -> npt.NDArray[np.bool_]:
        """Return whether the most probable class is the true one, (picture,)."""
        return self.classes[:, 0] == self.labels


class PredictionCollector:
    """Collects the predictions of one trainer."""

    def __init__(self, spec: RunSpec) -> None:
        self._reader = PictureReader(spec.validation)
        self._parts: list[Predictions] = []

    def add(self, indices: npt.NDArray[np.int64], probabilities: npt.NDArray[np.float64]) -> None:
        """Add a minibatch.

        Parameters
        ----------
        indices : int64 (picture,)
            In the data set.
        probabilities : float64 (at least as many, class)
        """
        rows = np.arange(len(indices))
        probabilities = probabilities[: len(indices)]
        labels = self._reader.labels(indices)
        classes = np.argsort(-probabilities, axis=1, kind="stable")[:, :MOST]
        best = probabilities[rows[:, np.newaxis], classes]
        part = Predictions(indices.copy(), labels, classes, best, probabilities[rows, labels])
        self._parts.append(part)

    def taken(self) -> Predictions | None:
        """Return what has been collected; None without a minibatch."""
        self._reader.close()
        return Predictions.joined(self._parts) if self._parts else None
