"""Runs on data sets of arrays, against gradient descent in NumPy, and against each other."""

import math
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import tandem
from tandem.artifacts.metrics_log import TrainRecord, ValidationRecord
from tandem.artifacts.run_folder import list_checkpoints
from tandem.config.schema import make_config
from tandem.errors import InputError
from tandem.launch.prepare import prepare_run
from tandem.layers.choices import LOSSES, metrics_of
from tandem.layers.network import ALEXNET, build_network
from tandem.look import LookOptions, look
from tandem.memory import RowType, SlotLayout
from tandem.preprocessing.arrays import write_arrays, write_pictures
from tandem.training.graphs import array_inputs, count_minibatch, targets_of
from tandem.training.setup import check_input
from tests.support.array_network import (
    LARGEST,
    NETWORK,
    RowsNetwork,
    inputs_of,
    largest_difference,
    softmax,
    trained,
)
from tests.support.op_checks import plain_python
from tests.support.runs import RunningJob, assert_same_bits, train, weights
from tests.support.tiny import run_program, settings

CLASSES, BATCH, RATE = 3, 4, 0.1
SHAPES = {"images": (4, 3, 2), "vectors": (6,), "sequences": (5, 2)}


def data_of(folder: Path, kind: str, targets: str, count: int = 23, validation: int = 9) -> Any:
    """Write a data set; return rows and targets, all of them as rows of numbers."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(count + validation, *SHAPES[kind])).astype(np.float32)
    y: Any = rng.integers(0, CLASSES, len(x))
    rows = np.eye(CLASSES)[y]
    if targets != "classes":
        shape = {"vectors": (CLASSES,), "one-hot": (CLASSES,), "numbers": ()}[targets]
        y = rows if targets == "one-hot" else rng.normal(size=(len(x), *shape))
        y = rows = y.astype(np.float32)
    parts = [(x[:count], y[:count]), (x[count:], y[count:]) if validation else None]
    write_arrays(folder, *parts)
    return x, rows


def settings_of(data: Path, kind: str, **changes: Any) -> dict[str, Any]:
    shape = SHAPES[kind]
    rows = [shape[2], shape[0], shape[1]] if len(shape) == 3 else list(shape)
    return {
        "data_folder": str(data),
        "network": NETWORK,
        "network_options": {"rows": rows},
        "devices": ["cpu"],
        "threads": 1,
        "batch_size": BATCH,
        "n_epochs": 2,
        "precision": "float64",
        "shuffle": "none",
        "learning_rate": RATE,
        "lr_policy": "constant",
        "momentum": 0.0,
        "weight_decay": 0.0,
        "bias_rate": 1.0,
        "print_freq": 6,
        "live_view": False,
        "tensorboard": False,
        **changes,
    }


def check_weights(run: Path, kind: str, x: np.ndarray, rows: np.ndarray, loss: str) -> Any:
    """Compare the last checkpoint with gradient descent in NumPy; return it."""
    outputs = rows.reshape(len(x), -1).shape[1]
    shape = SHAPES[kind]
    shape = (shape[2], shape[0], shape[1]) if len(shape) == 3 else shape
    network = RowsNetwork(None, outputs, 1.0, "float64", shape)
    initial = dict(network.initial_values(1))
    expected = trained(initial, x, rows, loss, rate=RATE, batch=BATCH, epochs=2)
    found = weights(run)
    for name, value in expected.items():
        assert np.abs(value - initial[name]).max() > 1e-3
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-9, err_msg=name)
    return expected


@pytest.mark.slow
def test_images_of_classes(tmp_path: Path) -> None:
    x, rows = data_of(tmp_path / "data", "images", "classes")
    metrics = ["accuracy", "mse", "binary_accuracy", LARGEST]
    own = settings_of(
        tmp_path / "data", "images", metrics=metrics, weights_dir=str(tmp_path / "run")
    )
    result = tandem.train(own)
    final = check_weights(tmp_path / "run", "images", x[:23], rows[:23], "cross_entropy")
    record = result.record[-1]
    assert isinstance(record, ValidationRecord)
    outputs = inputs_of(x[23:]) @ final["fc1.weight"] + final["fc1.bias"]
    likely, wanted = softmax(outputs), rows[23:]
    right = np.mean(outputs.argmax(1) == wanted.argmax(1))
    assert record.loss == pytest.approx(-np.log((likely * wanted).sum(1)).mean(), rel=1e-9)
    assert (record.images, record.top1_error) == (9, pytest.approx(1 - right))
    assert record.metrics == pytest.approx(
        {
            "accuracy": right,
            "mse": np.mean((outputs - wanted) ** 2),
            "binary_accuracy": np.mean((outputs > 0) == (wanted == 1)),
            "largest_difference": np.abs(likely - wanted).max(axis=1).mean(),
        },
        rel=1e-9,
    )
    header = make_config({**own, "resume_train": True, "n_epochs": 3})
    description = prepare_run(header).header.network
    assert (description.crop_size, description.wnids) == (None, ("0", "1", "2"))


CASES = [
    ("vectors", "numbers", "mse"),
    ("sequences", "vectors", "mse"),
    ("images", "one-hot", "cross_entropy"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "targets", "loss"), CASES)
def test_targets_of_numbers_and_two_trainers(
    tmp_path: Path, kind: str, targets: str, loss: str
) -> None:
    x, rows = data_of(tmp_path / "data", kind, targets)
    measured = ["mae", "binary_accuracy"] + ["accuracy"] * (targets == "one-hot")
    own = settings_of(tmp_path / "data", kind, loss=loss, metrics=measured)
    one = tandem.train({**own, "weights_dir": str(tmp_path / "one")})
    final = check_weights(tmp_path / "one", kind, x[:23], rows[:23], loss)
    outputs = inputs_of(x[23:]) @ final["fc1.weight"] + final["fc1.bias"]
    wanted, record = rows[23:].reshape(9, -1).astype(float), one.record[-1]
    assert isinstance(record, ValidationRecord)
    assert record.metrics["mae"] == pytest.approx(np.abs(outputs - wanted).mean(), rel=1e-9)
    assert tandem.validate(one.weights, own).loss == record.loss
    signs = np.mean((outputs > 0) == (wanted > 0.5))
    assert record.metrics["binary_accuracy"] == pytest.approx(signs)
    wrong = np.mean(outputs.argmax(1) != wanted.argmax(1))
    errors = [each.top1_error for each in one.record]
    if targets == "one-hot":
        assert record.top1_error == pytest.approx(wrong)
        assert record.metrics["accuracy"] == pytest.approx(1 - wrong)
    else:
        assert math.isnan(record.top1_error)
        assert math.isnan(record.top5_error)
        assert errors[0] is None
    two = {"devices": ["cpu", "cpu"], "batch_size": BATCH // 2, "exchange": "gradients"}
    divided = ["single"] + ["sharded"] * (targets != "numbers")  # of which there is one unit
    for where in ["replicated", *divided]:
        run = tmp_path / where
        tandem.train({**own, **two, "fully_connected": where, "weights_dir": str(run)})
        left, right = weights(tmp_path / "one"), weights(run)
        for name, value in left.items():
            np.testing.assert_allclose(value, right[name], rtol=0, atol=1e-9, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("pictures", [False, True])
def test_a_run_without_validation_rows(tmp_path: Path, pictures: bool) -> None:
    data, run = tmp_path / "data", tmp_path / "run"
    own = settings_of(data, "vectors", metrics=["accuracy"], weights_dir=str(run))
    if pictures:
        x = np.random.default_rng(1).integers(0, 256, (11, 4, 4), np.uint8)
        write_pictures(data, (x, np.arange(11) % 3), None)
        own |= {"crop_size": 4, "network_options": {}, "learning_rate": 1e-5, "mean_file": None}
        own |= {"rand_mirror": False, "tensorboard": True}
    else:
        data_of(data, "vectors", "classes", validation=0)
    result = tandem.train(own)
    checks = [each for each in result.record if isinstance(each, ValidationRecord)]
    assert len(checks) == 2
    for check in checks:
        assert check.images == 0
        assert math.isnan(check.loss)
        assert math.isnan(check.top1_error)
        assert math.isnan(check.metrics["accuracy"])
    assert any(isinstance(each, TrainRecord) for each in result.record)
    assert len(list_checkpoints(run)) == 2
    again = tandem.train({**own, "resume_train": True, "n_epochs": 3})
    assert [each.epoch for each in again.record if isinstance(each, ValidationRecord)] == [1, 2, 3]
    if pictures:
        network = RowsNetwork(4, 3, 1.0, "float64", (3, 4, 4))
        rgb = np.repeat(x[..., None], 3, axis=-1)
        initial, rows = dict(network.initial_values(1)), np.eye(3)[np.arange(11) % 3]
        run_of = {"rate": 1e-5, "batch": BATCH, "epochs": 3}
        expected = trained(initial, rgb, rows, "cross_entropy", **run_of)
        found = weights(run)["fc1.weight"]
        np.testing.assert_allclose(found, expected["fc1.weight"], rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("validation", [0, 9])
def test_a_run_that_is_killed_continues_to_the_same_bits(tmp_path: Path, validation: int) -> None:
    data_of(tmp_path / "data", "images", "one-hot", 2000, validation)
    own = settings_of(tmp_path / "data", "images", n_epochs=4, shuffle="images", print_freq=50)
    own |= {"network_options": "{rows: [2, 4, 3]}", "snapshot_minutes": 0.002}
    del own["data_folder"]
    options = {"crop_size": 67, "width": 1.0, **own}
    whole = train(tmp_path / "data", tmp_path / "whole", **options)
    job = RunningJob(tmp_path / "data", tmp_path / "killed", steps=7, **options)
    job.signal(signal.SIGKILL, "trainer 0")
    job.end(1)
    train(tmp_path / "data", tmp_path / "killed", resume_train=True, **options)
    assert_same_bits(tmp_path / "killed", whole)


@pytest.mark.slow
def test_a_trial_of_arrays_without_validation(tmp_path: Path) -> None:
    data_of(tmp_path / "data", "vectors", "numbers", validation=0)
    own = settings_of(tmp_path / "data", "vectors", loss="mse", weights_dir=str(tmp_path / "run"))
    own |= {"network_options": "{rows: [6]}", "crop_size": 67, "width": 1.0}
    del own["data_folder"], own["weights_dir"]
    arguments = settings(tmp_path / "data", tmp_path / "run", **own)
    result = run_program("train.py", [*arguments, "--try"])
    assert result.returncode == 0, result.stderr
    assert "23 training and 0 validation rows of 1 classes" in result.stderr
    assert "the same bits as without an interruption" in result.stdout


# What is refused before a process starts


def test_a_network_that_takes_other_rows_is_refused(tmp_path: Path) -> None:
    data_of(tmp_path / "data", "images", "classes")
    own = settings_of(tmp_path / "data", "images", weights_dir=str(tmp_path / "run"))
    spec = prepare_run(make_config(own))
    check_input(RowsNetwork(None, 3, 1.0, "float64", (2, 4, 3)), spec)
    with pytest.raises(InputError) as caught:
        check_input(RowsNetwork(None, 3, 1.0, "float64", (4, 3, 2)), spec)
    assert str(caught.value) == (
        f"{tmp_path / 'data'}: found rows of shape (4, 3, 2) (row, column, channel), expected"
        " (3, 2, 4) (row, column, channel), which RowsNetwork takes"
    )
    alexnet = prepare_run(make_config({**own, "network": ALEXNET, "network_options": {}}))
    with pytest.raises(InputError, match="cannot be made for rows of arrays"):
        build_network(alexnet.description)


@pytest.mark.parametrize(
    ("targets", "loss", "counted"),
    [("one-hot", "cross_entropy", True), ("one-hot", "mse", False), ("numbers", "mse", False)],
)
def test_counts_of_float_targets(targets: str, loss: str, counted: bool) -> None:
    """A minibatch of which the last row is not valid."""
    rng = np.random.default_rng(2)
    classes = 1 if targets == "numbers" else CLASSES
    outputs, right = rng.normal(size=(BATCH, classes)), rng.integers(0, classes, BATCH)
    values = np.eye(classes)[right] if classes > 1 else rng.normal(size=BATCH)
    values = values.astype(np.float32)
    config = make_config({"batch_size": BATCH, "precision": "float64"})
    layout = SlotLayout(BATCH, RowType("float32", (6,)), RowType("float32", values.shape[1:]))
    minibatch, images = array_inputs(config, layout)
    assert (images.type.dtype, images.type.shape) == ("float64", (BATCH, 6))
    network = RowsNetwork(None, classes, 1.0, "float64", (6,))
    network.loss = LOSSES.make(loss, {})
    logits = pt.matrix("logits", dtype="float64")
    rows = targets_of(minibatch, "float64")
    cost = network.cost(logits, rows, minibatch["valid"])
    metrics = metrics_of(["mae", *["accuracy"] * counted])
    counts = count_minibatch(cost, logits, minibatch, network, metrics)
    assert ("top1_errors" in counts) == counted
    given = {minibatch["labels"]: values, minibatch["valid"]: np.array(BATCH - 1), logits: outputs}
    with plain_python():
        function = pytensor.function([*given], [*counts.values()], on_unused_input="ignore")
        found = dict(zip(counts, function(*given.values()), strict=True))
    errors = outputs[:-1] - values.reshape(BATCH, -1)[:-1]
    assert found["mae_sum"] == pytest.approx(np.abs(errors).mean(axis=1).sum())
    if loss == "mse":
        assert found["loss"] == pytest.approx((errors**2).mean(axis=1).sum())
    if counted:
        wrong = (outputs.argmax(1) != right)[:-1].sum()
        assert found["top1_errors"] == wrong
        assert found["top1_right"] == BATCH - 1 - wrong


def refusal(own: dict[str, Any], job: Any = "train") -> str:
    with pytest.raises(InputError) as caught:
        prepare_run(make_config(own), job)
    return str(caught.value)


def test_what_arrays_cannot_have_is_refused(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data_of(data, "vectors", "numbers", validation=0)
    own = settings_of(data, "vectors", loss="mse", weights_dir=str(tmp_path / "run"))
    spec = prepare_run(make_config(own))
    assert spec.config.mean_file is None
    assert (spec.classes, spec.wnids, spec.description.crop_size) == (1, None, None)
    assert "rand_colour: found 0.1, expected 0" in refusal({**own, "rand_colour": 0.1})
    for key, value in (
        ("lr_policy", "plateau"), ("lr_policy", "auto"), ("stop_patience", 3), ("stop_at", 0.1)
    ):  # fmt: skip
        message = refusal({**own, key: value})
        assert f"{key}: found {value}" in message
        assert "no validation rows in" in message
    data_of(tmp_path / "whole", "vectors", "numbers")
    whole = {**own, "data_folder": str(tmp_path / "whole")}
    assert prepare_run(make_config({**whole, "lr_policy": "plateau", "stop_patience": 3}))
    for changes, name in (
        ({"lr_policy": "auto"}, "lr_policy: auto"),
        ({"lr_policy": "plateau", "lr_monitor": "top1_error"}, "lr_monitor: top1_error"),
        ({"stop_patience": 3, "stop_monitor": "top5_error"}, "stop_monitor: top5_error"),
    ):
        message = refusal({**whole, **changes})
        assert message.startswith(f"{name} follows an error of classes")
        assert prepare_run(make_config({**whole, **changes}), "validate")
    for changes in ({"clip_norm": 1.0, "clip_value": 1.0}, {"load_epoch": 3}):
        assert "set" in refusal({**whole, **changes})
        assert prepare_run(make_config({**whole, **changes}), "validate")
    assert "metrics: found accuracy, which is of classes" in refusal(
        {**own, "metrics": ["accuracy", "mae"]}
    )
    gone = {**own, "metrics": "tests.support.array_network:largest_diference"}
    assert "no function 'largest_diference'; did you mean" in refusal(gone)
    assert "put the function into a module" in refusal({**own, "metrics": "__main__:f"})
    twice = {**own, "metrics": [LARGEST, "tests.test_array_runs:largest_difference"]}
    assert "expected each name once" in refusal(twice)
    assert "found no validation rows, expected at least one" in refusal(own, "validate")
    assert callable(largest_difference)  # here under the same name as in its module
    with pytest.raises(InputError, match="format is 2, expected 1: the data set has rows of arr"):
        look(LookOptions(data_folder=str(data)))
