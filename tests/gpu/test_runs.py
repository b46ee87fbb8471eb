"""Whole runs on one GPU, as a user makes them: against the host, and resumed."""

from pathlib import Path

import numpy as np
import pytest

from tests.support.runs import assert_same_weights, weights
from tests.support.runs import train as train_tiny
from tests.support.tiny import read_record, run_program, settings

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

COMMON = {
    "precision": "float64",
    "batch_size": 2,
    "n_epochs": 2,
    "check_every": 1,
    "data_on_gpu": False,  # as of data that do not fit
}
EXACT = {"precision": "float32", "deterministic": True, "compile": False}
AHEAD = {"check_every": 0, "print_freq": 3}
PLACE = ("epoch", "step", "minibatch")
SECONDS = 200  # a first compilation takes minutes


def train(data: Path, run: Path, **changes: object) -> Path:
    return train_tiny(data, run, SECONDS, **{**COMMON, **changes})


@pytest.fixture(scope="module")
def on_host(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(data, tmp_path_factory.mktemp("host") / "run", devices=["cpu"], batch_size=4)


@pytest.mark.parametrize(
    "changes",
    [
        {"devices": ["cuda:0"], "batch_size": 4},
        {"devices": ["cuda:0"], "batch_size": 4, "compile": False, "use_data_layer": False},
        {"devices": ["cuda:0", "cuda:0"], "compile": False},
        {"devices": ["cuda:0", "cuda:0"], "compile": False, "exchange": "gradients"},
        {"devices": ["cuda:0", "cuda:0"], "compile": False, "para_load": False},
        {"devices": ["cuda:0", "cuda:0"], "compile": False, "fully_connected": "sharded"},
        {"devices": ["cuda:0", "cuda:0"], "compile": True, "fully_connected": "sharded"},
        {"devices": ["cuda:0", "cuda:0"], "compile": False, "fully_connected": "single"},
        {"devices": ["cuda:0"], "batch_size": 4, "compile": False, "data_on_gpu": True},
        {"devices": ["cuda:0", "cuda:0"], "compile": False, "data_on_gpu": True},
    ],
    ids=[
        "one, compiled",
        "one, loader crops",
        "average",
        "gradients",
        "without loaders",
        "sharded",
        "sharded, compiled",
        "single",
        "pictures on the GPU",
        "pictures on the GPU, average",
    ],
)
def test_trainers_on_a_gpu_compute_what_one_does_on_the_host(
    data: Path, tmp_path: Path, on_host: Path, changes: dict[str, object]
) -> None:
    run = train(data, tmp_path / "run", **changes)
    ours, theirs = weights(run), weights(on_host)
    for name, value in theirs.items():
        np.testing.assert_allclose(ours[name], value, rtol=1e-7, atol=1e-10, err_msg=name)
    for line, expected in zip(read_record(run), read_record(on_host), strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-7)
        assert line["top1_error"] == expected["top1_error"]


@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16"])
def test_each_precision_learns(data: Path, tmp_path: Path, precision: str) -> None:
    changes = {"devices": ["cuda:0"], "compile": False, "n_epochs": 20, "width": 0.25}
    run = train(data, tmp_path / "run", **changes, precision=precision)
    losses = [line["loss"] for line in read_record(run) if line["event"] == "train"]
    assert np.mean(losses[-10:]) < np.mean(losses[:10])


@pytest.mark.parametrize("devices", [["cuda:0"], ["cuda:0", "cuda:0"]])
def test_a_resumed_run_has_the_same_bits(data: Path, tmp_path: Path, devices: list[str]) -> None:
    common = {**EXACT, "devices": devices, "shuffle": "images"}
    whole = train(data, tmp_path / "whole", **common)
    train(data, tmp_path / "parts", **{**common, "n_epochs": 1})
    parts = train(data, tmp_path / "parts", **common, resume_train=True)
    assert_same_weights(parts, whole)


@pytest.mark.parametrize("changes", [{}, {"shuffle": "images"}, {"para_load": False}])
def test_pictures_on_the_gpu_give_the_same_bits(
    data: Path, tmp_path: Path, changes: dict[str, object]
) -> None:
    common = {**EXACT, "devices": ["cuda:0"], **changes}
    kept = train(data, tmp_path / "kept", **common, data_on_gpu=True)
    loaded = train(data, tmp_path / "loaded", **common, data_on_gpu=False)
    assert_same_weights(kept, loaded)


def train_nan(data: Path, run: Path, **changes: object) -> list[dict[str, object]]:
    """Train a network whose loss is once NaN; return the lines about it.

    Reports and checks are rare, so that a trainer alone learns of it when the next step has begun.
    """
    common = {**COMMON, **AHEAD, "n_epochs": 3, "compile": False, "on_nan": "skip"}
    arguments = settings(data, run, **{**common, **changes})
    program = "tests/support/broken_train.py"
    result = run_program(program, ["NanAlexNet", *arguments], SECONDS)
    assert result.returncode == 0, result.stderr
    return [line for line in read_record(run) if line["event"] == "not_finite"]


@pytest.fixture(scope="module")
def nan_on_host(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("host") / "nan"
    train_nan(data, run, devices=["cpu"], batch_size=4)
    return run


@pytest.mark.parametrize(
    "changes",
    [
        {"devices": ["cuda:0"], "batch_size": 4},
        {"devices": ["cuda:0"], "batch_size": 4, "compile": True},
        {"devices": ["cuda:0"], "batch_size": 4, "on_nan": "rollback"},
        {"devices": ["cuda:0", "cuda:0"]},
        {"devices": ["cuda:0", "cuda:0"], "exchange": "gradients"},
    ],
    ids=["one", "one, compiled", "one, rolled back", "average", "gradients"],
)
def test_a_minibatch_that_is_not_finite_changes_no_weight(
    data: Path, tmp_path: Path, nan_on_host: Path, changes: dict[str, object]
) -> None:
    (line,) = train_nan(data, tmp_path / "run", **changes)
    (expected,) = (one for one in read_record(nan_on_host) if one["event"] == "not_finite")
    assert [line[key] for key in PLACE] == [expected[key] for key in PLACE]
    assert line["action"] == changes.get("on_nan", "skip")
    ours, theirs = weights(tmp_path / "run"), weights(nan_on_host)
    for name, value in theirs.items():
        np.testing.assert_allclose(ours[name], value, rtol=1e-7, atol=1e-10, err_msg=name)


@pytest.mark.parametrize("devices", [["cuda:0"], ["cuda:0", "cuda:0"]])
def test_a_rate_that_overflows_stops_the_run_at_its_step(
    data: Path, tmp_path: Path, devices: list[str]
) -> None:
    """The first update makes weights with which the second loss is not finite."""
    run, changes = tmp_path / "run", {**COMMON, **EXACT, **AHEAD, "devices": devices}
    arguments = settings(data, run, **changes, learning_rate=1e30, lr_policy="constant")
    result = run_program("train.py", arguments, SECONDS)
    assert result.returncode == 1, result.stderr
    assert "not finite in step 2 (epoch 1, minibatch 2)" in result.stderr
    lines = [line for line in read_record(run) if line["event"] == "not_finite"]
    assert [(line["step"], line["action"]) for line in lines] == [(2, "stop")]


def test_more_than_the_memory_is_refused_in_a_sentence(data: Path, tmp_path: Path) -> None:
    changes = {**EXACT, "devices": ["cuda:0"], "width": 40.0, "batch_size": 4}
    result = run_program("train.py", settings(data, tmp_path / "run", **changes), SECONDS)
    assert result.returncode == 2, result.stderr
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("error: cuda:0 has too little memory"), last
    assert "batch_size" in last
