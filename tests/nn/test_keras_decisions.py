"""Decisions during training and steps of optimizers, against Keras's own on its torch backend."""

import os
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

os.environ.setdefault("KERAS_BACKEND", "torch")
import keras

from tandem.artifacts.checkpoint import Checkpoint, RunState, read_header, save_checkpoint
from tandem.config.schema import make_config
from tandem.layers.network import NetworkDescription
from tandem.optim import OPTIMIZERS, SCHEDULES, Moment
from tandem.training.early_end import reason_to_end

EPOCHS = 40


def walk(source: random.Random, rises: bool) -> list[float]:
    """Values that improve more and more seldom.

    They are multiples of 1/64, of which 32 bits hold every difference: equal for Keras is equal.
    """
    values, value = [], 64 * 4
    for epoch in range(EPOCHS):
        value += source.choice([-3, -1, 0, 1, 2]) if source.random() < 12 / (epoch + 5) else 0
        values.append((512 - value if rises else value) / 64)
    return values


def drive(callback: Any, values: list[float]) -> tuple[list[float], list[bool]]:
    """Call Keras's callback after each epoch; return the rates after them and whether it ended."""
    model = SimpleNamespace(stop_training=False)
    model.optimizer = SimpleNamespace(learning_rate=keras.ops.convert_to_tensor(0.1, "float64"))
    callback.set_model(model)
    callback.on_train_begin()
    rates, ended = [], []
    for epoch, value in enumerate(values):
        callback.on_epoch_end(epoch, {"watched": value})
        rates.append(float(model.optimizer.learning_rate))
        ended.append(model.stop_training)
    return rates, ended


def through_a_checkpoint(history: list[dict[str, float]], folder: Path) -> Any:
    """What a run that is resumed after these epochs knows of them."""
    path = folder / "w.safetensors"
    state = RunState(len(history), history=tuple(history))
    weights = {"fc8.weight": np.zeros(1, "f4")}
    save_checkpoint(path, Checkpoint(weights, {}, NetworkDescription(67, 3, 1.0), state))
    return read_header(path).state.history


@pytest.mark.parametrize(
    ("name", "mode"), [("validation_loss", "min"), ("f1", "max")], ids=["loss", "f1"]
)
def test_training_ends_where_keras_ends_it(name: str, mode: str, tmp_path: Path) -> None:
    source, ends = random.Random(7), set()
    for _ in range(150):
        values = walk(source, mode == "max")
        patience, start = source.choice([0, 1, 2, 5, EPOCHS]), source.choice([0, 0, 1, 4, 12])
        delta = source.choice([0, 1 / 64, 3 / 64])
        better = source.choice([-1, 8, 30]) / 64
        baseline = source.choice([None, values[0] + (better if mode == "max" else -better)])
        _, expected = drive(
            keras.callbacks.EarlyStopping(
                "watched",
                min_delta=delta,
                patience=patience,
                mode=mode,
                baseline=baseline,
                start_from_epoch=start,
            ),
            values,
        )
        config = make_config(
            {
                "stop_monitor": name,
                "stop_patience": max(1, patience),
                "stop_delta": delta,
                "stop_baseline": baseline,
                "stop_from_epoch": start,
                "metrics": ["f1"],
            }
        )
        history = [{name: value, "another": 1.0} for value in values]
        end = next((n for n, ended in enumerate(expected, 1) if ended), EPOCHS)
        for done in range(end + 1):
            known = through_a_checkpoint(history[:done], tmp_path) if done == end else history
            found = reason_to_end(config, known[:done])
            assert (found is not None) == (done > 0 and expected[done - 1])
        ends.add(end)
    assert len(ends) > 12  # or nothing has been compared
    assert EPOCHS in ends


@pytest.mark.parametrize(
    ("name", "mode"), [("validation_loss", "min"), ("f1", "max")], ids=["loss", "f1"]
)
def test_the_rate_falls_where_keras_lets_it(name: str, mode: str, tmp_path: Path) -> None:
    source, falls = random.Random(11), set()
    for _ in range(100):
        values = walk(source, mode == "max")
        patience, cooldown = source.choice([0, 1, 2, 4]), source.choice([0, 1, 2, 5])
        delta, factor = source.choice([0, 1 / 64, 3 / 64]), source.choice([0.1, 0.5])
        least = source.choice([0.0, 0.004])
        expected, _ = drive(
            keras.callbacks.ReduceLROnPlateau(
                "watched",
                factor=factor,
                patience=patience,
                mode=mode,
                min_delta=delta,
                cooldown=cooldown,
                min_lr=least,
            ),
            values,
        )
        settings = {
            "lr_policy": "plateau",
            "lr_monitor": name,
            "lr_factor": factor,
            "lr_patience": max(0, patience - 1),
            "lr_cooldown": max(0, cooldown - 1),
            "lr_threshold": 0,
            "lr_delta": delta,
            "lr_min": least,
            "metrics": ["f1"],
        }
        plateau = SCHEDULES.chosen(dict(make_config(settings)))
        history: Any = [{name: value} for value in values]
        for done in range(1, EPOCHS + 1):
            if done == EPOCHS // 2:  # resumed, with what was counted so far
                history[:done] = through_a_checkpoint(history[:done], tmp_path)
            rate = plateau.rate(0.1, Moment(done, done, EPOCHS, history[:done]))
            # PyTorch's and ours leaves a rate that would fall by less than 1e-8.
            assert rate == pytest.approx(expected[done - 1], rel=1e-5, abs=2e-8)
        falls.add(len(set(expected)))
    assert len(falls) > 4


STEPS, SHAPE = 40, (3, 4)
CASES: list[tuple[str, dict[str, Any], Callable[[], Any]]] = [
    (
        "sgd",
        {"momentum": 0.9, "use_nesterov_momentum": True},
        lambda: keras.optimizers.SGD(momentum=0.9, nesterov=True),
    ),
    ("sgd", {"momentum": 0.8}, lambda: keras.optimizers.SGD(momentum=0.8)),
    ("sgd", {"use_momentum": False}, lambda: keras.optimizers.SGD()),
    (
        "adam",
        {"adam_epsilon": 1e-3, "adam_epsilon_hat": True},
        lambda: keras.optimizers.Adam(epsilon=1e-3),
    ),
    (
        "adamw",
        {"adam_epsilon": 1e-3, "adam_epsilon_hat": True},
        lambda: keras.optimizers.AdamW(weight_decay=0.1, epsilon=1e-3),
    ),
    (
        "nadam",
        {"adam_epsilon": 1e-3, "nadam_decay": 1},
        lambda: keras.optimizers.Nadam(epsilon=1e-3),
    ),
    (
        "rmsprop",
        {"rmsprop_decay": 0.9, "rmsprop_epsilon": 1e-3, "rmsprop_epsilon_inside": True},
        lambda: keras.optimizers.RMSprop(rho=0.9, epsilon=1e-3),
    ),
]


def rates(name: str) -> list[float]:
    return [0.02 / (1 + step % 7) for step in range(STEPS)]


@pytest.mark.parametrize(("name", "settings", "theirs"), CASES, ids=[case[0] for case in CASES])
def test_forty_steps_equal_kerass(
    name: str, settings: dict[str, Any], theirs: Callable[[], Any]
) -> None:
    gradients = np.random.default_rng(3).normal(size=(STEPS, *SHAPE)) ** 3 / 30
    optimizer = OPTIMIZERS.chosen(dict(make_config({"optimizer": name, **settings})))
    decay = 0.1 if name == "adamw" else 0.0
    inputs = [
        pt.tensor(key, dtype="float64", shape=shape)
        for key, shape in [
            *((key, SHAPE) for key in ("weight", "gradient", *optimizer.states)),
            *((key, ()) for key in ("rate", *optimizer.numbers(0))),
        ]
    ]
    count = len(optimizer.states)
    weight, gradient, states, rate = inputs[0], inputs[1], inputs[2 : 2 + count], inputs[2 + count]
    numbers = dict(zip(optimizer.numbers(0), inputs[3 + count :], strict=True))
    stepped, new = optimizer.step(weight, states, gradient, rate, decay, numbers)
    step = pytensor.function(inputs, [stepped, *new], mode="FAST_COMPILE")

    reference = theirs()
    variable = keras.Variable(np.ones(SHAPE), dtype="float64")
    reference.build([variable])
    values = [np.ones(SHAPE), *(np.zeros(SHAPE) for _ in range(count))]
    for number, (each, rate_now) in enumerate(zip(gradients, rates(name), strict=True)):
        reference.learning_rate = rate_now
        reference.apply([keras.ops.convert_to_tensor(each)], [variable])
        of_step = optimizer.numbers(number).values()
        values = step(values[0], each, *values[1:], rate_now, *of_step)
        # Its states, rates and powers are of 32 bits.
        np.testing.assert_allclose(values[0], np.asarray(variable), rtol=2e-5, atol=2e-5)
    assert np.abs(values[0] - 1).max() > 0.01
