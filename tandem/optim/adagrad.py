"""Adagrad."""

from dataclasses import dataclass
from typing import Any

from tandem.optim.optimizer import OPTIMIZERS, Numbers, Optimizer, Stepped, decayed, in_dtype
from tandem.registry import setting


@OPTIMIZERS.register("adagrad")
@dataclass(frozen=True)
class Adagrad(Optimizer):
    """Adagrad (Duchi, Hazan and Singer 2011, "Adaptive subgradient methods for online learning").

    ``s <- s + g**2``, then ``w <- w - lr g / sqrt(s + epsilon)``. Weight decay is added to the
    gradient: ``g <- g + wd w``.
    """

    states = ("sum_of_squares",)

    adagrad_epsilon: float = setting(
        1e-6,
        "adagrad: added to the sum of squares, inside the root",
        "a number above 0",
        omit_default=True,
        gt=0,
    )

    def step(
        self, weight: Any, states: Any, gradient: Any, rate: Any, decay: float, numbers: Numbers
    ) -> Stepped:
        import pytensor.tensor as pt

        gradient, dtype = decayed(gradient, weight, decay), weight.dtype
        total = states[0] + pt.sqr(gradient)
        root = pt.sqrt(total + in_dtype(self.adagrad_epsilon, dtype))
        return weight - rate * gradient / root, (total,)
