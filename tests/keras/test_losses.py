"""Losses and metrics against Keras's own, and what `compile` chose as data."""

from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

from tandem.errors import InputError
from tandem.keras.compilation import (
    Compilation,
    check_model,
    function_of,
    optimizer_settings,
    rates_of,
)
from tandem.keras.losses import OF_LABELS, Objective
from tests.support.keras_models import keras

ROWS, CLASSES = 6, 4
LOSSES: dict[str, tuple[Any, str]] = {
    "squared": (keras.losses.MeanSquaredError(), "linear"),
    "absolute": (keras.losses.MeanAbsoluteError(), "linear"),
    "percentage": (keras.losses.MeanAbsolutePercentageError(), "linear"),
    "logarithmic": (keras.losses.MeanSquaredLogarithmicError(), "softmax"),
    "huber": (keras.losses.Huber(0.3), "linear"),
    "log_cosh": (keras.losses.LogCosh(), "linear"),
    "cosine": (keras.losses.CosineSimilarity(), "linear"),
    "poisson": (keras.losses.Poisson(), "softmax"),
    "kl": (keras.losses.KLDivergence(), "softmax"),
    "hinge": (keras.losses.Hinge(), "linear"),
    "squared_hinge": (keras.losses.SquaredHinge(), "linear"),
    "categorical_hinge": (keras.losses.CategoricalHinge(), "linear"),
    "binary": (keras.losses.BinaryCrossentropy(label_smoothing=0.1), "sigmoid"),
    "binary_logits": (keras.losses.BinaryCrossentropy(from_logits=True), "linear"),
    "binary_of_softmax": (keras.losses.BinaryCrossentropy(), "softmax"),
    "binary_focal": (keras.losses.BinaryFocalCrossentropy(True, alpha=0.3), "sigmoid"),
    "categorical": (keras.losses.CategoricalCrossentropy(label_smoothing=0.1), "softmax"),
    "of_sigmoid": (keras.losses.CategoricalCrossentropy(), "sigmoid"),
    "focal": (keras.losses.CategoricalFocalCrossentropy(gamma=1.5), "softmax"),
    "labels": (keras.losses.SparseCategoricalCrossentropy(), "softmax"),
    "labels_logits": (keras.losses.SparseCategoricalCrossentropy(from_logits=True), "linear"),
}
METRICS: dict[str, tuple[Any, str]] = {
    "binary_accuracy": (keras.metrics.BinaryAccuracy(threshold=0.4), "sigmoid"),
    "exact": (keras.metrics.Accuracy(), "linear"),
    "accuracy": (keras.metrics.CategoricalAccuracy(), "softmax"),
    "top_2": (keras.metrics.TopKCategoricalAccuracy(2), "softmax"),
    "label_accuracy": (keras.metrics.SparseCategoricalAccuracy(), "softmax"),
    "label_top_2": (keras.metrics.SparseTopKCategoricalAccuracy(2), "softmax"),
    "cosine": (keras.metrics.CosineSimilarity(), "linear"),
}


def measure(each: Any) -> dict[str, Any]:
    """A loss or metric of Keras as an objective has it."""
    function = getattr(each, "fn", None) or each._fn
    found = function_of(function, each._fn_kwargs, each.name)
    assert found is not None, each.name
    return {"name": each.name, **found}


@pytest.mark.parametrize("shape", [(CLASSES,), (3, CLASSES)])
def test_losses_and_metrics_are_those_of_keras(shape: tuple[int, ...]) -> None:
    """Of rows and of time steps; one function computes them all."""
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(ROWS, *shape)).astype(np.float32)
    labels = rng.integers(0, CLASSES, (ROWS, *shape[:-1]))
    one_hot = np.eye(CLASSES, dtype=np.float32)[labels]
    before, targets, numbers = (pt.matrix(name, dtype="float32") for name in "pyl")
    found, expected = [], []
    for each, activation in [*LOSSES.values(), *METRICS.values()]:
        chosen = measure(each)
        is_label = chosen["function"] in OF_LABELS
        objective = Objective.of(
            {"losses": [chosen], "targets": [shape[:-1] if is_label else shape]}, 1
        )
        y = numbers if is_label else targets
        wide = pt.specify_shape(before, (None, int(np.prod(shape))))
        found.append(objective.build(wide, y, [shape], [activation])[0].mean())
        function = {"softmax": keras.ops.softmax, "sigmoid": keras.ops.sigmoid}.get(activation)
        outputs = logits if function is None else function(logits)
        if isinstance(each, keras.metrics.Metric):
            each.reset_state()
        expected.append(float(each(labels if is_label else one_hot, outputs)))
    compiled = pytensor.function([before, targets, numbers], found, mode="FAST_COMPILE")
    rows = [array.reshape(ROWS, -1).astype(np.float32) for array in (logits, one_hot, labels)]
    for name, value, theirs in zip([*LOSSES, *METRICS], compiled(*rows), expected, strict=True):
        assert float(value) == pytest.approx(theirs, rel=2e-5, abs=1e-6), name


def test_an_objective_of_a_file_is_checked() -> None:
    good = {"name": "a", "function": "mean_squared_error"}
    for values, message in [
        ({"losses": []}, "losses"),
        ({"losses": [{**good, "function": "exec"}]}, "found the function 'exec'"),
        ({"losses": [{**good, "options": {"delta": 1.0}}]}, "found delta=1.0"),
        ({"losses": [{**good, "output": 1}]}, "found output 1"),
        ({"losses": [good], "weights": 3}, "found 3 weights"),
    ]:
        with pytest.raises(InputError, match=message):
            Objective.of(values, 1)


def model(**compiled: Any) -> Any:
    """A small model of two outputs, or of one without arguments."""
    inputs = keras.Input((3,), name="rows")
    one = keras.layers.Dense(2, "softmax", name="kind")(inputs)
    other = keras.layers.Dense(1, name="size")(inputs)
    found = keras.Model(inputs, [one, other])
    found.compile(**{"optimizer": "adam", **compiled})
    return found


def row() -> tuple[Any, Any]:
    return np.zeros((1, 3), np.float32), [np.zeros((1,), np.int64), np.zeros((1, 1), np.float32)]


def test_compile_of_two_outputs_becomes_data() -> None:
    found = Compilation.of(
        model(
            loss={"kind": "sparse_categorical_crossentropy", "size": "mse"},
            loss_weights={"kind": 1.0, "size": 0.25},
            metrics={"kind": ["accuracy"], "size": ["mae", keras.metrics.RootMeanSquaredError()]},
        ),
        row,
    )
    assert [(x["name"], x["output"], x["weight"]) for x in found.losses] == [
        ("kind", 0, 1.0),
        ("size", 1, 0.25),
    ]
    assert [(m["name"], m["function"]) for m in found.metrics] == [
        ("kind_accuracy", "sparse_categorical_accuracy"),
        ("size_mae", "mean_absolute_error"),
    ]
    assert found.foreign  # of the root, which is no mean over rows
    assert [found.takes_labels(output) for output in (0, 1)] == [True, False]


@pytest.mark.parametrize(
    ("compiled", "message"),
    [
        ({"loss": [lambda y, p: p[:, 0], "mse"]}, "found <lambda>, expected a loss of Keras"),
        ({"loss": [keras.losses.Dice(), "mse"]}, "found dice"),
        ({"loss": ["mse", keras.losses.MeanSquaredError("sum")]}, "found reduction='sum'"),
        ({"optimizer": "ftrl", "loss": ["mse", "mse"]}, "optimizer: found Ftrl, expected any of"),
        (
            {"optimizer": keras.optimizers.SGD(gradient_accumulation_steps=2), "loss": "mse"},
            "found gradient_accumulation_steps=2, expected None",
        ),
    ],
)
def test_what_has_no_counterpart_is_refused(compiled: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Compilation.of(model(**compiled), lambda: (row()[0], [np.zeros((1, 2)), np.zeros((1, 1))]))


def test_a_model_has_to_be_compiled() -> None:
    with pytest.raises(InputError, match="expected a call of compile first"):
        Compilation.of(keras.Sequential([keras.Input((3,))]), row)


def test_subclassed_models_and_own_steps_are_refused() -> None:
    class Own(keras.Model):
        pass

    class Stepped(keras.Sequential):
        def train_step(self, data: Any) -> Any: ...

    with pytest.raises(InputError, match="found the subclassed model Own, expected a Functional"):
        check_model(Own())
    with pytest.raises(InputError, match="found a train_step of Stepped's own"):
        check_model(Stepped())
    with pytest.raises(InputError, match="found list, expected a keras"):
        check_model([])
    inputs = keras.Input((1,))
    check_model(keras.Model(inputs, inputs))


def test_optimizers_become_settings() -> None:
    found = optimizer_settings(keras.optimizers.SGD(0.1, 0.9, nesterov=True, clipnorm=2.0))
    assert (found["use_nesterov_momentum"], found["momentum"]) == (True, 0.9)
    assert found["clip_norm"] == 2.0
    found = optimizer_settings(keras.optimizers.AdamW(weight_decay=0.01))
    assert (found["decoupled_decay"], found["weight_decay"]) == (True, 0.01)


def test_schedules_give_the_rate_of_each_step() -> None:
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    optimizer = keras.optimizers.Adam(schedule)
    optimizer.build([keras.Variable(np.zeros(1, np.float32))])
    optimizer.iterations.assign(2)
    assert rates_of(optimizer, 3) == pytest.approx([0.05, 0.05 / 2**0.5, 0.025])
    assert rates_of(keras.optimizers.Adam(0.25), 3) == (0.25,)
