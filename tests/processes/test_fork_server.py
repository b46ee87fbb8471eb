"""Processes that begin as copies of one that has imported PyTorch."""

import atexit
import contextlib
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
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
from tests.support.tiny import state_of, wait_until

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="on other systems all are new"),
    pytest.mark.usefixtures("own_server"),
]


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
            "core": resource.getrlimit(resource.RLIMIT_CORE),
            "umask": os.umask(0),
            "niceness": os.getpriority(os.PRIO_PROCESS, 0),
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


def end_and_write(path: Path) -> None:
    file = path.open("w")
    atexit.register(file.write, "written")


def count(connections: list[Connection], result: Connection) -> None:
    result.send((len(connections), os.getppid()))


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
def restored() -> Iterator[None]:
    kinds = (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE)
    limits, umask = [resource.getrlimit(kind) for kind in kinds], os.umask(0o022)
    yield
    os.umask(umask)
    for kind, limit in zip(kinds, limits, strict=True):
        resource.setrlimit(kind, limit)


@pytest.mark.usefixtures("restored")
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
    _, core = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, core))
    os.umask(0o027)
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    cores = os.sched_getaffinity(0)
    one = {max(cores)}
    os.sched_setaffinity(0, one)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    try:
        with ThreadPoolExecutor(1, initializer=os.nice, initargs=(1,)) as thread:
            found = thread.submit(reported).result()
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
    assert found["core"] == (0, core)
    assert (found["umask"], found["niceness"]) == (0o027, min(niceness + 1, 19))
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


def test_what_is_to_be_done_at_the_end_is_done(tmp_path: Path) -> None:
    assert begin()
    process = start_copy(end_and_write, (tmp_path / "file",), "ending")
    process.join()
    assert process.exitcode == 0
    assert (tmp_path / "file").read_text() == "written"


def test_threads_that_ask_at_once_hear_the_same_status() -> None:
    def ask(process: BaseProcess) -> int | None:
        while process.exitcode is None:
            pass
        return process.exitcode

    with ThreadPoolExecutor(3) as threads:
        for _ in range(8):
            process = start_copy(time.sleep, (600,), "sleeper")
            statuses = [threads.submit(ask, process) for _ in range(3)]
            process.kill()
            assert {status.result() for status in statuses} == {-signal.SIGKILL}


@pytest.mark.usefixtures("restored")
def test_what_the_server_cannot_be_sent_does_not_end_it() -> None:
    server = reported()["parent"]
    here, there = Pipe()
    pipes = [end for _ in range(fork_server._MOST_DESCRIPTORS // 2) for end in Pipe()]
    process = start_copy(count, (pipes, there), "counter")
    assert here.recv() == (len(pipes), os.getpid())
    process.join()
    for pipe in pipes:
        pipe.close()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    held = []
    with contextlib.suppress(OSError):
        while True:
            held.append(os.dup(2))
    for descriptor in held[-3:]:
        os.close(descriptor)
    with pytest.raises(OSError, match="Too many open files"):
        start_copy(count, ([], there), "counter")
    for descriptor in held[:-3]:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    assert reported()["parent"] == server


def test_libraries_that_read_another_environment_are_imported_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")  # as the program's own PyTorch may set it
    assert begin()
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert not begin()
    found = reported()
    assert (found["libraries"], found["parent"]) == (False, os.getpid())
    assert found["environment"]["OMP_WAIT_POLICY"] == "active"


def test_libraries_that_counted_fewer_cores_are_imported_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert begin()
    assert fork_server._begun is not None
    fewer = replace(fork_server._begun, cores=frozenset())
    monkeypatch.setattr(fork_server, "_begun", fewer)
    assert not begin()


def test_a_server_that_ends_while_it_imports_is_not_waited_for() -> None:
    assert begin()
    assert fork_server._begun is not None
    with subprocess.Popen(["true"]) as ended:
        assert comes("Z", ended.pid)
        assert not fork_server._is_ready(replace(fork_server._begun, server=ended.pid))


def test_a_path_that_is_no_text_is_left_to_new_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, Path("others")])
    assert not begin()


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


BEGINNING = """
import importlib, os, signal, sys, threading
from multiprocessing import Pipe
from pathlib import Path
from tandem.processes.fork_server import begin, start_copy
folder = Path(sys.argv[1])
sys.path.insert(0, str(folder))
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    begin()
except KeyboardInterrupt:
    print("interrupted")
begin()
folder.mkdir()
(folder / "later.py").write_text("def work(connection): connection.send('worked')")
importlib.invalidate_caches()
import later
here, there = Pipe()
process = start_copy(later.work, (there,), "worker")
there.close()
print(here.recv())
process.join()
print(process.exitcode)
"""


def test_a_beginning_can_be_interrupted_and_what_came_later_is_seen(tmp_path: Path) -> None:
    """The server hears of ends also where the program has SIGCHLD blocked."""
    command = [sys.executable, "-c", BEGINNING, str(tmp_path / "later")]
    found = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert found.stdout.split() == ["interrupted", "worked", "0"], found.stderr


def comes(states: str, pid: int) -> bool:
    return bool(wait_until(lambda: state_of(pid) in states, 10))


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
