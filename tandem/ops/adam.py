"""One step of Adam or AdamW, as one Op."""

# A make_node names its inputs, in place of the *inputs of PyTensor's Op.
# mypy: disable-error-code=override

from typing import Any

import numpy as np
from pytensor.graph.basic import Apply
from pytensor.tensor.variable import TensorVariable

from tandem.ops.base import SameShapeOp, Values, same_dtype, same_shape, tensor_input


class AdamStep(SameShapeOp):
    """New weights and moments, as `adam_step` defines them."""

    __props__ = ("beta1", "beta2", "decay", "is_decoupled")

    def __init__(self, beta1: float, beta2: float, decay: float, is_decoupled: bool) -> None:
        self.beta1, self.beta2, self.decay = float(beta1), float(beta2), float(decay)
        self.is_decoupled = bool(is_decoupled)

    def make_node(
        self,
        weight: Any,
        first: Any,
        second: Any,
        gradient: Any,
        rate: Any,
        rate_factor: Any,
        epsilon: Any,
    ) -> Apply:
        weight = tensor_input(self, "weight", weight, None)
        arrays = {"weight": weight}
        for name, value in {"first": first, "second": second, "gradient": gradient}.items():
            arrays[name] = tensor_input(self, name, value, weight.type.ndim)
        numbers = {
            name: tensor_input(self, name, value, 0)
            for name, value in {
                "rate": rate,
                "rate_factor": rate_factor,
                "epsilon": epsilon,
            }.items()
        }
        same_dtype(self, **arrays, **numbers)
        shapes = (array.type.shape for array in arrays.values())
        shape = same_shape(self, "weight, moments and gradient", *shapes)
        kind = weight.type.clone(shape=shape)
        return Apply(self, [*arrays.values(), *numbers.values()], [kind(), kind(), kind()])

    def perform(self, node: Apply, inputs: Values, output_storage: list[list[Any]]) -> None:
        weight, first, second, gradient, rate, rate_factor, epsilon = inputs
        number = weight.dtype.type
        beta1, beta2, decay = number(self.beta1), number(self.beta2), number(self.decay)
        if self.is_decoupled:
            weight = weight - rate * decay * weight
        else:
            gradient = gradient + decay * weight
        first = beta1 * first + number(1 - self.beta1) * gradient
        second = beta2 * second + number(1 - self.beta2) * gradient * gradient
        weight = weight - rate * rate_factor * first / (np.sqrt(second) + epsilon)
        for storage, value in zip(output_storage, (weight, first, second), strict=True):
            storage[0] = np.asarray(value)


def adam_step(
    weight: Any,
    moments: tuple[Any, Any],
    gradient: Any,
    rate: Any,
    rate_factor: Any,
    epsilon: Any,
    *,
    betas: tuple[float, float],
    decay: float,
    is_decoupled: bool,
) -> tuple[TensorVariable, TensorVariable, TensorVariable]:
    """Make one step of Adam, or of AdamW.

    ``m <- b1 m + (1 - b1) g``, ``v <- b2 v + (1 - b2) g**2``, then
    ``w <- w - lr f m / (sqrt(v) + e)``. With step t from 1, ``r = sqrt(1 - b2**t)``,
    ``f = r / (1 - b1**t)`` and ``e = r epsilon`` correct the bias of both moments: the form of
    Kingma and Ba 2015, arXiv 1412.6980, end of section 2. Adam decays by ``g <- g + wd w``, AdamW
    by ``w <- w - lr wd w`` (Loshchilov and Hutter 2019, arXiv 1711.05101, algorithm 2).

    Parameters
    ----------
    weight, gradient : float, of one shape
        w and g.
    moments : pair of float, of that shape
        m and v.
    rate, rate_factor, epsilon : float scalars of the same dtype
        lr, f and e.
    betas : pair of float
        b1 and b2.
    decay : float
        wd.
    is_decoupled : bool
        Whether it decays as AdamW.

    Returns
    -------
    weight, first moment, second moment
        The new values, of the types of the old.
    """
    op = AdamStep(*betas, decay, is_decoupled)
    new_weight, first, second = op(weight, *moments, gradient, rate, rate_factor, epsilon)
    return new_weight, first, second
