"""Layers as graph builders over `tandem.ops`.

Each takes symbolic variables and returns one. Axes are (batch, channel, row, column) between
convolutions and (batch, unit) between fully connected layers. Nothing here knows of devices.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import pytensor.tensor as pt
from pytensor.tensor.variable import TensorVariable

from tandem import ops
from tandem.layers.training_pass import Training
from tandem.ops import average_pool2d as average_pool
from tandem.ops import conv2d as convolution
from tandem.ops import max_pool2d as max_pool
from tandem.ops import pad2d as pad

__all__ = [
    "NORM_ALPHA",
    "NORM_BETA",
    "NORM_K",
    "NORM_SIZE",
    "average_pool",
    "batch_norm",
    "concatenate",
    "convolution",
    "dropout",
    "flatten",
    "fully_connected",
    "global_average_pool",
    "max_pool",
    "pad",
    "response_norm",
]

NORM_SIZE, NORM_ALPHA, NORM_BETA, NORM_K = 5, 1e-4, 0.75, 2.0
"""The paper's constants of local response normalisation (section 3.3)."""


def response_norm(
    x: TensorVariable,
    size: int = NORM_SIZE,
    alpha: float = NORM_ALPHA,
    beta: float = NORM_BETA,
    k: float = NORM_K,
) -> TensorVariable:
    """Local response normalisation, with the paper's constants; see `tandem.ops.lrn`.

    `alpha` is not divided by `size`: Caffe's alpha is `size` times as large.
    """
    return ops.lrn(x, size, alpha, beta, k)


def batch_norm(
    x: TensorVariable,
    parameters: Mapping[str, TensorVariable],
    layer: str,
    training: Training | None,
    epsilon: float = 1e-5,
) -> TensorVariable:
    """Batch normalisation with the parameters that `tandem.layers.norm` declares.

    In training, statistics are those of `training.rows` consecutive rows, see
    `tandem.ops.batch_norm`, or of all rows, see `tandem.ops.global_batch_norm`; they are reported
    for the running averages. In validation, and in a layer that is frozen, the running averages are
    used.

    Parameters
    ----------
    x : float (batch, channel, row, column) or (batch, unit)
    parameters : mapping of str to variable
        Holds ``layer.weight``, ``layer.bias``, ``layer.running_mean`` and ``layer.running_var``.
    layer : str
    training : Training or None
        None for validation.
    epsilon : float
        Added to the variance.

    Returns
    -------
    float, shaped like x
    """
    scale, shift = parameters[f"{layer}.weight"], parameters[f"{layer}.bias"]
    averages = [f"{layer}.running_mean", f"{layer}.running_var"]
    if training is None or training.is_frozen(layer):
        mean, variance = (parameters[name] for name in averages)
        return ops.batch_norm_inference(x, scale, shift, mean, variance, epsilon)
    rows, valid = training.rows, training.valid
    if rows is None:
        pivot = parameters[averages[0]]
        y, *statistics = ops.global_batch_norm(x, scale, shift, pivot, valid, epsilon)
    else:
        y, *statistics = ops.batch_norm(x, scale, shift, rows, valid, epsilon)
    training.statistics.update(zip(averages, statistics, strict=True))
    return y


def concatenate(parts: Sequence[TensorVariable]) -> TensorVariable:
    """The channels of several images, or units, one behind the other."""
    return pt.concatenate(parts, axis=1)


def global_average_pool(x: TensorVariable) -> TensorVariable:
    """Mean over all pixels: (batch, channel, row, column) to (batch, channel).

    The numbers of rows and columns must be known.
    """
    rows, columns = x.type.shape[2:]
    if rows is None or columns is None:
        raise ValueError(f"global_average_pool: rows and columns must be known, got {x.type}")
    return x.sum(axis=(2, 3)) * np.asarray(1 / (rows * columns), x.type.dtype)


def flatten(x: TensorVariable, units: int) -> TensorVariable:
    """(batch, channel, row, column) to (batch, units), in that order of channel, row, column."""
    return x.reshape((x.shape[0], units))


def fully_connected(
    x: TensorVariable, weight: TensorVariable, bias: TensorVariable
) -> TensorVariable:
    """``x weight + bias``: (batch, in) times (in, out) plus (out,)."""
    return pt.dot(x, weight) + bias


def dropout(
    x: TensorVariable,
    rate: float,
    layer: int,
    training: Training | None,
    inverted: bool = False,
) -> TensorVariable:
    """Drop units in training; in validation scale them by the fraction that training keeps.

    In training each unit is multiplied by 0 with probability `rate`, else by 1; in validation all
    are multiplied by ``1 - rate``. This is the convention of the paper's section 4.2 and of the
    weights published for AlexNet. With `inverted`, units that are kept are divided by ``1 - rate``
    in training, and validation leaves them alone, which is what other libraries do: weights learnt
    by one convention have another size than by the other.

    Parameters
    ----------
    x : float (batch, unit) or (batch, channel, row, column)
        The number of units must be known.
    rate : float
        In [0, 1).
    layer : int
        Number of the dropout layer in the network, from 0.
    training : Training or None
        None for validation; the graph then holds no mask.
    inverted : bool

    References
    ----------
    Krizhevsky, Sutskever, Hinton 2012, section 4.2.
    """
    if not 0 <= rate < 1:
        raise ValueError(f"dropout: rate must be in [0, 1), got {rate}")
    if training is None:
        return x if inverted else x * np.asarray(1 - rate, x.type.dtype)
    if None in x.type.shape[1:]:
        raise ValueError(f"dropout: the number of units must be known, got {x.type}")
    keys = (training.seed, training.epoch, training.indices)
    if inverted or x.type.ndim == 4:
        factor = 1 / (1 - rate) if inverted else 1.0
        return ops.dropout(x, *keys, rate=rate, layer=layer, factor=factor)
    mask = ops.dropout_mask(
        *keys, rate=rate, layer=layer, units=x.type.shape[1], dtype=x.type.dtype
    )
    return x * mask
