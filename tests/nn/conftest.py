"""A small model that has learnt once, for all tests of this folder."""

from dataclasses import dataclass

import numpy as np
import pytest

from tandem import nn
from tandem.nn.history import History
from tests.support.bars import bars, small_model


@dataclass(frozen=True)
class Trained:
    model: nn.Sequential
    history: History
    x: np.ndarray
    y: np.ndarray


@pytest.fixture(scope="package")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A model of pictures after six epochs with one trainer."""
    x, y = bars(320)
    model = small_model()
    model.compile("adam", "sparse_categorical_crossentropy", ["accuracy"])
    history = model.fit(
        x,
        y,
        batch_size=32,
        epochs=6,
        validation_split=0.2,
        devices=["cpu"],
        run=tmp_path_factory.mktemp("fit") / "run",
        verbose=0,
        class_names=["across", "down"],
        tensorboard=True,
        learning_rate=0.04,
    )
    return Trained(model, history, x, y)
