"""The report of a validation: a page and tables of what the network takes for what."""

import csv
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tandem.artifacts.metrics_log import ValidationRecord
from tandem.artifacts.page import Page
from tandem.data.class_names import short_names
from tandem.data.manifest import read_any_manifest
from tandem.data.reader import PictureReader
from tandem.errors import InputError, explained
from tandem.files import make_folder, write_text
from tandem.memory import CLASS_LABEL, PICTURE_DTYPE
from tandem.training.predictions import Predictions
from tandem.training.run_spec import RunSpec
from tandem.training.sample_predictions import centre_crops

PAGE = "report.html"
_BINS = 10  # of confidence
_SHOWN = 24  # pictures on a sheet
_ACROSS = 6
_MOST_NUMBERED = 20  # classes of a matrix whose cells have their numbers
_MOST_CONFUSIONS = 30  # lines of the table


@dataclass(frozen=True, eq=False)
class Report:
    """The contents of a report."""

    predictions: Predictions
    classes: Sequence[str]  # names
    pictures: Sequence[str]  # names of files or numbers of rows, by their index in the data set

    @property
    def confusion(self) -> npt.NDArray[np.int64]:
        """Numbers of pictures, (true class, predicted class)."""
        found = np.zeros((len(self.classes),) * 2, np.int64)
        np.add.at(found, (self.predictions.labels, self.predictions.classes[:, 0]), 1)
        return found

    @property
    def calibration(self) -> npt.NDArray[np.float64]:
        """Pictures, mean confidence and share that is right, (bin of confidence, 3); NaN: none."""
        found = self.predictions
        finite = np.isfinite(found.probabilities[:, 0])  # as not of a network whose weights are NaN
        confidence, right = found.probabilities[finite, 0], found.is_right[finite] * 1.0
        bins = np.minimum((confidence * _BINS).astype(int), _BINS - 1)
        counts = np.bincount(bins, minlength=_BINS).astype(float)
        sums = [np.bincount(bins, of, _BINS) for of in (confidence, right)]
        with np.errstate(invalid="ignore"):
            return np.stack([counts, *(total / counts for total in sums)], axis=1)

    @property
    def calibration_error(self) -> float:
        """The mean distance of confidence from the share that is right, over all pictures."""
        counts, confidence, right = self.calibration.T
        if not counts.any():
            return math.nan
        return float(np.nansum(counts * np.abs(confidence - right)) / counts.sum())

    def by_class(self) -> list[tuple[str, int, int, float, float, str]]:
        """Name, pictures, wrong ones, top-1 and top-5 error, and what it is most often taken for.

        The classes with the highest error are first.
        """
        found = self.predictions
        hits5 = (found.classes == found.labels[:, np.newaxis]).any(axis=1)
        confusion, rows = self.confusion, []
        for number, name in enumerate(self.classes):
            count = int(confusion[number].sum())
            wrong = count - int(confusion[number, number])
            missed5 = int((~hits5[found.labels == number]).sum())
            others = confusion[number].copy()
            others[number] = 0
            taken = self.classes[int(others.argmax())] if wrong else ""
            rows.append((name, count, wrong, wrong / (count or 1), missed5 / (count or 1), taken))
        return sorted(rows, key=lambda row: -row[3])

    def confusions(self) -> list[tuple[str, str, int]]:
        """True class, another predicted one, and the number of pictures, most first."""
        off = self.confusion
        np.fill_diagonal(off, 0)
        pairs = np.argwhere(off).tolist()
        pairs.sort(key=lambda pair: -off[*pair])
        return [(self.classes[a], self.classes[b], int(off[a, b])) for a, b in pairs]

    def worst(self) -> list[int]:
        """The mistakes whose true class seemed least probable, by position."""
        wrong = np.flatnonzero(~self.predictions.is_right)
        return wrong[np.argsort(self.predictions.of_labels[wrong], kind="stable")].tolist()

    def surest(self) -> list[int]:
        """The hits with the highest confidence, by position."""
        right = np.flatnonzero(self.predictions.is_right)
        return right[np.argsort(-self.predictions.of_labels[right], kind="stable")].tolist()


def check_reportable(spec: RunSpec) -> None:
    """Refuse a report of data without classes by an InputError."""
    target = spec.validation.target
    if target != CLASS_LABEL:
        raise InputError(f"report: found targets {target}, expected the number of a class each")


def write_report(
    folder: Path, spec: RunSpec, record: ValidationRecord, predictions: Predictions
) -> None:
    """Write a page and tables into a folder.

    Raises InputError if a file cannot be written, or the pictures cannot be read.
    """
    manifest, names = read_any_manifest(spec.config.manifest_path), short_names(spec.wnids or ())
    places = range(spec.validation.size)
    report = Report(predictions, names, [manifest.name("val", place) for place in places])
    with explained(folder, "cannot be written"):
        make_folder(folder)
        _write_csv(
            folder / "classes.csv",
            ("class", "pictures", "wrong", "top1_error", "top5_error", "taken_for"),
            report.by_class(),
        )
        _write_csv(
            folder / "confusion.csv",
            ("class", *names),
            ((name, *row) for name, row in zip(names, report.confusion.tolist(), strict=True)),
        )
        _write_csv(folder / "pictures.csv", *_pictures(report))
    _page(report, spec, record).write(folder / PAGE)


def _pictures(report: Report) -> tuple[Sequence[str], Iterable[Sequence[object]]]:
    found = report.predictions
    head = ["picture", "class", "probability"]
    for place in range(1, found.classes.shape[1] + 1):
        head += [f"guess_{place}", f"probability_{place}"]
    rows = (
        [
            report.pictures[index],
            report.classes[label],
            f"{own:.6g}",
            *(
                cell
                for k, p in zip(classes, probabilities, strict=True)
                for cell in (report.classes[k], f"{p:.6g}")
            ),
        ]
        for index, label, own, classes, probabilities in zip(
            found.indices.tolist(),
            found.labels.tolist(),
            found.of_labels.tolist(),
            found.classes.tolist(),
            found.probabilities.tolist(),
            strict=True,
        )
    )
    return head, rows


def _write_csv(path: Path, head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(rows)
    write_text(path, text.getvalue())


def _page(report: Report, spec: RunSpec, record: ValidationRecord) -> Page:
    page = Page(f"Validation of {spec.weights}")
    what = "rows" if spec.validation.pictures is None else "pictures"
    averaged = f", averaged over {record.crops} crops of each" if record.crops > 1 else ""
    page.text(
        f"{record.images:,} {what} of {spec.config.data_folder}{averaged}: top-1 error"
        f" {100 * record.top1_error:.2f} %, top-5 error {100 * record.top5_error:.2f} %, loss"
        f" {record.loss:.4f}."
    )
    page.section("Confusion matrix", "Rows are true classes, columns predicted ones.")
    page.figure(_draw_confusion(report), "Confusion matrix")
    if confusions := report.confusions():
        page.table(("is", "taken for", "pictures"), confusions[:_MOST_CONFUSIONS])
    page.section("Error of each class", "The classes with the highest error are first.")
    head = ("class", "pictures", "wrong", "top-1 error", "top-5 error", "most often taken for")
    rows = [
        (name, count, wrong, f"{100 * top1:.1f} %", f"{100 * top5:.1f} %", taken)
        for name, count, wrong, top1, top5, taken in report.by_class()
    ]
    page.table(head, rows)
    page.section(
        "Reliability",
        "On the diagonal, of the pictures to which the network gives a confidence as many are"
        f" right. The mean distance from it is {report.calibration_error:.4f}.",
    )
    page.figure(_draw_reliability(report), "Reliability diagram")
    for title, places in (
        ("Worst mistakes", report.worst()),
        ("Most confident hits", report.surest()),
    ):
        if places:
            page.section(title)
            _add_examples(page, title, report, spec, places[:_SHOWN])
    return page


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _draw_confusion(report: Report) -> Any:
    counts = report.confusion
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    figure: Any = _figure(8, 7)
    axis = figure.subplots()
    image = axis.imshow(shares, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    figure.colorbar(image, label="share of the true class")
    axis.set_xlabel("predicted")
    axis.set_ylabel("true")
    if len(counts) <= _MOST_NUMBERED:
        names = [name.replace("$", r"\$") for name in report.classes]  # no formulas
        axis.set_xticks(range(len(counts)), names, rotation=90)
        axis.set_yticks(range(len(counts)), names)
        for row, column in np.argwhere(counts).tolist():
            colour = "white" if shares[row, column] > 0.5 else "black"
            axis.text(column, row, counts[row, column], ha="center", va="center", color=colour)
    return figure


def _draw_reliability(report: Report) -> Any:
    counts, _, right = report.calibration.T
    edges = np.linspace(0, 1, _BINS, endpoint=False)
    figure: Any = _figure(6, 6)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    above.bar(edges, np.nan_to_num(right), 1 / _BINS, align="edge", edgecolor="white")
    above.plot([0, 1], [0, 1], color="black", lw=1, ls="--")
    above.set(ylabel="share that is right", xlim=(0, 1), ylim=(0, 1))
    below.bar(edges, counts, 1 / _BINS, align="edge", edgecolor="white", color="#555555")
    below.set(xlabel="confidence", ylabel="pictures")
    return figure


def _add_examples(
    page: Page, title: str, report: Report, spec: RunSpec, places: Sequence[int]
) -> None:
    """Add pictures with true class, prediction and file; a table of rows that are none."""
    from tandem.artifacts.visualize import RIGHT, WRONG, contact_sheet  # which imports Pillow

    found = report.predictions
    indices = found.indices[places]
    captions, frames = [], []
    crops = _images(spec, indices)
    for place, index in zip(places, indices.tolist(), strict=True):
        guess = report.classes[found.classes[place, 0]]
        captions.append(
            (
                f"is {report.classes[found.labels[place]]}: {100 * found.of_labels[place]:.2g} %",
                f"{guess}: {100 * found.probabilities[place, 0]:.3g} %",
                report.pictures[index].rpartition("/")[2],
            )
        )
        frames.append(RIGHT if found.is_right[place] else WRONG)
    if crops is None:
        page.table(("class and its probability", "most probable", "row"), captions)
    else:
        sheet = contact_sheet(crops, captions, 3, frames, min(_ACROSS, len(captions)))
        page.picture(sheet, title)


def _images(spec: RunSpec, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8] | None:
    """Read centre crops, or rows that can be drawn, uint8 (n, row, column, RGB); None: others."""
    dataset, shape = spec.validation, spec.validation.row.shape
    if dataset.pictures is not None:
        return centre_crops(dataset, indices, spec.config.crop_size)
    if dataset.row.dtype != PICTURE_DTYPE or len(shape) < 2 or shape[2:] not in ((), (1,), (3,)):
        return None
    rows = np.empty((len(indices), *shape), np.uint8)
    with PictureReader(dataset) as reader:
        reader.read(indices, rows)
    rows = rows.reshape((*rows.shape[:3], -1))
    return np.broadcast_to(rows, (*rows.shape[:3], 3))
