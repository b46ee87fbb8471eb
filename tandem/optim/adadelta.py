"""Adadelta."""

from dataclasses import dataclass
from typing import Any

from tandem.optim.optimizer import OPTIMIZERS, Numbers, Optimizer, Stepped, decayed, in_dtype
from tandem.registry import setting


@OPTIMIZERS.register("adadelta")
@dataclass(frozen=True)
class Adadelta(Optimizer):
    """Adadelta (Zeiler 2012, arXiv 1212.5701, algorithm 1).

    ``s <- a s + (1 - a) g**2``, ``u = g sqrt(d + epsilon) / sqrt(s + epsilon)``,
    ``d <- a d + (1 - a) u**2``, then ``w <- w - lr u``. Weight decay is added to the gradient:
    ``g <- g + wd w``.
    """

    states = ("mean_square", "mean_squared_step")

    adadelta_decay: float = setting(
        0.95,
        "adadelta: fraction of the mean squares kept in a step",
        "a number of at least 0 and below 1",
        omit_default=True,
        ge=0,
        lt=1,
    )
    adadelta_epsilon: float = setting(
        1e-6,
        "adadelta: added to the mean squares, inside the roots",
        "a number above 0",
        omit_default=True,
        gt=0,
    )

    def step(
        self, weight: Any, states: Any, gradient: Any, rate: Any, decay: float, numbers: Numbers
    ) -> Stepped:
        import pytensor.tensor as pt

        gradient, dtype = decayed(gradient, weight, decay), weight.dtype
        kept, rest = in_dtype(self.adadelta_decay, dtype), in_dtype(1 - self.adadelta_decay, dtype)
        epsilon = in_dtype(self.adadelta_epsilon, dtype)
        square = kept * states[0] + rest * pt.sqr(gradient)
        step = gradient * pt.sqrt(states[1] + epsilon) / pt.sqrt(square + epsilon)
        return weight - rate * step, (square, kept * states[1] + rest * pt.sqr(step))
