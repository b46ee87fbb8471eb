"""Dropout by a counter-based generator: a pure function of seed, epoch and picture."""

# A make_node names its inputs, in place of the *inputs of PyTensor's Op.
# mypy: disable-error-code=override

from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.gradient import disconnected_type
from pytensor.graph.basic import Apply
from pytensor.tensor.variable import TensorVariable

from tandem.ops.base import (
    FLOATS,
    TensorOp,
    Values,
    float_dtype,
    positive_int,
    same_length,
    tensor_input,
)
from tandem.philox import Purpose, words


class _DropoutOp(TensorOp):
    """Base of the Ops that drop units of a layer."""

    rate: float
    layer: int
    first: int

    def _set_layer(self, rate: float, layer: int, first: int) -> None:
        owner = type(self).__name__
        if not 0 <= rate < 1:
            raise ValueError(f"{owner}: rate must be in [0, 1), got {rate}")
        self.rate = float(rate)
        self.layer = positive_int(owner, "layer", layer, least=0)
        self.first = positive_int(owner, "first", first, least=0)

    @property
    def purpose(self) -> int:
        return int(Purpose.DROPOUT) + self.layer

    @property
    def threshold(self) -> int:
        return round(self.rate * 2**32)

    def _kept(
        self, seed: np.ndarray, epoch: np.ndarray, indices: np.ndarray, units: int
    ) -> np.ndarray:
        """Return whether each of `units` units of each picture is kept, from unit `first` on."""
        last = self.first + units
        random = words(int(seed), int(epoch), indices, self.purpose, last)[:, self.first :]
        return random >= self.threshold

    def _keys(self, seed: Any, epoch: Any, indices: Any) -> list[TensorVariable]:
        return [
            tensor_input(self, "seed", seed, 0, ("int64",)),
            tensor_input(self, "epoch", epoch, 0, ("int64",)),
            tensor_input(self, "indices", indices, 1, ("int64",)),
        ]


class DropoutMask(_DropoutOp):
    """The mask of kept units, as `dropout_mask` defines it.

    With `first` it is that of the `units` units from that one on, a part of a wider layer's mask.
    """

    __props__ = ("rate", "layer", "units", "dtype", "first")

    def __init__(
        self, rate: float, layer: int, units: int, dtype: str = "float32", first: int = 0
    ) -> None:
        self._set_layer(rate, layer, first)
        self.units = positive_int("DropoutMask", "units", units, least=0)
        self.dtype = float_dtype("DropoutMask", dtype)

    def make_node(self, seed: Any, epoch: Any, indices: Any) -> Apply:
        seed, epoch, indices = self._keys(seed, epoch, indices)
        mask = pt.tensor(dtype=self.dtype, shape=(*indices.type.shape, self.units))
        return Apply(self, [seed, epoch, indices], [mask])

    def perform(self, node: Apply, inputs: Values, output_storage: list[list[Any]]) -> None:
        seed, epoch, indices = inputs
        kept = self._kept(seed, epoch, indices, self.units)
        output_storage[0][0] = kept.astype(self.dtype)

    def infer_shape(self, fgraph: Any, node: Apply, shapes: list[tuple]) -> list[tuple]:
        return [(shapes[2][0], pt.constant(self.units, dtype="int64"))]

    def connection_pattern(self, node: Apply) -> list[list[bool]]:
        return [[False], [False], [False]]

    def pullback(self, inputs: Values, outputs: Values, cotangents: Values) -> list[Any]:
        return [disconnected_type() for _ in inputs]


class Dropout(_DropoutOp):
    """The product of a layer's outputs with a mask, as `dropout` defines it.

    The gradient is the same Op: it makes the mask again, which takes less than keeping it. With
    `first`, the units of x are those from that one on of a wider layer.
    """

    __props__ = ("rate", "layer", "factor", "first")

    def __init__(self, rate: float, layer: int, factor: float = 1.0, first: int = 0) -> None:
        self._set_layer(rate, layer, first)
        self.factor = float(factor)

    def make_node(self, x: Any, seed: Any, epoch: Any, indices: Any) -> Apply:
        x = pt.as_tensor_variable(x)
        if x.type.ndim not in (2, 4) or x.type.dtype not in FLOATS:
            raise TypeError(
                f"{self}: x must be a 2- or 4-dimensional tensor of {' or '.join(FLOATS)}, got"
                f" {x.type}"
            )
        keys = self._keys(seed, epoch, indices)
        batch = same_length(
            self, "rows of x and length of indices", x.type.shape[0], keys[2].type.shape[0]
        )
        y = pt.tensor(dtype=x.type.dtype, shape=(batch, *x.type.shape[1:]))
        return Apply(self, [x, *keys], [y])

    def perform(self, node: Apply, inputs: Values, output_storage: list[list[Any]]) -> None:
        x, seed, epoch, indices = inputs
        if len(indices) != len(x):
            raise ValueError(f"{self}: x has {len(x)} rows, indices has {len(indices)}")
        last = np.moveaxis(x, 1, -1)
        units = int(np.prod(x.shape[1:]))
        kept = self._kept(seed, epoch, indices, units)
        kept = np.moveaxis(kept.reshape(last.shape), -1, 1)
        output_storage[0][0] = np.where(kept, x * x.dtype.type(self.factor), x.dtype.type(0))

    def infer_shape(self, fgraph: Any, node: Apply, shapes: list[tuple]) -> list[tuple]:
        return [shapes[0]]

    def connection_pattern(self, node: Apply) -> list[list[bool]]:
        return [[True], [False], [False], [False]]

    def pullback(self, inputs: Values, outputs: Values, cotangents: Values) -> list[Any]:
        return [self(cotangents[0], *inputs[1:]), *(disconnected_type() for _ in inputs[1:])]


def dropout_mask(
    seed: Any,
    epoch: Any,
    indices: Any,
    *,
    rate: float,
    layer: int,
    units: int,
    dtype: str = "float32",
) -> TensorVariable:
    """Make a 0/1 mask that drops each unit of each picture with probability `rate`.

    Unit j of a picture is kept if and only if word j of ``philox.words(seed, epoch, index,
    Purpose.DROPOUT + layer, units)`` is at least ``round(rate * 2**32)``. So the mask depends on
    the picture and not on its position in a minibatch, and is the same on every device. Hinton et
    al. 2012, "Improving neural networks by preventing co-adaptation of feature detectors", for
    dropout; Salmon et al. 2011 for the generator.

    Parameters
    ----------
    seed, epoch : int64 scalar
        Random seed, and the epoch from 0, below 2**32: each a Python int, or symbolic.
    indices : int64 (batch,)
        Dataset index of each picture, below 2**32.
    rate : float
        Probability of being dropped, in [0, 1).
    layer : int
        Number of the dropout layer, from 0; layers are independent of each other.
    units : int
        Units per picture.

    Returns
    -------
    dtype (batch, units)
        1 where the unit is kept, else 0.

    Raises
    ------
    TypeError
        An input is not int64, or has another number of axes.
    ValueError
        `rate` is out of its range.
    """
    # PyTensor would give a Python int the smallest type that holds it.
    seed, epoch = (np.int64(n) if isinstance(n, int) else n for n in (seed, epoch))
    return DropoutMask(rate, layer, units, dtype)(seed, epoch, indices)


def dropout(
    x: Any, seed: Any, epoch: Any, indices: Any, *, rate: float, layer: int, factor: float = 1.0
) -> TensorVariable:
    """Multiply each unit of each picture by `factor`, or with probability `rate` by 0.

    Unit j of a picture is kept by the rule of `dropout_mask`. Units of images are counted pixel by
    pixel, in the order (row, column, channel) in which they lie in memory. A unit that is dropped
    is 0 even if it is infinite or NaN.

    Parameters
    ----------
    x : float (batch, unit) or (batch, channel, row, column)
    seed, epoch, indices, rate, layer
        As of `dropout_mask`.
    factor : float
        ``1 / (1 - rate)`` keeps the mean of what follows.
    """
    seed, epoch = (np.int64(n) if isinstance(n, int) else n for n in (seed, epoch))
    return Dropout(rate, layer, factor)(x, seed, epoch, indices)
