"""Heartbeats, on a simulated clock and between real processes."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.processes import heartbeat
from tandem.processes.activity import ProcessSnapshot, ThreadSnapshot
from tandem.processes.child import ChildContext, enter
from tandem.processes.heartbeat import (
    LAUNCHER,
    ORPHANED,
    START_SECONDS,
    HeartbeatMonitor,
    HeartbeatTable,
    HeartbeatThread,
    StatusSlot,
)
from tandem.processes.rank_heartbeat import RankHeartbeat
from tests.support.tiny import state_of, wait_until

needs_proc = pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="only Linux shows what a process does"
)
CONTEXT = multiprocessing.get_context("spawn")
TIMEOUT = 10.0
STEP = 0.25


class World:
    """Two watched processes, and a clock that the test advances."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.table = HeartbeatTable.create(("launcher", "reader", "writer"), TIMEOUT)
        counters = self.table.counters
        self.monitor = HeartbeatMonitor(counters, TIMEOUT, {1: 101, 2: None}, lambda: self.now)

    def pass_time(self, seconds: float, beating: tuple[int, ...]) -> list[int]:
        """Let time pass, looking often; return the processes that are silent at the end."""
        found: dict[int, float] = {}
        for _ in range(round(seconds / STEP)):
            self.now += STEP
            for index in beating:
                self.table.counters[index] += 1
            found = self.monitor.silent()
        return list(found)


def test_a_process_that_counts_is_alive_however_long_its_work_takes() -> None:
    assert World().pass_time(1000, beating=(1, 2)) == []


def test_a_process_that_stops_counting_is_dead_after_the_timeout() -> None:
    world = World()
    world.pass_time(5, beating=(1, 2))
    assert world.pass_time(TIMEOUT, beating=(2,)) == []
    assert world.pass_time(STEP, beating=(2,)) == [1]
    # Until it counts again: the launcher acts on it at once.
    assert world.pass_time(STEP, beating=(1, 2)) == []


def test_a_process_that_starts_may_take_longer() -> None:
    world = World()
    assert world.pass_time(START_SECONDS, beating=(2,)) == []
    assert world.pass_time(STEP, beating=(2,)) == [1]


def test_a_process_that_stops_counting_is_alive_while_the_kernel_sees_it_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    computed = 0.0
    waits = "D"

    def take_snapshot(pid: int) -> ProcessSnapshot:
        assert pid == 101
        return ProcessSnapshot({7: ThreadSnapshot(waits, computed)})

    monkeypatch.setattr(heartbeat, "take_snapshot", take_snapshot)
    world.pass_time(5, beating=(1, 2))
    assert world.pass_time(10 * TIMEOUT, beating=(2,)) == []
    waits = "S"
    for _ in range(400):
        computed += STEP / 4
        assert world.pass_time(STEP, beating=(2,)) == []
    # Its work before it stopped may count as life until the kernel is asked again.
    assert world.pass_time(TIMEOUT - STEP, beating=(2,)) == []
    assert world.pass_time(TIMEOUT / 4 + 2 * STEP, beating=(2,)) == [1]


def test_after_its_own_suspension_a_monitor_restarts_its_clocks() -> None:
    """Ctrl-Z stops all processes of the group; those that continue last are not dead."""
    world = World()
    world.pass_time(5, beating=(1, 2))
    world.pass_time(TIMEOUT - 1, beating=(2,))
    world.now += 1000
    assert world.monitor.silent() == {}
    assert world.pass_time(TIMEOUT - STEP, beating=(2,)) == []
    assert world.pass_time(2 * STEP, beating=(2,)) == [1]


def start_child(
    table: HeartbeatTable, target: Callable[..., None], folder: Path | None = None
) -> tuple[BaseProcess, Connection]:
    here, there = CONTEXT.Pipe()
    arguments = (ChildContext(table, 1, folder), target, there)
    process = CONTEXT.Process(target=enter, args=arguments, name="worker", daemon=True)
    process.start()
    there.close()
    return process, here


def test_the_counters_are_seen_by_other_processes() -> None:
    table = HeartbeatTable.create(("launcher", "worker"), timeout=60)
    process, here = start_child(table, wait_for_message)
    assert wait_until(lambda: table.counters[1] >= 3, 60)
    here.send("first")
    here.send("go on")
    process.join(20)
    assert process.exitcode == 0


def wait_for_message(message: str, connection: Connection) -> None:
    assert message == "first"
    assert connection.recv() == "go on"


@needs_proc
def test_a_child_goes_on_while_its_launcher_computes_without_a_heartbeat() -> None:
    table = HeartbeatTable.create(("launcher", "worker"), timeout=1.0)
    process, here = start_child(table, wait_for_message)
    table.counters[LAUNCHER] += 1
    begin = None
    while begin is None or time.monotonic() < begin + 2.0:
        if begin is None and table.counters[1] >= 3:
            begin = time.monotonic()
    count = table.counters[1]
    time.sleep(0.6)
    assert table.counters[1] > count
    process.kill()
    process.join()
    here.close()


def child_of(folder: Path, started: Connection) -> None:
    """Start a child as a launcher does, and send its process id."""
    table = HeartbeatTable.create(("launcher", "worker"), timeout=1.0)
    HeartbeatThread(table, LAUNCHER).start()
    process, here = start_child(table, stubborn, folder)
    here.send(None)
    assert here.recv() == "begun"
    started.send(process.pid)
    time.sleep(600)


def stubborn(message: None, connection: Connection) -> None:
    """Work without looking at a pipe, as a long step does."""
    connection.send("begun")
    time.sleep(600)


@pytest.mark.parametrize(
    ("fault", "child_is_stopped"), [(signal.SIGKILL, True), (signal.SIGSTOP, False)]
)
def test_a_child_ends_by_itself_when_its_launcher_is_gone(
    tmp_path: Path, fault: signal.Signals, child_is_stopped: bool
) -> None:
    here, there = CONTEXT.Pipe()
    launcher = CONTEXT.Process(target=child_of, args=(tmp_path, there), name="launcher")
    launcher.start()
    assert here.poll(60)
    child = here.recv()
    partial = tmp_path / ".epoch-0001.x.partial.safetensors"
    partial.touch()
    if child_is_stopped:
        os.kill(child, signal.SIGSTOP)
    assert launcher.pid is not None
    os.kill(launcher.pid, fault)
    try:
        assert wait_until(lambda: state_of(child) == "Z", heartbeat.PATIENCE_SECONDS + 1.0 + 10.0)
        assert not partial.exists()
    finally:
        launcher.kill()
        launcher.join()


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Exit statuses of this process, a child whose launcher is gone, which does not end."""
    found: list[int] = []
    monkeypatch.setattr(heartbeat, "_parent_ended", lambda seconds: True)
    monkeypatch.setattr(heartbeat, "PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 0.01)
    monkeypatch.setattr(os, "_exit", found.append)
    return found


def test_an_orphan_finishes_what_it_writes(exits: list[int]) -> None:
    table = HeartbeatTable.create(("launcher", "worker"), TIMEOUT)
    status = StatusSlot(table, 1)
    status.show_writing(True)
    thread = HeartbeatThread(table, 1)
    thread.start()
    thread.join(0.1)
    assert exits == []
    status.show_writing(False)
    thread.join(5)
    assert exits == [ORPHANED]


def test_an_orphan_does_not_write_forever(
    exits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "WRITE_SECONDS", 0.05)
    table = HeartbeatTable.create(("launcher", "worker"), TIMEOUT)
    StatusSlot(table, 1).show_writing(True)
    thread = HeartbeatThread(table, 1)
    thread.start()
    thread.join(5)
    assert exits == [ORPHANED]


def test_a_thread_counts_though_the_table_is_closed_before_it_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 0.01)
    table = HeartbeatTable.create(("launcher",), TIMEOUT)
    counters = table.counters
    thread = HeartbeatThread(table, LAUNCHER)
    table.buffer.close()
    thread.start()
    has_counted = wait_until(lambda: counters[LAUNCHER] >= 3, 5)
    thread.stop()
    thread.join()
    assert has_counted


def test_a_rank_that_stops_before_its_first_beat_is_dead_after_the_timeout() -> None:
    """Not when a process that may not have started is: ranks begin when they have met."""
    silent: list[str] = []
    ended = threading.Event()
    group: Any = SimpleNamespace(
        rank=0, size=2, starter="mpirun", beat=lambda rank: None, beats=lambda: set()
    )

    def end(reason: str, killed: bool) -> None:
        silent.append(reason)
        ended.set()

    beats = RankHeartbeat(group, {}, 0.2, end)
    beats.start()
    assert ended.wait(20)
    beats.stop()
    assert silent[0].startswith("trainer 1: has given no sign of life")
