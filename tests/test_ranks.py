"""train.py and validate.py as ranks of mpirun and of torchrun, on a tiny data set."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tandem.artifacts.run_folder import list_checkpoints
from tandem.distributed.gloo import VARIABLES
from tests.support.ranks import Starter, job, leaves_no_memory, mpich_memory, need_ranks, run_ranks
from tests.support.runs import (
    assert_close,
    assert_same_bits,
    forget_after,
    train,
    train_ranks,
    train_ranks_log,
    weights,
)
from tests.support.terminal import Terminal
from tests.support.tiny import ROOT, prepare, read_record, run_program, settings, shared_memory

# 13 pictures, 7 for validation: the last minibatch leaves some ranks with none.
COMMON = {"n_epochs": 2, "check_every": 1, "shuffle": "images"}
DOUBLE = {**COMMON, "precision": "float64", "learning_rate": 0.05}
ENDLESS = {**COMMON, "n_epochs": 10_000}
GPUS = {"devices": ["cuda:0", "cuda:1", "cuda:2"], "compile": False}
SIMULATED = "tests/support/simulated_train.py"
BROKEN = "tests/support/broken_train.py"

slow = pytest.mark.slow


@pytest.fixture
def starter(request: pytest.FixtureRequest) -> Starter:
    """What starts the ranks, mpirun if the test does not choose; skipped where it is missing."""
    by: Starter = getattr(request, "param", "mpirun")
    need_ranks(by)
    return by


def starters(*cases: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("starter", cases, indirect=True)


both = starters("mpirun", pytest.param("torchrun", marks=slow))


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One trainer with the global minibatch of six, in float64."""
    return train(data, tmp_path_factory.mktemp("alone") / "run", **DOUBLE, batch_size=6)


@pytest.fixture(scope="module")
def two(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two trainers of one machine, without ranks, in float32."""
    return train(data, tmp_path_factory.mktemp("two") / "run", **COMMON, devices=["cpu"] * 2)


# What is computed


@slow
@both
def test_ranks_compute_the_bits_of_trainers_on_one_machine(
    data: Path, tmp_path: Path, two: Path, starter: Starter
) -> None:
    before, run = shared_memory(), tmp_path / "run"
    lines = train_ranks_log(data, run, 2, starter, **COMMON).splitlines()
    if starter == "torchrun":  # which has something to log itself
        lines = [line for line in lines if line.startswith("[")]
    assert_same_bits(run, two)
    # Rank 0 alone reports, in lines, and writes.
    assert all(line.startswith("[0] ") and "\x1b" not in line for line in lines)
    assert sum("wrote" in line for line in lines) == 2
    for stage in ("checking data", "starting processes", "compiling gradient", "first step"):
        assert sum(line.endswith(f" s: {stage}") for line in lines) == 1
    for folder in (run, two):
        assert [path.name for path in folder.glob("events.out.*")] == ["events.out.tfevents.00001"]
    assert shared_memory() <= before


@slow
@pytest.mark.parametrize(
    ("ranks", "collective", "exchange"),
    [
        (3, "asa", "gradients"),
        (2, "ar", "average"),
        (3, "ar", "gradients"),
        (3, "asa", "average"),
        (1, "asa", "average"),
        (3, "hierarchical", "average"),
        (2, "hierarchical", "gradients"),
    ],
)
@pytest.mark.usefixtures("starter")
def test_the_number_of_ranks_does_not_change_what_is_computed(
    data: Path, tmp_path: Path, alone: Path, ranks: int, collective: str, exchange: str
) -> None:
    changes = {**DOUBLE, "batch_size": 6 // ranks, "collective": collective, "exchange": exchange}
    train_ranks(data, tmp_path / "run", ranks, **changes)
    assert_close(tmp_path / "run", alone, 1e-9)


@slow
@pytest.mark.parametrize("optimizer", ["rmsprop", "adam", "adamw", "nadam"])
@both
def test_nor_does_it_with_another_optimizer(
    data: Path, tmp_path: Path, starter: Starter, optimizer: str
) -> None:
    changes = {**DOUBLE, "learning_rate": 0.001, "optimizer": optimizer}
    alone = train(data, tmp_path / "alone", **changes, batch_size=6)
    for number, more in enumerate(({}, {"collective": "ar", "bucket_mb": 0.1})):
        run = tmp_path / f"ranks-{number}"
        train_ranks(data, run, 3, starter, **changes, **more, batch_size=2)
        assert_close(run, alone, 1e-9)


@slow
@pytest.mark.parametrize(
    "changes",
    [
        {"collective": "asa"},
        {"collective": "hierarchical"},
        {"collective": "hierarchical", "exchange": "gradients", "bucket_mb": 0.1},
        {"collective": "ar", "exchange": "gradients", "bucket_mb": 0.1},
    ],
)
@pytest.mark.usefixtures("starter")
def test_ranks_on_gpus_compute_what_they_do_on_the_host(
    data: Path, tmp_path: Path, alone: Path, changes: dict[str, object]
) -> None:
    """On simulated GPUs, of which the first two can't reach each other."""
    changes = {**DOUBLE, **GPUS, "batch_size": 2, **changes}
    log = train_ranks_log(data, tmp_path / "run", 3, program=(SIMULATED,), **changes)
    is_apart = "cuda:0 and cuda:1 can't reach" in log
    assert is_apart == (changes["collective"] == "hierarchical")
    assert log.count("left on GPUs: 0, shared: 0\n") == 3
    recorded = [1, 3] if "bucket_mb" in changes else [1]
    assert log.count(f"segments recorded: {recorded}\n") == 3
    assert_close(tmp_path / "run", alone, 1e-9)


@pytest.fixture(scope="module")
def gradients(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two trainers of one machine that exchange gradients, as a whole."""
    changes = {**COMMON, "devices": ["cpu"] * 2, "exchange": "gradients"}
    return train(data, tmp_path_factory.mktemp("gradients") / "run", **changes)


@slow
@starters("mpirun", "torchrun")
@pytest.mark.parametrize("collective", ["asa", "hierarchical"])
def test_buckets_and_hierarchies_change_no_bit(
    data: Path, tmp_path: Path, gradients: Path, starter: Starter, collective: str
) -> None:
    changes = {**COMMON, "exchange": "gradients", "collective": collective, "bucket_mb": 0.1}
    train_ranks(data, tmp_path / "run", 2, starter, **changes)
    assert_same_bits(tmp_path / "run", gradients)


@slow
@pytest.mark.parametrize("exchange", ["average", "gradients"])
@pytest.mark.usefixtures("starter")
def test_ranks_fine_tune_as_trainers_of_one_machine_do(
    data: Path, tmp_path: Path, two: Path, exchange: str
) -> None:
    """Frozen layers are not exchanged."""
    start = list_checkpoints(two)[0]
    changes = {**COMMON, "init_weights": str(start), "freeze": ["conv1", "fc6"]}
    changes |= {"lr_multipliers": {"fc8": 10.0}, "exchange": exchange, "n_epochs": 1}
    train_ranks(data, tmp_path / "ranks", 2, **changes)
    here = train(data, tmp_path / "here", **changes, devices=["cpu"] * 2)
    assert_same_bits(tmp_path / "ranks", here)
    before, after = load_file(start), weights(here)
    kept = {name for name in before if np.array_equal(before[name], after[name])}
    assert {"conv1.weight", "conv1.bias", "fc6.weight", "fc6.bias"} <= kept
    assert not {"conv2.weight", "fc8.weight"} & kept


@slow
@pytest.mark.usefixtures("starter")
def test_rank_0_on_a_terminal_shows_the_live_view(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by ``srun --pty``: here one rank, since mpirun gives its ranks pipes."""
    monkeypatch.setenv("PMI_SIZE", "1")
    run = tmp_path / "run"
    with Terminal("train.py", settings(data, run, batch_size=1, n_epochs=4)) as terminal:
        own = r"trainer 0  (computing|exchanging|waiting)[^\n]* 0\.\d\d GB  loader 0  \w+"
        terminal.wait_for(lambda: re.search(own, "\n".join(terminal.lines)) is not None)
        assert terminal.wait() == 0
        assert "[0] epoch 1 validation: loss" in terminal.text
        assert "trainer 0  " not in terminal.text


@slow
@pytest.mark.parametrize(
    ("wire", "exchange", "feedback"),
    [
        ("float16", "average", False),
        ("bfloat16", "average", True),
        ("float16", "gradients", True),
        ("bfloat16", "gradients", False),
    ],
)
@pytest.mark.usefixtures("starter")
def test_sixteen_bits_train_nearly_the_same(
    data: Path, tmp_path: Path, two: Path, wire: str, exchange: str, feedback: bool
) -> None:
    changes = {"collective": "asa16", "wire": wire, "exchange": exchange}
    train_ranks(data, tmp_path / "run", 2, **COMMON, **changes, error_feedback=feedback)
    ours, theirs = weights(tmp_path / "run"), weights(two)
    assert any(ours[name].tobytes() != theirs[name].tobytes() for name in theirs)
    for name, value in ours.items():
        # Eight updates, each rounded. Momenta are of the size of an update; biases began at 0 or
        # 0.1 and are the sum of their updates.
        scale = np.abs(theirs[name]).max()
        tolerance = 2e-3 if value.ndim > 1 and not name.startswith("momentum/") else 0.05
        np.testing.assert_allclose(value, theirs[name], rtol=0, atol=tolerance * scale)


@slow
@pytest.mark.parametrize(
    ("starter", "collective"),
    [("mpirun", "asa"), ("torchrun", "ar"), ("torchrun", "asa16")],
    indirect=["starter"],
)
def test_validation_counts_each_picture_once(
    data: Path, tmp_path: Path, starter: Starter, collective: str
) -> None:
    """Seven pictures, two for each rank: the second minibatch is of one rank alone."""
    run = tmp_path / "run"
    train_ranks(data, run, 3, starter, **COMMON, collective=collective)
    arguments = ["--weights", str(list_checkpoints(run)[-1]), *settings(data, run)]
    result = run_ranks(3, "validate.py", arguments, by=starter)
    assert result.returncode == 0, result.stderr
    found, last = json.loads(result.stdout), read_record(run)[-1]
    assert found["images"] == last["images"] == 7
    assert found["top1_error"] == last["top1_error"]
    assert found["loss"] == pytest.approx(last["loss"], rel=1e-6)


def assert_last_validation(data: Path, run: Path) -> None:
    """Validate the last checkpoint on this machine and compare with the record."""
    checkpoint = str(list_checkpoints(run)[-1])
    result = run_program("validate.py", ["--weights", checkpoint, *settings(data, run)])
    assert result.returncode == 0, result.stderr
    last = read_record(run)[-1]
    assert json.loads(result.stdout)["loss"] == pytest.approx(last["loss"], rel=1e-5)


@slow
@pytest.mark.parametrize(
    "changes",
    [
        {"rule": "easgd", "easgd_tau": 2, "print_freq": 3},
        # Reports of one step, in which a rank may have had no picture.
        {"rule": "gosgd", "gosgd_p": 0.5, "print_freq": 1},
        # Each rank steps by itself, so that nothing need be linear.
        {"rule": "easgd", "optimizer": "adam", "learning_rate": 0.001, "print_freq": 3},
        {"rule": "gosgd", "optimizer": "nadam", "learning_rate": 0.001, "gosgd_p": 0.5},
    ],
)
@pytest.mark.usefixtures("starter")
def test_asynchronous_ranks_train_validate_and_resume(
    data: Path, tmp_path: Path, changes: dict[str, object]
) -> None:
    """Every picture is seen, the consensus weights are validated and kept, and all ranks end."""
    run, common = tmp_path / "run", {**changes, "shuffle": "images"}
    train_ranks(data, run, 3, **common, n_epochs=2)
    record = read_record(run)
    assert [line["images"] for line in record if line["event"] == "validation"] == [7, 7]
    log = train_ranks_log(data, run, 3, **common, n_epochs=3, resume_train=True)
    assert "epoch 3 validation" in log
    assert_last_validation(data, run)


@slow
@pytest.mark.parametrize("rule", ["easgd", "gosgd"])
@pytest.mark.usefixtures("starter")
def test_asynchronous_ranks_on_gpus_keep_what_they_validated(
    data: Path, tmp_path: Path, rule: str
) -> None:
    changes = {**GPUS, "rule": rule, "gosgd_p": 0.5, "shuffle": "images", "n_epochs": 2}
    train_ranks(data, tmp_path / "run", 3, program=(SIMULATED,), **changes)
    assert_last_validation(data, tmp_path / "run")


@slow
@pytest.mark.parametrize("rule", ["easgd", "gosgd"])
@pytest.mark.usefixtures("starter")
def test_each_rule_learns(tmp_path: Path, rule: str) -> None:
    changes = {"rule": rule, "n_epochs": 16, "learning_rate": 0.02, "batch_size": 5}
    changes |= {"snapshot_freq": 16, "gosgd_p": 0.5}
    train_ranks(prepare(tmp_path / "data", 15), tmp_path / "run", 3, **changes)
    losses = [x["loss"] for x in read_record(tmp_path / "run") if x["event"] == "train"]
    assert np.mean(losses[-4:]) < losses[0] - 0.01


# How it ends


@slow
@pytest.mark.parametrize(
    ("starter", "victim"),
    [
        ("mpirun", "trainer 1"),
        *(
            pytest.param(by, victim, marks=slow)
            for by in ("mpirun", "torchrun")
            for victim in ("trainer 0", "trainer 1", "loader 1")
            if (by, victim) != ("mpirun", "trainer 1")
        ),
    ],
    indirect=["starter"],
)
def test_a_killed_process_ends_the_job(
    data: Path, tmp_path: Path, starter: Starter, victim: str
) -> None:
    mpich, shared = mpich_memory(), shared_memory()
    started = job(data, tmp_path / "run", 3, 3, by=starter, **ENDLESS)
    os.kill(started.find(victim), signal.SIGKILL)
    killed = time.monotonic()
    result = started.finish(20 if starter == "mpirun" else 40)
    assert time.monotonic() - killed < (15 if starter == "mpirun" else 20)
    assert result.returncode == 1 or (starter == "mpirun" and result.returncode not in (0, 2))
    message = "KILLED|Killed|[Ss]ignal 9"
    if victim == "loader 1":
        message = r"\[1\] error: the run has ended: loader 1: was killed by SIGKILL"
    assert re.search(message, result.stdout + result.stderr), result.stderr
    assert leaves_no_memory(mpich)
    assert shared_memory() <= shared


@slow
@starters("mpirun", "torchrun")
def test_a_rank_that_raises_reports_its_traceback(
    data: Path, tmp_path: Path, starter: Starter
) -> None:
    arguments = ["BrokenAlexNet", *settings(data, tmp_path / "run", **COMMON)]
    result = run_ranks(3, BROKEN, arguments, timeout=60, by=starter)
    assert result.returncode == 1, result.stderr
    assert "[1] trainer 1 failed:\nTraceback" in result.stderr
    text = "[1] error: the run has ended: trainer 1: ZeroDivisionError: broken on purpose"
    assert text in result.stderr


@slow
@pytest.mark.usefixtures("starter")
def test_a_server_of_elastic_averaging_that_raises_ends_the_run(data: Path, tmp_path: Path) -> None:
    arguments = settings(data, tmp_path / "run", **{**COMMON, "check_every": 0}, rule="easgd")
    result = run_ranks(2, BROKEN, ["BrokenServerAlexNet", *arguments], timeout=60)
    assert result.returncode == 1, result.stderr
    assert "[0] error: the run has ended: the server of elastic averaging failed" in result.stderr
    assert "ZeroDivisionError: broken on purpose" in result.stderr


@slow
@starters("mpirun", "torchrun")
@pytest.mark.parametrize("victim", ["trainer 0", "trainer 1"])
def test_a_stopped_rank_is_dead_after_its_timeout(
    data: Path, tmp_path: Path, starter: Starter, victim: str
) -> None:
    started = job(data, tmp_path / "run", 2, 3, by=starter, **ENDLESS, peer_timeout_seconds=3)
    os.kill(started.find(victim), signal.SIGSTOP)
    result = started.finish(25)
    assert result.returncode == 1
    assert f"error: the run has ended: {victim}: has given no sign of life" in result.stderr


@slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_end_when_torchrun_is_killed(data: Path, tmp_path: Path, ranks: int) -> None:
    started = job(data, tmp_path / "run", ranks, 3, by="torchrun", **ENDLESS)
    started.process.kill()
    result = started.finish(40)
    assert "torchrun, which has started this rank, is gone" in result.stderr


@pytest.mark.usefixtures("starter")
def test_bad_input_is_reported_once(data: Path, tmp_path: Path) -> None:
    result = run_ranks(3, "train.py", settings(data, tmp_path / "run", crop_size=400))
    assert result.returncode == 2
    first, line = result.stderr.splitlines()
    assert first == "[0]   0.0 s: checking data"
    assert line.startswith("[0] error: crop_size is 400")


@pytest.mark.parametrize(
    ("starter", "changes", "message"),
    [
        ("mpirun", {"restarts": 2}, "restarts: 2 is not possible under mpirun"),
        *(
            pytest.param(*case, marks=slow)
            for case in (
                ("mpirun", {"rule": "easgd", "on_nan": "rollback"}, "on_nan is rollback"),
                ("mpirun", {"devices": ["cuda:0"]}, "devices: cuda:0"),
                ("torchrun", {"rule": "easgd"}, "easgd is for trainers that are joined by MPI"),
                ("torchrun", {"restarts": 2}, "use torchrun --max-restarts 2, with"),
                ("torchrun", {"collective": "nccl"}, "collective: nccl needs a GPU for each"),
            )
        ),
    ],
    indirect=["starter"],
)
def test_what_ranks_cannot_do_is_refused(
    data: Path, tmp_path: Path, starter: Starter, changes: dict[str, object], message: str
) -> None:
    if "devices" in changes and Path("/dev/nvidia0").exists():
        pytest.skip("there is a GPU here")
    arguments = settings(data, tmp_path / "run", **changes)
    result = run_ranks(2, "train.py", arguments, by=starter)
    assert len(re.findall(rf"\[0\] error: .*{message}", result.stderr)) == 1, result.stderr
    if starter == "mpirun":
        assert result.returncode == 2
    else:
        assert result.returncode == 1  # torchrun's own
        assert re.search(r"exitcode *: 2 ", result.stderr), result.stderr


@pytest.mark.parametrize(
    ("collective", "message"),
    [
        ("ar", "collective: ar is for trainers that are ranks"),
        ("nccl", "collective: nccl is for trainers that torchrun starts"),
    ],
)
def test_a_collective_of_ranks_needs_ranks(
    data: Path, tmp_path: Path, collective: str, message: str
) -> None:
    result = run_program("train.py", settings(data, tmp_path / "run", collective=collective))
    assert result.returncode == 2
    assert message in result.stderr


@slow
def test_ranks_that_find_no_others_report_it(data: Path, tmp_path: Path) -> None:
    values = ("1", "2", "127.0.0.1", "no port")
    result = subprocess.run(
        [sys.executable, "train.py", *settings(data, tmp_path / "run")],
        cwd=ROOT,
        env={**os.environ, **dict(zip(VARIABLES, values, strict=True))},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 2
    assert "error: the ranks can't be joined" in result.stderr


@pytest.mark.usefixtures("starter")
def test_ranks_of_tests_find_the_project_and_what_else_is_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, program = tmp_path / "modules", tmp_path / "program.py"
    folder.mkdir()
    (folder / "mine.py").write_text("NAME = 'mine'\n")
    program.write_text("import mine, tandem\nprint(mine.NAME, tandem.__file__)\n")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    result = run_ranks(1, str(program))
    assert result.stdout == f"mine {ROOT / 'tandem' / '__init__.py'}\n", result.stderr


@slow
@pytest.mark.usefixtures("starter")
def test_help_is_shown_once() -> None:
    result = run_ranks(2, "train.py", ["--help"])
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("Train AlexNet with several processes") == 1


# How it resumes


@slow
@pytest.mark.parametrize(
    ("starter", "number", "status"),
    [
        ("mpirun", signal.SIGTERM, 143),
        ("mpirun", signal.SIGINT, 130),
        ("torchrun", signal.SIGTERM, 1),
    ],
    indirect=["starter"],
)
def test_an_interrupted_job_resumes_with_the_same_bits(
    data: Path, tmp_path: Path, two: Path, starter: Starter, number: signal.Signals, status: int
) -> None:
    """It resumes as ranks, and the whole has the bits of two trainers on one machine."""
    run = tmp_path / "run"
    started = job(data, run, 2, 2, by=starter, **ENDLESS)
    started.process.send_signal(number)
    result = started.finish(60)
    assert result.returncode == status, result.stderr
    assert "wrote" in result.stderr
    forget_after(run, "epoch-0001")
    train_ranks(data, run, 2, starter, **COMMON, resume_train=True)
    assert_same_bits(run, two)


@slow
@pytest.mark.usefixtures("starter")
def test_a_killed_job_resumes_with_the_same_bits(data: Path, tmp_path: Path, two: Path) -> None:
    """The other way round: begun as ranks, ended as trainers of one machine."""
    run = tmp_path / "run"
    started = job(data, run, 2, 7, **ENDLESS, keep_snapshots="all")
    os.kill(started.find("trainer 1"), signal.SIGKILL)
    assert started.finish(20).returncode != 0
    forget_after(run, "epoch-0001")
    train(data, run, **COMMON, devices=["cpu"] * 2, resume_train=True)
    assert_same_bits(run, two)


@slow
@pytest.mark.parametrize("victim", ["trainer 0", "trainer 1"])
def test_torchrun_starts_again_at_the_step_that_a_survivor_saved(
    data: Path, tmp_path: Path, victim: str
) -> None:
    """Nothing else is saved. With sums of single rows the bits are those of one trainer."""
    changes = {**COMMON, "n_epochs": 100, "sum_rows": 1, "global_batch": 4, "print_freq": 1}
    changes |= {"snapshot_freq": 10_000, "snapshot_minutes": 0, "resume_train": True}
    whole, run = tmp_path / "whole", tmp_path / "run"
    train(data, whole, **changes, devices=["cpu"])
    started = job(data, run, 2, 20, "torchrun", 1, **changes)
    os.kill(started.find(victim), signal.SIGKILL)
    result = started.finish(120)
    assert result.returncode == 0, result.stderr
    found = re.search(r"continuing from .*epoch-(\d+)(?:-step-(\d+))?", result.stderr)
    assert found, result.stderr
    assert 4 * int(found[1]) + int(found[2] or 0) >= 16  # of 20 lines, four of validation
    assert_same_bits(run, whole)


@slow
@pytest.mark.parametrize("collective", ["ar", "asa16"])
@pytest.mark.usefixtures("starter")
def test_other_collectives_resume_consistently(data: Path, tmp_path: Path, collective: str) -> None:
    for name, epochs, resume in (("whole", 2, False), ("parts", 1, False), ("parts", 2, True)):
        changes = {**COMMON, "n_epochs": epochs, "collective": collective, "resume_train": resume}
        train_ranks(data, tmp_path / name, 2, **changes)
    assert_close(tmp_path / "parts", tmp_path / "whole", 1e-2)


@slow
@pytest.mark.usefixtures("starter")
def test_all_ranks_skip_a_bad_minibatch(data: Path, tmp_path: Path) -> None:
    program = (BROKEN, "NanAlexNet")
    log = train_ranks_log(data, tmp_path / "run", 2, program=program, **COMMON, on_nan="rollback")
    assert log.count("going back to the newest checkpoint") == 1
    events = [line["event"] for line in read_record(tmp_path / "run")]
    assert events.count("not_finite") == 1
    assert events.count("validation") == 2


@slow
@pytest.mark.parametrize("collective", ["asa", "hierarchical"])
@pytest.mark.usefixtures("starter")
def test_ranks_that_roll_back_leave_nothing_on_gpus_and_no_pipes(
    data: Path, tmp_path: Path, collective: str
) -> None:
    program = (SIMULATED, "--network", "tests.support.broken_network:OftenNanAlexNet")
    changes = {**COMMON, **GPUS, "collective": collective, "on_nan": "rollback"}
    log = train_ranks_log(data, tmp_path / "run", 3, program=program, **changes)
    assert log.count("going back to the newest checkpoint") == 3
    assert log.count("left on GPUs: 0, shared: 0\n") == 3
    files = re.findall(r"files of 4 runs: \[(\d+)\] then \[(\d+)\]\n", log)
    assert len(files) == 3
    assert all(int(last) <= int(second) for second, last in files)


BETWEEN = """
import sys

from tandem.launch.ranks import work_on_ranks_of_script

number = work_on_ranks_of_script(lambda launcher: 3)
if sys.argv[1] != "passes" and __import__("os").environ["PMI_RANK"] == "1":
    if sys.argv[1] == "leaves":
        sys.exit()
    raise ValueError("between two runs")
print(number + work_on_ranks_of_script(lambda launcher: 4))
"""


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("fails", "ValueError: between two runs"),
        ("leaves", "error: rank 1 ends before a run that others begin"),
        ("passes", ""),
    ],
)
def test_a_script_that_ends_at_one_rank_between_two_runs_ends_at_all(
    tmp_path: Path, how: str, said: str
) -> None:
    need_ranks()
    script = tmp_path / "script.py"
    script.write_text(BETWEEN)
    result = run_ranks(2, str(script), [how], timeout=60)
    assert said in result.stderr
    if how == "passes":
        assert (result.returncode, "".join(result.stdout.split())) == (0, "77"), result.stderr
    else:
        assert result.returncode != 0
