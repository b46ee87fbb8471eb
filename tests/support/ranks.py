"""Programs of the project as ranks, by torchrun or by an mpirun: this Python's, or the system's."""

import contextlib
import importlib.util
import itertools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest

from tandem.distributed.mpi import find_mpirun
from tests.support.machines import missing_for_two_machines
from tests.support.tiny import ROOT, count_steps, python_path, settings, wait_until

Starter = Literal["mpirun", "torchrun"]

_MARK = "TANDEM_TEST_JOB"
_numbers = itertools.count()


@cache
def missing() -> str | None:
    """Why ranks can't be started here; None where they can."""
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed: pip install .[mpi]"
    if find_mpirun() is None:
        return "there is no mpirun: pip install .[mpi]"
    probe = "from mpi4py import MPI; print(MPI.COMM_WORLD.size)"
    result = subprocess.run(
        [*command(2), "-c", probe], capture_output=True, text=True, timeout=60, check=False
    )
    if result.stdout.count("2") != 2:
        output = f"{result.stdout}{result.stderr}".strip()[-300:]
        return f"mpirun does not start two ranks of mpi4py: {output}"
    return None


def command(ranks: int, by: Starter = "mpirun", restarts: int = 0) -> list[str]:
    """Return the command that starts this Python as ranks, by torchrun again if they fail."""
    if by == "torchrun":
        # With a port of its own: several jobs may run at once.
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        options = ["--master-port", str(port), "--nproc-per-node", str(ranks)]
        options += ["--max-restarts", str(restarts)]
        return [sys.executable, "-m", "torch.distributed.run", *options]
    return [str(find_mpirun()), "-n", str(ranks), sys.executable]


def need_ranks(by: Starter = "mpirun") -> None:
    """Skip a test, or a module of tests, where ranks can't be started; torchrun is always there."""
    if by == "mpirun" and (reason := missing()):
        pytest.skip(reason)


def need_two_machines() -> None:
    """Skip a test, or a module of tests, where ranks on two machines can't be started."""
    need_ranks()
    if reason := missing_for_two_machines():
        pytest.skip(reason)


class Job:
    """A program that runs as ranks.

    mpirun and torchrun put their ranks into other sessions and groups, so the processes of a job
    are recognised by an environment variable, which they inherit.
    """

    def __init__(
        self,
        ranks: int,
        program: str,
        arguments: Iterable[str] = (),
        by: Starter = "mpirun",
        restarts: int = 0,
    ) -> None:
        self._mark = f"{_MARK}={os.getpid()}-{next(_numbers)}"
        name, _, value = self._mark.partition("=")
        self.process = subprocess.Popen(
            [*command(ranks, by, restarts), program, *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, name: value, "PYTHONPATH": python_path()},
        )

    def finish(self, timeout: float = 120) -> "subprocess.CompletedProcess[str]":
        """Wait for its end; kill processes that are left then, and fail."""
        try:
            output, errors = self.process.communicate(timeout=timeout)
            left = {} if self.is_gone() else self.processes()
        finally:
            for pid in self.processes():
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        assert not left, f"processes are left behind: {left}"
        return subprocess.CompletedProcess((), self.process.returncode, output, errors)

    def processes(self) -> dict[int, str]:
        """Find its living processes: process id -> the name that each has given itself."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if self._mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found[int(folder.name)] = (folder / "comm").read_text().strip()
        return found

    def find(self, name: str) -> int:
        """Find a process by its name."""
        by_name = {comm: pid for pid, comm in self.processes().items()}
        return by_name[name.replace(" ", "-")]

    def wait_until(self, condition: Callable[[], Any], seconds: float) -> None:
        """Wait for a condition; fail if the job ends before, or it takes too long."""
        assert wait_until(condition, seconds, self.process), self.finish(1)

    def is_gone(self, seconds: float = 8.0) -> bool:
        """Whether no process is left, or none soon: loaders take a moment to notice the end."""
        return bool(wait_until(lambda: not self.processes(), seconds))


def run_ranks(
    ranks: int,
    program: str,
    arguments: Iterable[str] = (),
    timeout: float = 120,
    by: Starter = "mpirun",
) -> "subprocess.CompletedProcess[str]":
    """Run a program as ranks, from the project's top folder."""
    return Job(ranks, program, arguments, by).finish(timeout)


def job(
    data: Path,
    run: Path,
    ranks: int,
    steps: int,
    by: Starter = "mpirun",
    restarts: int = 0,
    **changes: object,
) -> Job:
    """Start ranks, and return when the record has `steps` lines."""
    started = Job(ranks, "train.py", settings(data, run, **changes), by, restarts)
    started.wait_until(lambda: count_steps(run) >= steps, 180)
    return started


def leaves_no_memory(before: set[str], seconds: float = 10) -> bool:
    """Whether all new names of MPICH's shared memory disappear.

    A test that runs at the same time may have a few for a moment.
    """
    return bool(wait_until(lambda: mpich_memory() <= before, seconds))


def mpich_memory() -> set[str]:
    """Names of MPICH's segments in the machine's shared memory folder."""
    return {path.name for path in Path("/dev/shm").glob("mpich_shm*")}
