"""train.py and validate.py as a user runs them, on a tiny data set."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tandem.compilers import cpp_compiler
from tests.support.runs import assert_close, assert_same_weights, train
from tests.support.tiny import prepare, read_record, run_program

TRAIN_KEYS = (
    "event epoch step loss top1_error learning_rate images_per_second compute_seconds"
    " load_wait_seconds exchange_seconds"
)
VALIDATION_KEYS = "event epoch step loss top1_error top5_error images"
DOUBLE = {"n_epochs": 2, "precision": "float64", "learning_rate": 0.05}
SLOWLY = {**DOUBLE, "learning_rate": 0.001}

slow = pytest.mark.slow


def train_losses(run: Path) -> list[float]:
    return [line["loss"] for line in read_record(run) if line["event"] == "train"]


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One trainer, 6 images a step, 13 pictures: a last minibatch of one; two epochs, float64."""
    return train(data, tmp_path_factory.mktemp("alone") / "run", batch_size=6, **DOUBLE)


@pytest.mark.parametrize(
    ("trainers", "exchange"),
    [
        (2, "average"),
        pytest.param(2, "gradients", marks=slow),
        pytest.param(3, "average", marks=slow),
        pytest.param(2, "shared", marks=slow),
        pytest.param(3, "gradients", marks=slow),
        pytest.param(3, "shared", marks=slow),
    ],
)
def test_the_number_of_trainers_does_not_change_what_is_computed(
    data: Path, alone: Path, tmp_path: Path, trainers: int, exchange: str
) -> None:
    changes = {**DOUBLE, "batch_size": 6 // trainers, "devices": ["cpu"] * trainers}
    run = train(data, tmp_path / "run", **changes, exchange=exchange, check_every=1)
    assert_close(run, alone, 1e-9)


OPTIMIZERS = ["rmsprop", "adam", "adamw", "nadam"]


@pytest.fixture(scope="module")
def by_optimizer(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """One trainer with each optimizer."""

    @cache
    def run(optimizer: str) -> Path:
        folder = tmp_path_factory.mktemp(optimizer) / "run"
        return train(data, folder, batch_size=6, optimizer=optimizer, **SLOWLY)

    return run


@pytest.mark.parametrize(
    ("optimizer", "trainers", "exchange"),
    [
        pytest.param("adam", 2, "auto", marks=slow),
        *(
            pytest.param(optimizer, trainers, exchange, marks=slow)
            for optimizer in OPTIMIZERS
            for trainers in (2, 3)
            for exchange in ("gradients", "shared")
        ),
    ],
)
def test_nor_does_it_with_another_optimizer(
    data: Path,
    by_optimizer: Callable[[str], Path],
    tmp_path: Path,
    optimizer: str,
    trainers: int,
    exchange: str,
) -> None:
    changes = {**SLOWLY, "batch_size": 6 // trainers, "devices": ["cpu"] * trainers}
    chosen = {"optimizer": optimizer, "exchange": exchange}
    run = train(data, tmp_path / "run", **changes, **chosen, check_every=1)
    assert_close(run, by_optimizer(optimizer), 1e-9)


def test_a_run_leaves_checkpoints_a_record_and_its_configuration(alone: Path) -> None:
    assert sorted(path.name for path in alone.iterdir()) == [
        "config.yaml",
        "epoch-0001.safetensors",
        "epoch-0002.safetensors",
        "events.out.tfevents.00001",
        "record.jsonl",
    ]
    record = read_record(alone)
    for line in record:
        assert " ".join(line) == (TRAIN_KEYS if line["event"] == "train" else VALIDATION_KEYS)
    assert [line["step"] for line in record if line["event"] == "train"] == [1, 2, 3, 4, 5, 6]
    validations = [line for line in record if line["event"] == "validation"]
    assert [(line["epoch"], line["images"]) for line in validations] == [(1, 7), (2, 7)]


@slow
def test_training_lowers_the_loss(data: Path, tmp_path: Path) -> None:
    changes = {"n_epochs": 16, "batch_size": 13, "snapshot_freq": 16, "learning_rate": 0.02}
    losses = train_losses(train(data, tmp_path / "run", **changes))
    # Seven of the thirteen pictures are of one class; all the rest is for the demo to learn.
    assert losses[0] == pytest.approx(np.log(3), abs=0.02)
    assert np.mean(losses[-4:]) < losses[0] - 0.02


@pytest.fixture(scope="module")
def usual(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose loader process crops."""
    return train(data, tmp_path_factory.mktemp("usual") / "run", batch_size=4)


@slow
@pytest.mark.parametrize(
    "changes",
    [
        {"use_data_layer": True},
        {"para_load": False},
        {"para_load": False, "use_data_layer": True},
        {"layout": "c01b"},  # Theano's
    ],
)
def test_how_pictures_are_loaded_does_not_change_a_bit(
    data: Path, tmp_path: Path, usual: Path, changes: dict[str, object]
) -> None:
    if "layout" in changes:
        data, changes = prepare(tmp_path / "data", layout="c01b"), {}
    assert_same_weights(train(data, tmp_path / "run", batch_size=4, **changes), usual)


@slow
def test_a_compiled_run_computes_the_same(data: Path, tmp_path: Path) -> None:
    if cpp_compiler() is None:
        pytest.skip("torch.compile needs a C++ compiler, and none is here")
    runs = [
        train(data, tmp_path / str(compile), batch_size=6, n_epochs=2, compile=compile)
        for compile in (True, False)
    ]
    for ours, theirs in zip(*map(read_record, runs), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["top1_error"] == theirs["top1_error"]


@slow
def test_validate_agrees_with_what_training_recorded(data: Path, alone: Path) -> None:
    """With the settings that the run saved beside its checkpoints."""
    weights = ["--weights", str(alone / "epoch-0002.safetensors")]
    result = run_program("validate.py", [*weights, "--devices", "cpu", "cpu"])
    assert result.returncode == 0, result.stderr
    assert result.stderr.startswith(f"settings are those of {alone}/config.yaml; devices")
    found, last = json.loads(result.stdout), read_record(alone)[-1]
    for name in ("images", "top1_error", "top5_error"):
        assert found[name] == last[name]
    assert found["loss"] == pytest.approx(last["loss"], rel=1e-9)


@slow
def test_every_step_is_in_one_record(data: Path, tmp_path: Path) -> None:
    """Windows of print_freq steps span epochs: 4 steps an epoch, a report every 3."""
    common = {"batch_size": 4, "n_epochs": 3}
    losses = train_losses(train(data, tmp_path / "each", **common))
    threes = read_record(train(data, tmp_path / "threes", **common, print_freq=3))
    images = [4, 4, 4, 1] * 3
    for number, line in enumerate(line for line in threes if line["event"] == "train"):
        window = slice(3 * number, 3 * number + 3)
        expected = np.average(losses[window], weights=images[window])
        assert line["step"] == 3 * number + 3
        assert line["loss"] == pytest.approx(expected, rel=1e-6)
