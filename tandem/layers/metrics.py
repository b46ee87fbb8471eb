"""Metrics of a minibatch that are not minimised."""

import pytensor.tensor as pt
from pytensor.tensor.variable import TensorVariable

__all__ = ["class_counts", "label_rank", "true_classes"]


def true_classes(targets: TensorVariable) -> TensorVariable:
    """The class of each row, int64 (batch,): of targets (batch, class) the first largest one."""
    return targets if targets.type.ndim == 1 else pt.argmax(targets, axis=1)


def label_rank(logits: TensorVariable, labels: TensorVariable) -> TensorVariable:
    """Number of classes that beat the true one: the row is a top-k error if that is k or more.

    Class j beats label y if not ``logit_j <= logit_y``, so a row with NaN is never right by
    accident, or if the two are equal and ``j < y``: a tie is resolved as by argmax, and not in the
    network's favour.

    Parameters
    ----------
    logits : float (batch, class)
    labels : int64 (batch,)
        In [0, classes).

    Returns
    -------
    int64 (batch,)
        In [0, classes].
    """
    label = labels.dimshuffle(0, "x")
    classes = pt.arange(logits.shape[1]).dimshuffle("x", 0)
    true = logits[pt.arange(logits.shape[0]), labels].dimshuffle(0, "x")
    more = pt.invert(pt.le(logits, true))
    earlier = pt.and_(pt.eq(logits, true), pt.lt(classes, label))
    return pt.or_(more, earlier).sum(axis=1, dtype="int64")


def class_counts(
    outputs: TensorVariable, labels: TensorVariable, counted: TensorVariable
) -> tuple[TensorVariable, TensorVariable, TensorVariable]:
    """Number of pictures of each class that are right, that are taken for it, and that are of it.

    Parameters
    ----------
    outputs : float (batch, class)
    labels : int64 (batch,)
        In [0, classes).
    counted : bool (batch,)
        Whether each row counts.

    Returns
    -------
    right, predicted, labelled : float64 (class,)
    """
    classes = pt.arange(outputs.shape[1]).dimshuffle("x", 0)
    right = counted & pt.eq(label_rank(outputs, labels), 0)
    labelled = pt.eq(labels.dimshuffle(0, "x"), classes)
    predicted = pt.eq(pt.argmax(outputs, axis=1).dimshuffle(0, "x"), classes)
    return (
        (right.dimshuffle(0, "x") & labelled).sum(axis=0, dtype="float64"),
        (counted.dimshuffle(0, "x") & predicted).sum(axis=0, dtype="float64"),
        (counted.dimshuffle(0, "x") & labelled).sum(axis=0, dtype="float64"),
    )
