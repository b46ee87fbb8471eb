"""Stages of a batch normalisation, which ranks can share, and what they compute, in NumPy.

What rows have in common are two sums for each channel, in the forward and in the backward pass:
ranks that have some of the rows each add up theirs, and need no more of the others.
"""

# A make_node names its inputs, in place of the *inputs of PyTensor's Op.
# mypy: disable-error-code=override

from collections.abc import Collection
from typing import Any

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
    same_dtype,
    same_length,
    same_shape,
    tensor_input,
)


class ByChannel(TensorOp):
    """Base of Ops of images and numbers of each channel, with `valid` as an optional last input.

    Images are (batch, channel, row, column) or (batch, unit), of float32 or float64.
    """

    __props__: tuple[str, ...] = ()

    def _node_inputs(
        self, x: Any, images: Collection[str] = (), **inputs: Any
    ) -> tuple[list[TensorVariable], Length]:
        """Check x and other inputs, in their order; return them and the number of channels.

        Those named in `images` are shaped like x, the others have a number for each channel, and
        all have one dtype.
        """
        x = pt.as_tensor_variable(x)
        if x.type.ndim not in (2, 4) or x.type.dtype not in FLOATS:
            raise TypeError(
                f"{self}: x must be a 2- or 4-dimensional tensor of {' or '.join(FLOATS)}, got"
                f" {x.type}"
            )
        found = {
            name: tensor_input(self, name, value, x.type.ndim if name in images else 1)
            for name, value in inputs.items()
        }
        same_dtype(self, x=x, **found)
        for name in images:
            same_shape(self, f"x and {name}", x.type.shape, found[name].type.shape)
        vectors = {name: value for name, value in found.items() if name not in images}
        what = f"channels of x and lengths of {' and '.join(vectors)}"
        lengths = (vector.type.shape[0] for vector in vectors.values())
        return [x, *found.values()], same_length(self, what, x.type.shape[1], *lengths)

    def _valid(self, valid: Any) -> list[TensorVariable]:
        """The number of valid rows as an optional last input."""
        return [] if valid is None else [tensor_input(self, "valid", valid, 0, ("int64",))]

    def _sums(self, sums: Any, dtype: str, channels: Length) -> TensorVariable:
        """Check two sums of each channel."""
        sums = tensor_input(self, "sums", sums, 2, (dtype,))
        same_shape(self, "sums and (2, channel)", sums.type.shape, (2, channels))
        return sums


# What the stages compute, of rows that are all valid, float64


def channel_sums(x: np.ndarray, pivot: np.ndarray) -> np.ndarray:
    """Sums of ``x - pivot`` and of its square, (2, channel)."""
    moved = x.astype(np.float64) - across(pivot, x)
    return np.stack([moved.sum(_axes(x)), (moved * moved).sum(_axes(x))])


def statistics(
    sums: np.ndarray, pivot: np.ndarray, count: float, epsilon: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean, unbiased variance and inverse of the standard deviation, of `count` values."""
    values = max(1.0, count)
    moved = sums[0] / values
    variance = np.maximum(sums[1] / values - moved**2, 0)
    unbiased = variance * values / max(1.0, count - 1)
    return (pivot + moved) * (count > 0), unbiased, 1 / np.sqrt(variance + epsilon)


def normalized(
    x: np.ndarray, scale: np.ndarray, shift: np.ndarray, mean: np.ndarray, inverse: np.ndarray
) -> np.ndarray:
    return (x - across(mean, x)) * across(inverse * scale, x) + across(shift, x)


def gradient_sums(
    x: np.ndarray, g: np.ndarray, mean: np.ndarray, inverse: np.ndarray
) -> np.ndarray:
    """Gradients of scale and shift, (2, channel)."""
    slope = g.astype(np.float64)
    normal = (x.astype(np.float64) - across(mean, x)) * across(inverse, x)
    return np.stack([(slope * normal).sum(_axes(x)), slope.sum(_axes(x))])


def gradient(
    x: np.ndarray,
    g: np.ndarray,
    scale: np.ndarray,
    mean: np.ndarray,
    inverse: np.ndarray,
    sums: np.ndarray,
    count: float,
) -> np.ndarray:
    """Gradient of x from both sums over `count` values."""
    along, level = (across(each / max(1.0, count), x) for each in sums)
    normal = (x.astype(np.float64) - across(mean, x)) * across(inverse, x)
    return across(scale * inverse, x) * (g - level - normal * along)


def across(vector: np.ndarray, x: np.ndarray) -> np.ndarray:
    """A number of each channel, to be combined with images."""
    return vector.reshape(-1, *[1] * (x.ndim - 2))


def _axes(x: np.ndarray) -> tuple[int, ...]:
    """All axes but that of the channels."""
    return (0, *range(2, x.ndim))


def _valid_rows(x: np.ndarray, valid: list[Any]) -> slice:
    return slice(0, max(0, min(int(valid[0]), len(x))) if valid else len(x))


class ChannelSums(ByChannel):
    """Sums of each channel, about a pivot: ``ChannelSums()(x, pivot)``, or with `valid`.

    The result, float64 (2, channel), are the sums of ``x - pivot`` and of its square over the valid
    rows and their pixels. About a pivot near the mean, they give the variance with few digits lost.
    """

    def make_node(self, x: Any, pivot: Any, valid: Any = None) -> Apply:
        inputs, channels = self._node_inputs(x, pivot=pivot)
        output = pt.tensor(dtype="float64", shape=(2, channels))
        return Apply(self, [*inputs, *self._valid(valid)], [output])

    def perform(self, node: Apply, inputs: Values, output_storage: list[list[Any]]) -> None:
        x, pivot, *valid = inputs
        output_storage[0][0] = channel_sums(x[_valid_rows(x, valid)], pivot)

    def infer_shape(self, fgraph: Any, node: Apply, shapes: list[tuple]) -> list[tuple]:
        return [(pt.constant(2, dtype="int64"), shapes[0][1])]


class BatchNormBySums(ByChannel):
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
        inputs, channels = self._node_inputs(x, scale=scale, shift=shift, pivot=pivot)
        sums = self._sums(sums, "float64", channels)
        count = tensor_input(self, "count", count, 0, ("float64",))
        image = inputs[0].type
        vectors = [pt.tensor(dtype=image.dtype, shape=(channels,)) for _ in range(3)]
        return Apply(self, [*inputs, sums, count, *self._valid(valid)], [image(), *vectors])

    def perform(self, node: Apply, inputs: Values, output_storage: list[list[Any]]) -> None:
        x, scale, shift, pivot, sums, count, *valid = inputs
        mean, unbiased, inverse = statistics(sums, pivot, float(count), self.epsilon)
        y = np.empty_like(x)
        y[...] = across(shift, x)
        rows = _valid_rows(x, valid)
        y[rows] = normalized(x[rows], scale, shift, mean, inverse)
        for storage, result in zip(output_storage, (y, mean, unbiased, inverse), strict=True):
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


class ChannelGradientSums(ByChannel):
    """Sums of each channel in the gradient of `BatchNormBySums`.

    ``ChannelGradientSums()(x, g, mean, inverse)``, or with `valid`, of the valid rows: the sums of
    ``g (x - mean) inverse`` and of g, (2, channel), which are the gradients of scale and shift.
    """

    def make_node(self, x: Any, g: Any, mean: Any, inverse: Any, valid: Any = None) -> Apply:
        inputs, channels = self._node_inputs(x, ("g",), g=g, mean=mean, inverse=inverse)
        output = pt.tensor(dtype=inputs[0].type.dtype, shape=(2, channels))
        return Apply(self, [*inputs, *self._valid(valid)], [output])

    def perform(self, node: Apply, inputs: Values, output_storage: list[list[Any]]) -> None:
        x, g, mean, inverse, *valid = inputs
        rows = _valid_rows(x, valid)
        output_storage[0][0] = gradient_sums(x[rows], g[rows], mean, inverse).astype(x.dtype)

    def infer_shape(self, fgraph: Any, node: Apply, shapes: list[tuple]) -> list[tuple]:
        return [(pt.constant(2, dtype="int64"), shapes[0][1])]


class BatchNormBySumsGrad(SameShapeOp, ByChannel):
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
        inputs, channels = self._node_inputs(x, ("g",), g=g, **vectors)
        sums = self._sums(sums, inputs[0].type.dtype, channels)
        count = tensor_input(self, "count", count, 0, ("float64",))
        return Apply(self, [*inputs, sums, count, *self._valid(valid)], [inputs[0].type()])

    def perform(self, node: Apply, inputs: Values, output_storage: list[list[Any]]) -> None:
        x, g, scale, mean, inverse, sums, count, *valid = inputs
        rows, dx = _valid_rows(x, valid), np.zeros_like(x)
        dx[rows] = gradient(x[rows], g[rows], scale, mean, inverse, sums, float(count))
        output_storage[0][0] = dx
