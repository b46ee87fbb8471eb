"""The loss of sequences without alignment: all ways are written out, gradients are differences."""

import itertools
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
import torch

from tandem.backend import device_mode
from tandem.ops import CTC, ctc
from tests.support.op_checks import check_gradient, check_shapes, evaluate

STEPS, CLASSES = 4, 3
LABELS = np.array([[1, 2, 0], [1, 1, 0], [2, 0, 0], [0, 0, 0], [1, 2, 1]])


def logits(dtype: str = "float64") -> np.ndarray:
    return np.random.default_rng(3).normal(size=(len(LABELS), STEPS, CLASSES)).astype(dtype)


def by_ways(values: np.ndarray, label: np.ndarray) -> float:
    """The loss of a row, from the probability of every sequence of classes."""
    logs = values - np.log(np.exp(values).sum(axis=1, keepdims=True))
    total = 0.0
    for way in itertools.product(range(CLASSES), repeat=STEPS):
        found = [k for k, group in itertools.groupby(way) if k]
        if found == [k for k in label if k]:
            total += np.exp(sum(logs[step, k] for step, k in enumerate(way)))
    return float(-np.log(total))


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_losses_are_those_of_all_ways_and_kernels_compute_what_perform_does(dtype: str) -> None:
    values = logits(dtype)
    loss, gradient = evaluate(CTC(), values, LABELS)
    expected = [by_ways(*row) for row in zip(values.astype("float64"), LABELS, strict=True)]
    np.testing.assert_allclose(loss, expected, rtol=1e-5 if dtype == "float32" else 1e-12)
    x, y = pt.tensor3(dtype=dtype), pt.lmatrix()
    found = pytensor.function([x, y], CTC()(x, y), mode=device_mode("cpu"))(values, LABELS)
    for one, other in zip(found, (loss, gradient), strict=True):
        assert one.dtype == dtype
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_gradients_are_those_of_differences_and_shapes_are_inferred() -> None:
    check_gradient(lambda x: (ctc(x, LABELS) * [1.0, -2.0, 0.5, 3.0, 1.0]).sum(), logits())
    check_shapes(CTC(), logits(), LABELS)


def test_more_labels_than_steps_hold_have_an_infinite_loss() -> None:
    crowded = np.array([[1, 1, 1]])
    found = [ctc(logits()[:1], crowded).eval(mode=m) for m in ("FAST_COMPILE", device_mode("cpu"))]
    np.testing.assert_array_equal(found, np.inf)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((np.zeros((2, 3)), LABELS), "logits must be a 3-dimensional tensor"),
        ((logits(), LABELS.astype("float64")), "labels must be a 2-dimensional tensor of int64"),
        ((logits(), LABELS[:2]), "rows"),
    ],
)
def test_other_arrays_are_refused(given: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        ctc(*given)


@pytest.mark.parametrize("mode", ["FAST_COMPILE", device_mode("cpu")], ids=["perform", "kernel"])
def test_labels_that_are_no_classes_are_refused_and_no_rows_have_no_loss(mode: Any) -> None:
    """PyTorch's kernels read and write beyond their arrays for such labels."""
    x, y = pt.dtensor3(), pt.lmatrix()
    function = pytensor.function([x, y], [*CTC()(x, y)], mode=mode)
    for label in (CLASSES, -1, 10**6):
        with pytest.raises(IndexError, match="a label is no class, expected numbers from 0 to 2"):
            function(logits()[:1], np.array([[label]]))
    loss, gradient = function(logits()[:0], LABELS[:0])
    assert (loss.shape, gradient.shape) == ((0,), (0, STEPS, CLASSES))


def test_rows_are_those_of_pytorch() -> None:
    x = torch.tensor(logits(), requires_grad=True)
    counts = torch.tensor((LABELS != 0).sum(axis=1))
    loss = torch.nn.functional.ctc_loss(
        x.transpose(0, 1).log_softmax(2),
        torch.tensor(LABELS),
        torch.full((len(LABELS),), STEPS),
        counts,
        reduction="none",
    )
    loss.sum().backward()
    for one, other in zip(evaluate(CTC(), logits(), LABELS), (loss.detach(), x.grad), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)
