"""Batch normalisation over groups of rows of a minibatch, or over all of them.

Statistics of groups cover a fixed number of consecutive rows, so that what is computed does not
depend on how many trainers share a minibatch. Those of all rows are computed in stages that ranks
can share, `tandem.ops.batch_norm_stages`.
"""

# A make_node names its inputs, in place of the *inputs of PyTensor's Op.
# mypy: disable-error-code=override

import math
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytensor.tensor as pt
from pytensor.gradient import DisconnectedType, disconnected_type
from pytensor.graph.basic import Apply
from pytensor.tensor.variable import TensorVariable

from tandem.ops.base import (
    Length,
    SameShapeOp,
    Values,
    positive_float,
    positive_int,
    same_dtype,
    same_shape,
    tensor_input,
)
from tandem.ops.batch_norm_stages import (
    BatchNormBySums,
    ByChannel,
    ChannelSums,
    across,
    channel_sums,
    gradient,
    gradient_sums,
    normalized,
    statistics,
)
from tandem.ops.relu import ReluGrad


class _ByGroup(ByChannel):
    """Base of the normalisation by groups of rows and its gradient."""

    rows: int

    def _group_count(self, x: TensorVariable) -> Length:
        batch = x.type.shape[0]
        return None if batch is None else -(-batch // self.rows)

    def _groups(self, x: np.ndarray, valid: list[Any]) -> Iterator[tuple[int, slice]]:
        """Number and rows of each group, as far as they are valid."""
        last = int(valid[0]) if valid else len(x)
        for group in range(-(-len(x) // self.rows)):
            first = group * self.rows
            yield group, slice(first, max(first, min(first + self.rows, last)))


class BatchNorm(_ByGroup):
    """Batch normalisation by groups of rows, as `batch_norm` defines it.

    ``BatchNorm(rows, epsilon)(x, scale, shift)``, or with `valid` as the last input. With `relu`, y
    is the ReLU of that; with `adds` as well, of its sum with other images, the fourth input: a
    rewrite for CPUs puts these in place of the Ops of a network. Outputs are y, mean and variance,
    and what the gradient reuses, (group, channel): each group's mean, and the inverse of its
    standard deviation. Only y has a gradient: mean and variance are reported, and count as
    constants.
    """

    __props__ = ("rows", "epsilon", "relu", "adds")

    def __init__(
        self, rows: int, epsilon: float = 1e-5, relu: bool = False, adds: bool = False
    ) -> None:
        self.rows = positive_int("BatchNorm", "rows", rows)
        self.epsilon = positive_float("BatchNorm", "epsilon", epsilon)
        if adds and not relu:
            raise ValueError("BatchNorm: adds is for a ReLU that follows, but relu is False")
        self.relu, self.adds = relu, adds

    def make_node(self, x: Any, scale: Any, shift: Any, *more: Any) -> Apply:
        other = {"other": more[0]} if self.adds else {}
        valid = more[self.adds] if len(more) > self.adds else None
        inputs, channels = self._node_inputs(x, other, scale=scale, shift=shift, **other)
        kind, groups = inputs[0].type, self._group_count(inputs[0])
        shapes = [kind.shape, (channels,), (channels,), (groups, channels), (groups, channels)]
        outputs = [pt.tensor(dtype=kind.dtype, shape=shape) for shape in shapes]
        return Apply(self, [*inputs, *self._valid(valid)], outputs)

    def perform(self, node: Apply, inputs: Values, output_storage: list[list[Any]]) -> None:
        x, scale, shift, *valid = inputs
        other = valid.pop(0) if self.adds else np.zeros((), x.dtype)
        _check_lengths(self, x, scale=scale, shift=shift)
        groups, channels = -(-len(x) // self.rows), x.shape[1]
        y = np.empty_like(x)
        y[...] = across(shift, x)
        means, variances, inverses = (np.zeros((groups, channels)) for _ in range(3))
        weights = np.zeros(groups)
        for group, rows in self._groups(x, valid):
            part = x[rows].astype(np.float64)
            weights[group] = len(part)
            count = part.size // channels
            pivot = channel_sums(part, np.zeros(channels))[0] / max(1, count)
            sums = channel_sums(part, pivot)
            found = statistics(sums, pivot, count, self.epsilon)
            means[group], variances[group], inverses[group] = found
            y[rows] = normalized(part, scale, shift, means[group], inverses[group])
        weights /= max(1, weights.sum())
        y = np.maximum(y + other, 0) if self.relu else y
        results = [y, weights @ means, weights @ variances, means, inverses]
        for storage, result in zip(output_storage, results, strict=True):
            storage[0] = result.astype(x.dtype)

    def infer_shape(self, fgraph: Any, node: Apply, shapes: list[tuple]) -> list[tuple]:
        batch, channels = shapes[0][:2]
        groups = (batch + self.rows - 1) // self.rows
        return [shapes[0], (channels,), (channels,), (groups, channels), (groups, channels)]

    def connection_pattern(self, node: Apply) -> list[list[bool]]:
        last = 3 + self.adds
        return [[index < last, False, False, False, False] for index in range(len(node.inputs))]

    def pullback(self, inputs: Values, outputs: Values, cotangents: Values) -> list[Any]:
        x, scale, _, *valid = inputs
        g = cotangents[0]
        if isinstance(g.type, DisconnectedType):
            return [disconnected_type() for _ in inputs]
        if self.relu:
            g = ReluGrad()(outputs[0], g)
        others = [g for _ in range(self.adds)]
        del valid[: self.adds]
        gradients = BatchNormGrad(self.rows)(x, scale, g, *outputs[3:], *valid)
        return [*gradients, *others, *(disconnected_type() for _ in valid)]


class BatchNormGrad(_ByGroup):
    """Gradient of `BatchNorm` with respect to x, scale and shift.

    ``BatchNormGrad(rows)(x, scale, g, means, inverses)``, with g the gradient with respect to y and
    with the last two outputs of `BatchNorm`, or with `valid` as another input. The gradient of rows
    that are not valid is 0, whatever they and g hold there. With `relu`, of a `BatchNorm` that has
    it and adds nothing, the shift follows the scale: where y is above 0 is computed again, which
    takes less than reading it.
    """

    __props__ = ("rows", "relu")

    def __init__(self, rows: int, relu: bool = False) -> None:
        self.rows = positive_int("BatchNormGrad", "rows", rows)
        self.relu = relu

    def make_node(self, x: Any, scale: Any, *more: Any) -> Apply:
        shift = {"shift": more[0]} if self.relu else {}
        g, means, inverses, *valid = more[self.relu :]
        inputs, channels = self._node_inputs(x, ("g",), scale=scale, **shift, g=g)
        x = inputs[0]
        means = tensor_input(self, "means", means, 2)
        inverses = tensor_input(self, "inverses", inverses, 2)
        dtype = same_dtype(self, x=x, means=means, inverses=inverses)
        same_shape(
            self,
            "means, inverses and (group, channel)",
            *(means.type.shape, inverses.type.shape, (self._group_count(x), channels)),
        )
        shapes = x.type.shape, (channels,), (channels,)
        outputs = [pt.tensor(dtype=dtype, shape=shape) for shape in shapes]
        last = self._valid(*valid or [None])
        return Apply(self, [*inputs, means, inverses, *last], outputs)

    def perform(self, node: Apply, inputs: Values, output_storage: list[list[Any]]) -> None:
        x, scale, *shift, g, means, inverses = inputs[: 5 + self.relu]
        dx, sums = np.zeros_like(x), np.zeros((2, x.shape[1]))
        for group, rows in self._groups(x, [*inputs[5 + self.relu :]]):
            part, slope, given = x[rows], g[rows], (means[group], inverses[group])
            if shift:
                y = normalized(part, scale, shift[0], *given)
                slope = np.where(y <= 0, np.zeros((), g.dtype), slope)
            own = gradient_sums(part, slope, *given)
            count = part.size // x.shape[1]
            dx[rows] = gradient(part, slope, scale, *given, own, count)
            sums += own
        for storage, result in zip(output_storage, (dx, *sums), strict=True):
            storage[0] = result.astype(x.dtype)

    def infer_shape(self, fgraph: Any, node: Apply, shapes: list[tuple]) -> list[tuple]:
        return [shapes[0], shapes[1], shapes[1]]


class BatchNormInference(SameShapeOp, ByChannel):
    """Normalisation by given statistics, as `batch_norm_inference` defines it."""

    __props__ = ("epsilon",)

    def __init__(self, epsilon: float = 1e-5) -> None:
        self.epsilon = positive_float("BatchNormInference", "epsilon", epsilon)

    def make_node(self, x: Any, scale: Any, shift: Any, mean: Any, variance: Any) -> Apply:
        vectors = {"scale": scale, "shift": shift, "mean": mean, "variance": variance}
        inputs, _ = self._node_inputs(x, **vectors)
        return Apply(self, inputs, [inputs[0].type()])

    def perform(self, node: Apply, inputs: Values, output_storage: list[list[Any]]) -> None:
        x, scale, shift, mean, variance = inputs
        _check_lengths(self, x, scale=scale, shift=shift, mean=mean, variance=variance)
        inverse = 1 / np.sqrt(variance + x.dtype.type(self.epsilon))
        output_storage[0][0] = normalized(x, scale, shift, mean, inverse)

    def pullback(self, inputs: Values, outputs: Values, cotangents: Values) -> list[Any]:
        x, scale, _, mean, variance = inputs
        (g,) = cotangents
        inverse = self.inverse(variance)
        order = ("x", 0, *["x"] * (x.type.ndim - 2))
        axes = (0, *range(2, x.type.ndim))
        sums = g.sum(axis=axes)
        centred = (x - mean.dimshuffle(order)) * inverse.dimshuffle(order)
        products = (g * centred).sum(axis=axes)
        factor = scale * inverse
        half = np.asarray(-0.5, x.type.dtype)
        return [
            g * factor.dimshuffle(order),
            products,
            sums,
            -factor * sums,
            half * factor * inverse * products,
        ]

    def inverse(self, variance: TensorVariable) -> TensorVariable:
        """Graph of the inverse of the standard deviation."""
        one, epsilon = (np.asarray(n, variance.type.dtype) for n in (1, self.epsilon))
        return cast(TensorVariable, one / pt.sqrt(variance + epsilon))


def _check_lengths(op: ByChannel, x: np.ndarray, **vectors: np.ndarray) -> None:
    for name, vector in vectors.items():
        if len(vector) != x.shape[1]:
            raise ValueError(f"{op}: x has {x.shape[1]} channels, {name} has {len(vector)}")


def batch_norm(
    x: Any, scale: Any, shift: Any, rows: int, valid: Any = None, epsilon: float = 1e-5
) -> tuple[TensorVariable, TensorVariable, TensorVariable]:
    """Normalise each channel by its mean and variance over groups of rows of a minibatch.

    ``y = scale (x - m) / sqrt(v + epsilon) + shift``, where m and v, the biased variance, are those
    of the channel in a group: in `rows` consecutive rows and all of their pixels. The last group
    has fewer rows where `rows` does not divide the batch. Ioffe, Szegedy 2015, "Batch
    normalization", algorithm 1; Goyal et al. 2017, "Accurate, large minibatch SGD", section 3.1,
    for groups smaller than the minibatch.

    Parameters
    ----------
    x : float (batch, channel, row, column) or (batch, unit)
    scale, shift : float (channel,)
    rows : int
        Rows in a group.
    valid : int64 scalar, optional
        Only the first `valid` rows count: others, which may hold anything, have a y that is finite
        and a gradient of 0. By default all count.
    epsilon : float

    Returns
    -------
    y : float, shaped like x
    mean, variance : float (channel,)
        The groups' means, and their unbiased variances, weighted by their numbers of valid rows: 0
        where there is none. The variance of a single value is 0. They have no gradient.

    Raises
    ------
    TypeError
        An input has another number of axes, or the dtypes differ or are not float32 or float64.
    ValueError
        Known shapes do not fit each other, or `rows` or `epsilon` is not positive.
    """
    inputs = (x, scale, shift) if valid is None else (x, scale, shift, valid)
    y, mean, variance, *_ = BatchNorm(rows, epsilon)(*inputs)
    return y, mean, variance


def global_batch_norm(
    x: Any, scale: Any, shift: Any, pivot: Any, valid: Any = None, epsilon: float = 1e-5
) -> tuple[TensorVariable, TensorVariable, TensorVariable]:
    """Normalise each channel by its mean and variance over all valid rows of a minibatch.

    The result is that of `tandem.ops.batch_norm` over one group of all rows, to rounding. It is
    built such that ranks which have a shard of the rows each have to add up two numbers of each
    channel in the forward pass and two in the backward pass.

    Parameters
    ----------
    x : float (batch, channel, row, column) or (batch, unit)
    scale, shift : float (channel,)
    pivot : float (channel,)
        A guess at the mean, such as the running average: the nearer, the fewer digits of the
        variance are lost. Sums are in float64, so that float32 needs none. It has no gradient.
    valid : int64 scalar, optional
        Only the first `valid` rows count: others, which may hold anything, have a y that is finite
        and a gradient of 0. By default all count.
    epsilon : float

    Returns
    -------
    y : float, shaped like x
    mean, variance : float (channel,)
        The unbiased variance, of a single value 0; both 0 where no row is valid. They have no
        gradient.

    Raises
    ------
    TypeError, ValueError
        As `tandem.ops.batch_norm`.
    """
    x = pt.as_tensor_variable(x)
    lengths = [x.shape[axis] if n is None else n for axis, n in enumerate(x.type.shape)]
    rows = lengths[0] if valid is None else pt.as_tensor_variable(valid)
    values = rows * math.prod(lengths[2:])
    count = np.float64(values) if isinstance(values, int) else values.astype("float64")
    last = () if valid is None else (valid,)
    sums = ChannelSums()(x, pivot, *last)
    y, mean, variance, _ = BatchNormBySums(epsilon)(x, scale, shift, pivot, sums, count, *last)
    return y, mean, variance


def batch_norm_inference(
    x: Any, scale: Any, shift: Any, mean: Any, variance: Any, epsilon: float = 1e-5
) -> TensorVariable:
    """Normalise each channel by a mean and a variance that are given.

    ``y = scale (x - mean) / sqrt(variance + epsilon) + shift``. Behind a convolution or a product
    with a matrix it costs nothing: a rewrite puts it into their weights, see
    `tandem.ops.batch_norm_folding`.

    Parameters
    ----------
    x : float (batch, channel, row, column) or (batch, unit)
    scale, shift, mean, variance : float (channel,)
    epsilon : float

    Returns
    -------
    float, shaped like x
    """
    return BatchNormInference(epsilon)(x, scale, shift, mean, variance)
