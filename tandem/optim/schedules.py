"""Learning-rate schedules as pure functions of a run's position.

Epochs and steps are counted from 0. Nothing is remembered from one call to the next, so a resumed
run has exactly the rate that it would have had, and skips no drop.
"""

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field

from tandem.registry import Choice, Registry, setting

_DROP = 10


@dataclass(frozen=True)
class Moment:
    """A run's position, by which a schedule decides."""

    epoch: int  # whole epochs done
    done: float  # epochs done, with the fraction of the current one
    epochs: int  # of the whole training
    validation_errors: Sequence[float] = ()  # top-1, after each whole epoch so far, fractions


class Schedule(Choice, ABC):
    """Base of a schedule: a frozen dataclass of its settings, registered by name."""

    @abstractmethod
    def rate(self, base: float, moment: Moment) -> float:
        """The rate of weights before warm-up and scaling; `base` is that of the first step."""


_Epoch = Annotated[int, Field(ge=1)]


def _increasing(epochs: tuple[int, ...]) -> tuple[int, ...]:
    if any(a >= b for a, b in itertools.pairwise(epochs)):
        raise ValueError("the epochs must increase from each to the next")
    return epochs


SCHEDULES: Registry[Schedule] = Registry("lr_policy")


@SCHEDULES.register("step")
@dataclass(frozen=True)
class Step(Schedule):
    """Divide the rate by 10 at each listed epoch.

    With 20, the first twenty epochs have the whole rate and the twenty-first a tenth of it.

    Velocities are in units of weights, so after a drop they are those of the higher rate, and for
    about 2 / (1 - momentum) steps weights overshoot ("momentum correction", Goyal et al. 2017,
    arXiv 1706.02677, section 3). Where an epoch has as few steps, its error may rise: a smooth
    schedule does not do that.
    """

    lr_step: Annotated[tuple[_Epoch, ...], AfterValidator(_increasing)] = setting(
        (20, 40),
        "step: epochs done when the rate is divided by 10",
        "a list of increasing whole numbers of epochs, each at least 1",
    )

    def rate(self, base: float, moment: Moment) -> float:
        return base / _DROP ** sum(moment.epoch >= drop for drop in self.lr_step)


@SCHEDULES.register("auto")
@dataclass(frozen=True)
class Auto(Schedule):
    """Divide the rate by 10 whenever the validation error has stopped falling.

    After epoch n > 5 the rate falls if the error is less than the threshold below that of two
    epochs before. The two epochs of such a window all had the same rate: after a division the next
    can follow two epochs later at the earliest. An error that is not a number is no improvement.
    """

    WINDOW: ClassVar[int] = 2
    FIRST_EPOCHS: ClassVar[int] = 5

    lr_adapt_threshold: float = setting(
        0.01,
        "auto: least gain in top-1 error over two epochs, a fraction",
        "a number of at least 0",
        ge=0,
    )

    def rate(self, base: float, moment: Moment) -> float:
        errors = moment.validation_errors
        drops, last_drop = 0, 0
        for done in range(self.FIRST_EPOCHS + 1, len(errors) + 1):
            improvement = errors[done - 1 - self.WINDOW] - errors[done - 1]
            # Written so that a comparison with NaN, which is false, counts as no improvement.
            improved = improvement >= self.lr_adapt_threshold
            if done - last_drop >= self.WINDOW and not improved:
                drops, last_drop = drops + 1, done
        return base / _DROP**drops


@SCHEDULES.register("poly")
@dataclass(frozen=True)
class Poly(Schedule):
    """Let the rate fall to 0 as ``base * (1 - done / epochs) ** power``."""

    lr_power: float = setting(
        1.0,
        "poly: exponent, of the fraction of training that is left",
        "a number above 0",
        gt=0,
    )

    def rate(self, base: float, moment: Moment) -> float:
        return base * (1 - min(moment.done / moment.epochs, 1.0)) ** self.lr_power


@SCHEDULES.register("cosine")
@dataclass(frozen=True)
class Cosine(Schedule):
    """Let the rate fall to 0 as half a cosine: ``base * (1 + cos(pi * done / epochs)) / 2``.

    Loshchilov and Hutter, "SGDR", ICLR 2017, equation 5, with one period and a minimum of 0.
    """

    def rate(self, base: float, moment: Moment) -> float:
        return base * (1 + math.cos(math.pi * min(moment.done / moment.epochs, 1.0))) / 2


@SCHEDULES.register("constant")
@dataclass(frozen=True)
class Constant(Schedule):
    """Keep the rate."""

    def rate(self, base: float, moment: Moment) -> float:
        return base
