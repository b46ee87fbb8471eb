"""The learning rate of a step: the schedule, the warm-up and the scaling together."""

import math

from tandem.config.schema import Config
from tandem.layers.monitored import History
from tandem.optim import SCHEDULES, Moment


def learning_rate(
    config: Config,
    epoch: int,
    step_in_epoch: int,
    steps_per_epoch: int,
    history: History = (),
) -> float:
    """The rate of weights in one step, by the configured schedule, warm-up and scaling.

    Parameters
    ----------
    config : Config
        With its devices resolved.
    epoch, step_in_epoch : int
        Whole epochs done, and steps done in this epoch, from 0.
    history : sequence of mappings
        What was monitored after each whole epoch. Only the first `epoch` are used.
    """
    done = epoch + step_in_epoch / steps_per_epoch
    steps = epoch * steps_per_epoch + step_in_epoch
    whole = config.n_epochs * steps_per_epoch
    moment = Moment(epoch, done, config.n_epochs, history[:epoch], steps, whole)
    schedule = SCHEDULES.chosen(dict(config))
    rate = schedule.rate(config.learning_rate, moment)
    warmup_steps = config.warmup_epochs * steps_per_epoch
    if config.lr_scaling == "none":
        return rate * warmup_factor(steps, warmup_steps)
    larger: float = len(config.devices)
    if config.summed_rows and config.global_batch:  # the same for every number of trainers
        larger = config.global_batch / config.batch_size
    full = scaling_factor(config.lr_scaling, larger)
    return rate * gradual_factor(steps, warmup_steps, full)


def warmup_factor(steps: int, warmup_steps: float) -> float:
    """A factor on the rate that rises linearly from 0 to 1 over the first steps of a run.

    The first step has ``1 / warmup_steps`` rather than 0, which would teach nothing; the last step
    of the warm-up is the first with the whole rate. `steps` counts those done; `warmup_steps` is 0
    for no warm-up.
    """
    return min((steps + 1) / warmup_steps, 1.0) if warmup_steps > 0 else 1.0


def scaling_factor(scaling: str, trainers: float) -> float:
    """Return how much larger the rate may be for the global minibatch of several trainers.

    "linear" is in proportion, so that as many steps of one trainer become one ("linear scaling
    rule", Goyal et al. 2017, arXiv 1706.02677, section 2.1); "sqrt" is by the root, which keeps the
    noise of a step (Krizhevsky 2014, arXiv 1404.5997, section 5).
    """
    return float(trainers) if scaling == "linear" else math.sqrt(trainers)


def gradual_factor(steps: int, warmup_steps: float, full: float) -> float:
    """A factor that rises linearly from about 1 to `full` over the first steps of a run.

    "Gradual warm-up", Goyal et al. 2017, section 2.2; the arguments are those of `warmup_factor`.
    """
    return 1 + (full - 1) * warmup_factor(steps, warmup_steps)
