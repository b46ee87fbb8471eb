"""The epochs of a run under Keras's names, and a table of them."""

import csv
import io
from collections.abc import Iterable, Sequence
from math import fsum
from pathlib import Path

from tandem.artifacts.metrics_log import Record, TrainRecord, ValidationRecord
from tandem.files import write_text


def epochs_of(records: Iterable[Record]) -> list[tuple[ValidationRecord, list[TrainRecord]]]:
    """Each whole epoch's validation, with the reports of its training."""
    epochs = []
    train: list[TrainRecord] = []
    for record in records:
        if isinstance(record, TrainRecord):
            train.append(record)
        elif isinstance(record, ValidationRecord):
            epochs.append((record, [each for each in train if each.epoch == record.epoch]))
            train = []
    return epochs


def logs_of(record: ValidationRecord, train: Sequence[TrainRecord]) -> dict[str, float]:
    """The values of an epoch as Keras names them.

    With `print_epochs` those of training are means over the pictures of the epoch, otherwise means
    of its reports. (A precision, recall or `f1` is that of the whole epoch if there is one report.)

    Returns
    -------
    dict of str to float
        ``loss`` (nats), each of `metrics` under its name, ``val_loss`` and each metric of the
        validation as ``val_...``, and ``learning_rate``, the last. What was not measured is
        missing: training without a report, a validation without pictures.
    """
    logs: dict[str, float] = {}
    if train:
        logs["loss"] = _mean([each.loss for each in train], train)
        for name in train[0].metrics:
            if all(name in each.metrics for each in train):  # also those before a resume
                logs[name] = _mean([each.metrics[name] for each in train], train)
    if record.images:
        logs["val_loss"] = record.loss
        logs |= {f"val_{name}": value for name, value in record.metrics.items()}
    if train:
        logs["learning_rate"] = train[-1].learning_rate
    return logs


def _mean(values: Sequence[float], train: Sequence[TrainRecord]) -> float:
    counts = [each.images for each in train]
    if not all(counts):  # reports that are not of single epochs, which do not count pictures
        counts = [1] * len(values)
    return fsum(v * n for v, n in zip(values, counts, strict=True)) / sum(counts)


def write_csv(path: Path, records: Iterable[Record]) -> None:
    """Write a line for each epoch, whole or not at all.

    The columns are ``epoch``, from 0, then loss and metrics in the order of their names, those of
    the validation with ``val_`` last: Keras's ``CSVLogger``. What was not measured is ``NA``.
    """
    epochs = epochs_of(records)
    rows = [(record.epoch - 1, logs_of(record, train)) for record, train in epochs]
    names = sorted({name for _, logs in rows for name in logs} - {"learning_rate"})
    names.sort(key=lambda name: name.startswith("val_"))
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["epoch", *names])
    table.writerows([epoch, *(logs.get(name, "NA") for name in names)] for epoch, logs in rows)
    write_text(path, text.getvalue())
