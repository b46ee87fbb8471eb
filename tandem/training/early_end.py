"""Early stopping, and other ends before the last epoch: a pure function of what was monitored."""

from tandem.config.schema import Config
from tandem.layers.monitored import History, is_better, is_higher_better, worst


def reason_to_end(config: Config, history: History) -> str | None:
    """Why training ends after the epochs so far, by `stop_at` or `stop_patience`; None: it goes on.

    A run that is resumed within the patience ends where it would have ended. An epoch is better if
    it improves by more than `stop_delta`, and the epochs without improvement are counted anew only
    if it is better than `stop_baseline` too; the first `stop_from_epoch` epochs do not count.
    """
    name, limit, best, bad = config.stop_monitor, config.stop_at, worst(config.stop_monitor), 0
    for epoch, values in enumerate(history):
        if name not in values:
            continue
        value = values[name]
        if limit is not None and (value >= limit if is_higher_better(name) else value <= limit):
            return f"{name} is {value:.4g} and has reached stop_at, {limit:g}: training ends"
        if epoch < config.stop_from_epoch:
            continue
        bad += 1
        if is_better(value, best, name, delta=config.stop_delta):
            best = value
            base = worst(name) if config.stop_baseline is None else config.stop_baseline
            if is_better(value, base, name, delta=config.stop_delta):
                bad = 0
        elif config.stop_patience and bad >= config.stop_patience:
            return f"{name} has not improved on {best:.4g} for {bad} epochs: training ends"
    return None
