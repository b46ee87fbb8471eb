"""Metrics against loops over pictures, of which some rows do not count."""

from typing import Any

import numpy as np
import pytensor.tensor as pt
import pytest

from tandem.config.schema import make_config
from tandem.errors import InputError
from tandem.layers.choices import METRIC_NAMES, evaluate_metrics, find_metric, metrics_of
from tests.support.op_checks import evaluate

CLASSES = 5


def sums_of(names: tuple[str, ...], outputs: np.ndarray, labels: np.ndarray, valid: int) -> Any:
    """The sums of a minibatch, as a run adds them up."""
    found = {}
    for metric in metrics_of(names):

        def build(y: Any, t: Any, metric: Any = metric) -> Any:
            return list(metric.counts(y, t, pt.arange(len(labels)) < valid))

        values = evaluate(build, outputs, labels)
        for name, value in zip(metric.sums, values, strict=True):
            assert value.dtype == np.float64
            assert value.shape == ((CLASSES,) if metric.by_class else ())
            found[name] = tuple(value.tolist()) if value.ndim else float(value)
    return found


def by_loops(name: str, outputs: np.ndarray, labels: np.ndarray) -> float:
    taken = outputs.argmax(1)
    if name.startswith("top") or name == "accuracy":
        k = int(name.removeprefix("top")) if name != "accuracy" else 1
        order = np.argsort(-outputs, axis=1, kind="stable")[:, :k]
        return float(np.mean([label in row for label, row in zip(labels, order, strict=True)]))
    rows = np.eye(CLASSES)[labels]
    errors = outputs - rows
    if name == "binary_accuracy":
        return float(np.mean((outputs > 0) == (rows == 1)))
    if name == "categorical_hinge":
        others = ((1 - rows) * outputs).max(axis=1)
        return float(np.maximum(0, 1 + others - (rows * outputs).sum(axis=1)).mean())
    if name in ("mse", "mae"):
        return float(np.mean(errors**2 if name == "mse" else abs(errors)))
    values = []
    for c in sorted({*labels.tolist(), *taken.tolist()}):
        right = sum(a == b == c for a, b in zip(labels, taken, strict=True))
        predicted, labelled = (taken == c).sum(), (labels == c).sum()
        below = {"precision": predicted, "recall": labelled, "f1": predicted + labelled}[name]
        values.append(((2 if name == "f1" else 1) * right / below) if below else 0.0)
    return float(np.mean(values))


@pytest.mark.parametrize("seed", range(4))
def test_metrics_are_what_loops_compute(seed: int) -> None:
    """Class 4 never occurs; in some samples a class is only taken for others, or never."""
    rng = np.random.default_rng(seed)
    outputs, labels = np.round(rng.normal(size=(9, CLASSES)), 1), rng.integers(0, 4, 9)
    outputs[:, 4] = -9
    sums = sums_of(METRIC_NAMES, outputs, labels, 6)
    found = evaluate_metrics(metrics_of(METRIC_NAMES), 6, sums)
    assert list(found) == list(METRIC_NAMES)
    for name, value in found.items():
        assert value == pytest.approx(by_loops(name, outputs[:6], labels[:6]), rel=1e-12), name


def test_a_quotient_of_nothing_is_defined() -> None:
    outputs, labels = np.eye(CLASSES)[[1, 1]], np.array([0, 0])
    names = ("precision", "recall", "f1")
    assert set(
        evaluate_metrics(metrics_of(names), 2, sums_of(names, outputs, labels, 2)).values()
    ) == {0.0}
    nothing = dict.fromkeys(("class_right", "class_predicted", "class_labelled"), (0.0,) * CLASSES)
    assert set(evaluate_metrics(metrics_of(names), 1, nothing).values()) == {0.0}


def test_sums_that_are_not_known_give_no_value() -> None:
    """Such as those of a metric that a resumed run has chosen within an epoch."""
    unknown = (np.nan,) * CLASSES
    sums = dict.fromkeys(("class_right", "class_predicted", "class_labelled"), unknown)
    found = evaluate_metrics(metrics_of(("precision", "recall", "f1")), 1, sums)
    assert np.isnan([*found.values()]).all()


def test_an_output_that_is_no_number_is_never_right() -> None:
    outputs = np.full((1, CLASSES), np.nan)
    names = ("accuracy", "top3", "f1")
    sums = sums_of(names, outputs, np.array([0]), 1)
    assert set(evaluate_metrics(metrics_of(names), 1, sums).values()) == {0.0}


def test_names() -> None:
    assert find_metric("top12").k == 12
    assert make_config({"metrics": "f1"}).metrics == ("f1",)
    assert "metrics" not in make_config({}).model_dump()
    assert "loss" not in make_config({}).model_dump()
    for values, expected in (
        ({"metrics": ["acuracy"]}, "there is no metric 'acuracy'; did you mean accuracy"),
        ({"metrics": ["top0"]}, "there is no metric 'top0'"),
        ({"metrics": ["f1", "f1"]}, "f1 is listed twice"),
        ({"loss": "hinge"}, "it must be cross_entropy, binary_cross_entropy"),
        ({"label_smoothing": 1.0}, "a number of at least 0 and below 1"),
    ):
        with pytest.raises(InputError, match=expected):
            make_config(values)
