"""Adam with Nesterov's momentum."""

from dataclasses import dataclass
from typing import Any

from tandem.optim.adam import Moments
from tandem.optim.optimizer import OPTIMIZERS, Numbers, Stepped, decayed, in_dtype
from tandem.registry import setting


@OPTIMIZERS.register("nadam")
@dataclass(frozen=True)
class Nadam(Moments):
    """Nadam (Dozat 2016, ICLR workshop, algorithm 8).

    With step t from 1 and ``mu_t = b1 (1 - 0.96**(t psi) / 2)``, of which the product up to step t
    is M: ``m <- b1 m + (1 - b1) g``, ``v <- b2 v + (1 - b2) g**2``, then
    ``w <- w - lr ((1 - mu_t) / (1 - M) g + mu_{t+1} / (1 - M mu_{t+1}) m) / (s + epsilon)`` with
    ``s = sqrt(v / (1 - b2**t))``. Weight decay is added to the gradient: ``g <- g + wd w``.
    """

    nadam_decay: float = setting(
        0.004,
        "nadam: how fast its momentum rises, psi",
        "a number of at least 0",
        omit_default=True,
        ge=0,
    )

    def __post_init__(self) -> None:
        # Not a field, which would be a setting: the last product, to which factors are added.
        object.__setattr__(self, "_last", (0, 1.0))

    def numbers(self, updates: int) -> dict[str, float]:
        step = updates + 1
        mu, mu_next, product = self._mu(step), self._mu(step + 1), self._product(step)
        root = (1 - self.adam_beta2**step) ** 0.5
        return {
            "gradient_factor": root * (1 - mu) / (1 - product),
            "moment_factor": root * mu_next / (1 - product * mu_next),
            "epsilon": self.epsilon(root),
        }

    def _mu(self, step: int) -> float:
        return self.adam_beta1 * (1 - 0.5 * 0.96 ** (step * self.nadam_decay))

    def _product(self, step: int) -> float:
        """The product of all mu up to that of `step`, by the same operations from any start."""
        done, product = self._last  # type: ignore[attr-defined]
        if done > step:
            done, product = 0, 1.0
        for number in range(done + 1, step + 1):
            product *= self._mu(number)
        object.__setattr__(self, "_last", (step, product))
        return product

    def step(
        self, weight: Any, states: Any, gradient: Any, rate: Any, decay: float, numbers: Numbers
    ) -> Stepped:
        import pytensor.tensor as pt

        first, second = states
        gradient, dtype = decayed(gradient, weight, decay), weight.dtype
        beta1, rest1 = in_dtype(self.adam_beta1, dtype), in_dtype(1 - self.adam_beta1, dtype)
        beta2, rest2 = in_dtype(self.adam_beta2, dtype), in_dtype(1 - self.adam_beta2, dtype)
        first = beta1 * first + rest1 * gradient
        second = beta2 * second + rest2 * gradient * gradient
        ahead = numbers["gradient_factor"] * gradient + numbers["moment_factor"] * first
        return weight - rate * ahead / (pt.sqrt(second) + numbers["epsilon"]), (first, second)
