"""train.py and validate.py under mpirun, on a tiny data set."""

import json
import os
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tandem.artifacts.run_folder import list_checkpoints
from tests.support.ranks import (
    assert_same_bits,
    job,
    leaves_no_memory,
    missing,
    mpich_memory,
    run_ranks,
    weights,
)
from tests.support.terminal import Terminal
from tests.support.tiny import prepare, read_record, run_program, settings

if reason := missing():
    pytest.skip(reason, allow_module_level=True)

# 13 pictures, 7 for validation: the last minibatch leaves some ranks with none.
COMMON = {"n_epochs": 2, "check_every": 1, "shuffle": "images"}
DOUBLE = {**COMMON, "precision": "float64", "learning_rate": 0.05}
ENDLESS = {**COMMON, "n_epochs": 10_000}


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One trainer with the global minibatch of six, in float64."""
    return train_here(data, tmp_path_factory.mktemp("alone") / "run", **DOUBLE, batch_size=6)


@pytest.fixture(scope="module")
def two(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two trainers of one machine, without ranks, in float32."""
    return train_here(data, tmp_path_factory.mktemp("two") / "run", **COMMON, devices=["cpu"] * 2)


def train_here(data: Path, run: Path, **changes: object) -> Path:
    result = run_program("train.py", settings(data, run, **changes))
    assert result.returncode == 0, result.stderr
    return run


def train(data: Path, run: Path, ranks: int, **changes: object) -> str:
    """Train as ranks, check that it succeeds; return the log."""
    result = run_ranks(ranks, "train.py", settings(data, run, **changes))
    assert result.returncode == 0, result.stderr
    return result.stderr


def assert_close(ours: Path, theirs: Path, tolerance: float) -> None:
    left, right = weights(ours), weights(theirs)
    assert left.keys() == right.keys()
    for name, value in left.items():
        scale = np.abs(right[name]).max()
        np.testing.assert_allclose(value, right[name], rtol=0, atol=tolerance * scale, err_msg=name)
    for mine, other in zip(read_record(ours), read_record(theirs), strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=max(tolerance, 1e-9))
        assert mine["event"] == other["event"]
        if mine["event"] == "validation":
            assert mine["images"] == 7


# What is computed


def test_ranks_compute_the_bits_of_trainers_on_one_machine(
    data: Path, tmp_path: Path, two: Path
) -> None:
    log = train(data, tmp_path / "run", 2, **COMMON)
    assert_same_bits(tmp_path / "run", two)
    # Rank 0 alone reports, in lines, and writes.
    assert all(line.startswith("[0] ") for line in log.splitlines())
    assert "\x1b" not in log
    assert log.count("wrote") == 2
    for run in (tmp_path / "run", two):
        assert [path.name for path in run.glob("events.out.*")] == ["events.out.tfevents.00001"]


@pytest.mark.parametrize(
    ("ranks", "collective", "exchange"),
    [
        pytest.param(3, "asa", "gradients", marks=pytest.mark.slow),
        pytest.param(2, "ar", "average", marks=pytest.mark.slow),
        pytest.param(3, "ar", "gradients", marks=pytest.mark.slow),
        pytest.param(3, "asa", "average", marks=pytest.mark.slow),
        pytest.param(1, "asa", "average", marks=pytest.mark.slow),
        pytest.param(3, "hierarchical", "average", marks=pytest.mark.slow),
        pytest.param(2, "hierarchical", "gradients", marks=pytest.mark.slow),
    ],
)
def test_the_number_of_ranks_does_not_change_what_is_computed(
    data: Path, tmp_path: Path, alone: Path, ranks: int, collective: str, exchange: str
) -> None:
    changes = {**DOUBLE, "batch_size": 6 // ranks, "collective": collective, "exchange": exchange}
    train(data, tmp_path / "run", ranks, **changes)
    assert_close(tmp_path / "run", alone, 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"collective": "asa"},
        {"collective": "hierarchical"},
        {"collective": "hierarchical", "exchange": "gradients", "bucket_mb": 0.1},
        {"collective": "ar", "exchange": "gradients", "bucket_mb": 0.1},
    ],
)
def test_ranks_on_gpus_compute_what_they_do_on_the_host(
    data: Path, tmp_path: Path, alone: Path, changes: dict[str, object]
) -> None:
    """On simulated GPUs, of which the first two can't reach each other."""
    gpus = {"devices": ["cuda:0", "cuda:1", "cuda:2"], "compile": False, **changes}
    arguments = settings(data, tmp_path / "run", **DOUBLE, batch_size=2, **gpus)
    result = run_ranks(3, "tests/support/simulated_train.py", arguments)
    assert result.returncode == 0, result.stderr
    is_apart = "cuda:0 and cuda:1 can't reach" in result.stderr
    assert is_apart == (changes["collective"] == "hierarchical")
    assert result.stderr.count("left on GPUs: 0, shared: 0\n") == 3
    assert_close(tmp_path / "run", alone, 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("collective", ["asa", "hierarchical"])
def test_buckets_change_no_bit(data: Path, tmp_path: Path, collective: str) -> None:
    changes = {**COMMON, "exchange": "gradients", "collective": collective}
    for name, megabytes in (("whole", 0.0), ("buckets", 0.1)):
        train(data, tmp_path / name, 2, **changes, bucket_mb=megabytes)
    assert_same_bits(tmp_path / "buckets", tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["average", "gradients"])
def test_ranks_fine_tune_as_trainers_of_one_machine_do(
    data: Path, tmp_path: Path, two: Path, exchange: str
) -> None:
    """What is frozen is no part of what is exchanged."""
    start = list_checkpoints(two)[0]
    changes = {**COMMON, "init_weights": str(start), "freeze": ["conv1", "fc6"]}
    changes |= {"lr_multipliers": {"fc8": 10.0}, "exchange": exchange, "n_epochs": 1}
    train(data, tmp_path / "ranks", 2, **changes)
    here = train_here(data, tmp_path / "here", **changes, devices=["cpu"] * 2)
    assert_same_bits(tmp_path / "ranks", here)
    before, after = load_file(start), weights(here)
    kept = {name for name in before if np.array_equal(before[name], after[name])}
    assert {"conv1.weight", "conv1.bias", "fc6.weight", "fc6.bias"} <= kept
    assert not {"conv2.weight", "fc8.weight"} & kept


@pytest.mark.slow
def test_rank_0_on_a_terminal_shows_the_live_view(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by ``srun --pty``: here one rank, since mpirun gives its ranks pipes."""
    monkeypatch.setenv("PMI_SIZE", "1")
    with Terminal("train.py", settings(data, tmp_path / "run", batch_size=1)) as terminal:
        own = r"trainer 0  (computing|exchanging|waiting)[^\n]* 0\.\d\d GB  loader 0  \w+"
        terminal.wait_for(lambda: re.search(own, "\n".join(terminal.lines)) is not None)
        assert terminal.wait() == 0
        assert "[0] epoch 1 validation: loss" in terminal.text
        assert "trainer 0  " not in terminal.text


@pytest.mark.parametrize(
    ("wire", "exchange", "feedback"),
    [
        pytest.param("float16", "average", False, marks=pytest.mark.slow),
        pytest.param("bfloat16", "average", True, marks=pytest.mark.slow),
        pytest.param("float16", "gradients", True, marks=pytest.mark.slow),
        pytest.param("bfloat16", "gradients", False, marks=pytest.mark.slow),
    ],
)
def test_sixteen_bits_train_nearly_the_same(
    data: Path, tmp_path: Path, two: Path, wire: str, exchange: str, feedback: bool
) -> None:
    changes = {"collective": "asa16", "wire": wire, "exchange": exchange}
    train(data, tmp_path / "run", 2, **COMMON, **changes, error_feedback=feedback)
    ours, theirs = weights(tmp_path / "run"), weights(two)
    assert any(ours[name].tobytes() != theirs[name].tobytes() for name in theirs)
    for name, value in ours.items():
        # Eight updates, each rounded; momenta are of the size of an update.
        scale = np.abs(theirs[name]).max()
        # Biases began at 0 or .1, and are no more than their updates.
        tolerance = 2e-3 if value.ndim > 1 and not name.startswith("momentum/") else 0.05
        np.testing.assert_allclose(value, theirs[name], rtol=0, atol=tolerance * scale)


@pytest.mark.slow
def test_validation_counts_each_picture_once(data: Path, two: Path) -> None:
    """Seven pictures, two a rank: the second minibatch is one rank's alone."""
    arguments = ["--weights", str(list_checkpoints(two)[-1]), *settings(data, two)]
    result = run_ranks(3, "validate.py", arguments)
    assert result.returncode == 0, result.stderr
    found, last = json.loads(result.stdout), read_record(two)[-1]
    assert found["images"] == 7
    assert found["top1_error"] == last["top1_error"]
    assert found["loss"] == pytest.approx(last["loss"], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"rule": "easgd", "easgd_tau": 2, "print_freq": 3},
        # Reports of one step, which may have had nothing for a rank.
        {"rule": "gosgd", "gosgd_p": 0.5, "print_freq": 1},
    ],
)
def test_ranks_that_are_not_in_step_train_validate_and_go_on(
    data: Path, tmp_path: Path, changes: dict[str, object]
) -> None:
    """Every picture is seen, the centre is what is validated and kept, and all of them end."""
    run, common = tmp_path / "run", {**changes, "shuffle": "images"}
    train(data, run, 3, **common, n_epochs=2)
    record = read_record(run)
    assert [line["images"] for line in record if line["event"] == "validation"] == [7, 7]
    log = train(data, run, 3, **common, n_epochs=3, resume_train=True)
    assert "epoch 3 validation" in log
    checkpoint = str(list_checkpoints(run)[-1])
    result = run_program("validate.py", ["--weights", checkpoint, *settings(data, run)])
    assert result.returncode == 0, result.stderr
    last = read_record(run)[-1]
    assert json.loads(result.stdout)["loss"] == pytest.approx(last["loss"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["easgd", "gosgd"])
def test_ranks_on_gpus_need_not_be_in_step(data: Path, tmp_path: Path, rule: str) -> None:
    """On simulated GPUs: what is kept is the centre, which was validated."""
    run, changes = tmp_path / "run", {"rule": rule, "gosgd_p": 0.5, "shuffle": "images"}
    gpus = {"devices": ["cuda:0", "cuda:1", "cuda:2"], "compile": False, "n_epochs": 2}
    result = run_ranks(
        3, "tests/support/simulated_train.py", settings(data, run, **changes, **gpus)
    )
    assert result.returncode == 0, result.stderr
    checkpoint = str(list_checkpoints(run)[-1])
    found = run_program("validate.py", ["--weights", checkpoint, *settings(data, run)])
    last = read_record(run)[-1]
    assert json.loads(found.stdout)["loss"] == pytest.approx(last["loss"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["easgd", "gosgd"])
def test_each_rule_learns(tmp_path: Path, rule: str) -> None:
    data = prepare(tmp_path / "data")
    changes = {"rule": rule, "n_epochs": 16, "learning_rate": 0.02, "batch_size": 5}
    train(data, tmp_path / "run", 3, **changes, snapshot_freq=16, gosgd_p=0.5)
    losses = [x["loss"] for x in read_record(tmp_path / "run") if x["event"] == "train"]
    assert np.mean(losses[-4:]) < losses[0] - 0.02


# How it ends


@pytest.mark.parametrize(
    ("victim", "message"),
    [
        ("trainer 1", "KILLED|Killed|signal 9"),
        pytest.param("trainer 0", "KILLED|Killed|signal 9", marks=pytest.mark.slow),
        pytest.param(
            "loader 1",
            r"\[1\] error: the run has ended: loader 1: was killed by SIGKILL",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_killed_process_ends_the_job(
    data: Path, tmp_path: Path, victim: str, message: str
) -> None:
    before = mpich_memory()
    started = job(data, tmp_path / "run", 3, 3, **ENDLESS)
    os.kill(started.find(victim), signal.SIGKILL)
    killed = time.monotonic()
    result = started.finish(20)
    assert result.returncode not in (0, 2)
    assert time.monotonic() - killed < 15
    assert re.search(message, result.stdout + result.stderr)
    assert leaves_no_memory(before)


@pytest.mark.slow
def test_a_rank_that_raises_reports_its_traceback(data: Path, tmp_path: Path) -> None:
    arguments = ["BrokenAlexNet", *settings(data, tmp_path / "run", **COMMON)]
    result = run_ranks(3, "tests/support/broken_train.py", arguments, timeout=60)
    assert result.returncode == 1, result.stderr
    assert "[1] trainer 1 failed:\nTraceback" in result.stderr
    text = "[1] error: the run has ended: trainer 1: ZeroDivisionError: broken on purpose"
    assert text in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["trainer 0", "trainer 1"])
def test_a_rank_that_is_stopped_is_dead_after_its_time(
    data: Path, tmp_path: Path, victim: str
) -> None:
    started = job(data, tmp_path / "run", 2, 3, **ENDLESS, peer_timeout_seconds=2)
    os.kill(started.find(victim), signal.SIGSTOP)
    result = started.finish(30)
    assert result.returncode == 1
    assert f"error: the run has ended: {victim}: has given no sign of life" in result.stderr


def test_bad_input_is_reported_once(data: Path, tmp_path: Path) -> None:
    result = run_ranks(3, "train.py", settings(data, tmp_path / "run", crop_size=400))
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("[0] error: crop_size is 400")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param(
            {"rule": "easgd", "on_nan": "rollback"}, "on_nan is rollback", marks=pytest.mark.slow
        ),
        ({"restarts": 2}, "restarts: 2 can't be done under mpirun"),
        pytest.param(
            {"devices": ["cuda:0"]}, "devices: cuda:0 is not there", marks=pytest.mark.slow
        ),
    ],
)
def test_what_ranks_cannot_do_is_refused(
    data: Path, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    if "devices" in changes and Path("/dev/nvidia0").exists():
        pytest.skip("there is a GPU here")
    result = run_ranks(2, "train.py", settings(data, tmp_path / "run", **changes))
    assert result.returncode == 2
    assert message in result.stderr


def test_a_collective_of_ranks_needs_mpirun(data: Path, tmp_path: Path) -> None:
    result = run_program("train.py", settings(data, tmp_path / "run", collective="ar"))
    assert result.returncode == 2
    assert "collective: ar is for trainers that are ranks" in result.stderr


@pytest.mark.slow
def test_help_is_shown_once(tmp_path: Path) -> None:
    result = run_ranks(2, "train.py", ["--help"])
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("Train AlexNet with several processes") == 1


# How it goes on


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGTERM, 143), (signal.SIGINT, 130)],
)
def test_an_interrupted_job_goes_on_with_the_same_bits(
    data: Path, tmp_path: Path, two: Path, number: signal.Signals, status: int
) -> None:
    """It goes on as ranks, and the whole has the bits of two trainers on one machine."""
    run = tmp_path / "run"
    started = job(data, run, 2, 2, **{**COMMON, "n_epochs": 10_000})
    started.process.send_signal(number)
    result = started.finish(30)
    assert result.returncode == status, result.stderr
    assert "wrote" in result.stderr
    for later in list_checkpoints(run):  # as if it had been stopped in the first epoch
        if later.name >= "epoch-0001-":
            later.unlink()
    train(data, run, 2, **COMMON, resume_train=True)
    assert_same_bits(run, two)


@pytest.mark.slow
def test_a_killed_job_goes_on_with_the_same_bits(data: Path, tmp_path: Path, two: Path) -> None:
    """The other way round: begun as ranks, ended as trainers of one machine."""
    run = tmp_path / "run"
    started = job(data, run, 2, 7, **{**COMMON, "n_epochs": 10_000}, keep_snapshots="all")
    os.kill(started.find("trainer 1"), signal.SIGKILL)
    assert started.finish(20).returncode != 0
    for later in list_checkpoints(run):
        if later.name >= "epoch-0001-":
            later.unlink()
    train_here(data, run, **COMMON, devices=["cpu"] * 2, resume_train=True)
    assert_same_bits(run, two)


@pytest.mark.slow
@pytest.mark.parametrize("collective", ["ar", "asa16"])
def test_other_collectives_go_on_consistently(data: Path, tmp_path: Path, collective: str) -> None:
    for name, epochs, resume in (("whole", 2, False), ("parts", 1, False), ("parts", 2, True)):
        changes = {**COMMON, "n_epochs": epochs, "collective": collective, "resume_train": resume}
        train(data, tmp_path / name, 2, **changes)
    assert_close(tmp_path / "parts", tmp_path / "whole", 1e-2)


@pytest.mark.slow
def test_a_bad_minibatch_is_passed_over_by_all_ranks(data: Path, tmp_path: Path) -> None:
    arguments = settings(data, tmp_path / "run", **COMMON, on_nan="rollback")
    result = run_ranks(2, "tests/support/broken_train.py", ["NanAlexNet", *arguments])
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("going back to the newest checkpoint") == 1
    events = [line["event"] for line in read_record(tmp_path / "run")]
    assert events.count("not_finite") == 1
    assert events.count("validation") == 2


@pytest.mark.slow
@pytest.mark.parametrize("collective", ["asa", "hierarchical"])
def test_ranks_that_roll_back_leave_nothing_on_gpus(
    data: Path, tmp_path: Path, collective: str
) -> None:
    gpus = {"devices": ["cuda:0", "cuda:1", "cuda:2"], "compile": False, "collective": collective}
    arguments = settings(data, tmp_path / "run", **COMMON, **gpus, on_nan="rollback")
    broken = ["--network", "tests.support.broken_network:NanAlexNet", *arguments]
    result = run_ranks(3, "tests/support/simulated_train.py", broken)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("going back to the newest checkpoint") == 1
    assert result.stderr.count("left on GPUs: 0, shared: 0\n") == 3
