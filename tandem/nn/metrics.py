"""Metrics, with Keras's names."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tandem.errors import InputError
from tandem.layers.choices import find_metric
from tandem.nn.graph import own_function
from tandem.nn.losses import Loss

__all__ = ["TopKCategoricalAccuracy", "find_metrics"]

_ACCURACY = ("accuracy", "acc")
# Keras's names; what is left are those of the configuration.
_NAMES = {
    "categorical_accuracy": "accuracy",
    "sparse_categorical_accuracy": "accuracy",
    "binary_accuracy": "binary_accuracy",
    "top_k_categorical_accuracy": "top5",
    "sparse_top_k_categorical_accuracy": "top5",
    "mean_squared_error": "mse",
    "mean_absolute_error": "mae",
}


@dataclass(frozen=True)
class TopKCategoricalAccuracy:
    """Fraction of rows whose class is among the k most probable ones."""

    k: int = 5
    name: str = "top_k_categorical_accuracy"


def find_metrics(metrics: Sequence[Any], loss: Loss) -> dict[str, str]:
    """The metric of the configuration for each name in a history.

    "accuracy" is that of labels or of numbers from 0 to 1, as the loss is.
    """
    if isinstance(metrics, str):
        raise InputError(f'metrics: found "{metrics}", expected a list, such as ["{metrics}"]')
    found: dict[str, str] = {}
    for metric in metrics:
        if isinstance(metric, TopKCategoricalAccuracy):
            found[metric.name] = f"top{metric.k}"
        elif callable(metric):
            path = own_function("metrics", metric)
            found[path.partition(":")[2]] = path
        elif metric in _ACCURACY:
            found[metric] = "binary_accuracy" if loss.output == "sigmoid" else "accuracy"
        else:
            found[str(metric)] = _named(metric)
    if "binary_accuracy" in found.values() and loss.output != "sigmoid":
        raise InputError(
            f"metrics: found binary_accuracy with {loss.name}, expected binary_crossentropy: it is "
            "of the outputs of a sigmoid"
        )
    return found


def _named(metric: Any) -> str:
    name = _NAMES.get(metric, metric) if isinstance(metric, str) else ""
    if name and find_metric(name) is not None:
        return name
    from tandem.layers.choices import METRIC_NAMES
    from tandem.validation import shown, suggestion

    known = [_ACCURACY[0], *_NAMES, *METRIC_NAMES]
    hint = suggestion(str(metric), known) or "."
    raise InputError(
        f"metrics: found {shown(metric)}{hint} Expected a function of a module, or any of "
        f"{', '.join(dict.fromkeys(known))}"
    )
