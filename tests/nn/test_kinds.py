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
    assert mae == pytest.approx(np.abs(model.predict(x)[:, 0] - y).mean(), rel=1e-4)
    with pytest.raises(InputError, match="pictures"):
        from tandem.classify.classifier import Classifier

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
