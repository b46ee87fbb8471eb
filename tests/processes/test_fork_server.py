"""Processes that begin as copies of one that has imported PyTorch."""

import contextlib
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing import Pipe, active_children
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.processes import fork_server
from tandem.processes.child import continue_when_parent_ends
from tandem.processes.fork_server import begin, start_copy
from tests.support.tiny import state_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="on other systems all are new")


def report(connection: Connection) -> None:
    sys.stderr.write("said by a copy\n")
    connection.send(
        {
            "libraries": "torch" in sys.modules,
            "parent": os.getppid(),
            "folder": os.getcwd(),  # noqa: PTH109
            "environment": dict(os.environ),
            "cores": os.sched_getaffinity(0),
            "files": resource.getrlimit(resource.RLIMIT_NOFILE),
            "blocked": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
            "drawn": np.random.random(),
            "starts": multiprocessing.get_start_method(),
        }
    )


def end(connection: Connection, how: str) -> None:
    if how == "signal":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "error":
        raise RuntimeError("meant")
    raise SystemExit(7)


def sleep(_: Connection) -> None:
    continue_when_parent_ends()
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(600)


def server_of(process: BaseProcess) -> int:
    return int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[1])


def reported() -> dict[str, Any]:
    here, there = Pipe()
    process = start_copy(report, (there,), "reporter")
    there.close()
    found: dict[str, Any] = here.recv()
    process.join()
    assert process.exitcode == 0
    return found


@pytest.fixture
def restored_limit() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("restored_limit")
def test_a_copy_has_the_libraries_and_what_a_child_inherits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert begin()
    monkeypatch.chdir(tmp_path)
    former = os.dup(2)
    with Path("errors").open("w") as errors:
        os.dup2(errors.fileno(), 2)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    cores = os.sched_getaffinity(0)
    one = {max(cores)}
    os.sched_setaffinity(0, one)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    try:
        found = reported()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.sched_setaffinity(0, cores)
        os.dup2(former, 2)
        os.close(former)
    assert found["libraries"]
    assert found["parent"] not in (os.getpid(), os.getppid())
    assert found["folder"] == str(tmp_path)
    assert found["environment"] == dict(os.environ)
    assert found["cores"] == one
    assert found["files"] == (soft - 1, hard)
    assert found["starts"] == "spawn"
    assert found["blocked"] == mask | {signal.SIGUSR2}
    assert Path("errors").read_text() == "said by a copy\n"


def test_copies_draw_different_numbers() -> None:
    assert reported()["drawn"] != reported()["drawn"]


@pytest.mark.parametrize(("how", "status"), [("exit", 7), ("error", 1), ("signal", -9)])
def test_the_program_has_its_exit_status(how: str, status: int) -> None:
    here, there = Pipe()
    process = start_copy(end, (there, how), "ending")
    process.join()
    assert process.exitcode == status
    here.close()
    there.close()


def test_libraries_that_read_another_environment_are_imported_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert begin()
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert not begin()
    found = reported()
    assert (found["libraries"], found["parent"]) == (False, os.getpid())
    assert found["environment"]["OMP_WAIT_POLICY"] == "active"


def test_libraries_are_found_where_this_process_finds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["/others", "", *sys.path])
    show = [sys.executable, "-c", "import sys; print(*sys.path, sep=chr(10))"]
    with fork_server.searching_alike():
        found = subprocess.check_output(show, text=True).splitlines()
    assert found[:2] == ["/others", str(tmp_path)]


def test_a_server_that_was_killed_is_replaced() -> None:
    former = reported()["parent"]
    os.kill(former, signal.SIGKILL)
    reported()  # by a new process, where its end does not show yet
    assert comes("Z", former)
    found = reported()
    assert found["libraries"]
    assert found["parent"] != former


def test_a_copy_of_a_server_that_is_stopped_can_be_killed() -> None:
    process = start_copy(sleep, (Pipe()[1],), "sleeper")
    server = server_of(process)
    os.kill(server, signal.SIGSTOP)
    process.kill()
    process.join(10)
    assert process.exitcode == -signal.SIGKILL


def test_a_copy_outlives_its_server_and_how_it_ends_is_then_unknown() -> None:
    process = start_copy(sleep, (Pipe()[1],), "sleeper")
    assert process.pid is not None
    server = server_of(process)
    os.kill(server, signal.SIGKILL)
    assert comes("Z", server)
    process.join(0.1)
    assert process.is_alive()
    process.kill()
    process.join(10)
    assert process.exitcode == fork_server.UNKNOWN
    assert comes("Z", process.pid)


def test_a_child_of_fork_starts_new_processes_and_leaves_the_copies_alone() -> None:
    copy = start_copy(sleep, (Pipe()[1],), "sleeper")
    assert copy in active_children()
    if (child := os.fork()) == 0:
        os._exit(begin() or copy in active_children())
    assert os.waitpid(child, 0)[1] == 0
    copy.kill()
    copy.join()


def test_a_single_process_is_new_and_those_after_it_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "_asked", 0)
    assert [fork_server.pays(1), fork_server.pays(1)] == [False, True]
    monkeypatch.setattr(fork_server, "_asked", 0)
    assert fork_server.pays(2)


PROGRAM = """
import time
from multiprocessing import Pipe
from tandem.processes import fork_server
from tests.processes.test_fork_server import sleep
process = fork_server.start_copy(sleep, (Pipe()[1],), "sleeper")
print(process.pid, flush=True)
print(fork_server._begun.server, fork_server._server._forkserver_address, flush=True)
time.sleep(600)
"""


def comes(states: str, pid: int) -> bool:
    end = time.monotonic() + 10
    while (found := state_of(pid) in states) is False and time.monotonic() < end:
        time.sleep(0.02)
    return found


def test_stopped_copies_and_server_end_with_a_program_that_was_killed() -> None:
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        copy = int(program.stdout.readline())
        number, address = program.stdout.readline().split()
        server, folder = int(number), Path(address).parent
        assert folder.exists()
        assert comes("T", copy)
        os.kill(server, signal.SIGSTOP)
        program.kill()
    try:
        assert comes("Z", server)
        assert comes("RSDZ", copy)  # continued
        assert not folder.exists()
    finally:
        for pid in (copy, server):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
