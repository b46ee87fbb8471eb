"""Learning rates as pure functions of where a run stands.

Epochs and steps are counted from 0 here: ``epoch`` is the number of whole epochs done, and
``step_in_epoch`` the number of steps done since. Nothing is remembered from one call to the next,
so a resumed run has exactly the rate that it would have had, and skips no drop.
"""

import math
from collections.abc import Sequence

from tandem.config.schema import Config

_DROP = 10
_WINDOW = 2
_FIRST_EPOCHS = 5


def learning_rate(
    config: Config,
    epoch: int,
    step_in_epoch: int,
    steps_per_epoch: int,
    validation_errors: Sequence[float] = (),
) -> float:
    """The rate of one step, by the policy and the warm-up of `config`.

    Parameters
    ----------
    config : Config
        Its ``learning_rate``, ``lr_...`` settings, ``warmup_epochs``, ``n_epochs`` and, resolved,
        ``devices``.
    epoch : int
        Whole epochs done, from 0.
    step_in_epoch : int
        Steps done in this epoch, from 0.
    steps_per_epoch : int
        Steps of an epoch, at least 1.
    validation_errors : sequence of float
        Top-1 error after each whole epoch, as a fraction. Only the first `epoch` are used.

    Returns
    -------
    float
        The rate for weights; biases learn at twice that.
    """
    done = epoch + step_in_epoch / steps_per_epoch
    base, policy = config.learning_rate, config.lr_policy
    if policy == "step":
        rate = step_rate(epoch, base, config.lr_step)
    elif policy == "auto":
        rate = auto_rate(base, validation_errors[:epoch], config.lr_adapt_threshold)
    elif policy == "poly":
        rate = poly_rate(done, base, config.n_epochs, config.lr_power)
    elif policy == "cosine":
        rate = cosine_rate(done, base, config.n_epochs)
    else:
        rate = base
    steps = epoch * steps_per_epoch + step_in_epoch
    warmup_steps = config.warmup_epochs * steps_per_epoch
    if config.lr_scaling == "none":
        return rate * warmup_factor(steps, warmup_steps)
    full = scaling_factor(config.lr_scaling, len(config.devices))
    return rate * gradual_factor(steps, warmup_steps, full)


def step_rate(epoch: int, base: float, drops: Sequence[int]) -> float:
    """Divide the rate by 10 at each of the epochs in `drops`.

    Parameters
    ----------
    epoch : int
        Whole epochs done.
    base : float
        The rate of the first epoch.
    drops : sequence of int
        With 20, the first twenty epochs have the whole rate and the twenty-first a tenth of it.
    """
    return base / _DROP ** sum(epoch >= drop for drop in drops)


def auto_rate(base: float, validation_errors: Sequence[float], threshold: float) -> float:
    """Divide the rate by 10 whenever the validation error has stopped falling.

    After epoch n > 5 the rate falls if the error is less than `threshold` below what it was two
    epochs before. The two epochs of such a window all had the same rate: after a division the next
    can follow two epochs later at the earliest. An error that is not a number is no improvement.

    Parameters
    ----------
    base : float
        The rate of the first epoch.
    validation_errors : sequence of float
        After each whole epoch so far, as fractions.
    threshold : float
        The least improvement in two epochs that keeps the rate, as a fraction.
    """
    drops, last_drop = 0, 0
    for done in range(_FIRST_EPOCHS + 1, len(validation_errors) + 1):
        improvement = validation_errors[done - 1 - _WINDOW] - validation_errors[done - 1]
        # Written so that a comparison with NaN, which is false, counts as no improvement.
        if done - last_drop >= _WINDOW and not improvement >= threshold:
            drops, last_drop = drops + 1, done
    return base / _DROP**drops


def poly_rate(done: float, base: float, epochs: int, power: float) -> float:
    """Let the rate fall to 0 as ``base * (1 - done / epochs) ** power``.

    Parameters
    ----------
    done : float
        Epochs done, with the fraction of the one that runs.
    base : float
        The rate of the first step.
    epochs : int
        Epochs of the whole training.
    power : float
        1 is a straight line.
    """
    return base * (1 - min(done / epochs, 1.0)) ** power


def cosine_rate(done: float, base: float, epochs: int) -> float:
    """Let the rate fall to 0 as half a cosine: ``base * (1 + cos(pi * done / epochs)) / 2``.

    Loshchilov and Hutter, "SGDR", ICLR 2017, equation 5, with one period and a minimum of 0.

    Parameters
    ----------
    done : float
        Epochs done, with the fraction of the one that runs.
    base : float
        The rate of the first step.
    epochs : int
        Epochs of the whole training.
    """
    return base * (1 + math.cos(math.pi * min(done / epochs, 1.0))) / 2


def warmup_factor(steps: int, warmup_steps: float) -> float:
    """A factor that rises linearly from 0 to 1 over the first steps of a run.

    It multiplies whatever the policy gives. The first step has ``1 / warmup_steps`` rather than 0,
    which would teach nothing; the last step of the warm-up is the first with the whole rate.

    Parameters
    ----------
    steps : int
        Steps done in all.
    warmup_steps : float
        Length of the warm-up in steps; 0 is none.
    """
    return min((steps + 1) / warmup_steps, 1.0) if warmup_steps > 0 else 1.0


def scaling_factor(scaling: str, trainers: int) -> float:
    """How much larger a rate may be for a global minibatch of several trainers'.

    Parameters
    ----------
    scaling : "linear" or "sqrt"
        In proportion, by which so many steps of one trainer become one ("linear scaling rule",
        Goyal et al. 2017, arXiv 1706.02677, section 2.1), or to the root, by which the noise of a
        step stays the same (Krizhevsky 2014, arXiv 1404.5997, section 5).
    trainers : int
        By how much the global minibatch is larger than ``batch_size``, for which the rate is meant.
    """
    return float(trainers) if scaling == "linear" else math.sqrt(trainers)


def gradual_factor(steps: int, warmup_steps: float, full: float) -> float:
    """A factor that rises linearly from about 1 to `full` over the first steps of a run.

    "Gradual warm-up", Goyal et al. 2017, section 2.2. The last step of the warm-up is the first
    with the whole factor, as in `warmup_factor`.

    Parameters
    ----------
    steps : int
        Steps done in all.
    warmup_steps : float
        Length of the warm-up in steps; 0 is none.
    full : float
        The factor after it.
    """
    return 1 + (full - 1) * warmup_factor(steps, warmup_steps)
