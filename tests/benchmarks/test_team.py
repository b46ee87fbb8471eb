"""Programs that a benchmark starts end with it, however it ends."""

import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from benchmarks.team import program

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]
STARTER = f"""
import sys, tempfile, time
from benchmarks.team import program
with tempfile.TemporaryFile() as errors, program({SLEEP!r}, errors) as process:
    print(process.pid, flush=True)
    time.sleep(60)
"""


def test_a_program_ends_with_the_context() -> None:
    with (
        pytest.raises(RuntimeError),
        tempfile.TemporaryFile() as errors,
        program(SLEEP, errors) as process,
    ):
        raise RuntimeError
    assert process.returncode == -signal.SIGKILL


def test_a_program_ends_with_a_benchmark_that_is_killed() -> None:
    command = [sys.executable, "-c", STARTER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as benchmark:
        assert benchmark.stdout is not None
        started = int(benchmark.stdout.readline())
        benchmark.kill()
    deadline = time.monotonic() + 10
    while _runs(started):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _runs(process: int) -> bool:
    """Return whether a process runs; one that has ended may still wait for its parent."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (ProcessLookupError, FileNotFoundError):
        return False
    return state != "Z"
