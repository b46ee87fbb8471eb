"""train.py and validate.py under torchrun, on a tiny data set. Ranks of MPI: test_ranks.py."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tandem.artifacts.run_folder import list_checkpoints
from tandem.distributed.gloo import VARIABLES
from tests.support.ranks import assert_same_bits, job, run_ranks
from tests.support.tiny import ROOT, read_record, run_program, settings, shared_memory

# 13 pictures, 7 for validation: the last minibatch leaves some ranks with none.
COMMON = {"n_epochs": 2, "check_every": 1, "shuffle": "images"}
ENDLESS = {**COMMON, "n_epochs": 10_000}


@pytest.fixture(scope="module")
def two(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two trainers of one machine, without ranks."""
    run = tmp_path_factory.mktemp("two") / "run"
    result = run_program("train.py", settings(data, run, **COMMON, devices=["cpu"] * 2))
    assert result.returncode == 0, result.stderr
    return run


def train(data: Path, run: Path, ranks: int, **changes: object) -> str:
    """Train as ranks, check that it succeeds; return what they logged."""
    result = run_ranks(ranks, "train.py", settings(data, run, **changes), by="torchrun")
    assert result.returncode == 0, result.stderr
    return "".join(line for line in result.stderr.splitlines(True) if line.startswith("["))


def test_ranks_compute_the_bits_of_trainers_on_one_machine(
    data: Path, tmp_path: Path, two: Path
) -> None:
    before = shared_memory()
    log = train(data, tmp_path / "run", 2, **COMMON)
    assert_same_bits(tmp_path / "run", two)
    assert all(line.startswith("[0] ") for line in log.splitlines())
    assert log.count("wrote") == 2
    assert shared_memory() <= before


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"collective": "hierarchical"}, {"bucket_mb": 0.1}])
def test_other_ways_change_no_bit(
    data: Path, tmp_path: Path, two: Path, changes: dict[str, object]
) -> None:
    """On one machine; the record of gradients differs by nothing from that of averages' bits."""
    common = {**COMMON, "exchange": "gradients"}
    train(data, tmp_path / "run", 2, **common, **changes)
    here = tmp_path / "here"
    result = run_program("train.py", settings(data, here, **common, devices=["cpu"] * 2))
    assert result.returncode == 0, result.stderr
    assert_same_bits(tmp_path / "run", here)


@pytest.mark.slow
@pytest.mark.parametrize("collective", ["ar", "asa16"])
def test_three_ranks_train_and_validate(data: Path, tmp_path: Path, collective: str) -> None:
    train(data, tmp_path / "run", 3, **COMMON, collective=collective)
    checkpoint = str(list_checkpoints(tmp_path / "run")[-1])
    arguments = ["--weights", checkpoint, *settings(data, tmp_path / "run")]
    result = run_ranks(3, "validate.py", arguments, by="torchrun")
    assert result.returncode == 0, result.stderr
    found, last = json.loads(result.stdout), read_record(tmp_path / "run")[-1]
    assert found["images"] == last["images"] == 7
    assert found["loss"] == pytest.approx(last["loss"], rel=1e-6)


# How it ends


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["trainer 0", "trainer 1", "loader 1"])
def test_a_killed_process_ends_the_job(data: Path, tmp_path: Path, victim: str) -> None:
    before = shared_memory()
    started = job(data, tmp_path / "run", 3, 3, by="torchrun", **ENDLESS)
    os.kill(started.find(victim), signal.SIGKILL)
    killed = time.monotonic()
    result = started.finish(40)
    assert result.returncode == 1
    assert time.monotonic() - killed < 20
    message = {
        "loader 1": r"\[1\] error: the run has ended: loader 1: was killed by SIGKILL",
    }.get(victim, r"Signal 9 \(SIGKILL\) received")
    assert re.search(message, result.stderr), result.stderr
    assert shared_memory() <= before


@pytest.mark.slow
def test_a_rank_that_raises_reports_its_traceback(data: Path, tmp_path: Path) -> None:
    arguments = ["BrokenAlexNet", *settings(data, tmp_path / "run", **COMMON)]
    result = run_ranks(3, "tests/support/broken_train.py", arguments, by="torchrun")
    assert result.returncode == 1, result.stderr
    text = "[1] error: the run has ended: trainer 1: ZeroDivisionError: broken on purpose"
    assert text in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["trainer 0", "trainer 1"])
def test_a_rank_that_is_stopped_is_dead_after_its_time(
    data: Path, tmp_path: Path, victim: str
) -> None:
    """torchrun gives the stopped one half a minute to end by itself."""
    started = job(data, tmp_path / "run", 2, 3, by="torchrun", **ENDLESS, peer_timeout_seconds=3)
    os.kill(started.find(victim), signal.SIGSTOP)
    result = started.finish(60)
    assert result.returncode == 1
    assert f"error: the run has ended: {victim}: has given no sign of life" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_end_when_torchrun_is_killed(data: Path, tmp_path: Path, ranks: int) -> None:
    started = job(data, tmp_path / "run", ranks, 3, by="torchrun", **ENDLESS)
    started.process.kill()
    result = started.finish(40)
    assert "torchrun, which has started this rank, is gone" in result.stderr


@pytest.mark.slow
def test_an_interrupted_job_goes_on_with_the_same_bits(
    data: Path, tmp_path: Path, two: Path
) -> None:
    run = tmp_path / "run"
    started = job(data, run, 2, 2, by="torchrun", **ENDLESS)
    started.process.send_signal(signal.SIGTERM)
    result = started.finish(60)
    assert result.returncode != 0
    assert "wrote" in result.stderr
    for later in list_checkpoints(run):  # as if it had been stopped in the first epoch
        if later.name >= "epoch-0001-":
            later.unlink()
    train(data, run, 2, **COMMON, resume_train=True)
    assert_same_bits(run, two)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rule": "easgd"}, "rule: easgd is for trainers that are joined by MPI"),
        ({"restarts": 2}, "use torchrun --max-restarts 2, with"),
        ({"collective": "nccl"}, "collective: nccl needs a GPU for each"),
    ],
)
def test_what_ranks_of_torchrun_cannot_do_is_refused(
    data: Path, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    arguments = settings(data, tmp_path / "run", **changes)
    result = run_ranks(2, "train.py", arguments, by="torchrun")
    assert result.returncode == 1  # torchrun's own
    assert len(re.findall(rf"\[0\] error: .*{message}", result.stderr)) == 1
    assert re.search(r"exitcode *: 2 ", result.stderr), result.stderr


def test_nccl_needs_torchrun(data: Path, tmp_path: Path) -> None:
    result = run_program("train.py", settings(data, tmp_path / "run", collective="nccl"))
    assert result.returncode == 2
    assert "collective: nccl is for trainers that torchrun starts" in result.stderr


@pytest.mark.slow
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
    assert "error: the ranks can't be joined by the variables" in result.stderr
