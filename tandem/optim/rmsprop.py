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
    gradient: ``g <- g + wd w``. With `rmsprop_centered` the mean gradient ``m <- a m + (1 - a) g``
    makes a variance of s, ``s - m**2`` (Graves 2013, arXiv 1308.0850, equation 38). With
    `rmsprop_momentum` b the step u, which is taken off w, becomes a velocity: ``v <- b v + u``.
    """

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

    rmsprop_momentum: float = setting(
        0.0,
        "rmsprop: fraction of the velocity kept from step to step",
        "a number of at least 0 and below 1",
        omit_default=True,
        ge=0,
        lt=1,
    )
    rmsprop_centered: bool = setting(
        False,
        "rmsprop: the mean square less the square of the mean gradient",
        "true or false",
        omit_default=True,
    )

    @property
    def states(self) -> tuple[str, ...]:
        momentum = ["momentum"] * (self.rmsprop_momentum > 0)
        return ("mean_square", *momentum, *["mean_gradient"] * self.rmsprop_centered)

    def step(
        self, weight: Any, states: Any, gradient: Any, rate: Any, decay: float, numbers: Numbers
    ) -> Stepped:
        import pytensor.tensor as pt

        named = dict(zip(self.states, states, strict=True))
        gradient, dtype = decayed(gradient, weight, decay), weight.dtype
        kept, rest = in_dtype(self.rmsprop_decay, dtype), in_dtype(1 - self.rmsprop_decay, dtype)
        square = kept * named["mean_square"] + rest * gradient * gradient
        found, spread = {"mean_square": square}, square
        if self.rmsprop_centered:
            mean = found["mean_gradient"] = kept * named["mean_gradient"] + rest * gradient
            spread = pt.maximum(square - mean * mean, in_dtype(0, dtype))
        epsilon = in_dtype(self.rmsprop_epsilon, dtype)
        inside = self.rmsprop_epsilon_inside
        root = pt.sqrt(spread + epsilon) if inside else pt.sqrt(spread) + epsilon
        step = rate * gradient / root
        if self.rmsprop_momentum > 0:
            step = in_dtype(self.rmsprop_momentum, dtype) * named["momentum"] + step
            found["momentum"] = step
        return weight - step, tuple(found[name] for name in self.states)
