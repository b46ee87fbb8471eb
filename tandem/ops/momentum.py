"""One step of stochastic gradient descent with momentum, as one Op."""

# A make_node names its inputs, in place of the *inputs of PyTensor's Op.
# mypy: disable-error-code=override

from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Variable
from pytensor.tensor.variable import TensorVariable

from tandem.ops.base import SameShapeOp, Values, same_dtype, same_shape, tensor_input


class MomentumStep(SameShapeOp):
    """New weights and velocities, as `momentum_step` defines them."""

    __props__ = ("momentum", "decay", "nesterov")

    def __init__(self, momentum: float, decay: float, nesterov: bool) -> None:
        self.momentum = float(momentum)
        self.decay = float(decay)
        self.nesterov = bool(nesterov)

    def make_node(self, weight: Any, velocity: Any, gradient: Any, rate: Any) -> Apply:
        weight = tensor_input(self, "weight", weight, None)
        velocity = tensor_input(self, "velocity", velocity, weight.type.ndim)
        gradient = tensor_input(self, "gradient", gradient, weight.type.ndim)
        rate = tensor_input(self, "rate", rate, 0)
        same_dtype(self, weight=weight, velocity=velocity, gradient=gradient, rate=rate)
        shapes = (v.type.shape for v in (weight, velocity, gradient))
        shape = same_shape(self, "weight, velocity and gradient", *shapes)
        kind = weight.type.clone(shape=shape)
        return Apply(self, [weight, velocity, gradient, rate], [kind(), kind()])

    def perform(self, node: Apply, inputs: Values, output_storage: list[list[Any]]) -> None:
        number = inputs[0].dtype.type
        weight, velocity, gradient, rate = inputs
        kept, decay = number(self.momentum), number(self.decay)
        found = _stepped(weight, velocity, gradient, rate, kept, decay, self.nesterov)
        for storage, value in zip(output_storage, found, strict=True):
            storage[0] = np.asarray(value)


def _stepped(
    weight: Any, velocity: Any, gradient: Any, rate: Any, momentum: Any, decay: Any, nesterov: bool
) -> tuple[Any, Any]:
    """Compute a step of arrays, or of variables."""
    step = rate * (gradient + decay * weight)
    velocity = momentum * velocity - step
    return weight + (momentum * velocity - step if nesterov else velocity), velocity


def momentum_step(
    weight: Any,
    velocity: Any,
    gradient: Any,
    rate: Any,
    momentum: Any,
    decay: float,
    nesterov: bool,
) -> tuple[TensorVariable, TensorVariable]:
    """Make one step of stochastic gradient descent with momentum.

    ``v <- m v - lr (g + wd w)``, then ``w <- w + v``, or with Nesterov's momentum
    ``w <- w + m v - lr (g + wd w)``, both with the new v: the stored velocity is never the
    look-ahead. Krizhevsky, Sutskever, Hinton 2012, section 5; Sutskever et al. 2013, section 2, in
    the form in which the weights are those of the look-ahead.

    Parameters
    ----------
    weight, velocity, gradient : float, of one shape
        w, v and g.
    rate : float scalar of the same dtype
        lr.
    momentum : float or scalar variable
        m. One Op makes the step where it is a number.
    decay : float
        wd.

    Returns
    -------
    weight, velocity
        The new values, of the types of the old.
    """
    if isinstance(momentum, Variable):
        kept, wd = (pt.cast(number, weight.dtype) for number in (momentum, decay))
        return _stepped(weight, velocity, gradient, rate, kept, wd, nesterov)
    new_weight, new_velocity = MomentumStep(momentum, decay, nesterov)(
        weight, velocity, gradient, rate
    )
    return new_weight, new_velocity
