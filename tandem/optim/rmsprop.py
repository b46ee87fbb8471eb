"""RMSProp."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tandem.optim.optimizer import OPTIMIZERS, Optimizer
from tandem.registry import setting

if TYPE_CHECKING:
    from pytensor.tensor.variable import TensorVariable

    from tandem.optim.optimizer import Numbers, Stepped


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
        self,
        weight: "TensorVariable",
        states: "Sequence[TensorVariable]",
        gradient: "TensorVariable",
        rate: "TensorVariable",
        decay: float,
        numbers: "Numbers",
    ) -> "Stepped":
        import pytensor.tensor as pt

        (square,) = states
        kind = np.dtype(weight.dtype).type
        if decay:
            gradient = gradient + kind(decay) * weight
        kept, rest = kind(self.rmsprop_decay), kind(1 - self.rmsprop_decay)
        square = kept * square + rest * gradient * gradient
        epsilon = kind(self.rmsprop_epsilon)
        inside = self.rmsprop_epsilon_inside
        root = pt.sqrt(square + epsilon) if inside else pt.sqrt(square) + epsilon
        return weight - rate * gradient / root, (square,)
