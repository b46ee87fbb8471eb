"""Decisions during training and steps of optimizers, against Keras's own on its torch backend."""

import csv
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

from tandem.artifacts.checkpoint import Checkpoint, RunState, read_header, save_checkpoint
from tandem.artifacts.epochs import logs_of, write_csv
from tandem.artifacts.metrics_log import TrainRecord, ValidationRecord
from tandem.config.schema import make_config
from tandem.layers.network import NetworkDescription
from tandem.nn.callbacks import (
    Context,
    EarlyStopping,
    LearningRateScheduler,
    ModelCheckpoint,
    ReduceLROnPlateau,
)
from tandem.nn.callbacks.settings import Mode
from tandem.optim import OPTIMIZERS, SCHEDULES, Moment
from tandem.training.early_end import reason_to_end
from tests.support.lazily import Lazily

os.environ.setdefault("KERAS_BACKEND", "torch")
keras = Lazily("keras")

EPOCHS = 40
CONTEXT = Context(EPOCHS, 0.1, {"f1": "f1"})
WATCHED = [("validation_loss", "val_loss", "min"), ("f1", "val_f1", "max")]


def walk(source: random.Random, rises: bool) -> list[float]:
    """Values that improve more and more seldom.

    They are multiples of 1/64, of which 32 bits hold every difference: equal for Keras is equal.
    """
    values, value = [], 64 * 4
    for epoch in range(EPOCHS):
        value += source.choice([-3, -1, 0, 1, 2]) if source.random() < 12 / (epoch + 5) else 0
        values.append((512 - value if rises else value) / 64)
    return values


def drive(callback: Any, name: str, values: list[float]) -> tuple[list[float], list[bool]]:
    """Call Keras's callback after each epoch; return the rates after them and whether it ended."""
    model = SimpleNamespace(stop_training=False)
    model.optimizer = SimpleNamespace(learning_rate=keras.ops.convert_to_tensor(0.1, "float64"))
    callback.set_model(model)
    callback.on_train_begin()
    rates, ended = [], []
    for epoch, value in enumerate(values):
        callback.on_epoch_end(epoch, {name: value})
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


@pytest.mark.parametrize(("name", "theirs", "mode"), WATCHED, ids=["loss", "f1"])
def test_training_ends_where_keras_ends_it(
    name: str, theirs: str, mode: Mode, tmp_path: Path
) -> None:
    source, ends = random.Random(7), set()
    for _ in range(60):
        values = walk(source, mode == "max")
        patience, start = source.choice([0, 1, 2, 5, EPOCHS]), source.choice([0, 0, 1, 4, 12])
        delta = source.choice([0, 1 / 64, 3 / 64])
        better = source.choice([-1, 8, 30]) / 64
        baseline = source.choice([None, values[0] + (better if mode == "max" else -better)])
        arguments: Any = {
            "monitor": theirs,
            "min_delta": delta,
            "patience": patience,
            "mode": mode,
            "baseline": baseline,
            "start_from_epoch": start,
        }
        _, expected = drive(keras.callbacks.EarlyStopping(**arguments), theirs, values)
        config = make_config({"metrics": ["f1"], **EarlyStopping(**arguments).settings(CONTEXT)})
        history = [{name: value, "another": 1.0} for value in values]
        end = next((n for n, ended in enumerate(expected, 1) if ended), EPOCHS)
        for done in range(end + 1):
            known = through_a_checkpoint(history[:done], tmp_path) if done == end else history
            found = reason_to_end(config, known[:done])
            assert (found is not None) == (done > 0 and expected[done - 1])
        ends.add(end)
    assert len(ends) > 12  # or nothing has been compared
    assert EPOCHS in ends


@pytest.mark.parametrize(("name", "theirs", "mode"), WATCHED, ids=["loss", "f1"])
def test_the_rate_falls_where_keras_lets_it(
    name: str, theirs: str, mode: Mode, tmp_path: Path
) -> None:
    source, falls = random.Random(11), set()
    for _ in range(50):
        values = walk(source, mode == "max")
        patience, cooldown = source.choice([0, 1, 2, 4]), source.choice([0, 1, 2, 5])
        delta, factor = source.choice([0, 1 / 64, 3 / 64]), source.choice([0.1, 0.5])
        least = source.choice([0.0, 0.004])
        arguments: Any = {
            "monitor": theirs,
            "factor": factor,
            "patience": patience,
            "mode": mode,
            "min_delta": delta,
            "cooldown": cooldown,
            "min_lr": least,
        }
        expected, _ = drive(keras.callbacks.ReduceLROnPlateau(**arguments), theirs, values)
        settings = {"metrics": ["f1"], **ReduceLROnPlateau(**arguments).settings(CONTEXT)}
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


def test_a_scheduler_sets_the_rates_that_keras_s_sets() -> None:
    def schedule(epoch: int, rate: float) -> float:
        return rate if epoch % 3 else rate * 0.5

    theirs = keras.callbacks.LearningRateScheduler(schedule)
    optimizer = SimpleNamespace(learning_rate=keras.ops.convert_to_tensor(0.1, "float64"))
    theirs.set_model(SimpleNamespace(optimizer=optimizer))
    settings = LearningRateScheduler(schedule).settings(CONTEXT)
    table = SCHEDULES.chosen(dict(make_config(settings)))
    for epoch in range(EPOCHS):
        theirs.on_epoch_begin(epoch)
        rate = table.rate(0.1, Moment(epoch, epoch, EPOCHS))
        assert rate == pytest.approx(float(optimizer.learning_rate), rel=1e-6)


def test_the_best_checkpoints_are_those_that_keras_saves(tmp_path: Path) -> None:
    source, counts = random.Random(5), set()
    run = tmp_path / "run"
    run.mkdir()
    for number in range(10):
        values = walk(source, False)
        threshold = source.choice([None, 3.9])
        saved: list[str] = []
        theirs = keras.callbacks.ModelCheckpoint(
            "{epoch}-{val_loss}.keras", save_best_only=True, initial_value_threshold=threshold
        )
        model = SimpleNamespace(save=lambda path, saved=saved, **_: saved.append(Path(path).name))
        theirs.set_model(model)
        mine: Any = ModelCheckpoint(
            tmp_path / f"{number}" / "{epoch}-{val_loss}.keras",
            save_best_only=True,
            initial_value_threshold=threshold,
        ).adapted()
        mine.on_train_begin({"weights_dir": str(run), "resume_train": False})
        for epoch, value in enumerate(values):
            (run / f"epoch-{epoch + 1:04}.safetensors").touch()
            logs = {"loss": 1.0, "val_loss": value}
            theirs.on_epoch_end(epoch, logs)
            mine.on_epoch_end(epoch + 1, SimpleNamespace(logs=logs))
        found = [path.name for path in (tmp_path / f"{number}").glob("*")]
        assert sorted(found) == sorted(saved)
        counts.add(len(saved))
    assert len(counts) > 3


def test_a_table_has_the_rows_of_keras_s(tmp_path: Path) -> None:
    """Its columns are in the same order, and numbers are written as exactly."""
    records: list[Any] = []
    theirs = keras.callbacks.CSVLogger(tmp_path / "theirs.csv")
    theirs.set_model(SimpleNamespace())
    theirs.on_train_begin()
    for epoch in range(3):
        metrics = {"accuracy": epoch / 3, "mse": 1 / (epoch + 1)}
        train = TrainRecord(
            epoch + 1, epoch + 1, 0.1 * epoch, None, 0.5, 1.0, 1.0, 0.0, 0.0, metrics
        )
        record = ValidationRecord(epoch + 1, epoch + 1, 0.3 * epoch, 0.5, 0.5, 7, metrics)
        records += [train, record]
        logs = logs_of(record, [train])
        del logs["learning_rate"]  # Keras has it only where a callback changes it
        theirs.on_epoch_end(epoch, logs)
    theirs.on_train_end()
    write_csv(tmp_path / "ours.csv", records)
    with (tmp_path / "ours.csv").open() as mine, (tmp_path / "theirs.csv").open() as other:
        assert [*csv.reader(mine)] == [*csv.reader(other)]


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
