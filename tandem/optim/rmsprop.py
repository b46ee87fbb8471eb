"""RMSProp."""

from dataclasses import dataclass
from typing import Any

from tandem.optim.optimizer import OPTIMIZERS, Numbers, Optimizer, Stepped, decayed, in_dtype
from tandem.registry import setting


@OPTIMIZERS.register("rmsprop")
@dataclass(frozen=True)
class RMSProp(Optimizer):
    """RMSProp (Tieleman and Hinton 2012, lecture 6.5 of "Neural networks for machine learning").

    ``s <- a s + (1 - a) g**2``, then ``w <- w - lr g / (sqrt(s) + epsilon)``, or with
    `rmsprop_epsilon_inside` ``w <- w - lr g / sqrt(s + epsilon)``. Weight decay is added to the
    gradient: ``g <- g + wd w``.
    """

    states = ("mean_square",)

    rmsprop_decay: float = setting(
        0.99,
        "rmsprop: fraction of the mean square kept in a step",
        "a number of at least 0 and below 1",
        omit_default=True,
        ge=0,
        lt=1,
    )
    rmsprop_epsilon: float = setting(
        1e-8,
        "rmsprop: added to the root of the mean square",
        "a number above 0",
        omit_default=True,
        gt=0,
    )
    rmsprop_epsilon_inside: bool = setting(
        False,
        "rmsprop: rmsprop_epsilon is added to the mean square, inside the root",
        "true or false",
        omit_default=True,
    )

    def step(
        self, weight: Any, states: Any, gradient: Any, rate: Any, decay: float, numbers: Numbers
    ) -> Stepped:
        import pytensor.tensor as pt

        (square,) = states
        gradient, dtype = decayed(gradient, weight, decay), weight.dtype
        kept, rest = in_dtype(self.rmsprop_decay, dtype), in_dtype(1 - self.rmsprop_decay, dtype)
        square = kept * square + rest * gradient * gradient
        epsilon = in_dtype(self.rmsprop_epsilon, dtype)
        inside = self.rmsprop_epsilon_inside
        root = pt.sqrt(square + epsilon) if inside else pt.sqrt(square) + epsilon
        return weight - rate * gradient / root, (square,)
