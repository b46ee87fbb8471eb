"""The history that `fit` returns."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tandem.artifacts.epochs import epochs_of, logs_of
from tandem.artifacts.metrics_log import Record
from tandem.nn.callbacks.base import renamed


@dataclass
class History:
    """Values after each epoch of a run, those before it was resumed included.

    Attributes
    ----------
    history : dict of str to list of float
        ``loss`` and the metrics over the epoch's training, and ``val_loss`` and so on over the
        validation rows after it, where there are any, under Keras's names; with a callback that
        changes it ``learning_rate``.
    epoch : list of int
        From 0.
    run : Path
        The run folder, with checkpoints, ``record.jsonl`` and event files for TensorBoard.
    """

    history: dict[str, list[float]] = field(default_factory=dict)
    epoch: list[int] = field(default_factory=list)
    run: Path = Path()

    @classmethod
    def of_records(
        cls,
        records: Iterable[Record],
        metrics: Mapping[str, str],
        run: Path,
        *,
        with_rate: bool,
    ) -> "History":
        """The history of a run's records; `metrics` are their names there by those in Keras."""
        found = cls(run=run)
        for record, train in epochs_of(records):
            found.epoch.append(record.epoch - 1)
            for name, value in renamed(logs_of(record, train), metrics).items():
                if with_rate or name != "learning_rate":
                    found.history.setdefault(name, []).append(value)
        return found
