"""Batch normalisation over all rows of a minibatch, in stages that ranks can share.

What all rows have in common are two sums for each channel, in the forward and in the backward pass:
ranks that have some of the rows each add up theirs, and need no more of the others.
"""

# A make_node names its inputs, in place of the *inputs of PyTensor's Op.
# mypy: disable-error-code=override

import math
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.gradient import DisconnectedType, disconnected_type
from pytensor.graph.basic import Apply
from pytensor.tensor.variable import TensorVariable

from tandem.ops.base import (
    FLOATS,
    SameShapeOp,
    TensorOp,
    Values,
    positive_float,
    same_dtype,
    same_length,
    same_shape,
    tensor_input,
)


class _ByChannel(TensorOp):
    """Base of Ops of images and numbers of each channel, with `valid` as an optional last input.

    Images are (batch, channel, row, column) or (batch, unit), of float32 or float64.
    """

    __props__: tuple[str, ...] = ()

    def _node_inputs(
        self, x: Any, vectors: dict[str, Any], valid: Any, **others: Any
    ) -> tuple[list[TensorVariable], Any]:
        """All inputs, in the order x, `others`, `vectors` and valid, and the number of channels.

        `vectors` have a number for each channel, and all have one dtype; `others` are images.
        """
        x = pt.as_tensor_variable(x)
        if x.type.ndim not in (2, 4) or x.type.dtype not in FLOATS:
            raise TypeError(
                f"{self}: x must be a 2- or 4-dimensional tensor of {' or '.join(FLOATS)}, got"
                f" {x.type}"
            )
        images = {
            name: tensor_input(self, name, value, x.type.ndim) for name, value in others.items()
        }
        vectors = {name: tensor_input(self, name, value, 1) for name, value in vectors.items()}
        same_dtype(self, x=x, **images, **vectors)
        for name, value in images.items():
            same_shape(self, f"x and {name}", x.type.shape, value.type.shape)
        what = f"channels of x and lengths of {' and '.join(vectors)}"
        lengths = (vector.type.shape[0] for vector in vectors.values())
        channels = same_length(self, what, x.type.shape[1], *lengths)
        last = [] if valid is None else [tensor_input(self, "valid", valid, 0, ("int64",))]
        return [x, *images.values(), *vectors.values(), *last], channels

    def _sums(self, sums: Any, dtypes: tuple[str, ...], channels: Any) -> TensorVariable:
        """Check two sums of each channel."""
        sums = tensor_input(self, "sums", sums, 2, dtypes)
        same_shape(self, "sums and (2, channel)", sums.type.shape, (2, channels))
        return sums


def _valid_rows(x: np.ndarray, valid: list[Any]) -> slice:
    return slice(0, max(0, min(int(valid[0]), len(x))) if valid else len(x))


def _axes(x: Any) -> tuple[int, ...]:
    """All axes but that of the channels."""
    return (0, *range(2, x.ndim))


def _across(vector: np.ndarray, x: np.ndarray) -> np.ndarray:
    """A number of each channel, to be combined with images."""
    return vector.reshape(-1, *[1] * (x.ndim - 2))


class ChannelSums(_ByChannel):
    """Sums of each channel, about a pivot: ``ChannelSums()(x, pivot)``, or with `valid`.

    The result, float64 (2, channel), are the sums of ``x - pivot`` and of its square over the valid
    rows and their pixels. About a pivot near the mean, they give the variance with few digits lost.
    """

    def make_node(self, x: Any, pivot: Any, valid: Any = None) -> Apply:
        inputs, channels = self._node_inputs(x, {"pivot": pivot}, valid)
        return Apply(self, inputs, [pt.tensor(dtype="float64", shape=(2, channels))])

    def perform(self, node: Apply, inputs: Values, output_storage: list[list[Any]]) -> None:
        x, pivot, *valid = inputs
        moved = x[_valid_rows(x, valid)].astype(np.float64) - _across(pivot, x)
        output_storage[0][0] = np.stack([moved.sum(_axes(x)), (moved * moved).sum(_axes(x))])

    def infer_shape(self, fgraph: Any, node: Apply, shapes: list[tuple]) -> list[tuple]:
        return [(pt.constant(2, dtype="int64"), shapes[0][1])]


class BatchNormBySums(_ByChannel):
    """Normalisation by `ChannelSums` of all rows, of which x may be a part.

    ``BatchNormBySums(epsilon)(x, scale, shift, pivot, sums, count)``, or with `valid`, where
    `count`, float64, is the number of values of a channel in the sums. Outputs are y, the mean and
    the unbiased variance, as `global_batch_norm` returns them, and the inverse of the standard
    deviation. Only y has a gradient; that with respect to x is as if the sums were of x.
    """

    __props__ = ("epsilon",)

    def __init__(self, epsilon: float = 1e-5) -> None:
        self.epsilon = positive_float("BatchNormBySums", "epsilon", epsilon)

    def make_node(
        self, x: Any, scale: Any, shift: Any, pivot: Any, sums: Any, count: Any, valid: Any = None
    ) -> Apply:
        vectors = {"scale": scale, "shift": shift, "pivot": pivot}
        (x, *given), channels = self._node_inputs(x, vectors, valid)
        sums = self._sums(sums, ("float64",), channels)
        count = tensor_input(self, "count", count, 0, ("float64",))
        vector = pt.tensor(dtype=x.type.dtype, shape=(channels,)).type
        outputs = [x.type(), vector(), vector(), vector()]
        return Apply(self, [x, *given[:3], sums, count, *given[3:]], outputs)

    def perform(self, node: Apply, inputs: Values, output_storage: list[list[Any]]) -> None:
        x, scale, shift, pivot, (sums, squares), count, *valid = inputs
        values = max(1.0, count)
        moved = sums / values
        variance = np.maximum(squares / values - moved**2, 0)
        mean = (pivot + moved) * (count > 0)
        inverse = 1 / np.sqrt(variance + self.epsilon)
        y = np.empty_like(x)
        y[...] = _across(shift, x)
        rows = _valid_rows(x, valid)
        y[rows] += (x[rows] - _across(mean, x)) * _across(inverse * scale, x)
        unbiased = variance * values / max(1.0, count - 1)
        results = (y, mean, unbiased, inverse)
        for storage, result in zip(output_storage, results, strict=True):
            storage[0] = result.astype(x.dtype)

    def infer_shape(self, fgraph: Any, node: Apply, shapes: list[tuple]) -> list[tuple]:
        return [shapes[0], *[(shapes[0][1],)] * 3]

    def connection_pattern(self, node: Apply) -> list[list[bool]]:
        return [[index < 3, False, False, False] for index, _ in enumerate(node.inputs)]

    def pullback(self, inputs: Values, outputs: Values, cotangents: Values) -> list[Any]:
        x, scale, _, _, _, count, *valid = inputs
        (g, *_), (_, mean, _, inverse) = cotangents, outputs
        without = [disconnected_type() for _ in inputs]
        if isinstance(g.type, DisconnectedType):
            return without
        sums = ChannelGradientSums()(x, g, mean, inverse, *valid)
        dx = BatchNormBySumsGrad()(x, g, scale, mean, inverse, sums, count, *valid)
        return [dx, sums[0], sums[1], *without[3:]]


class ChannelGradientSums(_ByChannel):
    """Sums of each channel in the gradient of `BatchNormBySums`.

    ``ChannelGradientSums()(x, g, mean, inverse)``, or with `valid`, of the valid rows: the sums of
    ``g (x - mean) inverse`` and of g, (2, channel), which are the gradients of scale and shift.
    """

    def make_node(self, x: Any, g: Any, mean: Any, inverse: Any, valid: Any = None) -> Apply:
        vectors = {"mean": mean, "inverse": inverse}
        inputs, channels = self._node_inputs(x, vectors, valid, g=g)
        return Apply(self, inputs, [pt.tensor(dtype=inputs[0].type.dtype, shape=(2, channels))])

    def perform(self, node: Apply, inputs: Values, output_storage: list[list[Any]]) -> None:
        x, g, mean, inverse, *valid = inputs
        rows = _valid_rows(x, valid)
        slope = g[rows].astype(np.float64)
        normal = (x[rows].astype(np.float64) - _across(mean, x)) * _across(inverse, x)
        found = np.stack([(slope * normal).sum(_axes(x)), slope.sum(_axes(x))])
        output_storage[0][0] = found.astype(x.dtype)

    def infer_shape(self, fgraph: Any, node: Apply, shapes: list[tuple]) -> list[tuple]:
        return [(pt.constant(2, dtype="int64"), shapes[0][1])]


class BatchNormBySumsGrad(SameShapeOp, _ByChannel):
    """Gradient of `BatchNormBySums` with respect to x.

    ``BatchNormBySumsGrad()(x, g, scale, mean, inverse, sums, count)``, or with `valid`, where
    `sums` are the `ChannelGradientSums` of all rows. It is 0 in rows that are not valid.
    """

    def make_node(
        self,
        x: Any,
        g: Any,
        scale: Any,
        mean: Any,
        inverse: Any,
        sums: Any,
        count: Any,
        valid: Any = None,
    ) -> Apply:
        vectors = {"scale": scale, "mean": mean, "inverse": inverse}
        (x, *given), channels = self._node_inputs(x, vectors, valid, g=g)
        sums = self._sums(sums, (x.type.dtype,), channels)
        count = tensor_input(self, "count", count, 0, ("float64",))
        return Apply(self, [x, *given[:4], sums, count, *given[4:]], [x.type()])

    def perform(self, node: Apply, inputs: Values, output_storage: list[list[Any]]) -> None:
        x, g, scale, mean, inverse, sums, count, *valid = inputs
        rows, values = _valid_rows(x, valid), max(1.0, float(count))
        along, level = (_across(each / values, x) for each in sums)
        inverse = _across(inverse, x)
        normal = (x[rows].astype(np.float64) - _across(mean, x)) * inverse
        dx = np.zeros_like(x)
        dx[rows] = _across(scale, x) * inverse * (g[rows] - level - normal * along)
        output_storage[0][0] = dx


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
