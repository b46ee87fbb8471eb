"""Losses and metrics against Keras's own, and what `compile` chose as data."""

import functools
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
    rates_of,
    traced,
)
from tandem.keras.losses import OF_LABELS, Objective, is_here
from tests.support.keras_models import keras

ROWS, CLASSES = 6, 4


class Weighted(keras.losses.Loss):
    def call(self, y: Any, p: Any) -> Any:
        both = keras.losses.binary_crossentropy(y, p) + keras.losses.categorical_crossentropy(y, p)
        weights = keras.ops.array([1.0, 2.0, 0.5, 3.0])
        return both + keras.ops.max(abs(y - p) * weights, axis=-1)


class MeanOfAll(keras.losses.Loss):
    def call(self, y: Any, p: Any) -> Any:
        return keras.ops.mean(keras.ops.square(y - p) ** 2 * keras.ops.sigmoid(p))


class Generalized(keras.losses.Loss):
    """The loss of Keras, of one-hot rows."""

    def call(self, y: Any, p: Any) -> Any:
        return keras.losses.categorical_generalized_cross_entropy(keras.ops.argmax(y, -1), p, 0.6)


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
    "generalized": (Generalized(), "softmax"),
    "dice": (keras.losses.Dice(), "sigmoid"),
    "dice_by_row": (keras.losses.Dice(axis=-1), "sigmoid"),
    "tversky": (keras.losses.Tversky(0.3, 0.8), "sigmoid"),
    "own": (Weighted(), "softmax"),
    "own_of_all": (MeanOfAll(), "linear"),
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


def measure(each: Any, shape: tuple[int, ...]) -> dict[str, Any]:
    """A loss or metric of Keras as an objective has it."""
    function = getattr(each, "fn", None) or getattr(each, "_fn", None)
    found = function_of(function, getattr(each, "_fn_kwargs", {}))
    if not is_here(found):
        call = getattr(each, "call", None) or functools.partial(function, **found["options"])
        found = {"function": "own", "graph": traced(call, shape, shape, each.name)}
    way = getattr(each, "reduction", "mean")
    way = way if way in ("sum", "mean_with_sample_weight") else "mean"
    return {"name": each.name, "reduction": way, **found}


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
        chosen = measure(each, shape)
        is_label = chosen["function"] in OF_LABELS
        objective = Objective.of(
            {"losses": [chosen], "targets": [shape[:-1] if is_label else shape], "group": ROWS}, 1
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


@pytest.mark.parametrize("valid", [ROWS, 5])
def test_masks_weights_of_steps_and_circles_are_those_of_keras(valid: int) -> None:
    """In two groups of rows, the mean of which Keras's means of each are; one row is all masked."""
    steps, group = 3, 3
    rng = np.random.default_rng(2)
    outputs = rng.normal(size=(ROWS, steps, CLASSES)).astype(np.float32)
    labels, mask = rng.integers(0, CLASSES, (ROWS, steps)), rng.random((ROWS, steps)) < 0.6
    mask[1] = False
    weights = rng.uniform(0, 2, (ROWS, steps)).astype(np.float32)
    embedded = outputs[:, 0] / np.linalg.norm(outputs[:, 0], axis=-1, keepdims=True)
    kinds = np.array([0, 1, 0, 1, 1, 1])
    of_labels = functools.partial(keras.losses.SparseCategoricalCrossentropy, from_logits=True)
    losses = [of_labels(), of_labels(ignore_class=0)]
    losses += [of_labels(reduction=way) for way in ("mean_with_sample_weight", "sum")]
    circle, metric = keras.losses.Circle(gamma=2), keras.metrics.SparseCategoricalAccuracy()
    expected, of_circle, sizes = [], [], []
    for rows in (slice(0, group), slice(group, valid)):
        found = keras.ops.convert_to_tensor(outputs[rows])
        found._keras_mask = keras.ops.convert_to_tensor(mask[rows])
        given = [labels[rows], found]  # Keras changes weights
        expected.append([float(f(*given, sample_weight=weights[rows].copy())) for f in losses])
        of_circle.append(float(circle(kinds[rows], embedded[rows])))
        metric.update_state(labels[rows], found)
        sizes.append(rows.stop - rows.start)

    def built(each: Any, y: Any, p: Any, masks: Any = (), **given: Any) -> Any:
        """The loss of rows, and the measured metric, if there is one."""
        shape = p.shape[1:]
        given["losses"] = [measure(each, shape)]
        y, p = (pt.constant(v.reshape(ROWS, -1).astype(np.float32)) for v in (y, p))
        objective = Objective.of({**given, "group": group}, 1)
        rows, measured = objective.build(p, y, [shape], ["linear"], masks, pt.constant(valid))
        values = [v.eval(mode="FAST_COMPILE")[:valid] for f in measured.values() for v in f]
        return rows.eval(mode="FAST_COMPILE")[:valid].mean(), values

    both = np.concatenate([labels, weights], axis=1)
    shapes = {"targets": [[steps]], "weights": [[steps]]}
    metrics = [measure(metric, outputs.shape[1:])]
    for place, loss in enumerate(losses):
        given = {**shapes, "metrics": metrics}
        found, measured = built(loss, both, outputs, [pt.constant(mask)], **given)
        means = [values[place] for values in expected]
        exact = sum(means) if loss.reduction == "sum" else np.average(means, weights=sizes)
        assert found == pytest.approx(exact, rel=1e-5)
    assert measured[0].sum() / measured[1].sum() == pytest.approx(float(metric.result()))
    found, _ = built(circle, kinds, embedded, targets=[[]])
    assert found == pytest.approx(np.average(of_circle, weights=sizes), rel=1e-5)


def test_an_objective_of_a_file_is_checked() -> None:
    good = {"name": "a", "function": "hinge"}
    for values, message in [
        ({"losses": []}, "losses"),
        ({"losses": [{**good, "function": "exec"}]}, "found the function 'exec'"),
        ({"losses": [{**good, "options": {"delta": 1.0}}]}, r"with options \['delta'\]"),
        ({"losses": [{**good, "graph": {"class_name": "os"}}]}, "found null as config"),
        ({"losses": [{**good, "output": 1}]}, "found output 1"),
        ({"losses": [good], "weights": [[], [], []]}, "found 3 weights"),
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
    assert found.foreign == ("size_root_mean_squared_error",)  # which is no mean over rows
    assert [found.takes_labels(output) for output in (0, 1)] == [True, False]


@pytest.mark.parametrize(
    ("compiled", "message"),
    [
        ({"loss": [lambda y, p: p.cpu(), "mse"]}, "found AttributeError.* of symbols, expected op"),
        ({"loss": [lambda y, p: keras.ops.sum(p), "mse"]}, r"found a result of shape \(\)"),
        ({"loss": ["mse", keras.losses.MeanSquaredError("none")]}, "found reduction='none'"),
        ({"loss": ["mse", MeanOfAll(reduction="sum")]}, r"found a result of shape \(\)"),
        ({"loss": ["mse", keras.losses.Dice(reduction="sum")]}, "found reduction='sum', expected"),
        (
            {"optimizer": keras.optimizers.SGD(lambda: 0.1), "loss": "mse"},
            "SGD: found a function as learning_rate, expected a number or a LearningRateSchedule",
        ),
        ({"optimizer": "ftrl", "loss": ["mse", "mse"]}, "optimizer: found Ftrl, expected any of"),
        (
            {
                "optimizer": keras.optimizers.SGD(gradient_accumulation_steps=2, use_ema=True),
                "loss": "mse",
            },
            "found use_ema with gradient_accumulation_steps, expected one",
        ),
    ],
)
def test_what_has_no_counterpart_is_refused(compiled: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Compilation.of(model(**compiled), lambda: (row()[0], [np.zeros((1, 2)), np.zeros((1, 1))]))


class Tenfold(keras.losses.BinaryCrossentropy):
    """A loss of Keras with a `call` of its own."""

    def call(self, y: Any, p: Any) -> Any:
        return 10.0 * super().call(y, p)


class Squared(keras.metrics.MeanAbsoluteError):
    def result(self) -> Any:
        return super().result() ** 2


class Doubled(keras.metrics.BinaryAccuracy):
    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> Any:
        return super().update_state(y, 2 * p, sample_weight)


class Halved(keras.losses.MeanSquaredError):
    def __call__(self, y: Any, p: Any, sample_weight: Any = None) -> Any:
        return super().__call__(y, p, sample_weight) / 2


def test_methods_of_ones_own_in_losses_and_metrics_of_keras_are_used() -> None:
    x = keras.Input((3,))
    ours = keras.Model(x, keras.layers.Dense(2, "sigmoid")(x))
    ours.compile("sgd", Tenfold(), metrics=["mae", Squared(), Doubled()])
    y = np.array([[0, 1]], np.float32)
    found = Compilation.of(ours, lambda: (np.zeros((1, 3), np.float32), y))
    assert [m["name"] for m in found.metrics] == ["mae"]
    assert found.foreign == ("mean_absolute_error", "binary_accuracy")
    objective = Objective.of({"losses": found.losses, "targets": [[2]]}, 1)
    logits, p = np.array([[0.5, -2]], np.float32), pt.matrix(dtype="float32")
    rows = objective.build(pt.specify_shape(p, (None, 2)), pt.constant(y), [(2,)], ["sigmoid"])[0]
    expected = float(Tenfold()(y, keras.ops.sigmoid(logits)))
    assert rows.eval({p: logits}, mode="FAST_COMPILE")[0] == pytest.approx(expected, rel=1e-5)
    ours.compile("sgd", Halved())
    with pytest.raises(InputError, match="found a __call__ of Halved's own, expected a call of"):
        Compilation.of(ours, lambda: (np.zeros((1, 3), np.float32), y))


def test_decay_of_some_parameters_of_a_kind_is_refused() -> None:
    optimizer = keras.optimizers.AdamW()
    found = model(optimizer=optimizer, loss=["mse", "mse"])
    optimizer.exclude_from_weight_decay(var_list=found.trainable_variables[:1])
    with pytest.raises(InputError, match="found some parameters of the kind weight, expected all"):
        Compilation.of(found, lambda: (row()[0], [np.zeros((1, 2)), np.zeros((1, 1))]))


def test_a_model_has_to_be_compiled() -> None:
    with pytest.raises(InputError, match="expected a call of compile first"):
        Compilation.of(keras.Sequential([keras.Input((3,))]), row)


def test_subclassed_models_and_own_steps_are_refused() -> None:
    class Own(keras.Model):
        pass

    own = ["train_step", "test_step", "fit"]
    stepped = [type("Stepped", (keras.Sequential,), {m: lambda self: None}) for m in own]
    with pytest.raises(InputError, match="found the subclassed model Own, expected a Functional"):
        check_model(Own())
    for method, kind in zip(own, stepped, strict=True):
        with pytest.raises(InputError, match=f"found a {method} of Stepped's own"):
            check_model(kind())
    with pytest.raises(InputError, match="found list, expected a keras"):
        check_model([])
    inputs = keras.Input((1,))
    check_model(keras.Model(inputs, inputs))


def test_schedules_give_the_rate_of_each_step() -> None:
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    optimizer = keras.optimizers.Adam(schedule)
    optimizer.build([keras.Variable(np.zeros(1, np.float32))])
    optimizer.iterations.assign(2)
    assert rates_of(optimizer, 3) == pytest.approx([0.05, 0.05 / 2**0.5, 0.025])
    assert rates_of(keras.optimizers.Adam(0.25), 3) == (0.25,)
