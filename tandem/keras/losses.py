"""Losses and metrics of Keras as graphs, by the names of its functions, and what `compile` chose.

Rows of a minibatch hold all outputs ravelled behind each other, and targets alike. A place is a
row's, or one of its time steps or pixels: each has values along the last axis of the output.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from tandem.errors import InputError
from tandem.validation import validated

if TYPE_CHECKING:
    from pytensor.tensor.variable import TensorVariable

_EPSILON = 1e-7  # to which Keras keeps probabilities away from 0 and 1


@dataclass(frozen=True)
class Prediction:
    """The values of an output at each place, (place, value), before its last activation."""

    before: "TensorVariable"
    activation: str  # softmax, sigmoid or linear

    @cached_property
    def values(self) -> "TensorVariable":
        """The output as users see it."""
        import pytensor.tensor as pt

        if self.activation == "softmax":
            return pt.special.softmax(self.before, axis=1)
        return pt.sigmoid(self.before) if self.activation == "sigmoid" else self.before

    def logits(self, activation: str, from_logits: bool) -> "TensorVariable":
        """The input of an activation that a loss contains; exact, where the output ends in it."""
        import pytensor.tensor as pt

        if from_logits:
            return self.values
        if self.activation == activation:
            return self.before
        values, (low, high, one) = self.values, _numbers(self.values, _EPSILON, 1 - _EPSILON, 1)
        if activation == "softmax":
            total = values.sum(axis=1, keepdims=True, dtype=values.dtype)
            return pt.log(pt.clip(values / total, low, high))
        kept = pt.clip(values, low, high)
        return pt.log(kept) - pt.log(one - kept)


Function = Callable[..., "TensorVariable"]
"""A function of targets, (place, value) or labels (place,), a `Prediction`, options: (place,)."""

_FUNCTIONS: dict[str, Function] = {}
OF_LABELS = frozenset(
    {
        "sparse_categorical_crossentropy",
        "sparse_categorical_accuracy",
        "sparse_top_k_categorical_accuracy",
    }
)
"""Functions of Keras whose targets are whole numbers."""
OF_CLASSES = OF_LABELS | {name.removeprefix("sparse_") for name in OF_LABELS}
"""Functions that take the number of a class for its one-hot row."""


def _function(function: Function) -> Function:
    _FUNCTIONS[function.__name__] = function
    return function


def is_known(name: str) -> bool:
    """Return whether there is a graph of a loss or metric of Keras, by its function's name."""
    return name in _FUNCTIONS


def check_options(name: str, options: Mapping[str, Any], place: str) -> None:
    """Refuse an option that a function of Keras has here no counterpart of, with an InputError."""
    known = [*inspect.signature(_FUNCTIONS[name]).parameters][2:]
    for option, value in options.items():
        if option not in known:
            raise InputError(
                f"{place}: found {option}={value!r} of {name}, expected it at its default"
            )


@_function
def sparse_categorical_crossentropy(y: Any, p: Prediction, from_logits: bool = False) -> Any:
    from tandem.layers.losses import negative_log_likelihood

    return negative_log_likelihood(p.logits("softmax", from_logits), y)


@_function
def categorical_crossentropy(
    y: Any, p: Prediction, from_logits: bool = False, label_smoothing: float = 0.0
) -> Any:
    from tandem.layers.losses import categorical_cross_entropy

    return categorical_cross_entropy(p.logits("softmax", from_logits), y, label_smoothing)


@_function
def binary_crossentropy(
    y: Any, p: Prediction, from_logits: bool = False, label_smoothing: float = 0.0
) -> Any:
    from tandem.layers.losses import binary_cross_entropy

    return binary_cross_entropy(p.logits("sigmoid", from_logits), _smoothed(y, label_smoothing, 2))


@_function
def binary_focal_crossentropy(
    y: Any,
    p: Prediction,
    apply_class_balancing: bool = False,
    alpha: float = 0.25,
    gamma: float = 2.0,
    from_logits: bool = False,
    label_smoothing: float = 0.0,
) -> Any:
    import pytensor.tensor as pt

    logits, y = p.logits("sigmoid", from_logits), _smoothed(y, label_smoothing, 2)
    one, power, share, rest = _numbers(logits, 1, gamma, alpha, 1 - alpha)
    found = pt.sigmoid(logits)
    missed = one - (y * found + (one - y) * (one - found))
    value = missed**power * (pt.softplus(logits) - y * logits)
    if apply_class_balancing:
        value = value * (y * share + (one - y) * rest)
    return _mean(value)


@_function
def categorical_focal_crossentropy(
    y: Any,
    p: Prediction,
    alpha: float = 0.25,
    gamma: float = 2.0,
    from_logits: bool = False,
    label_smoothing: float = 0.0,
) -> Any:
    import pytensor.tensor as pt

    logits = p.logits("softmax", from_logits)
    y = _smoothed(y, label_smoothing, logits.type.shape[1])
    one, power, share = _numbers(logits, 1, gamma, alpha)
    missed = one - pt.special.softmax(logits, axis=1)
    value = share * missed**power * y * pt.special.log_softmax(logits, axis=1)
    return -value.sum(axis=1, dtype=value.dtype)


def _of_layers(name: str) -> Function:
    """A loss of `tandem.layers.losses`, of the output as users see it."""

    def function(y: Any, p: Prediction) -> Any:
        from tandem.layers import losses

        return getattr(losses, name)(p.values, y)

    return function


for _name in ("mean_squared_error", "mean_absolute_error", "categorical_hinge"):
    _FUNCTIONS[_name] = _of_layers(_name)


@_function
def mean_absolute_percentage_error(y: Any, p: Prediction) -> Any:
    import pytensor.tensor as pt

    least, hundred = _numbers(p.values, _EPSILON, 100)
    return hundred * _mean(abs(y - p.values) / pt.maximum(abs(y), least))


@_function
def mean_squared_logarithmic_error(y: Any, p: Prediction) -> Any:
    import pytensor.tensor as pt

    (least,) = _numbers(p.values, _EPSILON)
    ours, theirs = (pt.log1p(pt.maximum(value, least)) for value in (p.values, y))
    return _mean(pt.sqr(ours - theirs))


@_function
def huber(y: Any, p: Prediction, delta: float = 1.0) -> Any:
    import pytensor.tensor as pt

    error = abs(p.values - y)
    half, bound = _numbers(error, 0.5, delta)
    near, far = half * pt.sqr(error), bound * error - half * pt.sqr(bound)
    return _mean(pt.switch(pt.le(error, bound), near, far))


@_function
def log_cosh(y: Any, p: Prediction) -> Any:
    import pytensor.tensor as pt

    error = p.values - y
    two, log_two = _numbers(error, 2, math.log(2))
    return _mean(abs(error) + pt.softplus(-two * abs(error)) - log_two)


@_function
def kl_divergence(y: Any, p: Prediction) -> Any:
    import pytensor.tensor as pt

    low, high = _numbers(p.values, _EPSILON, 1)
    target, found = pt.clip(y, low, high), pt.clip(p.values, low, high)
    value = target * (pt.log(target) - pt.log(found))
    return value.sum(axis=1, dtype=value.dtype)


@_function
def poisson(y: Any, p: Prediction) -> Any:
    import pytensor.tensor as pt

    (least,) = _numbers(p.values, _EPSILON)
    return _mean(p.values - y * pt.log(p.values + least))


@_function
def hinge(y: Any, p: Prediction) -> Any:
    return _mean(_margins(y, p))


@_function
def squared_hinge(y: Any, p: Prediction) -> Any:
    import pytensor.tensor as pt

    return _mean(pt.sqr(_margins(y, p)))


@_function
def cosine_similarity_metric(y: Any, p: Prediction) -> Any:
    import pytensor.tensor as pt

    (least,) = _numbers(p.values, _EPSILON)

    def unit(value: Any) -> Any:
        square = pt.sqr(value).sum(axis=1, keepdims=True, dtype=value.dtype)
        return value / pt.sqrt(pt.maximum(square, least * least))

    product = unit(y) * unit(p.values)
    return product.sum(axis=1, dtype=product.dtype)


@_function
def binary_accuracy(y: Any, p: Prediction, threshold: float = 0.5) -> Any:
    import pytensor.tensor as pt

    (limit,) = _numbers(p.values, threshold)
    return _mean(pt.eq(y, (p.values > limit).astype(y.dtype)).astype(y.dtype))


@_function
def accuracy(y: Any, p: Prediction) -> Any:
    import pytensor.tensor as pt

    return _mean(pt.eq(y, p.values).astype(y.dtype))


@_function
def top_k_categorical_accuracy(y: Any, p: Prediction, k: int = 5) -> Any:
    import pytensor.tensor as pt

    from tandem.layers.metrics import label_rank, true_classes

    return pt.lt(label_rank(p.before, true_classes(y)), k).astype(p.before.dtype)


_FUNCTIONS |= {
    "cosine_similarity": lambda y, p: -cosine_similarity_metric(y, p),
    "categorical_accuracy": lambda y, p: top_k_categorical_accuracy(y, p, 1),
    "sparse_categorical_accuracy": lambda y, p: top_k_categorical_accuracy(y, p, 1),
    "sparse_top_k_categorical_accuracy": top_k_categorical_accuracy,
}


def _numbers(like: "TensorVariable", *values: float) -> list[Any]:
    """Numbers of a variable's dtype."""
    import numpy as np

    return [np.asarray(value, like.dtype) for value in values]


def _mean(values: "TensorVariable") -> "TensorVariable":
    """Mean over the values of each place."""
    count = values.shape[1].astype(values.dtype)
    return values.sum(axis=1, dtype=values.dtype) / count


def _smoothed(y: Any, smoothing: float, classes: Any) -> Any:
    if not smoothing:
        return y
    kept, spread = _numbers(y, 1 - smoothing, smoothing / classes)
    return kept * y + spread


def _margins(y: Any, p: Prediction) -> Any:
    """Margins that are lacking to 1; targets of 0 count as -1."""
    import pytensor.tensor as pt

    zero, one = _numbers(p.values, 0, 1)
    return pt.maximum(zero, one - pt.switch(pt.eq(y, zero), -one, y) * p.values)


Options = dict[str, bool | int | float | None]


@dataclass(frozen=True)
class Measure:
    """A loss or a metric of an output."""

    name: str  # in Keras's logs
    function: str
    output: Annotated[int, Field(ge=0)] = 0
    options: Options = field(default_factory=dict)
    weight: float = 1.0  # of a loss in the sum


@dataclass(frozen=True)
class Objective:
    """The choices of `compile` as data: losses, metrics and the layout of a row of targets.

    A row has the targets of each output behind each other, then weights: none, one for all losses,
    or one for each output. Where targets are the class of a single output, they are int64 labels.

    Attributes
    ----------
    losses : tuple of Measure
    metrics : tuple of Measure
    targets : tuple of tuple of int
        Shape of a row of the targets of each output.
    weights : int
        Numbers at the end of a row.
    """

    losses: Annotated[tuple[Measure, ...], Field(min_length=1)]
    metrics: tuple[Measure, ...] = ()
    targets: tuple[tuple[int, ...], ...] = ((),)
    weights: Annotated[int, Field(ge=0)] = 0

    @classmethod
    def of(cls, values: Any, outputs: int) -> "Objective":
        """Check the JSON of an objective of so many outputs; raises InputError."""
        found = validated(cls, values, source="compiled")
        for measure in (*found.losses, *found.metrics):
            if not is_known(measure.function):
                raise InputError(
                    f"compiled: found the function {measure.function!r}, expected any of "
                    f"{', '.join(_FUNCTIONS)}"
                )
            check_options(measure.function, measure.options, "compiled")
            if measure.output >= min(outputs, len(found.targets)):
                raise InputError(
                    f"compiled: found output {measure.output}, expected one of {outputs}"
                )
        if found.weights not in (0, 1, len(found.targets)):
            raise InputError(f"compiled: found {found.weights} weights of {outputs} outputs")
        return found

    def build(
        self,
        logits: "TensorVariable",
        labels: "TensorVariable",
        shapes: Sequence[tuple[int, ...]],
        activations: Sequence[str],
    ) -> "tuple[TensorVariable, dict[str, TensorVariable]]":
        """Build the loss of each row, and the values of each row that are measured.

        Parameters
        ----------
        logits : dtype (batch, numbers)
            All outputs before their `activations`.
        labels : int64 (batch,) or dtype (batch, numbers)
        shapes, activations
            Of a row of each output.
        """
        predictions, end = [], 0
        for shape, activation in zip(shapes, activations, strict=True):
            begin, end = end, end + math.prod(shape)
            values = logits if len(shapes) == 1 else logits[:, begin:end]
            predictions.append(Prediction(_places(values, shape), activation))
        targets, weights = self._cut(labels, shapes)

        def rows(measure: Measure) -> Any:
            shape, function = shapes[measure.output], _FUNCTIONS[measure.function]
            target = targets[measure.output]
            if measure.function in OF_LABELS:
                target = target.reshape((-1,)).astype("int64")
            elif target.type.dtype != "int64":
                target = _places(target, shape)
            found = function(target, predictions[measure.output], **measure.options)
            return found if len(shape) <= 1 else _mean(found.reshape((-1, math.prod(shape[:-1]))))

        total: Any = None
        measured: dict[str, Any] = {}
        for loss in self.losses:
            value = rows(loss)
            if weights:
                value = value * weights[loss.output % len(weights)]
            if len(self.losses) > 1:
                measured[f"{loss.name}_loss"] = value
            value = value if loss.weight == 1 else value * _numbers(value, loss.weight)[0]
            total = value if total is None else total + value
        return total, measured | {metric.name: rows(metric) for metric in self.metrics}

    def _cut(self, labels: Any, shapes: Sequence[tuple[int, ...]]) -> tuple[list[Any], list[Any]]:
        """The targets of each output, and the weights, of rows that have all."""
        if labels.type.ndim == 1:
            return [labels], []
        found, end = [], 0
        for shape in self.targets:
            begin, end = end, end + math.prod(shape)
            found.append(labels[:, begin:end])
        return found, [labels[:, end + n] for n in range(self.weights)]


def _places(values: "TensorVariable", shape: Sequence[int]) -> "TensorVariable":
    """Rows, (batch, numbers), as (place, value)."""
    return values if len(shape) <= 1 else values.reshape((-1, shape[-1]))
