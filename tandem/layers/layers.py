"""Graph builders over `tandem.ops`: the layers of a network, its cost and its errors.

Each takes symbolic variables and returns one. Axes are (batch, channel, row, column) between
convolutions and (batch, unit) between fully connected layers. Nothing here knows of devices.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.tensor.sharedvar import TensorSharedVariable
from pytensor.tensor.variable import TensorVariable

from tandem import ops

Kind = Literal["weight", "bias"]

NORM_SIZE, NORM_ALPHA, NORM_BETA, NORM_K = 5, 1e-4, 0.75, 2.0
"""The paper's constants of local response normalisation (section 3.3)."""


@dataclass(frozen=True)
class Parameter:
    """What is learned: its name and shape, and what it starts from.

    Attributes
    ----------
    name : str
        ``layer.weight`` or ``layer.bias``.
    shape : tuple of int
        (filter, channel of its group, row, column), (in, out), or (out,).
    kind : "weight" or "bias"
        Biases learn at twice the rate and do not decay.
    mean, std : float
        Of the normal distribution of the initial values; all equal `mean` where `std` is 0.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind
    mean: float = 0.0
    std: float = 0.0

    def shared(self, dtype: str) -> TensorSharedVariable:
        """A shared variable of this name and static shape, all zeros.

        The operating system maps zeros when they are first touched, so a network that is given
        its values elsewhere, or only looked at, takes no memory.
        """
        zeros = np.zeros(self.shape, dtype)
        return pytensor.shared(zeros, name=self.name, shape=self.shape, borrow=True)

    def initial_value(self, seed: int, position: int, dtype: str) -> np.ndarray:
        """Draw this parameter's initial value: a function of `seed` and `position` alone.

        Drawn in float32 whatever the dtype, so that networks in float32 and float64 start from
        the same numbers.

        Parameters
        ----------
        seed : int
            The run's seed, 64 bits.
        position : int
            The parameter's place in the network, from 0.
        dtype : str
            dtype of the result.
        """
        if self.std == 0:
            return np.full(self.shape, self.mean, dtype)
        key = np.array([seed % 2**64, position], np.uint64)
        generator = np.random.Generator(np.random.Philox(key=key))
        normal = generator.standard_normal(self.shape, np.float32)
        normal *= np.float32(self.std)
        normal += np.float32(self.mean)
        return normal.astype(dtype, copy=False)


class Parameters:
    """The parameters of a network, in order.

    Parameters
    ----------
    declared : iterable of Parameter
        Their order fixes the order of `variables` and what each starts from.
    dtype : str
        float32 or float64.

    Attributes
    ----------
    variables : dict of str to TensorSharedVariable
        By name, in order.
    kinds : dict of str to "weight" or "bias"
        By name, in order.
    """

    def __init__(self, declared: Iterable[Parameter], dtype: str) -> None:
        self._declared = tuple(declared)
        self._dtype = dtype
        self.variables = {p.name: p.shared(dtype) for p in self._declared}
        self.kinds: dict[str, Kind] = {p.name: p.kind for p in self._declared}

    def of(self, layer: str) -> tuple[TensorSharedVariable, TensorSharedVariable]:
        """Weight and bias of a layer."""
        return self.variables[f"{layer}.weight"], self.variables[f"{layer}.bias"]

    def initial_values(self, seed: int) -> Iterator[tuple[str, np.ndarray]]:
        """Each parameter's name and initial value, drawn one at a time."""
        for position, parameter in enumerate(self._declared):
            yield parameter.name, parameter.initial_value(seed, position, self._dtype)

    def initialize(self, seed: int) -> None:
        """Set every variable to its initial value."""
        for name, value in self.initial_values(seed):
            self.variables[name].set_value(value, borrow=True)


@dataclass(frozen=True)
class DropoutKeys:
    """What the dropout masks of a minibatch are a function of, all symbolic.

    Attributes
    ----------
    seed : int64 scalar
        The run's seed.
    epoch : int64 scalar
        From 0.
    indices : int64 (batch,)
        Dataset index of each picture.
    """

    seed: TensorVariable
    epoch: TensorVariable
    indices: TensorVariable


def convolution(
    x: TensorVariable,
    weight: TensorVariable,
    bias: TensorVariable,
    stride: int = 1,
    pad: int = 0,
    groups: int = 1,
) -> TensorVariable:
    """Correlate images with filters and add the bias; see `tandem.ops.conv2d`."""
    return ops.conv2d(x, weight, bias, stride, pad, groups)


def relu(x: TensorVariable) -> TensorVariable:
    """``max(x, 0)``; see `tandem.ops.relu`."""
    return ops.relu(x)


def max_pool(x: TensorVariable, size: int = 3, stride: int = 2) -> TensorVariable:
    """The maximum of overlapping windows; see `tandem.ops.max_pool2d`."""
    return ops.max_pool2d(x, size, stride)


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


def dropout(x: TensorVariable, rate: float, layer: int, keys: DropoutKeys | None) -> TensorVariable:
    """Drop units in training, and scale them by what is kept on average in validation.

    In training each unit is multiplied by 0 with probability `rate`, else by 1; in validation all
    are multiplied by ``1 - rate``. That is the convention of the paper's section 4.2 and of the
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
    keys : DropoutKeys or None
        None for validation; the graph then holds no mask.

    References
    ----------
    Krizhevsky, Sutskever, Hinton 2012, section 4.2.
    """
    if keys is None:
        return x * np.asarray(1 - rate, x.type.dtype)
    units = x.type.shape[1]
    if units is None:
        raise ValueError(f"dropout: the number of units must be known, got {x.type}")
    return x * ops.dropout_mask(
        keys.seed,
        keys.epoch,
        keys.indices,
        rate=rate,
        layer=layer,
        units=units,
        dtype=x.type.dtype,
    )


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


def label_rank(logits: TensorVariable, labels: TensorVariable) -> TensorVariable:
    """How many classes beat the true one; the row is a top-k error if that is k or more.

    Class j beats label y if not ``logit_j <= logit_y``, so a row with NaN is never right by
    accident, or if the two are equal and ``j < y``: a tie is resolved once and for all, as by
    argmax, and not in the network's favour.

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


def mean_over_valid(values: TensorVariable, valid: TensorVariable) -> TensorVariable:
    """Mean of the first `valid` rows; 0, not NaN, where there are none.

    What the other rows hold does not count, be it infinite or NaN.

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
    if dtype not in ops.FLOATS:
        raise TypeError(f"mean_over_valid: values must be floating-point, got {values.type}")
    counts = pt.lt(pt.arange(values.shape[0]), valid)
    total = pt.switch(counts, values, np.zeros((), dtype)).sum(dtype=dtype)
    return total / pt.maximum(valid, 1).astype(dtype)
