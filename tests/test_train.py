"""train.py and validate.py as a user runs them, on a tiny data set."""

import json
import os
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tandem.backend import cpp_compiler
from tests.support.tiny import (
    find_process,
    is_gone,
    prepare,
    read_record,
    run_program,
    settings,
    shared_memory,
    start_program,
    start_run,
    wait_for_steps,
    without_times,
)

TRAIN_KEYS = [
    "event",
    "epoch",
    "step",
    "loss",
    "top1_error",
    "learning_rate",
    "images_per_second",
    "compute_seconds",
    "load_wait_seconds",
    "exchange_seconds",
]
VALIDATION_KEYS = ["event", "epoch", "step", "loss", "top1_error", "top5_error", "images"]


def train(data: Path, run: Path, **changes: object) -> list[dict[str, object]]:
    """Train, check that it went well, and give the record."""
    result = run_program("train.py", settings(data, run, **changes))
    assert result.returncode == 0, result.stderr
    return read_record(run)


def weights(run: Path, name: str) -> dict[str, np.ndarray]:
    return load_file(run / f"{name}.safetensors")


def assert_same(left: dict[str, np.ndarray], right: dict[str, np.ndarray], rtol: float) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        scale = np.abs(right[name]).max()
        np.testing.assert_allclose(value, right[name], rtol=0, atol=rtol * scale, err_msg=name)


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One trainer, 6 images a step, 13 pictures: a last minibatch of one; two epochs, float64."""
    run = tmp_path_factory.mktemp("alone") / "run"
    train(data, run, batch_size=6, n_epochs=2, precision="float64", learning_rate=0.05)
    return run


@pytest.mark.parametrize(
    ("trainers", "exchange"),
    [
        (2, "average"),
        pytest.param(2, "gradients", marks=pytest.mark.slow),
        pytest.param(3, "average", marks=pytest.mark.slow),
        pytest.param(2, "shared", marks=pytest.mark.slow),
        pytest.param(3, "gradients", marks=pytest.mark.slow),
        pytest.param(3, "shared", marks=pytest.mark.slow),
    ],
)
def test_the_number_of_trainers_does_not_change_what_is_computed(
    data: Path, alone: Path, tmp_path: Path, trainers: int, exchange: str
) -> None:
    record = train(
        data,
        tmp_path / "run",
        batch_size=6 // trainers,
        devices=["cpu"] * trainers,
        n_epochs=2,
        precision="float64",
        learning_rate=0.05,
        exchange=exchange,
        check_every=1,
    )
    for name in ("epoch-0001", "epoch-0002"):
        assert_same(weights(tmp_path / "run", name), weights(alone, name), rtol=1e-9)
    for ours, theirs in zip(record, read_record(alone), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-9)
        assert ours["top1_error"] == theirs["top1_error"]


def test_a_run_leaves_checkpoints_a_record_and_its_configuration(alone: Path) -> None:
    names = sorted(path.name for path in alone.iterdir())
    assert names == [
        "config.yaml",
        "epoch-0001.safetensors",
        "epoch-0002.safetensors",
        "events.out.tfevents.00001",
        "record.jsonl",
    ]
    record = read_record(alone)
    for line in record:
        assert list(line) == (TRAIN_KEYS if line["event"] == "train" else VALIDATION_KEYS)
    assert [line["step"] for line in record if line["event"] == "train"] == [1, 2, 3, 4, 5, 6]
    validations = [line for line in record if line["event"] == "validation"]
    assert [line["images"] for line in validations] == [7, 7]
    assert [line["epoch"] for line in validations] == [1, 2]


def test_training_lowers_the_loss(data: Path, tmp_path: Path) -> None:
    record = train(
        data,
        tmp_path / "run",
        n_epochs=16,
        batch_size=13,
        snapshot_freq=16,
        learning_rate=0.02,
    )
    losses = [line["loss"] for line in record if line["event"] == "train"]
    # Seven of the thirteen pictures are of one class; all the rest is for the demo to learn.
    assert losses[0] == pytest.approx(np.log(3), abs=0.02)
    assert np.mean(losses[-4:]) < losses[0] - 0.02


@pytest.fixture(scope="module")
def usual(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose loader process crops."""
    run = tmp_path_factory.mktemp("usual") / "run"
    train(data, run, batch_size=4)
    return run


@pytest.mark.parametrize(
    "changes",
    [
        {"use_data_layer": True},
        {"para_load": False},
        pytest.param({"para_load": False, "use_data_layer": True}, marks=pytest.mark.slow),
    ],
)
def test_how_pictures_are_loaded_does_not_change_a_bit(
    data: Path, tmp_path: Path, usual: Path, changes: dict[str, bool]
) -> None:
    train(data, tmp_path / "run", batch_size=4, **changes)
    ours, theirs = (weights(run, "epoch-0001") for run in (tmp_path / "run", usual))
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in ours)


@pytest.mark.slow
def test_a_compiled_run_computes_the_same(data: Path, tmp_path: Path) -> None:
    if cpp_compiler() is None:
        pytest.skip("torch.compile needs a C++ compiler, and none is here")
    compiled = train(data, tmp_path / "compiled", batch_size=6, n_epochs=2, compile=True)
    eager = train(data, tmp_path / "eager", batch_size=6, n_epochs=2)
    for ours, theirs in zip(compiled, eager, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["top1_error"] == theirs["top1_error"]


@pytest.mark.slow
def test_validate_agrees_with_what_training_recorded(data: Path, alone: Path) -> None:
    last = read_record(alone)[-1]
    result = run_program(
        "validate.py",
        [
            "--weights",
            str(alone / "epoch-0002.safetensors"),
            *settings(data, alone, batch_size=4, precision="float64", devices=["cpu", "cpu"]),
        ],
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["images"] == 7
    assert found["top1_error"] == last["top1_error"]
    assert found["top5_error"] == last["top5_error"]
    assert found["loss"] == pytest.approx(last["loss"], rel=1e-9)


@pytest.mark.slow
def test_a_resumed_run_continues_as_if_it_had_not_stopped(data: Path, tmp_path: Path) -> None:
    common = {"batch_size": 4, "shuffle": "images"}
    train(data, tmp_path / "whole", n_epochs=3, **common)
    train(data, tmp_path / "parts", n_epochs=1, **common)
    train(data, tmp_path / "parts", n_epochs=3, resume_train=True, **common)
    ours, theirs = (weights(tmp_path / name, "epoch-0003") for name in ("parts", "whole"))
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in theirs)
    assert [without_times(line) for line in read_record(tmp_path / "parts")] == [
        without_times(line) for line in read_record(tmp_path / "whole")
    ]


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)],
)
def test_an_interrupted_run_writes_a_checkpoint_and_continues_exactly(
    data: Path, tmp_path: Path, number: signal.Signals, status: int
) -> None:
    before = shared_memory()
    common = {"batch_size": 1, "devices": ["cpu", "cpu"], "n_epochs": 6}
    run = tmp_path / "run"
    process = start_run(data, run, 9, **common)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal sends Ctrl-C
    else:
        process.send_signal(number)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == status, errors
    assert "Traceback" not in errors
    assert is_gone(process.pid)
    assert shared_memory() <= before
    assert not (run / "epoch-0006.safetensors").exists()
    train(data, run, resume_train=True, **common)
    train(data, tmp_path / "whole", **common)
    ours, theirs = (weights(tmp_path / name, "epoch-0006") for name in ("run", "whole"))
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in theirs)


@pytest.mark.parametrize("victim", [pytest.param("trainer 0", marks=pytest.mark.slow), "loader 1"])
def test_a_killed_process_ends_the_run(data: Path, tmp_path: Path, victim: str) -> None:
    before = shared_memory()
    run = tmp_path / "run"
    arguments = settings(data, run, batch_size=1, devices=["cpu", "cpu"], n_epochs=10_000)
    process = start_program("train.py", arguments)
    wait_for_steps(run, process, 3)
    os.kill(find_process(process.pid, victim), signal.SIGKILL)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert f"{victim}: was killed by SIGKILL" in errors
    assert is_gone(process.pid)
    assert shared_memory() <= before


def test_a_batch_file_that_is_damaged_in_mid_run_is_named(tmp_path: Path) -> None:
    data, run = prepare(tmp_path / "data"), tmp_path / "run"
    process = start_run(data, run, 3, batch_size=1, n_epochs=10_000)
    os.truncate(data / "train_hkl" / "0001.hkl", 100)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 2, errors
    assert re.search(r"^error: .*0001\.hkl", errors, re.MULTILINE), errors
    assert "Traceback" not in errors
    assert is_gone(process.pid)


@pytest.mark.parametrize("seconds", [0.5, 2.0])
def test_ctrl_c_before_the_first_step(data: Path, tmp_path: Path, seconds: float) -> None:
    process = start_program("train.py", settings(data, tmp_path / "run", devices=["cpu", "cpu"]))
    time.sleep(seconds)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    if process.returncode != 0:  # a quick machine may have finished
        assert process.returncode in (130, -signal.SIGINT), errors
        assert process.returncode == 130 or seconds < 2, errors  # Python was still starting
        assert "Traceback" not in errors or process.returncode < 0
    assert is_gone(process.pid)


def test_ctrl_c_twice_ends_at_once(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start_run(data, run, 3, batch_size=1, n_epochs=10_000)
    stubborn = find_process(process.pid, "trainer 0")
    os.kill(stubborn, signal.SIGSTOP)  # so that the first can have no effect
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(1.5)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert is_gone(process.pid)


@pytest.mark.slow
def test_the_originals_layout_gives_the_same_bits(data: Path, tmp_path: Path) -> None:
    other = prepare(tmp_path / "c01b", layout="c01b")
    train(data, tmp_path / "one", batch_size=4)
    train(other, tmp_path / "two", batch_size=4)
    ours, theirs = (weights(tmp_path / name, "epoch-0001") for name in ("one", "two"))
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in ours)


@pytest.mark.slow
def test_every_step_is_in_one_record(data: Path, tmp_path: Path) -> None:
    """Windows of print_freq steps go on from epoch to epoch: 4 steps an epoch, reports every 3."""
    common = {"batch_size": 4, "n_epochs": 3}
    each = train(data, tmp_path / "each", **common)
    threes = train(data, tmp_path / "threes", **common, print_freq=3)
    losses = [line["loss"] for line in each if line["event"] == "train"]
    images = [4, 4, 4, 1] * 3
    for number, line in enumerate(line for line in threes if line["event"] == "train"):
        window = slice(3 * number, 3 * number + 3)
        expected = np.average(losses[window], weights=images[window])
        assert line["step"] == 3 * number + 3
        assert line["loss"] == pytest.approx(expected, rel=1e-6)
