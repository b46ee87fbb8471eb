"""Losses against torch.nn.functional, and at their extremes."""

from collections.abc import Callable

import numpy as np
import pytensor.tensor as pt
import pytest
import torch
import torch.nn.functional as F

from tandem import layers
from tandem.layers.choices import LOSSES, CrossEntropy
from tests.support.op_checks import check_gradient, evaluate

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def hinge(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """Keras's, by a loop."""
    found = []
    for outputs, targets in zip(y.tolist(), t.tolist(), strict=True):
        pairs = list(zip(outputs, targets, strict=True))
        other = max((1 - target) * output for output, target in pairs)
        found.append(max(0.0, 1 + other - sum(output * target for output, target in pairs)))
    return torch.tensor(found, dtype=torch.float64)


THEIRS: dict[str, Loss] = {
    "cross_entropy": lambda y, t: F.cross_entropy(y, t, reduction="none"),
    "binary_cross_entropy": lambda y, t: F.binary_cross_entropy_with_logits(
        y, t, reduction="none"
    ).mean(1),
    "mse": lambda y, t: F.mse_loss(y, t, reduction="none").mean(1),
    "mae": lambda y, t: F.l1_loss(y, t, reduction="none").mean(1),
    "kl_divergence": lambda y, t: F.kl_div(F.log_softmax(y, 1), t, reduction="none").sum(1),
    "categorical_hinge": hinge,
}


def sample(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Outputs, labels and soft targets, some of them 0."""
    rng = np.random.default_rng(seed)
    soft = rng.random((5, 4)) * (rng.random((5, 4)) > 0.3)
    return 3 * rng.normal(size=(5, 4)), rng.integers(0, 4, 5), soft / (soft.sum(1)[:, None] + 1e-9)


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("name", list(LOSSES))
def test_labels_and_soft_targets_agree_with_torch(name: str, static: bool) -> None:
    loss = LOSSES[name]()
    outputs, labels, soft = sample()
    one_hot = np.eye(4)[labels]
    for ours, theirs in ((labels, one_hot), (one_hot, one_hot), (soft, soft)):
        found = evaluate(loss, outputs, ours, static=static)
        expected = THEIRS[name](torch.tensor(outputs), torch.tensor(theirs)).numpy()
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("smoothing", [0.1, 0.9])
def test_smoothing_is_that_of_torch(smoothing: float) -> None:
    outputs, labels, soft = sample()
    for targets in (labels, soft):
        expected = F.cross_entropy(
            torch.tensor(outputs),
            torch.tensor(targets),
            reduction="none",
            label_smoothing=smoothing,
        )
        found = evaluate(CrossEntropy(smoothing), outputs, targets)
        np.testing.assert_allclose(found, expected.numpy(), rtol=1e-12)


@pytest.mark.parametrize("name", list(LOSSES))
def test_gradients_agree_with_finite_differences(name: str) -> None:
    outputs, labels, soft = sample(2)
    for targets in (labels, soft):
        check_gradient(lambda y, targets=targets: LOSSES[name]()(y, pt.constant(targets)), outputs)
    check_gradient(lambda y: CrossEntropy(0.2)(y, pt.constant(labels)), outputs)


def test_classes_that_tie_share_the_gradient_of_the_hinge() -> None:
    outputs = np.array([[2.0, 2.0, 1.0, 2.0], [0.0, 3.0, 3.0, 1.0]])
    y = pt.dmatrix()
    cost = LOSSES["categorical_hinge"]()(y, pt.constant(np.array([2, 0]))).sum()
    expected = [[1 / 3, 1 / 3, -1, 1 / 3], [-1, 1 / 2, 1 / 2, 0]]
    np.testing.assert_allclose(pt.grad(cost, y).eval({y: outputs}), expected, rtol=1e-15)


@pytest.mark.parametrize("name", list(LOSSES))
def test_extreme_outputs_give_finite_losses_of_their_dtype(name: str) -> None:
    outputs = np.array([[1e4, -1e4, 0], [-1e4, 1e4, 0]], "float32")
    found = evaluate(LOSSES[name](), outputs, np.array([0, 0]))
    assert found.dtype == np.dtype("float32")
    assert np.isfinite(found).all()
    assert found[1] > found[0] or name in ("mse", "mae")
    if name == "cross_entropy":
        np.testing.assert_array_equal(found, [0, 2e4])


def test_without_smoothing_labels_take_the_graph_of_the_cross_entropy() -> None:
    """AlexNet's bits depend on it."""
    outputs, labels = pt.fmatrix(), pt.lvector()
    found = CrossEntropy()(outputs, labels)
    assert [str(node.op) for node in _nodes(found)] == [
        str(node.op) for node in _nodes(layers.negative_log_likelihood(outputs, labels))
    ]


def _nodes(variable):
    from pytensor.graph.traversal import applys_between

    return list(applys_between([], [variable]))
