"""Whole runs against Keras 3 on PyTorch: the same weights after the same forty steps."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem import nn

pytestmark = pytest.mark.slow

ROWS, BATCH = 640, 16  # forty steps


def layers_of(front: Any) -> list[Any]:
    """Layers of which Keras and `tandem.nn` have the same names."""
    layers = front.layers
    return [
        layers.Input((10, 10, 2)),
        layers.Conv2D(6, 3, padding="same", strides=2, activation="relu"),
        layers.BatchNormalization(),
        layers.DepthwiseConv2D(3, activation="tanh"),
        layers.AveragePooling2D(2, padding="same"),
        layers.Flatten(),
        layers.Dense(8, activation="elu"),
        layers.Dense(3, activation="softmax"),
    ]


@pytest.mark.parametrize("name", ["Adam", "SGD", "RMSprop", "Nadam"])
def test_forty_steps_give_the_weights_of_keras(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "KERAS_BACKEND", "torch")
    import keras

    rng = np.random.default_rng(1)
    x = rng.normal(size=(ROWS, 10, 10, 2)).astype(np.float32)
    y = rng.integers(0, 3, ROWS)
    options = {"momentum": 0.9, "nesterov": True} if name == "SGD" else {}
    ours, theirs = nn.Sequential(layers_of(nn), norm_rows=BATCH), keras.Sequential(layers_of(keras))
    loss, metrics = "sparse_categorical_crossentropy", ["accuracy"]
    ours.compile(getattr(nn.optimizers, name)(0.005, **options), loss, metrics)
    theirs.compile(getattr(keras.optimizers, name)(0.005, **options), loss, metrics=metrics)
    theirs.set_weights(ours.get_weights())
    np.testing.assert_allclose(ours.predict(x), theirs.predict(x, verbose=0), atol=1e-6)
    expected = theirs.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    found = ours.fit(
        x, y, batch_size=BATCH, shuffle=False, verbose=0, devices=["cpu"], run=tmp_path / "run"
    )
    assert found.history["loss"] == pytest.approx(expected.history["loss"], rel=1e-4)
    assert found.history["accuracy"] == pytest.approx(expected.history["accuracy"], abs=1e-6)
    for one, other in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-3, atol=2e-4)
    assert ours.evaluate(x, y) == pytest.approx(theirs.evaluate(x, y, verbose=0), rel=1e-3)
