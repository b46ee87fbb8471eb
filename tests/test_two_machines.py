"""Ranks on two machines: network namespaces, joined by a virtual link that all bytes have to cross.

They need the right to make namespaces, which root has, and are skipped with the reason elsewhere.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.artifacts.run_folder import list_checkpoints
from tandem.distributed.mpi import find_mpirun
from tandem.trace.chrome import read_trace
from tandem.trace.merge import merge
from tests.support.machines import CABLE, Machines, two_machines
from tests.support.ranks import need_two_machines
from tests.support.runs import assert_close, assert_same_bits, train
from tests.support.tiny import ROOT, prepare, python_path, settings

PROGRAM = """
import json, numpy as np
from tandem.distributed.mpi import join
engine = join()
vector = np.ones(1_000_000, np.float32)
engine.all_reduce(vector)
neighbours = engine.all_gather_object((engine.local.rank, engine.local.size))
if engine.rank == 0:
    print(json.dumps([neighbours, bool((vector == engine.size).all())]))
"""


@pytest.fixture(autouse=True, scope="module")
def _machines() -> None:
    need_two_machines()


@pytest.fixture(scope="module")
def pair() -> Iterator[Machines]:
    with two_machines() as made:
        yield made


def run(pair: Machines, *words: str, each: int = 1) -> "subprocess.CompletedProcess[str]":
    """Run this Python as so many ranks on each of two machines."""
    return subprocess.run(
        [*pair.mpirun(str(find_mpirun()), each), sys.executable, *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_ranks_of_two_machines_find_each_other(pair: Machines) -> None:
    before = pair.sent(0)
    result = run(pair, "-c", PROGRAM, each=2)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == [[[0, 2], [1, 2], [0, 2], [1, 2]], True]
    assert pair.sent(0) - before > 4_000_000  # the vector went over the link


@pytest.mark.slow
@pytest.mark.parametrize(
    ("collective", "each"), [("hierarchical", 2), ("asa", 1), ("asa16", 1), ("ar", 1)]
)
def test_two_machines_compute_what_one_trainer_does(
    pair: Machines, tmp_path: Path, collective: str, each: int
) -> None:
    data, double = prepare(tmp_path / "data"), collective != "asa16"
    common = {"n_epochs": 2, "precision": "float64" if double else "float32"}
    alone = train(data, tmp_path / "alone", **common, batch_size=4)
    changes = {**common, "batch_size": 4 // (2 * each), "collective": collective}
    arguments = settings(data, tmp_path / "run", **changes, check_every=1)
    result = run(pair, "train.py", *arguments, each=each)
    assert result.returncode == 0, result.stderr
    assert_close(tmp_path / "run", alone, 1e-9 if double else 0.05)


@pytest.mark.slow
def test_clocks_of_two_machines_are_aligned(pair: Machines, tmp_path: Path) -> None:
    """Both have the same clock here, so that the offset that they find is its error."""
    data, folder = prepare(tmp_path / "data"), tmp_path / "run"
    arguments = settings(data, folder, trace="steps", trace_steps=[0, 2])
    result = run(pair, "train.py", *arguments, each=2)
    assert result.returncode == 0, result.stderr
    offsets = [
        read_trace(folder / f"trace-{rank}.json").processes[0].clock_offset_ns for rank in range(4)
    ]
    assert offsets[:2] == [0, 0]
    assert offsets[2] == offsets[3] != 0
    assert abs(offsets[2]) < 20e6
    processes = [header.process for header in merge(folder).processes]
    assert processes == [f"{kind} {rank}" for rank in range(4) for kind in ("trainer", "loader")]


@pytest.mark.slow
def test_a_rank_that_raises_ends_both_machines(pair: Machines, tmp_path: Path) -> None:
    data = prepare(tmp_path / "data")
    arguments = ["BrokenAlexNet", *settings(data, tmp_path / "run")]
    result = run(pair, "tests/support/broken_train.py", *arguments)
    assert result.returncode == 1
    assert "[1] error: the run has ended: trainer 1: ZeroDivisionError" in result.stderr


def start_torchrun(
    pair: Machines, machine: int, *words: str, each: int = 1
) -> "subprocess.Popen[str]":
    """Start torchrun on one of the machines, of which the first is the meeting point."""
    place = ["--rdzv-backend", "c10d", "--rdzv-id", "test", "--rdzv-conf", f"is_host={1 - machine}"]
    place += ["--rdzv-endpoint", f"{pair.addresses[0]}:29500"]
    place += ["--local-addr", pair.addresses[machine]]
    count = ["--nnodes", "2", "--nproc-per-node", str(each), "--max-restarts", "1"]
    return subprocess.Popen(
        [*pair.on(machine), sys.executable, "-m", "torch.distributed.run", *count, *place, *words],
        cwd=ROOT,
        env={**os.environ, "GLOO_SOCKET_IFNAME": CABLE},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def process_of(pair: Machines, machine: int, name: str) -> int:
    """A process on one of the machines, by its name."""
    found = ["ip", "netns", "pids", pair.names[machine]]
    for pid in subprocess.run(found, capture_output=True, text=True, check=True).stdout.split():
        if Path(f"/proc/{pid}/comm").read_text().strip() == name:
            return int(pid)
    raise LookupError(name)


@pytest.mark.slow
@pytest.mark.parametrize("collective", ["asa", "hierarchical"])
def test_torchrun_starts_both_machines_again_when_a_rank_is_killed(
    pair: Machines, tmp_path: Path, collective: str
) -> None:
    """Agents count restarts each by itself, and yet all ranks find each other."""
    data, each = prepare(tmp_path / "data"), 2 if collective == "hierarchical" else 1
    common = {"n_epochs": 30, "check_every": 1, "batch_size": 2 // each, "resume_train": True}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    changes = {**common, "collective": collective}
    for folder in (whole, parts):
        words = ["train.py", *settings(data, folder, **changes)]
        both = [start_torchrun(pair, machine, *words, each=each) for machine in (0, 1)]
        if folder == parts:
            while not list_checkpoints(folder):
                assert both[0].poll() is None, both[0].communicate()
                time.sleep(0.1)
            os.kill(process_of(pair, 1, f"trainer-{2 * each - 1}"), signal.SIGKILL)
        errors = [process.communicate(timeout=120)[1] for process in both]
        assert [process.returncode for process in both] == [0, 0], errors
    assert "exitcode: -9" in errors[1]
    assert_same_bits(parts, whole)
