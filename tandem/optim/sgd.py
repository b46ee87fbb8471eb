"""Stochastic gradient descent with momentum."""

from dataclasses import dataclass
from typing import Any

from tandem.errors import InputError
from tandem.optim.optimizer import OPTIMIZERS, Numbers, Optimizer, Stepped
from tandem.registry import setting

_SWITCH = "true or false"


@OPTIMIZERS.register("sgd")
@dataclass(frozen=True)
class SGD(Optimizer):
    """SGD with momentum, or Nesterov's form of it; `tandem.ops.momentum_step` has the equations."""

    states = ("momentum",)
    is_linear = True

    use_momentum: bool = setting(True, "sgd: momentum; false: plain SGD", _SWITCH)
    momentum: float = setting(
        0.9,
        "sgd: fraction of the velocity kept from step to step",
        "a number of at least 0 and below 1",
        ge=0,
        lt=1,
    )
    use_nesterov_momentum: bool = setting(False, "sgd: Nesterov momentum", _SWITCH)

    def __post_init__(self) -> None:
        if self.use_nesterov_momentum and not self.use_momentum:
            raise InputError(
                "use_nesterov_momentum is true while use_momentum is false: Nesterov's is a form "
                "of momentum, so set use_momentum to true or both to false"
            )

    def step(
        self, weight: Any, states: Any, gradient: Any, rate: Any, decay: float, numbers: Numbers
    ) -> Stepped:
        from tandem.ops import momentum_step

        (velocity,) = states
        kept = self.momentum if self.use_momentum else 0.0
        weight, velocity = momentum_step(
            weight, velocity, gradient, rate, kept, decay, self.use_nesterov_momentum
        )
        return weight, (velocity,)
