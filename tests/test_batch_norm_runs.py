"""Runs of a network with batch normalisation, on tiny pictures: whoever computes them, alike."""

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tandem.artifacts.checkpoint import read_checkpoint, save_checkpoint
from tandem.artifacts.run_folder import list_checkpoints
from tandem.classify.cli import run_classification
from tandem.export.cli import main as export
from tests.support.norm_network import CROP, NETWORK
from tests.support.ranks import Starter, job, need_ranks, run_ranks
from tests.support.runs import (
    RunningJob,
    assert_close,
    assert_same_bits,
    forget_after,
    train,
    train_ranks,
    train_ranks_log,
    weights,
)
from tests.support.tiny import prepare, read_record, run_program, settings

SIMULATED = "tests/support/simulated_train.py"
GLOBAL = 12
# 31 pictures: the last minibatch has seven, so that of three trainers one has none and one a group
# that is cut, and of two trainers one has a single row.
COMMON: dict[str, Any] = {
    "network": NETWORK,
    "crop_size": CROP,
    "norm_rows": 2,
    "n_epochs": 2,
    "learning_rate": 0.1,
    "shuffle": "images",
}
DOUBLE = {**COMMON, "precision": "float64"}

slow = pytest.mark.slow


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("data"), train=31, image_size=CROP + 2)


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One trainer, in float64."""
    run = tmp_path_factory.mktemp("alone") / "run"
    return train(data, run, **DOUBLE, batch_size=GLOBAL)


# What is computed


@slow
@pytest.mark.parametrize("exchange", ["average", "gradients", "shared"])
@pytest.mark.parametrize("trainers", [2, 3])
def test_the_number_of_trainers_changes_nothing(
    data: Path, alone: Path, tmp_path: Path, trainers: int, exchange: str
) -> None:
    changes = {**DOUBLE, "batch_size": GLOBAL // trainers, "devices": ["cpu"] * trainers}
    run = train(data, tmp_path / "run", **changes, exchange=exchange, check_every=1)
    assert_close(run, alone, 1e-9)


@slow
@pytest.mark.parametrize(
    ("ranks", "by", "changes"),
    [
        (3, "mpirun", {"collective": "asa", "exchange": "average"}),
        (3, "mpirun", {"collective": "asa", "exchange": "gradients"}),
        (2, "mpirun", {"collective": "ar", "exchange": "average"}),
        (3, "mpirun", {"collective": "ar", "exchange": "gradients"}),
        (3, "mpirun", {"collective": "hierarchical", "exchange": "average"}),
        (3, "mpirun", {"collective": "hierarchical", "exchange": "gradients"}),
        (3, "mpirun", {"collective": "asa", "exchange": "gradients", "bucket_mb": 0.002}),
        (3, "torchrun", {"collective": "asa", "exchange": "average"}),
        (2, "torchrun", {"collective": "ar", "exchange": "gradients", "bucket_mb": 0.002}),
    ],
)
def test_the_number_of_ranks_changes_nothing(
    data: Path, alone: Path, tmp_path: Path, ranks: int, by: Starter, changes: dict[str, Any]
) -> None:
    changes = {**DOUBLE, "batch_size": GLOBAL // ranks, **changes}
    run = train_ranks(data, tmp_path / "run", ranks, by, **changes, check_every=1)
    assert_close(run, alone, 1e-9)


@slow
@pytest.mark.parametrize(
    "changes",
    [
        {"collective": "asa"},
        {"collective": "hierarchical", "exchange": "gradients", "bucket_mb": 0.002},
    ],
)
@pytest.mark.parametrize("ranks", [1, 3])
def test_ranks_on_gpus_compute_what_they_do_on_the_host(
    data: Path, alone: Path, tmp_path: Path, ranks: int, changes: dict[str, Any]
) -> None:
    """On simulated GPUs: both functions of gradients are recorded; one rank makes whole steps."""
    gpus = {"devices": [f"cuda:{rank}" for rank in range(ranks)], "compile": False}
    changes = {**DOUBLE, **gpus, **changes, "batch_size": GLOBAL // ranks}
    log = train_ranks_log(data, tmp_path / "run", ranks, program=(SIMULATED,), **changes)
    assert log.count("left on GPUs: 0, shared: 0\n") == ranks
    assert_close(tmp_path / "run", alone, 1e-9)


@slow
@pytest.mark.parametrize(
    ("changes", "exchange"),
    [
        ({"optimizer": "adam"}, "gradients"),
        ({"optimizer": "adamw"}, "shared"),
        ({"optimizer": "nadam"}, "gradients"),
        ({"optimizer": "rmsprop"}, "shared"),
        ({"use_nesterov_momentum": True}, "average"),
    ],
)
def test_the_number_of_trainers_changes_nothing_by_any_optimizer(
    data: Path, tmp_path: Path, changes: dict[str, Any], exchange: str
) -> None:
    # Small steps: what divides by the root of a mean square enlarges roundings of small gradients.
    changes = {**DOUBLE, "learning_rate": 0.0002, **changes}
    one = train(data, tmp_path / "one", **changes, batch_size=GLOBAL)
    several = {"batch_size": GLOBAL // 3, "devices": ["cpu"] * 3, "exchange": exchange}
    assert_close(train(data, tmp_path / "run", **changes, **several), one, 1e-9)


@slow
@pytest.mark.parametrize("exchange", ["average", "gradients"])
def test_sixteen_bits_leave_averages_whole(data: Path, tmp_path: Path, exchange: str) -> None:
    """One step: the averages are those of float32, weights and momenta are rounded."""
    small = prepare(tmp_path / "data", train=GLOBAL, image_size=CROP + 2)
    changes = {**COMMON, "n_epochs": 1, "batch_size": GLOBAL // 2, "exchange": exchange}
    found = {
        name: weights(train_ranks(small, tmp_path / name, 2, **changes, collective=name))
        for name in ("asa", "asa16")
    }
    rounded, whole = found["asa16"], found["asa"]
    for name in whole:
        bound = 1e-6 if "running" in name else 2**-9
        scale = np.abs(whole[name]).max()
        np.testing.assert_allclose(rounded[name], whole[name], 0, bound * scale, err_msg=name)
    assert rounded["fc1.weight"].tobytes() != whole["fc1.weight"].tobytes()


@slow
@pytest.mark.parametrize("rule", [{"rule": "easgd"}, {"rule": "gosgd", "gosgd_p": 0.5}])
def test_ranks_that_are_not_in_step_carry_averages(
    data: Path, tmp_path: Path, rule: dict[str, Any]
) -> None:
    """The consensus has them, and resumes; what is kept is what is validated."""
    changes = {**COMMON, **rule, "learning_rate": 0.01, "batch_size": GLOBAL // 3}
    run = train_ranks(data, tmp_path / "run", 3, **{**changes, "n_epochs": 4})
    train_ranks(data, run, 3, **{**changes, "n_epochs": 6}, resume_train=True)
    last, record = list_checkpoints(run)[-1], read_record(run)[-1]
    found = weights(run)
    assert all((found[f"{name}.norm.running_var"] != 1).all() for name in ("conv1", "fc1"))
    arguments = settings(data, run, **{**COMMON, "norm_rows": "auto", "batch_size": 5})
    result = run_program("validate.py", ["--weights", str(last), *arguments])
    assert result.returncode == 0, result.stderr
    match = re.search(r'"loss": ([0-9.]+)', result.stdout)
    assert match is not None
    assert float(match[1]) == pytest.approx(record["loss"], rel=1e-4)


@slow
def test_auxiliary_heads_train_and_are_not_reported(data: Path, tmp_path: Path) -> None:
    """The first loss is the main head's alone; validation needs no head."""
    runs = [
        train(
            data,
            tmp_path / str(weight),
            **{**COMMON, "batch_size": GLOBAL},
            network_options=f"{{auxiliary: {weight}}}",
        )
        for weight in (0.3, 0.6)
    ]
    first, second = (read_record(run) for run in runs)
    assert first[0]["loss"] == second[0]["loss"]
    assert first[1]["loss"] != second[1]["loss"]


# How it resumes


@slow
@pytest.mark.parametrize("exchange", ["average", "gradients", "shared"])
def test_a_killed_run_ends_in_the_same_bits(data: Path, tmp_path: Path, exchange: str) -> None:
    changes = {**COMMON, "devices": ["cpu"] * 2, "batch_size": GLOBAL // 2, "exchange": exchange}
    whole = train(data, tmp_path / "whole", **{**changes, "n_epochs": 4})
    endless = {**changes, "n_epochs": 10_000, "keep_snapshots": "all", "snapshot_minutes": 0.001}
    running = RunningJob(data, tmp_path / "parts", steps=6, **endless)
    running.signal(signal.SIGKILL, "trainer 1")
    running.end(1)
    forget_after(running.run, "epoch-0003")
    train(data, running.run, **{**changes, "n_epochs": 4}, resume_train=True)
    assert_same_bits(running.run, whole)


@slow
def test_a_killed_job_ends_in_the_same_bits(data: Path, tmp_path: Path) -> None:
    need_ranks()
    changes = {**COMMON, "batch_size": GLOBAL // 2}
    whole = train(data, tmp_path / "whole", **changes, devices=["cpu"] * 2)
    run = tmp_path / "parts"
    started = job(data, run, 2, 5, **{**changes, "n_epochs": 10_000}, keep_snapshots="all")
    os.kill(started.find("trainer 1"), signal.SIGKILL)
    assert started.finish(20).returncode != 0
    forget_after(run, "epoch-0001")
    train_ranks(data, run, 2, **changes, resume_train=True)
    assert_same_bits(run, whole)


def refusal(data: Path, run: Path, **changes: Any) -> str:
    """The one line of a run that is refused; nothing is written."""
    before = {path: path.read_bytes() for path in run.glob("*")}
    result = run_program("train.py", settings(data, run, **{**COMMON, **changes}))
    assert result.returncode == 2, result.stderr
    (line,) = [line for line in result.stderr.splitlines() if "error" in line]
    assert {path: path.read_bytes() for path in run.glob("*")} == before
    return line


@slow
def test_rows_that_would_straddle_trainers_are_refused(data: Path, tmp_path: Path) -> None:
    line = refusal(data, tmp_path / "run", norm_rows=4, batch_size=6, devices=["cpu"] * 2)
    text = "norm_rows: found 4, expected a divisor of batch_size 6, such as 3 or 6"
    assert line.count(text) == 1
    assert "a group of rows that are normalised together would lie at two trainers" in line
    assert not list((tmp_path / "run").glob("*"))


@slow
def test_networks_without_averages_take_any_rows(data: Path, tmp_path: Path) -> None:
    changes = {"crop_size": CROP, "norm_rows": 4, "batch_size": 6}
    train(data, tmp_path / "run", **changes, network="tests.support.norm_network:Plain")


# What its checkpoints are used for


@slow
def test_checkpoints_are_validated_classified_and_exported(
    data: Path, alone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the running averages: with others, the outputs are others."""
    last = list_checkpoints(alone)[-1]
    # Nothing is normalised by groups, so that their rows need not divide the batch size.
    others = settings(data, alone, **{**DOUBLE, "norm_rows": 4, "batch_size": 5})
    result = run_program("validate.py", ["--weights", str(last), *others])
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["loss"] == pytest.approx(read_record(alone)[-1]["loss"], 1e-9)
    picture, moved = tmp_path / "grey.png", tmp_path / "moved.safetensors"
    Image.fromarray(np.arange(768, dtype=np.uint8).reshape(16, 16, 3)).save(picture)
    checkpoint = read_checkpoint(last)
    for name in checkpoint.untrained:
        checkpoint.weights[name] *= 4
    save_checkpoint(moved, checkpoint)
    guesses = []
    for weights_file in (last, moved):
        arguments = ["--network", NETWORK, "--weights", str(weights_file), "--json", str(picture)]
        assert run_classification(arguments, None) == 0
        guesses.append(json.loads(capsys.readouterr().out)["guesses"])
    assert guesses[0] != guesses[1]
    target = tmp_path / "norm.onnx"
    assert export([str(last), str(target), "--network", NETWORK]) == 0
    assert target.exists()


@slow
def test_ranks_report_such_rows_once(data: Path, tmp_path: Path) -> None:
    need_ranks()
    changes = {**COMMON, "norm_rows": 4, "batch_size": 6}
    result = run_ranks(3, "train.py", settings(data, tmp_path / "run", **changes), by="mpirun")
    assert result.returncode == 2, result.stderr
    assert result.stderr.count("norm_rows: found 4, expected a divisor") == 1, result.stderr
