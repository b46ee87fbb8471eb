"""Runs with `sum_rows`: the same bits by every number of trainers, however they are started."""

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.norm_network import CROP, NETWORK
from tests.support.ranks import Starter
from tests.support.runs import RunningJob, assert_same_bits, train, train_ranks
from tests.support.tiny import prepare, run_program, settings

slow = pytest.mark.slow
CASES: dict[str, dict[str, Any]] = {
    "alexnet": {"rand_colour": 0.1},
    "resnet20": {
        "network": "tandem.models.resnet:ResNet20",
        "crop_size": 32,
        "width": 0.25,
        "optimizer": "adam",
        "norm_rows": 1,
    },
}
COMMON: dict[str, Any] = {
    "global_batch": 8,
    "sum_rows": 2,
    "n_epochs": 2,
    "shuffle": "images",
    "metrics": ["f1"],
    "lr_scaling": "linear",
    "print_freq": 7,
    "crop_size": 67,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirty steps an epoch, of which the last has a group, and a row of another."""
    return prepare(tmp_path_factory.mktemp("data"), train=235, validation=21)


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {**COMMON, **CASES[request.param]}


@pytest.fixture(scope="module")
def alone(data: Path, case: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(data, tmp_path_factory.mktemp("alone") / "run", 400, **case)


@slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("trainers", [2, 3, 4])
def test_any_number_of_trainers(
    data: Path, case: dict[str, Any], alone: Path, tmp_path: Path, trainers: int
) -> None:
    devices = ["cpu"] * trainers
    run = train(data, tmp_path / "run", 400, **case, devices=devices, check_every=5)
    assert_same_bits(run, alone)


@slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("ranks", "by"), [(3, "mpirun"), (2, "torchrun"), (4, "torchrun")])
def test_any_number_of_ranks(
    data: Path, case: dict[str, Any], alone: Path, tmp_path: Path, ranks: int, by: Starter
) -> None:
    run = train_ranks(data, tmp_path / "run", ranks, by, timeout=400, **case)
    assert_same_bits(run, alone)


@slow
@pytest.mark.timeout(900)
def test_a_killed_run_continues_with_other_numbers_of_trainers(
    data: Path, case: dict[str, Any], alone: Path, tmp_path: Path
) -> None:
    """Three, killed; two, stopped; then four ranks."""
    saves, run = {**case, "snapshot_minutes": 0.0001}, tmp_path / "run"
    job = RunningJob(data, run, 2, **saves, devices=["cpu"] * 3)
    job.signal(signal.SIGKILL, "trainer 1")
    job.end(1)
    job = RunningJob(data, run, 5, **saves, devices=["cpu"] * 2, resume_train=True)
    job.signal(signal.SIGINT, "group")
    job.end(130)
    train_ranks(data, run, 4, "torchrun", timeout=400, **saves, resume_train=True)
    assert_same_bits(run, alone)


@slow
def test_a_validation_by_ten_crops_does_not_depend_on_the_trainers(
    data: Path, case: dict[str, Any], alone: Path, tmp_path: Path
) -> None:
    found = []
    for trainers in (1, 3):
        arguments = settings(data, tmp_path, **case, devices=["cpu"] * trainers)
        result = run_program("validate.py", ["--weights", str(alone), "--ten_crops", *arguments])
        assert result.returncode == 0, result.stderr
        found.append(result.stdout)
    assert "loss" in found[0]
    assert found[0] == found[1]


@slow
def test_groups_are_normalised_alike(tmp_path: Path) -> None:
    """By three trainers, of which one has no group, and by one."""
    pictures = prepare(tmp_path / "data", train=31, image_size=CROP + 2)
    changes = {**COMMON, "network": NETWORK, "crop_size": CROP, "sum_rows": 4, "norm_rows": 2}
    one, three = (
        train(pictures, tmp_path / f"{n}", **changes, devices=["cpu"] * n) for n in (1, 3)
    )
    assert_same_bits(three, one)
