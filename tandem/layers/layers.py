"""Layers as graph builders over `tandem.ops`.

Each takes symbolic variables and returns one. Axes are (batch, channel, row, column) between
convolutions and (batch, unit) between fully connected layers. Nothing here knows of devices.
"""

import numpy as np
import pytensor.tensor as pt
from pytensor.tensor.variable import TensorVariable

from tandem import ops
from tandem.layers.training_pass import Training
from tandem.ops import conv2d as convolution
from tandem.ops import max_pool2d as max_pool
from tandem.ops import relu

__all__ = [
    "NORM_ALPHA",
    "NORM_BETA",
    "NORM_K",
    "NORM_SIZE",
    "convolution",
    "dropout",
    "flatten",
    "fully_connected",
    "max_pool",
    "relu",
    "response_norm",
]

NORM_SIZE, NORM_ALPHA, NORM_BETA, NORM_K = 5, 1e-4, 0.75, 2.0
"""The paper's constants of local response normalisation (section 3.3)."""


def response_norm(x: TensorVariable) -> TensorVariable:
    """Local response normalisation with the paper's constants; see `tandem.ops.lrn`."""
    return ops.lrn(x, size=NORM_SIZE, alpha=NORM_ALPHA, beta=NORM_BETA, k=NORM_K)


def flatten(x: TensorVariable, units: int) -> TensorVariable:
    """(batch, channel, row, column) to (batch, units), in that order of channel, row, column."""
    return x.reshape((x.shape[0], units))


def fully_connected(
    x: TensorVariable, weight: TensorVariable, bias: TensorVariable
) -> TensorVariable:
    """``x weight + bias``: (batch, in) times (in, out) plus (out,)."""
    return pt.dot(x, weight) + bias


def dropout(
    x: TensorVariable, rate: float, layer: int, training: Training | None
) -> TensorVariable:
    """Drop units in training; in validation scale them by the fraction that training keeps.

    In training each unit is multiplied by 0 with probability `rate`, else by 1; in validation all
    are multiplied by ``1 - rate``. This is the convention of the paper's section 4.2 and of the
    weights published for this network; libraries that divide by ``1 - rate`` in training instead
    learn weights of another size.

    Parameters
    ----------
    x : float (batch, unit)
        The number of units must be known.
    rate : float
        In [0, 1).
    layer : int
        Number of the dropout layer in the network, from 0.
    training : Training or None
        None for validation; the graph then holds no mask.

    References
    ----------
    Krizhevsky, Sutskever, Hinton 2012, section 4.2.
    """
    if training is None:
        return x * np.asarray(1 - rate, x.type.dtype)
    units = x.type.shape[1]
    if units is None:
        raise ValueError(f"dropout: the number of units must be known, got {x.type}")
    return x * ops.dropout_mask(
        training.seed,
        training.epoch,
        training.indices,
        rate=rate,
        layer=layer,
        units=units,
        dtype=x.type.dtype,
    )
