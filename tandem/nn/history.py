"""What `fit` returns."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tandem.artifacts.epochs import epochs_of, logs_of
from tandem.artifacts.metrics_log import Record


@dataclass
class History:
    """Values after each epoch of a run, those before it was resumed included.

    Attributes
    ----------
    history : dict of str to list of float
        ``loss`` and the metrics over the epoch's training, and ``val_loss`` and so on over the
        validation rows after it, where there are any, under Keras's names.
    epoch : list of int
        From 0.
    params : dict
        ``epochs`` and ``steps``, the steps of an epoch.
    run : Path
        The run folder, with checkpoints, ``record.jsonl`` and event files for TensorBoard.
    """

    history: dict[str, list[float]] = field(default_factory=dict)
    epoch: list[int] = field(default_factory=list)
    params: dict[str, Any] = field(default_factory=dict)
    run: Path = Path()

    @classmethod
    def of_records(
        cls,
        records: Iterable[Record],
        metrics: Mapping[str, str],
        params: dict[str, Any],
        run: Path,
    ) -> "History":
        """The history of a run's records; `metrics` are their names there by those in Keras."""
        found = cls(params=params, run=run)
        for record, train in epochs_of(records):
            found.epoch.append(record.epoch - 1)
            for name, value in renamed(logs_of(record, train), metrics).items():
                found.history.setdefault(name, []).append(value)
        return found


def renamed(logs: Mapping[str, float], metrics: Mapping[str, str]) -> dict[str, float]:
    """An epoch's values, with the names that the metrics have in Keras, and in its order."""
    found = {}
    for start in ("", "val_"):
        for key, name in sorted({"loss": "loss", **metrics}.items()):
            if f"{start}{name}" in logs:
                found[f"{start}{key}"] = logs[f"{start}{name}"]
    return found
