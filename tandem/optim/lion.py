"""Lion."""

from dataclasses import dataclass
from typing import Any

from tandem.optim.optimizer import OPTIMIZERS, Numbers, Optimizer, Stepped, decayed, in_dtype
from tandem.registry import setting

_BETA = "a number of at least 0 and below 1"


@OPTIMIZERS.register("lion")
@dataclass(frozen=True)
class Lion(Optimizer):
    """Lion (Chen et al. 2023, "Symbolic discovery of optimization algorithms", algorithm 2).

    ``w <- w - lr sign(b1 m + (1 - b1) g)``, then ``m <- b2 m + (1 - b2) g``. Weight decay is added
    to the gradient, ``g <- g + wd w``; the paper's has `decoupled_decay`.
    """

    states = ("momentum",)

    lion_beta1: float = setting(
        0.9,
        "lion: fraction of the momentum in the sign of a step",
        _BETA,
        omit_default=True,
        ge=0,
        lt=1,
    )
    lion_beta2: float = setting(
        0.99,
        "lion: fraction of the momentum kept in a step",
        _BETA,
        omit_default=True,
        ge=0,
        lt=1,
    )

    def step(
        self, weight: Any, states: Any, gradient: Any, rate: Any, decay: float, numbers: Numbers
    ) -> Stepped:
        import pytensor.tensor as pt

        gradient, dtype = decayed(gradient, weight, decay), weight.dtype

        def mixed(kept: float) -> Any:
            return in_dtype(kept, dtype) * states[0] + in_dtype(1 - kept, dtype) * gradient

        return weight - rate * pt.sign(mixed(self.lion_beta1)), (mixed(self.lion_beta2),)
