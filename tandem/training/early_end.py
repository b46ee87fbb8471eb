"""When training ends before its last epoch: a pure function of what was monitored."""

from tandem.config.schema import Config
from tandem.layers.monitored import History, is_better, is_higher_better, values_of, worst


def reason_to_end(config: Config, history: History) -> str | None:
    """Why training ends after the epochs so far, by `stop_at` or `stop_patience`; None: it goes on.

    A run that is resumed within the patience ends where it would have ended.
    """
    name, limit, best, bad = config.stop_monitor, config.stop_at, worst(config.stop_monitor), 0
    for value in values_of(name, history):
        if limit is not None and (value >= limit if is_higher_better(name) else value <= limit):
            return f"{name} is {value:.4g} and has reached stop_at, {limit:g}: training ends"
        if is_better(value, best, name):
            best, bad = value, 0
        else:
            bad += 1
        if config.stop_patience and bad >= config.stop_patience:
            return f"{name} has not improved on {best:.4g} for {bad} epochs: training ends"
    return None
