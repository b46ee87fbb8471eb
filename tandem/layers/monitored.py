"""The values after each epoch that a rate or the end of training may follow from."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence

from tandem.errors import InputError
from tandem.layers.choices import find_metric
from tandem.validation import suggestion

History = Sequence[Mapping[str, float]]
"""Values by name after each whole epoch; a name is missing where it was not measured."""

_RISING = (
    *("acc", "accuracy", "auc", "precision", "recall", "f1", "f1_score", "iou", "io_u"),
    "cosine_similarity",
)

ERRORS = ("validation_loss", "top1_error", "top5_error")


def is_higher_better(name: str) -> bool:
    """Return whether a monitored value is to rise."""
    if (metric := find_metric(name)) is not None:
        return metric.higher_is_better
    return re.sub(r"_\d+$", "", name).endswith(_RISING)  # of Keras's, or of one's own


def values_of(name: str, history: History) -> list[float]:
    """A value after each epoch in which it was measured."""
    return [epoch[name] for epoch in history if name in epoch]


def is_better(
    value: float, best: float, name: str, threshold: float = 0.0, delta: float = 0.0
) -> bool:
    """Test if a value improves on the best so far, by more than a fraction of that, and `delta`.

    A value that is not a number is no improvement.
    """
    if is_higher_better(name):
        return value - delta > best * (threshold + 1)
    return value + delta < best * (1 - threshold)


def worst(name: str) -> float:
    """Return what any number improves on."""
    return -math.inf if is_higher_better(name) else math.inf


def check_monitor(setting: str, name: str, metrics: Iterable[str]) -> None:
    """Refuse to monitor what is not measured: an error, or one of the chosen metrics."""
    known = [*ERRORS, *metrics]
    if name in known:
        return
    if find_metric(name) is not None:
        raise InputError(f"{setting}: {name} is not measured: add it to metrics")
    hint = suggestion(name, known) or "."
    raise InputError(f"{setting}: there is no value {name!r}{hint} There are {', '.join(known)}")
