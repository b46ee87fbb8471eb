"""Runs with losses of masked steps, of all rows together and of the user's own, against Keras."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tandem.keras
from tandem.errors import InputError
from tests.keras.test_runs import assert_equal_weights
from tests.support.keras_models import keras

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:__array__ implementation")]
ROWS, BATCH, STEPS = 50, 20, 6
Case = tuple[Any, Any, Any, dict[str, Any]]  # a compiled model, x, y, other arguments of fit


def masked(m: Any, rng: Any) -> Case:
    x = rng.integers(0, 5, (ROWS, STEPS)) * (rng.random((ROWS, STEPS)) < 0.6)
    layers = [m.Embedding(5, 4, mask_zero=True), m.LSTM(4, return_sequences=True)]
    model = keras.Sequential([keras.Input((STEPS,)), *layers, m.Dense(3, "softmax")])
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    weights = rng.uniform(0, 2, (ROWS, STEPS))
    return model, x, rng.integers(0, 3, (ROWS, STEPS)), {"sample_weight": weights}


def own(m: Any, rng: Any) -> Case:
    """Two outputs, of which one has a mask and both have losses of the user's own."""

    def pinball(y: Any, p: Any) -> Any:
        return keras.ops.maximum(0.9 * (y - p), -0.1 * (y - p))

    def smooth(y: Any, p: Any) -> Any:
        return keras.ops.mean(keras.ops.sqrt(keras.ops.square(y - p) + 1e-3))

    x = keras.Input((STEPS, 2))
    y = m.GRU(3, return_sequences=True)(m.Masking()(x))
    outputs = [m.Dense(1, name="each")(y), m.Dense(2, name="last")(m.GRU(3)(y))]
    model = keras.Model(x, outputs)
    model.compile("sgd", [pinball, smooth], metrics=[["mae"], ["mse"]], loss_weights=[2.0, 0.5])
    rows = rng.normal(size=(ROWS, STEPS, 2)) * (rng.random((ROWS, STEPS, 1)) < 0.7)
    return model, rows, [rng.normal(size=(ROWS, STEPS, 1)), rng.normal(size=(ROWS, 2))], {}


def of_kinds(m: Any, rng: Any) -> Case:
    """Targets of another shape than outputs."""

    def focal(y: Any, p: Any) -> Any:
        found = keras.ops.sum(keras.ops.one_hot(keras.ops.cast(y, "int32"), 3) * p, axis=-1)
        return -((1 - found) ** 2) * keras.ops.log(found)

    model = keras.Sequential([keras.Input((4,)), m.Dense(5, "relu"), m.Dense(3, "softmax")])
    model.compile("rmsprop", focal)
    return model, rng.normal(size=(ROWS, 4)), rng.integers(0, 3, ROWS), {}


def generalized(m: Any, rng: Any) -> Case:
    model, *given = of_kinds(m, rng)
    model.compile("rmsprop", keras.losses.CategoricalGeneralizedCrossEntropy(0.6))
    return (model, *given)


def dice(m: Any, rng: Any) -> Case:
    layers = [m.Conv2D(3, 3, padding="same", activation="relu"), m.Conv2D(1, 1)]
    model = keras.Sequential([keras.Input((5, 5, 1)), *layers, m.Activation("sigmoid")])
    model.compile("adam", keras.losses.Dice(), metrics=["binary_accuracy"])
    return model, rng.normal(size=(ROWS, 5, 5)), rng.integers(0, 2, (ROWS, 5, 5)), {}


def circle(m: Any, rng: Any) -> Case:
    layers = [m.Dense(6, "relu"), m.Dense(3), m.UnitNormalization()]
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile("adam", keras.losses.Circle(gamma=4))
    return model, rng.normal(size=(ROWS, 4)), rng.integers(0, 4, ROWS), {}


def ctc(m: Any, rng: Any) -> Case:
    """Of two labels of four, which may be equal, in six steps."""
    layers = [m.GRU(4, return_sequences=True), m.Dense(5)]
    model = keras.Sequential([keras.Input((STEPS, 2)), *layers])
    model.compile("adam", keras.losses.CTC())
    labels = rng.integers(1, 5, (ROWS, 3)) * [1, 1, 0]
    return model, rng.normal(size=(ROWS, STEPS, 2)), labels, {}


def ignoring(m: Any, rng: Any) -> Case:
    """Of labels of which one is no class."""
    model = keras.Sequential([keras.Input((4,)), m.Dense(5, "relu"), m.Dense(3, "softmax")])
    loss = keras.losses.SparseCategoricalCrossentropy(ignore_class=-1)
    model.compile("adam", loss, metrics=["accuracy"])
    weights = {"sample_weight": rng.uniform(0, 2, ROWS)}
    return model, rng.normal(size=(ROWS, 4)), rng.integers(-1, 3, ROWS), weights


def summed(m: Any, rng: Any) -> Case:
    model = keras.Sequential([keras.Input((4,)), m.Dense(5, "relu"), m.Dense(2)])
    model.compile(keras.optimizers.SGD(1e-3), keras.losses.MeanSquaredError(reduction="sum"))
    weights = {"sample_weight": rng.uniform(0, 2, ROWS)}
    return model, rng.normal(size=(ROWS, 4)), rng.normal(size=(ROWS, 2)), weights


CASES = [masked, own, of_kinds, generalized, dice, circle, ctc, ignoring, summed]


@pytest.mark.parametrize("case", CASES)
def test_losses_of_runs_are_those_of_keras(case: Any, tmp_path: Path) -> None:
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    theirs, *_ = case(keras.layers, np.random.default_rng(1))
    ours, x, y, given = case(keras.layers, np.random.default_rng(1))
    ours.set_weights(theirs.get_weights())
    settings = {"sum_rows": 4, "devices": ["cpu"] * 2} if case is summed else {"norm_rows": BATCH}
    tandem.keras.distribute(ours, run=tmp_path / "run", **{"devices": ["cpu"], **settings})
    given |= {"batch_size": BATCH, "epochs": 3, "shuffle": False, "verbose": 0}
    expected = theirs.fit(x, y, **given, validation_data=(x, y)).history
    found = ours.fit(x, y, **given, validation_data=(x, y)).history
    assert [*found] == [*expected]
    for key, values in expected.items():
        # Of masked steps, metrics in training are means of reports, weighted by their rows.
        is_mean = (case, key) in ((masked, "accuracy"), (own, "each_mae"))
        assert found[key] == pytest.approx(values, rel=2e-2 if is_mean else 1e-4), key
    assert_equal_weights(ours, theirs, atol=1e-5, rtol=1e-4)


def test_masked_steps_are_counted_by_groups_for_any_number_of_trainers(tmp_path: Path) -> None:
    found = []
    for trainers in (1, 2):
        keras.utils.clear_session()
        keras.utils.set_random_seed(1)
        model, x, y, given = masked(keras.layers, np.random.default_rng(1))
        run = tmp_path / f"{trainers}"
        tandem.keras.distribute(model, ["cpu"] * trainers, run, precision="float64", norm_rows=5)
        history = model.fit(x, y, BATCH, 2, verbose=0, validation_data=(x, y), **given)
        found.append((history.history, model))
    assert_equal_weights(found[0][1], found[1][1], atol=1e-8, rtol=1e-7)
    for key, values in found[0][0].items():
        assert found[1][0][key] == pytest.approx(values, rel=1e-7)


def test_a_loss_without_a_lowering_is_refused(tmp_path: Path) -> None:
    m = keras.layers
    model = keras.Sequential([keras.Input((9, 3)), m.Dense(5)])
    model.compile("sgd", lambda y, p: keras.ops.fft((y, p))[0])
    tandem.keras.distribute(model, ["cpu"], tmp_path / "run")
    with pytest.raises(InputError, match=r"found ops\.FFT, for which there is no lowering"):
        model.fit(np.zeros((4, 9, 3)), np.ones((4, 9, 5)), verbose=0)
