"""Losses and metrics of a run, by name.

Their graphs are in `tandem.layers.losses` and `tandem.layers.metrics`; importing this module
imports no PyTensor.
"""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from tandem.errors import InputError
from tandem.registry import Choice, Registry, find_function, setting

if TYPE_CHECKING:
    from pytensor.tensor.variable import TensorVariable

MetricValues = Mapping[str, float | tuple[float, ...]]
"""Sums over pictures by name; those of a confusion have a number for each class."""

# Losses


class Loss(Choice, ABC):
    """Base of a loss: a frozen dataclass of its settings, registered by name."""

    of_classes: ClassVar[bool] = False  # whether targets are of classes, one of which is true

    @abstractmethod
    def __call__(self, outputs: "TensorVariable", targets: "TensorVariable") -> "TensorVariable":
        """Build the graph of the loss of each row, see `tandem.layers.losses`."""


LOSSES: Registry[Loss] = Registry("loss")


@LOSSES.register("cross_entropy")
@dataclass(frozen=True)
class CrossEntropy(Loss):
    """Softmax cross-entropy."""

    of_classes = True

    label_smoothing: float = setting(
        0.0,
        "cross_entropy: part of each target that is spread over all classes",
        "a number of at least 0 and below 1",
        omit_default=True,
        ge=0,
        lt=1,
    )

    def __call__(self, outputs: "TensorVariable", targets: "TensorVariable") -> "TensorVariable":
        from tandem.layers.losses import categorical_cross_entropy

        return categorical_cross_entropy(outputs, targets, self.label_smoothing)


@dataclass(frozen=True)
class _Plain(Loss):
    """A loss without settings: the function `function` of `tandem.layers.losses`."""

    function: ClassVar[str]

    def __call__(self, outputs: "TensorVariable", targets: "TensorVariable") -> "TensorVariable":
        from tandem.layers import losses

        return getattr(losses, self.function)(outputs, targets)


@LOSSES.register("binary_cross_entropy")
@dataclass(frozen=True)
class BinaryCrossEntropy(_Plain):
    """Sigmoid cross-entropy of each class."""

    function = "binary_cross_entropy"


@LOSSES.register("mse")
@dataclass(frozen=True)
class MeanSquaredError(_Plain):
    """Mean squared error of the outputs."""

    function = "mean_squared_error"


@LOSSES.register("mae")
@dataclass(frozen=True)
class MeanAbsoluteError(_Plain):
    """Mean absolute error of the outputs."""

    function = "mean_absolute_error"


@LOSSES.register("kl_divergence")
@dataclass(frozen=True)
class KLDivergence(_Plain):
    """Kullback-Leibler divergence of the softmax from the targets."""

    function, of_classes = "kl_divergence", True


@LOSSES.register("categorical_hinge")
@dataclass(frozen=True)
class CategoricalHinge(_Plain):
    """Hinge of the true class against the best other one."""

    function, of_classes = "categorical_hinge", True


# Metrics


@dataclass(frozen=True)
class Metric(ABC):
    """Base of a metric: sums over pictures, and the value that follows from them."""

    name: str
    higher_is_better: ClassVar[bool] = True
    of_outputs: ClassVar[bool] = False  # rather than of the order of classes
    # What of the network's it looks at, the last two as the methods of these names return them:
    sees: ClassVar[Literal["logits", "measured", "predictions"]] = "logits"
    by_class: ClassVar[bool] = False  # whether its sums have a number for each class

    @property
    @abstractmethod
    def sums(self) -> tuple[str, ...]:
        """Names of its sums, which it may have in common with other metrics."""

    @abstractmethod
    def counts(
        self, outputs: "TensorVariable", labels: "TensorVariable", counted: "TensorVariable"
    ) -> "Sequence[TensorVariable]":
        """Build what a minibatch adds to each of its sums, float64.

        `labels` are classes, int64 (batch,), or rows of targets, (batch, class). `counted` is
        whether each row counts, bool (batch,).
        """

    @abstractmethod
    def value(self, images: int, sums: Sequence[float | tuple[float, ...]]) -> float:
        """The metric over so many images, at least one."""


@dataclass(frozen=True)
class TopK(Metric):
    """Fraction of pictures whose class is among the k most probable ones."""

    k: int = 1

    @property
    def sums(self) -> tuple[str, ...]:
        return (f"top{self.k}_right",)

    def counts(
        self, outputs: "TensorVariable", labels: "TensorVariable", counted: "TensorVariable"
    ) -> "Sequence[TensorVariable]":
        from tandem.layers.metrics import label_rank, true_classes

        rank = label_rank(outputs, true_classes(labels))
        return [(counted & (rank < self.k)).sum(dtype="float64")]

    def value(self, images: int, sums: Sequence[float | tuple[float, ...]]) -> float:
        return _number(sums[0]) / images


class RowMean(Metric):
    """Mean over rows of a number of each."""

    of_outputs = True

    @property
    def sums(self) -> tuple[str, ...]:
        return (f"{self.name}_sum",)

    @abstractmethod
    def rows(self, outputs: "TensorVariable", labels: "TensorVariable") -> Any:
        """Build the numbers, (batch,), as float64."""

    def counts(
        self, outputs: "TensorVariable", labels: "TensorVariable", counted: "TensorVariable"
    ) -> "Sequence[TensorVariable]":
        import pytensor.tensor as pt

        return [pt.switch(counted, self.rows(outputs, labels), np.float64(0)).sum()]

    def value(self, images: int, sums: Sequence[float | tuple[float, ...]]) -> float:
        return _number(sums[0]) / images


@dataclass(frozen=True)
class OutputError(RowMean):
    """Mean of a loss of the outputs against targets; classes count as one-hot rows."""

    higher_is_better = False
    sees = "measured"
    function: str = ""  # of `tandem.layers.losses`

    def rows(self, outputs: "TensorVariable", labels: "TensorVariable") -> Any:
        from tandem.layers import losses

        return getattr(losses, self.function)(outputs.astype("float64"), labels)


@dataclass(frozen=True)
class BinaryAccuracy(RowMean):
    """Fraction of the values of a target, above 0.5 or not, that a sigmoid's input has the sign of.

    Classes count as one-hot rows.
    """

    def rows(self, outputs: "TensorVariable", labels: "TensorVariable") -> Any:
        import pytensor.tensor as pt

        from tandem.layers.losses import target_rows

        half, zero = (np.asarray(value, outputs.dtype) for value in (0.5, 0))
        right = pt.eq(outputs > zero, target_rows(outputs, labels) > half)
        return right.sum(axis=1, dtype="float64") / outputs.shape[1]


@dataclass(frozen=True)
class OwnMetric(RowMean):
    """Mean of a user's function of targets and predictions, which returns a number for each row.

    The function is called with symbolic rows, (batch, class), classes as one-hot rows.
    """

    higher_is_better = False
    sees = "predictions"
    function: str = ""  # module:function

    def find(self) -> Callable[..., Any]:
        """Import the function; InputError if there is none."""
        return find_function("metrics", self.function)

    def rows(self, outputs: "TensorVariable", labels: "TensorVariable") -> Any:
        from tandem.layers.losses import target_rows

        rows = self.find()(target_rows(outputs, labels), outputs)
        if getattr(getattr(rows, "type", None), "ndim", None) != 1:
            raise InputError(
                f"metrics: found {rows} of {self.function}, expected a number for each row"
            )
        return rows.astype("float64")


@dataclass(frozen=True)
class Measured(Metric):
    """Mean over rows of a value that the network builds by itself (`Network.measures`).

    It may be a weighted one, of values times weights and of weights.
    """

    higher_is_better = False
    of_outputs = True

    @property
    def sums(self) -> tuple[str, ...]:
        return (f"{self.name}_sum", f"{self.name}_weights")

    def counts(
        self, outputs: Any, labels: "TensorVariable", counted: "TensorVariable"
    ) -> "Sequence[TensorVariable]":
        import pytensor.tensor as pt

        pair = outputs if isinstance(outputs, tuple) else (outputs, pt.ones_like(counted))
        return [pt.switch(counted, v.astype("float64"), np.float64(0)).sum() for v in pair]

    def value(self, images: int, sums: Sequence[float | tuple[float, ...]]) -> float:
        total, weights = map(_number, sums)
        return total / weights if weights else 0.0


@dataclass(frozen=True)
class Confusion(Metric):
    """Mean over classes of what follows from each class's counts.

    Classes that neither are nor were taken for any picture do not count; 0 divided by 0 is 0. Of
    sums that are not known it is NaN.
    """

    by_class = True
    # Of right, predicted and labelled pictures of each class, float64 (class,):
    ratio: Callable[[np.ndarray, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]] = (
        lambda right, predicted, labelled: (2 * right, predicted + labelled)
    )

    @property
    def sums(self) -> tuple[str, ...]:
        return ("class_right", "class_predicted", "class_labelled")

    def counts(
        self, outputs: "TensorVariable", labels: "TensorVariable", counted: "TensorVariable"
    ) -> "Sequence[TensorVariable]":
        from tandem.layers.metrics import class_counts, true_classes

        return class_counts(outputs, true_classes(labels), counted)

    def value(self, images: int, sums: Sequence[float | tuple[float, ...]]) -> float:
        right, predicted, labelled = (np.asarray(values, np.float64) for values in sums)
        above, below = self.ratio(right, predicted, labelled)
        if np.isnan(labelled).any():
            return math.nan
        occurs = predicted + labelled > 0
        values = np.divide(above, below, out=np.zeros_like(right), where=below > 0)
        return float(values[occurs].mean()) if occurs.any() else 0.0


_TOP_K = re.compile(r"top([1-9]\d{0,3})")
_METRICS: dict[str, Metric] = {
    "accuracy": TopK("accuracy"),
    "mse": OutputError("mse", "mean_squared_error"),
    "mae": OutputError("mae", "mean_absolute_error"),
    "precision": Confusion("precision", lambda right, predicted, _: (right, predicted)),
    "recall": Confusion("recall", lambda right, _, labelled: (right, labelled)),
    "f1": Confusion("f1"),
    "binary_accuracy": BinaryAccuracy("binary_accuracy"),
    "categorical_hinge": OutputError("categorical_hinge", "categorical_hinge"),
}
OF_NETWORK = "network."
"""Begins the name of a metric that the network builds, as it does those of Keras's models."""
METRIC_NAMES = (*_METRICS, "top3")
"""The names of metrics, with 3 for any number of classes."""


def find_metric(name: str) -> Metric | None:
    """The metric of a name, or of a function "module:function"; None if there is none."""
    if ":" in name:
        return OwnMetric(name.rpartition(":")[2], name)
    if name.startswith(OF_NETWORK):
        return Measured(name.removeprefix(OF_NETWORK))
    if match := _TOP_K.fullmatch(name):
        return TopK(name, int(match[1]))
    return _METRICS.get(name)


def metrics_of(names: Sequence[str]) -> tuple[Metric, ...]:
    """The metrics of names that were checked."""
    return tuple(metric for name in names if (metric := find_metric(name)) is not None)


def evaluate_metrics(
    metrics: Sequence[Metric], images: int, values: MetricValues
) -> dict[str, float]:
    """The value of each metric by its name, from the sums over images; NaN without any."""
    if not images:
        return {m.name: math.nan for m in metrics}
    return {m.name: m.value(images, [values[name] for name in m.sums]) for m in metrics}


def _number(value: float | tuple[float, ...]) -> float:
    return float(np.sum(value))
