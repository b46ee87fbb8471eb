"""The report of a validation: its numbers against loops, and its page in a browser."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import softmax

from tandem.artifacts.metrics_log import ValidationRecord
from tandem.config.schema import Config
from tandem.data.dataset import open_split
from tandem.data.manifest import read_manifest, write_manifest
from tandem.data.reader import PictureReader
from tandem.errors import InputError
from tandem.launch.prepare import prepare_run
from tandem.launch.validation_report import Report, check_reportable, write_report
from tandem.memory import RowType
from tandem.preprocessing.arrays import write_arrays
from tandem.training.predictions import PredictionCollector, Predictions
from tandem.training.run_spec import RunSpec
from tests.support.browser import assert_self_contained
from tests.support.runs import train
from tests.support.tiny import prepare, run_program, save_weights

CLASSES = ("$cat$", "<script>", "n00000002")


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> RunSpec:
    """Of 3 classes, two with names that no page may take for more, and 23 pictures."""
    folder = tmp_path_factory.mktemp("report")
    data = prepare(folder / "data", validation=23)
    write_manifest(data / "manifest.json", replace(read_manifest(data), wnids=CLASSES))
    weights = save_weights(folder / "w.safetensors", CLASSES)
    config = Config(data_folder=str(data), crop_size=67, width=0.05, devices=("cpu",), threads=1)
    return prepare_run(config, "validate", weights)


@pytest.fixture(scope="module")
def scores(spec: RunSpec) -> np.ndarray:
    """Outputs for 23 pictures that say the true class of two in three."""
    labels = labels_of(spec)
    found = np.random.default_rng(3).normal(0, 1, (len(labels), 3))
    right = np.arange(len(labels)) % 3 > 0
    found[np.flatnonzero(right), labels[right]] += 3
    return found


def labels_of(spec: RunSpec) -> np.ndarray:
    with PictureReader(spec.validation) as reader:
        return reader.labels(np.arange(spec.validation.size))


@pytest.fixture(scope="module")
def found(spec: RunSpec, scores: np.ndarray) -> Predictions:
    """Of two trainers, of which each had every second picture, in minibatches with stale rows."""
    parts = []
    for rank in range(2):
        collector = PredictionCollector(spec)
        for start in range(rank, 23, 8):
            indices = np.arange(start, min(start + 8, 23), 2)
            collector.add(
                indices, softmax(np.vstack([scores[indices], np.full((2, 3), np.nan)]), axis=1)
            )
        parts.append(collector.taken())
    return Predictions.joined([part for part in parts if part is not None])


def test_predictions_are_those_of_each_picture(
    spec: RunSpec, scores: np.ndarray, found: Predictions
) -> None:
    labels = labels_of(spec)
    assert found.indices.tolist() == list(range(23))
    assert found.labels.tolist() == labels.tolist()
    for row, of_label, classes, best in zip(
        scores, found.of_labels, found.classes, found.probabilities, strict=True
    ):
        powers = np.exp(row)
        order = sorted(range(3), key=lambda k: -powers[k])
        assert classes.tolist() == order
        np.testing.assert_allclose(best, [powers[k] / powers.sum() for k in order])
        assert of_label in best
    assert PredictionCollector(spec).taken() is None


def test_numbers_are_those_of_loops(found: Predictions) -> None:
    report = Report(found, CLASSES, [f"{n}.JPEG" for n in range(23)])
    confusion = [[0] * 3 for _ in range(3)]
    bins: list[list[tuple[float, bool]]] = [[] for _ in range(10)]
    for label, classes, best in zip(found.labels, found.classes, found.probabilities, strict=True):
        confusion[label][classes[0]] += 1
        bins[min(int(10 * best[0]), 9)].append((best[0], bool(classes[0] == label)))
    assert report.confusion.tolist() == confusion
    for row, inside in zip(report.calibration, bins, strict=True):
        assert row[0] == len(inside)
        if inside:
            np.testing.assert_allclose(row[1:], np.mean(inside, axis=0))
    distance = sum(abs(sum(p for p, _ in each) - sum(ok for _, ok in each)) for each in bins)
    assert report.calibration_error == pytest.approx(distance / 23)
    rows = {name: rest for name, *rest in report.by_class()}
    for number, name in enumerate(CLASSES):
        count, wrong = sum(confusion[number]), sum(confusion[number]) - confusion[number][number]
        assert rows[name][:4] == [count, wrong, wrong / count, 0]  # three classes are five's part
    errors = [row[3] for row in report.by_class()]
    assert errors == sorted(errors, reverse=True)
    assert sum(count for *_, count in report.confusions()) == int((~found.is_right).sum())
    worst, surest = report.worst(), report.surest()
    assert not found.is_right[worst].any()
    assert found.is_right[surest].all()
    assert len(worst) + len(surest) == 23
    assert found.of_labels[worst].tolist() == sorted(found.of_labels[worst])
    assert found.of_labels[surest].tolist() == sorted(found.of_labels[surest], reverse=True)


def test_weights_that_are_nan_have_a_report(
    spec: RunSpec, found: Predictions, tmp_path: Path
) -> None:
    nan = {
        name: np.full_like(getattr(found, name), np.nan) for name in ("probabilities", "of_labels")
    }
    unknown = replace(found, **nan)
    report = Report(unknown, CLASSES, [f"{n}.JPEG" for n in range(23)])
    assert (report.calibration[:, 0] == 0).all()
    assert np.isnan(report.calibration_error)
    write_report(tmp_path, spec, ValidationRecord(3, 20, float("nan"), 0.5, 0.0, 23), unknown)
    assert (tmp_path / "report.html").is_file()


def test_the_page_needs_nothing_else(spec: RunSpec, found: Predictions, tmp_path: Path) -> None:
    record = ValidationRecord(3, 20, 0.5, float((~found.is_right).mean()), 0.0, 23)
    write_report(tmp_path / "new" / "report", spec, record, found)
    folder = tmp_path / "new" / "report"
    names = {"classes.csv", "confusion.csv", "pictures.csv", "report.html"}
    assert {path.name for path in folder.iterdir()} == names
    with (folder / "pictures.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["picture"] for row in rows] == [f"{n}.JPEG" for n in range(23)]
    wrong = sum(row["class"] != row["guess_1"] for row in rows)
    assert wrong == round(23 * record.top1_error)
    headings = ["Confusion matrix", "Error of each class", "Reliability"]
    headings += ["Worst mistakes", "Most confident hits"]
    text = assert_self_contained(folder / "report.html", headings, pictures=4)
    assert "<script>" in text  # as text
    assert f"top-1 error {100 * record.top1_error:.2f} %" in text


def test_what_cannot_be_reported_is_refused(spec: RunSpec) -> None:
    check_reportable(replace(spec, crops=10))
    numbers = replace(spec.validation, target=RowType("float32", (3,)))
    with pytest.raises(InputError, match=r"report: found targets float32 \(3,\), expected the num"):
        check_reportable(replace(spec, validation=numbers))


@pytest.mark.parametrize(
    ("shape", "dtype", "pictures"),
    [((6, 5), np.uint8, 4), ((6, 5, 3), np.uint8, 4), ((6, 5, 2), np.uint8, 2), ((7,), "f4", 2)],
)
def test_rows_of_arrays_are_drawn_or_listed(
    spec: RunSpec, found: Predictions, tmp_path: Path, shape: Any, dtype: Any, pictures: int
) -> None:
    """Those that are pictures are on sheets, others by their numbers."""
    data, labels = tmp_path / "data", labels_of(spec)
    x = np.random.default_rng(5).integers(0, 255, (23, *shape)).astype(dtype)
    manifest = write_arrays(data, None, (x, labels), ("$cat$", "<script>", "b"))
    rows = open_split(manifest, data, "val", data / "labels")
    config = spec.config.model_copy(update={"data_folder": str(data)})
    spec = replace(spec, validation=rows, config=config, wnids=manifest.wnids)
    write_report(tmp_path, spec, ValidationRecord(3, 20, 0.5, 0.25, 0.0, 23, crops=10), found)
    page = (tmp_path / "report.html").read_text()
    assert page.count("<img ") == pictures
    assert "23 rows of " in page
    assert "averaged over 10 crops of each" in page
    with (tmp_path / "pictures.csv").open(newline="") as file:
        assert [row["picture"] for row in csv.DictReader(file)] == [*map(str, range(23))]


@pytest.mark.slow
@pytest.mark.parametrize("crops", [[], ["--ten_crops"]])
def test_two_trainers_report_what_they_validate(
    data: Path, tmp_path: Path, crops: list[str]
) -> None:
    run = train(data, tmp_path / "run", batch_size=6)
    report = ["--report", str(tmp_path / "report"), "--batch_size", "3", *crops]
    result = run_program("validate.py", ["--weights", str(run), *report, "--devices", "cpu", "cpu"])
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    with (tmp_path / "report" / "pictures.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == found["images"]
    wrong = [row["class"] != row["guess_1"] for row in rows]
    assert np.mean(wrong) == pytest.approx(found["top1_error"])
    losses = -np.log([float(row["probability"]) for row in rows])
    assert losses.mean() == pytest.approx(found["loss"], rel=1e-4)
