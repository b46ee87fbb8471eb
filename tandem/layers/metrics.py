"""Metrics of a minibatch that are not minimised."""

import pytensor.tensor as pt
from pytensor.tensor.variable import TensorVariable

__all__ = ["label_rank"]


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
