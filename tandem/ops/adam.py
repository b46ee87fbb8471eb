"""One step of Adam or AdamW, as one Op."""

# A make_node names its inputs, in place of the *inputs of PyTensor's Op.
# mypy: disable-error-code=override

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Variable
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
        options = (self.beta1, self.beta2), self.decay, self.is_decoupled
        found = _stepped(np.sqrt, inputs[0].dtype.type, inputs, *options)
        for storage, value in zip(output_storage, found, strict=True):
            storage[0] = np.asarray(value)


def _stepped(
    sqrt: Callable[[Any], Any],
    number: Callable[[Any], Any],  # converts to the dtype of the arrays
    inputs: Values,
    betas: tuple[Any, Any],
    decay: float,
    is_decoupled: bool,
) -> tuple[Any, Any, Any]:
    """Compute a step of arrays, or of variables."""
    weight, first, second, gradient, rate, rate_factor, epsilon = inputs
    beta1, beta2 = betas
    if is_decoupled:
        weight = weight - rate * number(decay) * weight
    else:
        gradient = gradient + number(decay) * weight
    first = number(beta1) * first + number(1 - beta1) * gradient
    second = number(beta2) * second + number(1 - beta2) * gradient * gradient
    return weight - rate * rate_factor * first / (sqrt(second) + epsilon), first, second


def adam_step(
    weight: Any,
    moments: tuple[Any, Any],
    gradient: Any,
    rate: Any,
    rate_factor: Any,
    epsilon: Any,
    *,
    betas: tuple[Any, Any],
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
    betas : pair of float or of scalar variables
        b1 and b2. One Op makes the step where they are numbers.
    decay : float
        wd.
    is_decoupled : bool
        Whether it decays as AdamW.

    Returns
    -------
    weight, first moment, second moment
        The new values, of the types of the old.
    """
    inputs = (weight, *moments, gradient, rate, rate_factor, epsilon)
    if any(isinstance(beta, Variable) for beta in betas):
        number = partial(pt.cast, dtype=weight.dtype)
        return _stepped(pt.sqrt, number, inputs, betas, decay, is_decoupled)
    new_weight, first, second = AdamStep(*betas, decay, is_decoupled)(*inputs)
    return new_weight, first, second
