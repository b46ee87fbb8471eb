"""Dropout masks by a counter-based generator: a pure function of seed, epoch and picture."""

# A make_node names its inputs, in place of the *inputs of PyTensor's Op.
# mypy: disable-error-code=override

from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.gradient import disconnected_type
from pytensor.graph.basic import Apply
from pytensor.tensor.variable import TensorVariable

from tandem.ops.base import TensorOp, Values, float_dtype, positive_int, tensor_input
from tandem.philox import Purpose, words


class DropoutMask(TensorOp):
    """The mask of kept units, as `dropout_mask` defines it."""

    __props__ = ("rate", "layer", "units", "dtype")

    def __init__(self, rate: float, layer: int, units: int, dtype: str = "float32") -> None:
        owner = type(self).__name__
        if not 0 <= rate < 1:
            raise ValueError(f"{owner}: rate must be in [0, 1), got {rate}")
        self.rate = float(rate)
        self.layer = positive_int(owner, "layer", layer, least=0)
        self.units = positive_int(owner, "units", units)
        self.dtype = float_dtype(owner, dtype)

    @property
    def purpose(self) -> int:
        return int(Purpose.DROPOUT) + self.layer

    @property
    def threshold(self) -> int:
        return round(self.rate * 2**32)

    def make_node(self, seed: Any, epoch: Any, indices: Any) -> Apply:
        seed = tensor_input(self, "seed", seed, 0, ("int64",))
        epoch = tensor_input(self, "epoch", epoch, 0, ("int64",))
        indices = tensor_input(self, "indices", indices, 1, ("int64",))
        mask = pt.tensor(dtype=self.dtype, shape=(*indices.type.shape, self.units))
        return Apply(self, [seed, epoch, indices], [mask])

    def perform(self, node: Apply, inputs: Values, output_storage: list[list[Any]]) -> None:
        seed, epoch, indices = inputs
        random = words(int(seed), int(epoch), indices, self.purpose, self.units)
        output_storage[0][0] = (random >= self.threshold).astype(self.dtype)

    def infer_shape(self, fgraph: Any, node: Apply, shapes: list[tuple]) -> list[tuple]:
        return [(shapes[2][0], pt.constant(self.units, dtype="int64"))]

    def connection_pattern(self, node: Apply) -> list[list[bool]]:
        return [[False], [False], [False]]

    def pullback(self, inputs: Values, outputs: Values, cotangents: Values) -> list[Any]:
        return [disconnected_type() for _ in inputs]


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
