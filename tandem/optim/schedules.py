"""Learning-rate schedules as pure functions of a run's position.

Epochs and steps are counted from 0. Nothing is remembered from one call to the next, so a resumed
run has exactly the rate that it would have had, and skips no drop.
"""

import itertools
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import AfterValidator, BeforeValidator, Field

from tandem.layers.monitored import History, is_better, values_of, worst
from tandem.registry import Choice, Registry, setting
from tandem.validation import MOST

_FRACTION = "a number above 0 and below 1"


@dataclass(frozen=True)
class Moment:
    """A run's position, by which a schedule decides."""

    epoch: int  # whole epochs done
    done: float  # epochs done, with the fraction of the current one
    epochs: int  # of the whole training
    history: History = ()  # what was monitored, after each whole epoch so far
    step: int = 0  # steps done
    steps: int = 0  # of the whole training


class Schedule(Choice, ABC):
    """Base of a schedule: a frozen dataclass of its settings, registered by name."""

    @abstractmethod
    def rate(self, base: float, moment: Moment) -> float:
        """The rate of weights before warm-up and scaling; `base` is that of the first step."""


_Epoch = Annotated[int, Field(ge=1, le=MOST)]
# A checkpoint's settings are JSON, whose keys are text.
_Done = Annotated[
    int,
    BeforeValidator(lambda key: int(key) if str(key).isdecimal() else key),
    Field(ge=0, le=MOST),
]
_Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def _increasing(epochs: tuple[int, ...]) -> tuple[int, ...]:
    if any(a >= b for a, b in itertools.pairwise(epochs)):
        raise ValueError("the epochs must increase from each to the next")
    return epochs


SCHEDULES: Registry[Schedule] = Registry("lr_policy")


def tenth(base: float, drops: int) -> float:
    """The rate divided by 10 so often; a quotient has the bits of the originals' programs."""
    return base / 10 ** min(drops, 308)  # a float's largest power of 10


@dataclass(frozen=True)
class _Falling(Schedule):
    """Base of schedules that multiply the rate by a factor."""

    lr_factor: float = setting(
        0.1,
        "step, every, plateau: what the rate is multiplied by",
        _FRACTION,
        omit_default=True,
        gt=0,
        lt=1,
    )

    def after(self, base: float, drops: int) -> float:
        """The rate after so many drops."""
        return tenth(base, drops) if self.lr_factor == 0.1 else base * self.lr_factor**drops


@SCHEDULES.register("step")
@dataclass(frozen=True)
class Step(_Falling):
    """Multiply the rate by a factor, a tenth, at each listed epoch.

    With 20, the first twenty epochs have the whole rate and the twenty-first a tenth of it.

    Velocities are in units of weights, so after a drop they are those of the higher rate, and for
    about 2 / (1 - momentum) steps weights overshoot ("momentum correction", Goyal et al. 2017,
    arXiv 1706.02677, section 3). Where an epoch has as few steps, its error may rise: a smooth
    schedule does not do that.
    """

    lr_step: Annotated[tuple[_Epoch, ...], AfterValidator(_increasing)] = setting(
        (20, 40),
        "step: epochs done when the rate falls",
        "a list of increasing whole numbers of epochs, each at least 1",
    )

    def rate(self, base: float, moment: Moment) -> float:
        return self.after(base, sum(moment.epoch >= drop for drop in self.lr_step))


@SCHEDULES.register("every")
@dataclass(frozen=True)
class Every(_Falling):
    """Multiply the rate by a factor after every so many epochs."""

    lr_every: int = setting(
        10,
        "every: epochs between two falls of the rate",
        f"a whole number of epochs from 1 to {MOST}",
        omit_default=True,
        ge=1,
        le=MOST,
    )

    def rate(self, base: float, moment: Moment) -> float:
        return self.after(base, moment.epoch // self.lr_every)


@SCHEDULES.register("plateau")
@dataclass(frozen=True)
class Plateau(_Falling):
    """Multiply the rate by a factor when a monitored value has stopped improving.

    That is when more than `lr_patience` epochs in a row were no better than the best before them,
    by more than the fraction `lr_threshold` of it and `lr_delta`; then they are counted anew, after
    `lr_cooldown` epochs. The rate never falls below `lr_min`, nor by less than 1e-8: PyTorch's
    ``ReduceLROnPlateau``.
    """

    LEAST_FALL: ClassVar[float] = 1e-8

    lr_patience: int = setting(
        10,
        "plateau: epochs without improvement that are tolerated",
        f"a whole number of epochs from 0 to {MOST}",
        omit_default=True,
        ge=0,
        le=MOST,
    )
    lr_threshold: float = setting(
        1e-4,
        "plateau: least improvement, as a fraction of the best value",
        "a number of at least 0 and below 1",
        omit_default=True,
        ge=0,
        lt=1,
    )
    lr_delta: float = setting(
        0.0,
        "plateau: least improvement in itself, beside lr_threshold",
        "a number of at least 0",
        omit_default=True,
        ge=0,
    )
    lr_cooldown: int = setting(
        0,
        "plateau: epochs after a fall of the rate that are not counted",
        f"a whole number of epochs from 0 to {MOST}",
        omit_default=True,
        ge=0,
        le=MOST,
    )
    lr_min: float = setting(
        0.0,
        "plateau: least rate, before lr_scaling",
        "a number of at least 0",
        omit_default=True,
        ge=0,
    )
    lr_monitor: str = setting(
        "validation_loss",
        "plateau: what is to improve: validation_loss, top1_error, top5_error or one of metrics",
        "validation_loss, top1_error, top5_error or one of metrics",
        omit_default=True,
    )

    def rate(self, base: float, moment: Moment) -> float:
        rate, best, bad, rest = base, worst(self.lr_monitor), 0, 0
        for value in values_of(self.lr_monitor, moment.history):
            if is_better(value, best, self.lr_monitor, self.lr_threshold, self.lr_delta):
                best, bad = value, 0
            else:
                bad += 1
            if rest:
                rest, bad = rest - 1, 0
            if bad > self.lr_patience:
                rest = self.lr_cooldown
                lower, bad = max(rate * self.lr_factor, self.lr_min), 0
                if rate - lower > self.LEAST_FALL:
                    rate = lower
        return rate


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
        errors = values_of("top1_error", moment.history)
        drops, last_drop = 0, 0
        for done in range(self.FIRST_EPOCHS + 1, len(errors) + 1):
            improvement = errors[done - 1 - self.WINDOW] - errors[done - 1]
            # Written so that a comparison with NaN, which is false, counts as no improvement.
            improved = improvement >= self.lr_adapt_threshold
            if done - last_drop >= self.WINDOW and not improved:
                drops, last_drop = drops + 1, done
        return tenth(base, drops)


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


@SCHEDULES.register("onecycle")
@dataclass(frozen=True)
class OneCycle(Schedule):
    """Let the rate rise to `base`, then fall to nearly 0, each as half a cosine.

    It begins at ``base / lr_begin_divisor``, has risen at the fraction `lr_rise` of all steps, and
    ends at the beginning's rate divided by `lr_end_divisor`: PyTorch's ``OneCycleLR``, which leaves
    the momentum alone here (Smith and Topin 2018, arXiv 1708.07120).
    """

    lr_rise: float = setting(
        0.3,
        "onecycle: fraction of all steps in which the rate rises",
        _FRACTION,
        omit_default=True,
        gt=0,
        lt=1,
    )
    lr_begin_divisor: float = setting(
        25.0,
        "onecycle: learning_rate divided by the first rate",
        "a number of at least 1",
        omit_default=True,
        ge=1,
    )
    lr_end_divisor: float = setting(
        1e4,
        "onecycle: first rate divided by the last",
        "a number of at least 1",
        omit_default=True,
        ge=1,
    )

    def rate(self, base: float, moment: Moment) -> float:
        first = base / self.lr_begin_divisor
        risen, last = self.lr_rise * moment.steps - 1, moment.steps - 1
        step = min(moment.step, last)
        if step <= risen and risen > 0:
            return _half_cosine(first, base, step / risen)
        fallen = (step - risen) / (last - risen) if last > risen else 1.0
        return _half_cosine(base, first / self.lr_end_divisor, fallen)


def _half_cosine(begin: float, end: float, done: float) -> float:
    return end + (begin - end) / 2 * (1 + math.cos(math.pi * done))


@SCHEDULES.register("table")
@dataclass(frozen=True)
class Table(Schedule):
    """Take the rate from a table; before its first epoch it is `base`."""

    lr_table: dict[_Done, _Rate] = setting(
        {},
        "table: rate from so many epochs done on, such as {0: 0.1, 30: 0.01}",
        "whole numbers of epochs and rates above 0, such as {0: 0.1, 30: 0.01}",
        omit_default=True,
    )

    def rate(self, base: float, moment: Moment) -> float:
        begun = [epoch for epoch in self.lr_table if epoch <= moment.epoch]
        return self.lr_table[max(begun)] if begun else base
