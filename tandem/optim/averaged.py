"""Averages of weights, beside the states of any optimizer."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tandem.optim.optimizer import OPTIMIZERS, Numbers, Optimizer, Stepped, in_dtype

AVERAGE = "weight_average"
"""Name of the state."""


@dataclass(frozen=True)
class Averaged(Optimizer):
    """An optimizer with a moving average of each parameter, as a state of its own.

    ``a <- k a + (1 - k) w`` after each step, with k = 0 in the first; where `overwrites` is above
    0, every so many steps ``w <- a``.
    """

    optimizer: Optimizer = field(kw_only=True)
    kept: float = field(kw_only=True)
    overwrites: int = field(kw_only=True)

    @property
    def states(self) -> tuple[str, ...]:
        return (*self.optimizer.states, AVERAGE)

    def numbers(self, updates: Any) -> dict[str, Any]:
        found = {**self.optimizer.numbers(updates), "average_kept": self.kept if updates else 0.0}
        if self.overwrites:
            found["overwrites"] = float((updates + 1) % self.overwrites == 0)
        return found

    def step(
        self, weight: Any, states: Any, gradient: Any, rate: Any, decay: float, numbers: Numbers
    ) -> Stepped:
        import pytensor.tensor as pt

        *others, average = states
        weight, after = self.optimizer.step(weight, others, gradient, rate, decay, numbers)
        kept, one = numbers["average_kept"], in_dtype(1, weight.dtype)
        average = kept * average + (one - kept) * weight
        if self.overwrites:
            weight = pt.switch(pt.gt(numbers["overwrites"], 0), average, weight)
        return weight, (*after, average)


def optimizer_of(settings: Mapping[str, Any]) -> Optimizer:
    """Make the optimizer of a configuration."""
    found = OPTIMIZERS.chosen(settings)
    if (kept := settings.get("average_weights")) is None:
        return found
    overwrites = settings.get("average_overwrites") or 0
    return Averaged(found.weight_decay, optimizer=found, kept=kept, overwrites=overwrites)
