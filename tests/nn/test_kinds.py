"""`fit` on arrays of other kinds, and against Keras: longer runs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem import nn
from tandem.errors import InputError

pytestmark = pytest.mark.slow


def test_numbers_are_regressed_without_validation(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(512, 5))
    y = x @ np.array([1.0, -2, 0.5, 0, 3]) + 0.5
    model = nn.Sequential([nn.layers.Dense(1)])
    model.compile(nn.optimizers.SGD(0.05, momentum=0.9, nesterov=True), "mse", metrics=["mae"])
    history = model.fit(x, y, epochs=8, devices=["cpu"], run=tmp_path / "run", verbose=0)
    assert [*history.history] == ["loss", "mae"]
    assert history.history["loss"][-1] < 1e-3
    loss, mae = model.evaluate(x, y)
    assert loss < 1e-3
    assert mae == pytest.approx(np.abs(model.predict(x)[:, 0] - y).mean(), abs=1e-6)
    from tandem.classify.classifier import Classifier

    with pytest.raises(InputError, match="pictures"):
        Classifier.load(sorted((tmp_path / "run").glob("*.safetensors"))[-1])


def test_yes_or_no_is_learnt_by_a_sigmoid(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(512, 4, 3))
    y = x.sum(axis=(1, 2)) > 0
    model = nn.Sequential([nn.layers.Flatten(), nn.layers.Dense(1, activation="sigmoid")])
    model.compile(nn.optimizers.Adam(0.05), "binary_crossentropy", metrics=["accuracy"])
    history = model.fit(
        x, y, epochs=5, validation_split=0.25, devices=["cpu"], run=tmp_path / "run", verbose=0
    )
    assert history.history["val_accuracy"][-1] > 0.95
    predicted = model.predict(x)
    assert ((predicted[:, 0] > 0.5) == y).mean() == pytest.approx(
        model.evaluate(x, y, return_dict=True)["accuracy"]
    )


def test_soft_targets_are_learnt(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(256, 6))
    scores = x @ rng.normal(size=(6, 3))
    y = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    model = nn.Sequential([nn.layers.Dense(3)])
    loss = nn.losses.CategoricalCrossentropy(from_logits=True)
    model.compile(nn.optimizers.Adam(0.05), loss, metrics=["accuracy"])
    history = model.fit(x, y, epochs=20, devices=["cpu"], run=tmp_path / "run", verbose=0)
    entropy = -(y * np.log(y)).sum(axis=1).mean()
    assert history.history["loss"][-1] == pytest.approx(entropy, rel=0.02)
    assert history.history["accuracy"][-1] > 0.95
    assert model.predict(x).min() < 0  # logits


def test_a_model_learns_on_with_what_it_has_learnt(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(128, 5))
    model = nn.Sequential([nn.layers.Dense(1)])
    model.compile("sgd", "mse")
    options: dict[str, Any] = {"devices": ["cpu"], "verbose": 0, "epochs": 2}
    first = model.fit(x, x[:, 0], run=tmp_path / "first", **options)
    second = model.fit(x, x[:, 0], run=tmp_path / "second", **options)
    assert second.history["loss"][0] < first.history["loss"][-1]


def test_layers_that_are_not_trainable_keep_their_weights(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(128, 5))
    model = nn.Sequential(
        [nn.layers.Dense(4, trainable=False, name="kept"), nn.layers.Dense(1, name="learnt")]
    )
    model.build((None, 5))
    before = {name: value.copy() for name, value in model.weights.items()}
    model.compile("sgd", "mse")
    model.fit(x, x[:, 0], devices=["cpu"], run=tmp_path / "run", verbose=0)
    for name, value in model.weights.items():
        assert np.array_equal(value, before[name]) == name.startswith("kept.")


class _Log(nn.callbacks.Callback):
    """Notes what it is called with, and ends training after three epochs."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def on_train_begin(self, logs: Any = None) -> None:
        self.calls.append(("begin", self.params["epochs"]))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.calls.append(("epoch", epoch))
        self.logs, self.weights = logs, self.model.get_weights()
        self.model.stop_training = epoch == 2

    def on_train_end(self, logs: Any = None) -> None:
        self.calls.append(("end", None))


def test_callbacks_are_called_here_and_end_training(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(128, 5))
    model = nn.Sequential([nn.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    log = _Log()
    callbacks = [
        log,
        nn.callbacks.CSVLogger(tmp_path / "log.csv"),
        nn.callbacks.ModelCheckpoint(tmp_path / "{epoch}.safetensors"),
        nn.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (1 + epoch)),
    ]
    history = model.fit(
        x,
        x[:, 0],
        epochs=9,
        validation_split=0.25,
        callbacks=callbacks,
        devices=["cpu"],
        run=tmp_path / "run",
        verbose=0,
    )
    assert log.calls == [("begin", 9), *(("epoch", n) for n in range(3)), ("end", None)]
    assert history.epoch == [0, 1, 2]
    assert history.history["learning_rate"] == pytest.approx([0.1, 0.05, 0.1 / 3])
    last = {name: values[-1] for name, values in history.history.items()}
    assert log.logs == pytest.approx(last)
    for seen, final in zip(log.weights, model.get_weights(), strict=True):
        np.testing.assert_array_equal(seen, final)  # callbacks see the weights of their epoch
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 4
    copy = nn.load_model(tmp_path / "3.safetensors")
    np.testing.assert_array_equal(copy.predict(x), model.predict(x))


def test_the_best_weights_are_restored(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(128, 5))
    model = nn.Sequential([nn.layers.Dense(1)])
    model.compile("sgd", "mse")
    rates = [0.1, 0.1, 0.1, 1.5, 1.5, 1.5, 1.5]  # with the larger one it diverges
    callbacks = [
        nn.callbacks.EarlyStopping(patience=2, restore_best_weights=True),
        nn.callbacks.LearningRateScheduler(lambda epoch: rates[epoch]),
    ]
    history = model.fit(
        x,
        x[:, 0],
        epochs=7,
        validation_split=0.25,
        callbacks=callbacks,
        devices=["cpu"],
        run=tmp_path / "run",
        verbose=0,
    )
    losses = history.history["val_loss"]
    assert len(losses) == losses.index(min(losses)) + 3
    assert model.evaluate(x[96:], x[96:, 0]) == pytest.approx(min(losses), rel=1e-5)


def test_a_run_without_numbers_ends_as_the_callback_says(tmp_path: Path) -> None:
    from tandem.errors import RunError

    x = np.full((64, 5), 1e30)
    model = nn.Sequential([nn.layers.Dense(1)])
    model.compile("sgd", "mse")
    options: dict[str, Any] = {"devices": ["cpu"], "verbose": 0}
    with pytest.raises(RunError, match="finite"):
        model.fit(x, x[:, 0], run=tmp_path / "raises", **options)
    callbacks = [nn.callbacks.TerminateOnNaN()]
    history = model.fit(x, x[:, 0], run=tmp_path / "ends", callbacks=callbacks, **options)
    assert history.history == {}


def test_an_own_layer_learns_and_is_named_when_it_is_loaded(tmp_path: Path) -> None:
    from examples.nn_layers import Swish

    rng = np.random.default_rng(1)
    x = rng.normal(size=(256, 5))
    model = nn.Sequential([nn.layers.Dense(16), Swish(name="swish"), nn.layers.Dense(1)])
    model.compile(nn.optimizers.Adam(0.02), "mse")
    history = model.fit(
        x, np.abs(x[:, 0]), epochs=10, devices=["cpu"], run=tmp_path / "run", verbose=0
    )
    assert history.history["loss"][-1] < 0.3 * history.history["loss"][0]
    assert model.weights["swish.scale"][0] != 1
    with pytest.raises(InputError, match=r"examples\.nn_layers:Swish"):
        nn.load_model(tmp_path / "run")
    loaded = nn.load_model(tmp_path / "run", layers=[Swish])
    np.testing.assert_array_equal(loaded.predict(x), model.predict(x))
    with pytest.raises(InputError, match=r"expected subclasses of nn\.layers\.Layer"):
        nn.load_model(tmp_path / "run", layers=[dict])
