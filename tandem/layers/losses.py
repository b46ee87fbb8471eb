"""Losses of a minibatch, of which some rows may be invalid."""

import numpy as np
import pytensor.tensor as pt
from pytensor.tensor.variable import TensorVariable

from tandem.ops import FLOATS

__all__ = ["mean_over_valid", "negative_log_likelihood"]


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
