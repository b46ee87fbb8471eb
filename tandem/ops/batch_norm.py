"""Batch normalisation over groups of rows of a minibatch.

Statistics cover a fixed number of consecutive rows, so that what is computed does not depend on how
many trainers share a minibatch.
"""

# A make_node names its inputs, in place of the *inputs of PyTensor's Op.
# mypy: disable-error-code=override

from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytensor.tensor as pt
from pytensor.gradient import DisconnectedType, disconnected_type
from pytensor.graph.basic import Apply
from pytensor.tensor.variable import TensorVariable

from tandem.ops.base import (
    FLOATS,
    Length,
    SameShapeOp,
    TensorOp,
    Values,
    positive_float,
    positive_int,
    same_dtype,
    same_length,
    same_shape,
    tensor_input,
)


class _NormalizationOp(TensorOp):
    """Base of the normalisation by groups of rows and its gradient."""

    rows: int

    def _group_count(self, x: TensorVariable) -> Length:
        batch = x.type.shape[0]
        return None if batch is None else -(-batch // self.rows)

    def _valid(self, valid: Any) -> list[TensorVariable]:
        """The number of valid rows as an optional last input."""
        return [] if valid is None else [tensor_input(self, "valid", valid, 0, ("int64",))]

    def _groups(self, x: np.ndarray, valid: list[Any]) -> Iterator[tuple[int, slice]]:
        """Number and rows of each group, as far as they are valid."""
        last = int(valid[0]) if valid else len(x)
        for group in range(-(-len(x) // self.rows)):
            first = group * self.rows
            yield group, slice(first, max(first, min(first + self.rows, last)))


class BatchNorm(_NormalizationOp):
    """Batch normalisation by groups of rows, as `batch_norm` defines it.

    ``BatchNorm(rows, epsilon)(x, scale, shift)``, or with `valid` as a fourth input. Outputs are y,
    mean and variance, and what the gradient reuses, (group, channel): each group's mean, and the
    inverse of its standard deviation. Only y has a gradient: mean and variance are reported, and
    count as constants.
    """

    __props__ = ("rows", "epsilon")

    def __init__(self, rows: int, epsilon: float = 1e-5) -> None:
        self.rows = positive_int("BatchNorm", "rows", rows)
        self.epsilon = positive_float("BatchNorm", "epsilon", epsilon)

    def make_node(self, x: Any, scale: Any, shift: Any, valid: Any = None) -> Apply:
        x = _images(self, x)
        scale, shift = tensor_input(self, "scale", scale, 1), tensor_input(self, "shift", shift, 1)
        dtype = same_dtype(self, x=x, scale=scale, shift=shift)
        channels = _channels(self, x, scale=scale, shift=shift)
        groups = self._group_count(x)
        shapes = [x.type.shape, (channels,), (channels,), (groups, channels), (groups, channels)]
        outputs = [pt.tensor(dtype=dtype, shape=shape) for shape in shapes]
        return Apply(self, [x, scale, shift, *self._valid(valid)], outputs)

    def perform(self, node: Apply, inputs: Values, output_storage: list[list[Any]]) -> None:
        x, scale, shift, *valid = inputs
        _check_lengths(self, x, scale=scale, shift=shift)
        groups, channels = -(-len(x) // self.rows), x.shape[1]
        y = np.empty_like(x)
        y[...] = _across(shift, x.ndim)
        means, variances = np.zeros((groups, channels)), np.zeros((groups, channels))
        unbiased, weights = np.zeros((groups, channels)), np.zeros(groups)
        for group, rows in self._groups(x, valid):
            part = x[rows].astype(np.float64)
            values = part.size // channels
            weights[group] = len(part)
            if not values:
                continue
            axes = _but_channels(x.ndim)
            means[group], variances[group] = part.mean(axes), part.var(axes)
            unbiased[group] = variances[group] * values / max(1, values - 1)
            inverse = scale / np.sqrt(variances[group] + self.epsilon)
            centred = part - _across(means[group], x.ndim)
            y[rows] = centred * _across(inverse, x.ndim) + _across(shift, x.ndim)
        weights /= max(1, weights.sum())
        reported = [weights @ means, weights @ unbiased]
        results = [y, *reported, means, 1 / np.sqrt(variances + self.epsilon)]
        for storage, result in zip(output_storage, results, strict=True):
            storage[0] = result.astype(x.dtype)

    def infer_shape(self, fgraph: Any, node: Apply, shapes: list[tuple]) -> list[tuple]:
        batch, channels = shapes[0][:2]
        groups = (batch + self.rows - 1) // self.rows
        return [shapes[0], (channels,), (channels,), (groups, channels), (groups, channels)]

    def connection_pattern(self, node: Apply) -> list[list[bool]]:
        return [[index < 3, False, False, False, False] for index in range(len(node.inputs))]

    def pullback(self, inputs: Values, outputs: Values, cotangents: Values) -> list[Any]:
        x, scale, _, *valid = inputs
        g = cotangents[0]
        if isinstance(g.type, DisconnectedType):
            return [disconnected_type() for _ in inputs]
        gradients = BatchNormGrad(self.rows)(x, scale, g, *outputs[3:], *valid)
        return [*gradients, *(disconnected_type() for _ in valid)]


class BatchNormGrad(_NormalizationOp):
    """Gradient of `BatchNorm` with respect to x, scale and shift.

    ``BatchNormGrad(rows)(x, scale, g, means, inverses)``, with g the gradient with respect to y and
    with the last two outputs of `BatchNorm`, or with `valid` as another input. The gradient of rows
    that are not valid is 0, whatever they and g hold there.
    """

    __props__ = ("rows",)

    def __init__(self, rows: int) -> None:
        self.rows = positive_int("BatchNormGrad", "rows", rows)

    def make_node(
        self, x: Any, scale: Any, g: Any, means: Any, inverses: Any, valid: Any = None
    ) -> Apply:
        x, scale = _images(self, x), tensor_input(self, "scale", scale, 1)
        g = tensor_input(self, "g", g, x.type.ndim)
        means = tensor_input(self, "means", means, 2)
        inverses = tensor_input(self, "inverses", inverses, 2)
        dtype = same_dtype(self, x=x, scale=scale, g=g, means=means, inverses=inverses)
        channels = _channels(self, x, scale=scale)
        shape = same_shape(self, "x and g", x.type.shape, g.type.shape)
        same_shape(
            self,
            "means, inverses and (group, channel)",
            *(means.type.shape, inverses.type.shape, (self._group_count(x), channels)),
        )
        outputs = [pt.tensor(dtype=dtype, shape=s) for s in (shape, (channels,), (channels,))]
        return Apply(self, [x, scale, g, means, inverses, *self._valid(valid)], outputs)

    def perform(self, node: Apply, inputs: Values, output_storage: list[list[Any]]) -> None:
        x, scale, g, means, inverses, *valid = inputs
        dx = np.zeros_like(x)
        dscale, dshift = np.zeros(x.shape[1]), np.zeros(x.shape[1])
        for group, rows in self._groups(x, valid):
            part, slope = x[rows].astype(np.float64), g[rows].astype(np.float64)
            values = max(1, part.size // x.shape[1])
            axes, inverse = _but_channels(x.ndim), _across(inverses[group], x.ndim)
            normal = (part - _across(means[group], x.ndim)) * inverse
            sums, products = slope.sum(axes), (slope * normal).sum(axes)
            mean, along = _across(sums / values, x.ndim), _across(products / values, x.ndim)
            dx[rows] = _across(scale, x.ndim) * inverse * (slope - mean - normal * along)
            dscale += products
            dshift += sums
        for storage, result in zip(output_storage, (dx, dscale, dshift), strict=True):
            storage[0] = result.astype(x.dtype)

    def infer_shape(self, fgraph: Any, node: Apply, shapes: list[tuple]) -> list[tuple]:
        return [shapes[0], shapes[1], shapes[1]]


class BatchNormInference(SameShapeOp):
    """Normalisation by given statistics, as `batch_norm_inference` defines it."""

    __props__ = ("epsilon",)

    def __init__(self, epsilon: float = 1e-5) -> None:
        self.epsilon = positive_float("BatchNormInference", "epsilon", epsilon)

    def make_node(self, x: Any, scale: Any, shift: Any, mean: Any, variance: Any) -> Apply:
        x = _images(self, x)
        vectors = {"scale": scale, "shift": shift, "mean": mean, "variance": variance}
        vectors = {name: tensor_input(self, name, value, 1) for name, value in vectors.items()}
        dtype = same_dtype(self, x=x, **vectors)
        _channels(self, x, **vectors)
        return Apply(self, [x, *vectors.values()], [pt.tensor(dtype=dtype, shape=x.type.shape)])

    def perform(self, node: Apply, inputs: Values, output_storage: list[list[Any]]) -> None:
        x, scale, shift, mean, variance = inputs
        _check_lengths(self, x, scale=scale, shift=shift, mean=mean, variance=variance)
        inverse = scale / np.sqrt(variance + x.dtype.type(self.epsilon))
        centred = x - _across(mean, x.ndim)
        output_storage[0][0] = centred * _across(inverse, x.ndim) + _across(shift, x.ndim)

    def pullback(self, inputs: Values, outputs: Values, cotangents: Values) -> list[Any]:
        x, scale, _, mean, variance = inputs
        (g,) = cotangents
        inverse = self.inverse(variance)
        across = ("x", 0, *["x"] * (x.type.ndim - 2))
        axes = _but_channels(x.type.ndim)
        sums = g.sum(axis=axes)
        centred = (x - mean.dimshuffle(across)) * inverse.dimshuffle(across)
        products = (g * centred).sum(axis=axes)
        factor = scale * inverse
        half = np.asarray(-0.5, x.type.dtype)
        return [
            g * factor.dimshuffle(across),
            products,
            sums,
            -factor * sums,
            half * factor * inverse * products,
        ]

    def inverse(self, variance: TensorVariable) -> TensorVariable:
        """Graph of the inverse of the standard deviation."""
        one, epsilon = (np.asarray(n, variance.type.dtype) for n in (1, self.epsilon))
        return cast(TensorVariable, one / pt.sqrt(variance + epsilon))


def _images(op: TensorOp, x: Any) -> TensorVariable:
    """Return x, if it is (batch, unit) or (batch, channel, row, column)."""
    x = pt.as_tensor_variable(x)
    if x.type.ndim not in (2, 4) or x.type.dtype not in FLOATS:
        raise TypeError(
            f"{op}: x must be a 2- or 4-dimensional tensor of {' or '.join(FLOATS)}, got {x.type}"
        )
    return x


def _channels(op: TensorOp, x: TensorVariable, **vectors: TensorVariable) -> Length:
    lengths = (vector.type.shape[0] for vector in vectors.values())
    what = f"channels of x and lengths of {' and '.join(vectors)}"
    return same_length(op, what, x.type.shape[1], *lengths)


def _check_lengths(op: TensorOp, x: np.ndarray, **vectors: np.ndarray) -> None:
    for name, vector in vectors.items():
        if len(vector) != x.shape[1]:
            raise ValueError(f"{op}: x has {x.shape[1]} channels, {name} has {len(vector)}")


def _but_channels(ndim: int) -> tuple[int, ...]:
    return (0, *range(2, ndim))


def _across(vector: np.ndarray, ndim: int) -> np.ndarray:
    """A number of each channel, to be combined with images."""
    return vector.reshape(-1, *[1] * (ndim - 2))


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
