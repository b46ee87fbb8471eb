"""Programs that a benchmark starts end with it, however it ends."""

import signal
import subprocess
import sys
import tempfile

import pytest

from benchmarks.team import program
from tests.support.tiny import state_of, wait_until

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
    assert wait_until(lambda: state_of(started) == "Z", 10)
