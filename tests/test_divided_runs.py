"""train.py and validate.py where trainers divide fully connected layers, on tiny data sets."""

import json
import os
import re
import signal
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from tandem.artifacts.checkpoint import read_header
from tandem.artifacts.run_folder import list_checkpoints
from tests.support.broken_network import PICTURE
from tests.support.norm_network import CROP, NETWORK
from tests.support.ranks import Starter, job, need_ranks
from tests.support.runs import (
    RunningJob,
    assert_close,
    assert_same_bits,
    train,
    train_ranks,
    weights,
)
from tests.support.tiny import prepare, read_record, run_program, settings

slow = pytest.mark.slow
GLOBAL = 12
# Of 29 pictures the last minibatch has five, so that some trainers have none of it.
COMMON: dict[str, Any] = {"n_epochs": 2, "shuffle": "images", "rand_colour": 0.1}
DOUBLE: dict[str, Any] = {**COMMON, "precision": "float64", "learning_rate": 0.05}
SHARDED: dict[str, Any] = {"fully_connected": "sharded"}
SINGLE: dict[str, Any] = {"fully_connected": "single"}
TWO: dict[str, Any] = {**COMMON, **SHARDED, "devices": ["cpu"] * 2}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("data"), train=29, validation=17, classes=5)


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One trainer, in float64."""
    run = tmp_path_factory.mktemp("alone") / "run"
    return train(data, run, **DOUBLE, batch_size=GLOBAL)


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two trainers that nothing disturbs, in float32."""
    return train(data, tmp_path_factory.mktemp("whole") / "run", **TWO)


def several(count: int) -> dict[str, Any]:
    return {"devices": ["cpu"] * count, "batch_size": GLOBAL // count, "check_every": 1}


@slow
@pytest.mark.parametrize("trainers", [2, 3, 4])
@pytest.mark.parametrize("changes", [SHARDED, SINGLE])
def test_the_number_of_trainers_does_not_change_what_is_computed(
    data: Path, alone: Path, tmp_path: Path, trainers: int, changes: dict[str, Any]
) -> None:
    run = train(data, tmp_path / "run", **DOUBLE, **several(trainers), **changes)
    assert_close(run, alone, 1e-9)
    header = read_header(list_checkpoints(run)[-1])
    assert header.conditions["fully_connected"] == changes["fully_connected"]
    assert header.config["exchange"] == "gradients"


@slow
def test_more_trainers_than_units_are_refused(data: Path, tmp_path: Path) -> None:
    small = {"width": 1e-4, "devices": ["cpu"] * 2, **SHARDED}
    arguments = settings(data, tmp_path / "run", **small)
    result = run_program("train.py", arguments)
    assert result.returncode == 2
    expected = "divides axis 1 of fc6.weight, of length 1, among 2 trainers"
    assert result.stderr.count(expected) == 1, result.stderr


@slow
@pytest.mark.timeout(600)
def test_a_compiled_run_computes_the_same(data: Path, alone: Path, tmp_path: Path) -> None:
    changes = {**DOUBLE, **several(2), **SHARDED}
    assert_close(train(data, tmp_path / "run", 400, **changes, compile=True), alone, 1e-9)


@slow
@pytest.mark.parametrize("optimizer", ["adam", "nadam"])
def test_other_optimizers_step_what_they_have(data: Path, tmp_path: Path, optimizer: str) -> None:
    changes = {**DOUBLE, "learning_rate": 0.001, "optimizer": optimizer}
    one = train(data, tmp_path / "one", **changes, batch_size=GLOBAL)
    assert_close(train(data, tmp_path / "three", **changes, **several(3), **SHARDED), one, 1e-9)


@slow
def test_checkpoints_continue_with_all_kinds_and_numbers_of_trainers(
    data: Path, alone: Path, tmp_path: Path
) -> None:
    """An epoch by each; at the end what one trainer has alone."""
    run, stages = tmp_path / "run", [(3, SHARDED), (2, {}), (4, SINGLE), (1, SHARDED), (2, SHARDED)]
    changes = {**DOUBLE, "exact": False, "resume_train": True, "exchange": "gradients"}
    for epoch, (trainers, kind) in enumerate(stages, start=1):
        train(data, run, **{**changes, "n_epochs": epoch}, **several(trainers), **kind)
    expected = train(data, tmp_path / "one", **{**DOUBLE, "n_epochs": 5}, batch_size=GLOBAL)
    found, right = weights(run), weights(expected)
    assert list(found) == list(right)
    for name, value in right.items():
        np.testing.assert_allclose(found[name], value, 0, 1e-9 * np.abs(value).max(), err_msg=name)


@slow
@pytest.mark.parametrize("kind", [SHARDED, SINGLE])
def test_a_killed_run_continues_with_the_same_bits(
    data: Path, tmp_path: Path, kind: dict[str, Any]
) -> None:
    changes = {**TWO, **kind, "n_epochs": 8, "snapshot_minutes": 0.0001, "batch_size": 3}
    expected = train(data, tmp_path / "whole", **changes)
    disturbed = RunningJob(data, tmp_path / "run", 14, **changes)
    disturbed.signal(signal.SIGKILL, "trainer 1")
    assert "trainer 1: was killed by SIGKILL" in disturbed.end(1)
    train(data, disturbed.run, **changes, resume_train=True)
    assert_same_bits(disturbed.run, expected)


@slow
@pytest.mark.parametrize("victim", ["trainer 0", "loader 1"])
def test_a_killed_process_ends_the_run(data: Path, tmp_path: Path, victim: str) -> None:
    disturbed = RunningJob(data, tmp_path / "run", 3, **{**TWO, "n_epochs": 10_000})
    disturbed.signal(signal.SIGKILL, victim)
    errors = disturbed.end(1)
    assert f"{victim}: was killed by SIGKILL" in errors
    assert "Traceback" not in errors, errors


@slow
def test_an_interrupted_run_continues_with_the_same_bits(
    data: Path, tmp_path: Path, whole: Path
) -> None:
    disturbed = RunningJob(data, tmp_path / "run", 4, **TWO)
    disturbed.signal(signal.SIGINT, "group")
    assert "Traceback" not in disturbed.end(130)
    train(data, disturbed.run, **TWO, resume_train=True)
    assert_same_bits(disturbed.run, whole)


@slow
def test_a_trainer_that_raises_ends_the_run(data: Path, tmp_path: Path) -> None:
    arguments = ["BrokenAlexNet", *settings(data, tmp_path / "run", **TWO)]
    result = run_program("tests/support/broken_train.py", arguments)
    assert result.returncode == 1
    assert "ZeroDivisionError: broken on purpose" in result.stderr
    assert "trainer 1" in result.stderr.splitlines()[-1]


@slow
@pytest.mark.parametrize("kind", [SHARDED, SINGLE])
def test_all_trainers_skip_a_bad_minibatch(
    data: Path, tmp_path: Path, kind: dict[str, Any]
) -> None:
    """Or go back to a checkpoint from before it, and pass it over."""
    found = []
    for action in ("skip", "rollback"):
        run = tmp_path / action
        changes = {**TWO, **kind, "on_nan": action, "n_epochs": 3, "rand_colour": 0}
        arguments = ["NanAlexNet", *settings(data, run, **changes)]
        result = run_program("tests/support/broken_train.py", arguments)
        assert result.returncode == 0, result.stderr
        (line,) = [line for line in read_record(run) if line["event"] == "not_finite"]
        pictures = cast(list[str], line["pictures"])
        assert f"{PICTURE}.JPEG" in pictures
        found.append((line["step"], set(pictures)))
    assert found[0] == found[1]
    assert all(np.isfinite(value).all() for value in weights(run).values())
    skipped, back = weights(tmp_path / "skip"), weights(tmp_path / "rollback")
    assert all(value.tobytes() == back[name].tobytes() for name, value in skipped.items())


@slow
@pytest.mark.parametrize("kind", [SHARDED, SINGLE])
@pytest.mark.parametrize("crops", [[], ["--ten_crops"]])
def test_a_validation_divides_them_too(
    data: Path, whole: Path, kind: dict[str, str], crops: list[str]
) -> None:
    weights_file = list_checkpoints(whole)[-1]
    found = []
    for trainers in (1, 3):
        arguments = [
            "--weights",
            str(weights_file),
            *crops,
            "--batch_size",
            str(GLOBAL // trainers),
        ]
        arguments += ["--precision", "float64", "--fully_connected", kind["fully_connected"]]
        result = run_program("validate.py", [*arguments, "--devices", *["cpu"] * trainers])
        assert result.returncode == 0, result.stderr
        found.append(json.loads(result.stdout))
    assert found[0]["loss"] == pytest.approx(found[1]["loss"], rel=1e-9)
    assert {**found[0], "loss": 0} == {**found[1], "loss": 0}


@slow
@pytest.mark.parametrize("by", ["mpirun", "torchrun"])
def test_ranks_compute_the_bits_of_trainers_on_one_machine(
    data: Path, tmp_path: Path, whole: Path, by: Starter
) -> None:
    run = train_ranks(data, tmp_path / "run", 2, by, **{**TWO, "devices": ["cpu"]})
    assert_same_bits(run, whole)


@slow
@pytest.mark.parametrize("by", ["mpirun", "torchrun"])
@pytest.mark.parametrize(
    "changes",
    [SHARDED, SINGLE, {**SHARDED, "collective": "hierarchical"}, {**SINGLE, "collective": "ar"}],
)
def test_the_number_of_ranks_does_not_change_what_is_computed(
    data: Path, alone: Path, tmp_path: Path, by: Starter, changes: dict[str, Any]
) -> None:
    arguments = {**DOUBLE, **several(3), "devices": ["cpu"], **changes}
    assert_close(train_ranks(data, tmp_path / "run", 3, by, **arguments), alone, 1e-9)


@slow
def test_sums_of_gradients_travel_in_sixteen_bits(data: Path, tmp_path: Path, whole: Path) -> None:
    changes = {**TWO, "devices": ["cpu"], "collective": "asa16", "error_feedback": True}
    run = train_ranks(data, tmp_path / "run", 2, "torchrun", **changes)
    assert_close(run, whole, 1e-2)


@slow
@pytest.mark.parametrize("by", ["mpirun", "torchrun"])
def test_a_killed_rank_ends_the_job(data: Path, tmp_path: Path, by: Starter) -> None:
    need_ranks(by)
    run = tmp_path / "run"
    changes = {**TWO, "devices": ["cpu"], "n_epochs": 10_000}
    started = job(data, run, 2, 3, by, **changes)
    os.kill(started.find("trainer 1"), signal.SIGKILL)
    result = started.finish()
    assert result.returncode not in (0, 2)
    assert re.search("KILLED|Killed|[Ss]ignal 9", result.stdout + result.stderr), result.stderr


# Other networks


def of_units(data: Path, run: Path, **changes: Any) -> Path:
    small = {"network": "tests.support.norm_network:Plain", "crop_size": CROP}
    return train(
        data, run, **{**DOUBLE, "rand_colour": 0, "learning_rate": 1e-4, **small, **changes}
    )


@slow
@pytest.mark.parametrize("kind", [SHARDED, SINGLE])
def test_nothing_is_exchanged_where_all_is_divided(
    data: Path, tmp_path: Path, kind: dict[str, Any]
) -> None:
    one = of_units(data, tmp_path / "one", batch_size=GLOBAL)
    assert_close(of_units(data, tmp_path / "two", **several(2), **kind), one, 1e-9)


@slow
@pytest.mark.parametrize("kind", [{}, SHARDED, SINGLE])
def test_rows_of_all_trainers_are_normalised_together(
    data: Path, tmp_path: Path, kind: dict[str, Any]
) -> None:
    """A resumed run takes this from its checkpoint, and so does a validation."""
    changes = {**DOUBLE, "network": NETWORK, "crop_size": CROP, "norm_rows": "global"}
    one = train(data, tmp_path / "one", **changes, batch_size=GLOBAL)
    run = train(data, tmp_path / "run", **changes, **several(3), **kind)
    assert_close(run, one, 1e-9)
    assert read_header(list_checkpoints(run)[-1]).conditions["norm_rows"] == "global"
    more = {**changes, "n_epochs": 3, "resume_train": True}
    del more["norm_rows"]
    more["exchange"] = "gradients"
    again = train(data, run, **more, **several(3), **kind)
    expected = train(data, one, **{**more, "exact": False}, batch_size=GLOBAL)
    assert_close(again, expected, 1e-9)
