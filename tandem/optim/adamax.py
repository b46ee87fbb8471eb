"""Adamax."""

from dataclasses import dataclass
from typing import Any

from tandem.optim.adam import Moments
from tandem.optim.optimizer import OPTIMIZERS, Numbers, Stepped, decayed, in_dtype


@OPTIMIZERS.register("adamax")
@dataclass(frozen=True)
class Adamax(Moments):
    """Adamax (Kingma and Ba 2015, arXiv 1412.6980, section 7.1).

    With step t from 1: ``m <- b1 m + (1 - b1) g``, ``u <- max(b2 u, abs(g))``, then
    ``w <- w - lr / (1 - b1**t) m / (u + epsilon)``. Weight decay is added to the gradient:
    ``g <- g + wd w``.
    """

    @property
    def states(self) -> tuple[str, ...]:
        return ("first_moment", "infinity_norm")

    def numbers(self, updates: Any) -> dict[str, Any]:
        return {"rate_factor": 1 / (1 - self.adam_beta1 ** (updates + 1))}

    def step(
        self, weight: Any, states: Any, gradient: Any, rate: Any, decay: float, numbers: Numbers
    ) -> Stepped:
        import pytensor.tensor as pt

        gradient, dtype = decayed(gradient, weight, decay), weight.dtype
        kept, rest = in_dtype(self.adam_beta1, dtype), in_dtype(1 - self.adam_beta1, dtype)
        first = kept * states[0] + rest * gradient
        norm = pt.maximum(in_dtype(self.adam_beta2, dtype) * states[1], pt.abs(gradient))
        epsilon = in_dtype(self.adam_epsilon, dtype)
        return weight - rate * numbers["rate_factor"] * first / (norm + epsilon), (first, norm)
