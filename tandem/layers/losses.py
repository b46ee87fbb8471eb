"""Losses of a minibatch, of which some rows may be invalid.

Each takes a network's outputs, before the softmax, and targets: labels, int64 (batch,), or soft
targets (batch, class), of the outputs' dtype, such as probabilities. A label stands for its
one-hot row. Each returns the loss of each row, (batch,).
"""

import numpy as np
import pytensor.tensor as pt
from pytensor.tensor.variable import TensorVariable

from tandem.ops import FLOATS

__all__ = [
    "binary_cross_entropy",
    "categorical_cross_entropy",
    "categorical_hinge",
    "kl_divergence",
    "mean_absolute_error",
    "mean_over_valid",
    "mean_squared_error",
    "negative_log_likelihood",
]


def negative_log_likelihood(logits: TensorVariable, labels: TensorVariable) -> TensorVariable:
    """Softmax cross-entropy of each row: ``log(sum over j of exp(logit_j)) - logit_label``.

    Parameters
    ----------
    logits : float (batch, class)
    labels : int64 (batch,)
        In [0, classes).

    Returns
    -------
    float (batch,)
        In nats.
    """
    rows = pt.arange(logits.shape[0])
    return -pt.special.log_softmax(logits, axis=1)[rows, labels]


def categorical_cross_entropy(
    outputs: TensorVariable, targets: TensorVariable, label_smoothing: float = 0.0
) -> TensorVariable:
    """Softmax cross-entropy of each row, in nats, against smoothed targets.

    Smoothed targets are ``(1 - s) t + s / classes`` (Szegedy et al. 2016, arXiv 1512.00567,
    section 7), as in PyTorch.
    """
    if targets.type.ndim == 1 and not label_smoothing:
        return negative_log_likelihood(outputs, targets)
    rows = target_rows(outputs, targets)
    if label_smoothing:
        kept, spread = (np.asarray(x, rows.dtype) for x in (1 - label_smoothing, label_smoothing))
        rows = kept * rows + spread / outputs.shape[1].astype(rows.dtype)
    return -(rows * pt.special.log_softmax(outputs, axis=1)).sum(axis=1)


def binary_cross_entropy(outputs: TensorVariable, targets: TensorVariable) -> TensorVariable:
    """Sigmoid cross-entropy, a mean over the classes of each row, in nats.

    ``log(1 + exp(y)) - t y`` of output y, which does not overflow.
    """
    rows = target_rows(outputs, targets)
    return _mean(pt.softplus(outputs) - rows * outputs)


def mean_squared_error(outputs: TensorVariable, targets: TensorVariable) -> TensorVariable:
    """Squared difference of outputs and targets, a mean over the classes of each row."""
    return _mean(pt.sqr(outputs - target_rows(outputs, targets)))


def mean_absolute_error(outputs: TensorVariable, targets: TensorVariable) -> TensorVariable:
    """Absolute difference of outputs and targets, a mean over the classes of each row."""
    return _mean(abs(outputs - target_rows(outputs, targets)))


def kl_divergence(outputs: TensorVariable, targets: TensorVariable) -> TensorVariable:
    """Kullback-Leibler divergence of each row's softmax from its targets, in nats.

    ``sum over j of t_j (log t_j - log softmax_j)``, where ``0 log 0`` is 0. For labels it is the
    cross-entropy.
    """
    if targets.type.ndim == 1:
        return negative_log_likelihood(outputs, targets)
    one = np.ones((), targets.dtype)
    logarithms = pt.log(pt.switch(pt.gt(targets, 0), targets, one))
    return (targets * (logarithms - pt.special.log_softmax(outputs, axis=1))).sum(axis=1)


def categorical_hinge(outputs: TensorVariable, targets: TensorVariable) -> TensorVariable:
    """Margin by which the best other class beats the true one, plus 1, if above 0.

    ``max(0, 1 + max over j of (1 - t_j) y_j - sum over j of t_j y_j)``, as in Keras: the other
    outputs count as at least 0, the product of the true one. Classes that tie for the maximum share
    its gradient.
    """
    rows = target_rows(outputs, targets)
    one, zero = np.ones((), outputs.dtype), np.zeros((), outputs.dtype)
    others = (one - rows) * outputs
    best = pt.eq(others, pt.max(others, axis=1, keepdims=True))
    other = pt.switch(best, others, zero).sum(axis=1) / best.sum(axis=1).astype(outputs.dtype)
    return pt.maximum(zero, one + other - (rows * outputs).sum(axis=1))


def target_rows(outputs: TensorVariable, targets: TensorVariable) -> TensorVariable:
    """Targets as rows (batch, class) of the outputs' dtype; labels become one-hot rows."""
    if targets.type.ndim == 2:
        return targets.astype(outputs.dtype)
    classes = pt.arange(outputs.shape[1]).dimshuffle("x", 0)
    return pt.eq(targets.dimshuffle(0, "x"), classes).astype(outputs.dtype)


def _mean(values: TensorVariable) -> TensorVariable:
    """Mean over the classes, of the values' dtype."""
    dtype = values.dtype
    return values.sum(axis=1, dtype=dtype) / values.shape[1].astype(dtype)


def mean_over_valid(values: TensorVariable, valid: TensorVariable) -> TensorVariable:
    """Mean of the first `valid` rows; 0, not NaN, if there are none.

    The other rows do not count, even if they are infinite or NaN.

    Parameters
    ----------
    values : float (batch,)
    valid : int64 scalar
        In [0, batch].

    Returns
    -------
    float scalar, of the values' dtype

    Raises
    ------
    TypeError
        `values` is not of a floating-point type.
    """
    dtype = values.type.dtype
    if dtype not in FLOATS:
        raise TypeError(f"mean_over_valid: values must be floating-point, got {values.type}")
    counts = pt.lt(pt.arange(values.shape[0]), valid)
    total = pt.switch(counts, values, np.zeros((), dtype)).sum(dtype=dtype)
    return total / pt.maximum(valid, 1).astype(dtype)
