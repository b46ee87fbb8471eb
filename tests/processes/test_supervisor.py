"""A pool of workers that add numbers: their reports, faults and ends."""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tandem.errors import InputError
from tandem.processes import fork_server, heartbeat
from tandem.processes.messages import Failed, Finished, Ready
from tandem.processes.signals import StopSignals
from tandem.processes.supervisor import Outcome, Patience, ProgressReporter, _root_cause, supervise
from tandem.processes.worker_pool import WorkerPool
from tests.support.adders import (
    add,
    add_and_finish,
    ask,
    compute_with_lock,
    exit_with,
    fail,
    fail_when_told,
    finish_at_once,
    hang,
    save_when_told,
    sleep_with_lock,
    stop_before_its_part,
    write_and_wait,
    write_slowly,
    write_with_another,
)
from tests.support.tiny import state_of, wait_until

needs_proc = pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="only Linux shows what a process does"
)


class Sums(ProgressReporter):
    """Keeps what is reported; acts on the workers when each has reported once."""

    def __init__(self, act: Callable[[dict[str, int]], None] = lambda pids: None) -> None:
        self.sums: list[object] = []
        self._act = act

    def begin(self, table: heartbeat.HeartbeatTable, pids: dict[str, int]) -> None:  # type: ignore[override]
        self.activities, self._pids = table.activities, pids

    def report(self, message: object) -> None:
        self.sums.append(message)
        if len(self.sums) == len(self._pids):
            self._act(self._pids)


def run(
    *targets: tuple[Callable[..., None], object],
    act: Callable[[dict[str, int]], None] = lambda pids: None,
    timeout: float = 60.0,
    saves: bool = True,
    reports: bool = True,
    folder: Path | None = None,
) -> tuple[Outcome, list[object]]:
    """Run a pool of ``adder 0`` and so on, and another worker that reports; check that all end."""
    reporter = Sums(act)
    names = [f"adder {number}" for number in range(len(targets))]
    with StopSignals() as signals, WorkerPool(names, timeout) as pool:
        for number, (name, (target, message)) in enumerate(zip(names, targets, strict=True)):
            must_report = reports or number == 0
            pool.start(name, target, message, reports=must_report, folder=folder)
        failure = supervise(pool, reporter, signals, saves)
        outcome = Outcome.of(failure, signals)
    assert all(handle.process and not handle.process.is_alive() for handle in pool.handles)
    return outcome, reporter.sums


def interrupt(*delays: float) -> Callable[[dict[str, int]], None]:
    """Send Ctrl-C to this process after each of the delays, in seconds."""

    def later() -> None:
        for delay in delays:
            time.sleep(delay)
            os.kill(os.getpid(), signal.SIGINT)

    return lambda pids: threading.Thread(target=later).start()


def test_two_workers_report_and_finish() -> None:
    outcome, sums = run((add_and_finish, [1, 2]), (add_and_finish, [3, 4]))
    assert outcome == Outcome(0)
    assert sorted(sums) == [3, 7]  # type: ignore[type-var]


@pytest.mark.parametrize(
    ("number", "who", "timeout", "message"),
    [
        (signal.SIGKILL, "adder 1", 60, "was killed by SIGKILL; the system does that when"),
        (signal.SIGRTMIN + 3, "adder 1", 60, "was killed by signal 37 (SIGRTMIN+3)"),
        (signal.SIGSTOP, "adder 0", 1, "has given no sign of life for 1 s: was it stopped?"),
    ],
)
def test_a_killed_or_stopped_worker_is_named(
    number: int, who: str, timeout: float, message: str
) -> None:
    outcome, _ = run(
        (add, [1]), (add, [2]), act=lambda pids: os.kill(pids[who], number), timeout=timeout
    )
    assert outcome.status == 1
    assert outcome.failure is not None
    assert outcome.failure.who == who
    assert outcome.failure.message.startswith(message)


@needs_proc
def test_a_worker_that_computes_without_a_heartbeat_is_alive() -> None:
    assert run((compute_with_lock, 2.5), timeout=1) == (Outcome(0), [True])


def test_a_worker_that_sleeps_without_a_heartbeat_is_dead() -> None:
    """It looks as alive to its launcher as one that computes: both hold the interpreter's lock."""
    outcome, _ = run((sleep_with_lock, 600), (add, [1]), timeout=1)
    assert outcome.failure is not None
    assert outcome.failure.who == "adder 0"
    assert outcome.failure.message.startswith("has given no sign of life for 1 s")


@pytest.mark.parametrize(
    ("error", "kind", "status", "text"),
    [
        (ZeroDivisionError("no sum"), "fault", 1, "the run has ended: adder 1: ZeroDivisionError"),
        (InputError("no numbers"), "input", 2, "error: no numbers"),
    ],
)
def test_a_worker_that_raises_is_the_root_cause(
    error: Exception, kind: str, status: int, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    outcome, _ = run((add, [1]), (fail, error))
    assert outcome.failure is not None
    assert (outcome.failure.kind, outcome.failure.who, outcome.status) == (kind, "adder 1", status)
    outcome.explain()
    assert text in caplog.messages[-1]


@pytest.mark.parametrize("status", [0, 3, 255])
def test_a_worker_that_must_report_may_not_just_exit(status: int) -> None:
    outcome, _ = run((add, [1]), (exit_with, status))
    assert outcome.failure == Failed(
        "adder 1", "consequence", f"ended with exit status {status}", ""
    )


@needs_proc
def test_a_worker_that_has_ended_is_believed_what_it_said_last(tmp_path: Path) -> None:
    """It has said so after its messages were read, and ended before its end was looked for."""

    def let_end(pids: dict[str, int]) -> None:
        (tmp_path / "go").touch()
        while state_of(pids["adder 0"]) != "Z":
            time.sleep(0.01)

    assert run((finish_at_once, tmp_path / "go"), act=let_end) == (Outcome(0), [0])


@pytest.mark.usefixtures("own_server")
@pytest.mark.skipif(sys.platform != "linux", reason="on other systems there are no copies")
def test_how_a_copy_ended_that_nobody_saw_is_not_guessed() -> None:
    with StopSignals() as signals, WorkerPool(["adder"], 60) as pool:
        pool.start("adder", hang, None, is_copy=True)
        while not pool.receive(timeout=10):
            pass
        process = pool.handles[0].process
        assert process is not None
        assert fork_server._begun is not None
        server = fork_server._begun.server
        os.kill(server, signal.SIGKILL)
        while state_of(server) != "Z":
            time.sleep(0.01)
        process.kill()
        failure = supervise(pool, ProgressReporter(), signals)
    assert failure is not None
    assert (failure.who, failure.kind) == ("adder", "consequence")
    assert "only the process 'libraries' knew" in failure.message


def test_another_worker_may_exit_with_status_0() -> None:
    outcome, sums = run((add_and_finish, [1]), (exit_with, 0), reports=False)
    assert (outcome, sums) == (Outcome(0), [1])
    outcome, _ = run((add, [1]), (exit_with, 3), reports=False)
    assert outcome.failure is not None
    assert outcome.failure.who == "adder 1"


class FailingReporter(Sums):
    """Fails at once, or when each worker has reported once."""

    def __init__(self, at_once: bool) -> None:
        super().__init__()
        self._at_once = at_once

    @property
    def failure(self) -> Failed | None:
        if not self._at_once and len(self.sums) < 2:
            return None
        return Failed("reporter", "fault", "broken", "")


@pytest.mark.parametrize(("at_once", "kind"), [(True, "fault"), (False, "agreed")])
def test_when_the_reporter_fails_ready_workers_save(at_once: bool, kind: str) -> None:
    reporter = FailingReporter(at_once)
    with StopSignals() as signals, WorkerPool(["adder 0", "adder 1"], 60) as pool:
        for name in ("adder 0", "adder 1"):
            pool.start(name, add, [1])
        failure = supervise(pool, reporter, signals, saves=True)
        assert pool.finished == (not at_once)
    assert failure is not None
    assert (failure.who, failure.kind) == ("reporter", kind)
    assert reporter.sums == ([] if at_once else [1, 1, "saved", "saved"])


def test_a_signal_that_the_caller_holds_back_stays_held() -> None:
    """As where a library is called by a program that handles its signals in another thread."""
    former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        assert run((add_and_finish, [1]))[0].status == 0
        assert signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def test_the_first_request_lets_workers_save(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        outcome, sums = run((add, [1]), (add, [2]), act=interrupt(0.0))
        outcome.explain()
    assert outcome == Outcome(130, stopped=True)
    assert sums.count("saved") == 2
    assert caplog.messages == [
        "SIGINT: stopping after this step; again to stop at once",
        "stopped by SIGINT",
    ]


def test_a_step_that_does_not_end_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    begin = time.monotonic()
    with caplog.at_level(logging.INFO):
        outcome, _ = run((hang, None), act=interrupt(0), timeout=2)
    assert outcome == Outcome(130, None, stopped=True)
    assert "no step has ended for 2 s: the last is lost" in caplog.messages
    assert 2 < time.monotonic() - begin < 20


def test_work_that_goes_on_is_no_lost_step() -> None:
    table = SimpleNamespace(activities=np.zeros(2), timeout=0.05)
    pool = SimpleNamespace(table=table, writing=[])
    patience = Patience(pool)  # type: ignore[arg-type]
    for change in ("nothing", "activity", "writing", "nothing"):
        time.sleep(0.1)
        table.activities[0] += change == "activity"
        pool.writing = [change] if change == "writing" else []
        assert patience.is_over == (change == "nothing")
        pool.writing = []


def test_the_second_request_ends_at_once(tmp_path: Path) -> None:
    outcome, _ = run((write_and_wait, tmp_path), act=interrupt(0.0, 1.2), folder=tmp_path)
    assert outcome == Outcome(130, stopped=True)
    assert list(tmp_path.iterdir()) == []


class HangingReporter(Sums):
    """As a callback that waits for a server, so that the main thread looks at nothing else."""

    def report(self, message: object) -> None:
        super().report(message)
        time.sleep(600)


def test_the_second_request_ends_what_a_reporter_does() -> None:
    begin = time.monotonic()
    with StopSignals() as signals, WorkerPool(["adder"], 60) as pool:
        pool.start("adder", add, [1])
        failure = supervise(pool, HangingReporter(interrupt(0.0, 1.5)), signals, saves=True)
        assert Outcome.of(failure, signals) == Outcome(130, stopped=True)
    assert time.monotonic() - begin < 20


class InterruptedReporter(Sums):
    def report(self, message: object) -> None:
        raise KeyboardInterrupt


def test_an_interrupt_of_the_reporters_own_is_raised() -> None:
    with StopSignals() as signals, WorkerPool(["adder"], 60) as pool:
        pool.start("adder", add, [1])
        with pytest.raises(KeyboardInterrupt):
            supervise(pool, InterruptedReporter(), signals, saves=True)


def test_survivors_have_a_time_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the first failure is a message, not a death."""
    monkeypatch.setattr("tandem.processes.supervisor.WRITE_SECONDS", 0.3)
    here, _there = Pipe()
    begin = time.monotonic()
    with StopSignals() as signals, WorkerPool(["broken", "writer"], 1.0) as pool:
        pool.start("writer", write_with_another, None, pool.status("writer"), here)
        pool.start("broken", fail_when_told, tmp_path / "go")
        await_ready(pool)
        (tmp_path / "go").touch()
        failure = supervise(pool, ProgressReporter(), signals, saves=True, survives=True)
    assert failure is not None
    assert failure.who == "broken"
    assert time.monotonic() - begin < 20


def await_ready(pool: WorkerPool) -> None:
    while not all(handle.ready for handle in pool.handles):
        for handle, message in pool.receive(timeout=10):
            handle.ready |= isinstance(message, Ready)


def run_while_writing(
    path: Path, seconds: float = 1.5, stops: bool = False, timeout: float = 60.0
) -> tuple[Failed | None, float]:
    """Run a pool in which one worker writes when another fails; return the seconds it took."""
    with StopSignals() as signals, WorkerPool(["writer", "adder"], timeout) as pool:
        pool.start("writer", write_slowly, (path, seconds, stops), pool.status("writer"))
        while not pool.receive(timeout=10):
            pass
        begin = time.monotonic()
        if not stops:
            pool.start("adder", fail, ZeroDivisionError("no sum"))
        failure = supervise(pool, ProgressReporter(), signals, saves=True)
    return failure, time.monotonic() - begin


def test_a_worker_finishes_what_it_writes_when_another_fails(tmp_path: Path) -> None:
    failure, seconds = run_while_writing(tmp_path / "sum")
    assert failure is not None
    assert failure.who == "adder"
    assert (tmp_path / "sum").exists()
    assert seconds < 20


def test_a_writer_does_not_wait_for_the_part_of_one_that_is_stopped() -> None:
    """As trainer 0 gathers a checkpoint of divided layers."""
    here, there = Pipe()
    begin = time.monotonic()
    with StopSignals() as signals, WorkerPool(["writer", "other"], 1.0) as pool:
        pool.start("writer", write_with_another, None, pool.status("writer"), here)
        pool.start("other", stop_before_its_part, None, there)
        here.close()
        there.close()
        failure = supervise(pool, ProgressReporter(), signals, saves=True)
    assert failure is not None
    assert failure.who == "other"
    assert time.monotonic() - begin < 20


@pytest.mark.parametrize("survives", [False, True])
def test_survivors_are_waited_for(tmp_path: Path, survives: bool) -> None:
    """One notices the end of another late: at the end of a long step."""
    path = tmp_path / "saved"
    with StopSignals() as signals, WorkerPool(["lost", "survivor"], 60) as pool:
        pool.start("survivor", save_when_told, path)
        pool.start("lost", hang, None)
        await_ready(pool)
        os.kill(pool.pids["lost"], signal.SIGKILL)
        threading.Timer(2.0, path.with_suffix(".go").touch).start()
        failure = supervise(pool, ProgressReporter(), signals, True, survives)
    assert failure is not None
    assert (failure.who, failure.kind) == ("lost", "death")
    assert path.exists() == survives


def test_time_to_write_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.processes.supervisor.WRITE_SECONDS", 0.3)
    _, seconds = run_while_writing(tmp_path / "sum", seconds=600)
    assert not (tmp_path / "sum").exists()
    assert seconds < 20


def test_a_worker_that_is_stopped_gets_no_time_to_write(tmp_path: Path) -> None:
    failure, seconds = run_while_writing(tmp_path / "sum", stops=True, timeout=1)
    assert failure is not None
    assert failure.who == "writer"
    assert seconds < 20


def test_a_request_to_stop_ends_the_time_to_write(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def interrupt() -> None:
        wait_until(lambda: caplog.messages, 20)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with caplog.at_level(logging.INFO):
        failure, seconds = run_while_writing(tmp_path / "sum", seconds=600)
    thread.join()
    assert failure is not None
    assert failure.who == "adder"
    assert caplog.messages == [
        "writer: waiting for its file to be written; interrupt to end at once"
    ]
    assert seconds < 20


def test_where_nothing_is_saved_the_first_request_ends_at_once() -> None:
    outcome, sums = run((add, [1]), (add, [2]), act=interrupt(0.0), saves=False)
    assert outcome == Outcome(130, stopped=True)
    assert "saved" not in sums


@pytest.mark.parametrize("finishes", [True, False])
def test_the_main_thread_may_be_a_worker(monkeypatch: pytest.MonkeyPatch, finishes: bool) -> None:
    """It has no heartbeat of its own, and no exit status but the end of its connection."""
    monkeypatch.setattr(heartbeat, "START_SECONDS", 0.2)
    found: list[Failed | None] = []
    with StopSignals() as signals, WorkerPool(["adder 0"], timeout=0.2) as pool:
        launcher = pool.attach("adder 0")
        thread = threading.Thread(
            target=lambda: found.append(supervise(pool, ProgressReporter(), signals))
        )
        thread.start()
        time.sleep(0.8)
        if finishes:
            launcher.send(Finished())
        launcher.close()
        thread.join(10)
    (failure,) = found
    assert (failure is None) == finishes


def test_a_worker_that_reported_nothing_is_nearer_to_the_cause() -> None:
    """As one that had no memory left even to report that."""
    lost = Failed("adder 0", "consequence", "PeerLost: adder 1 ended", "Traceback")
    exits = [Failed(f"adder {n}", "consequence", "ended with exit status 1", "") for n in (0, 1)]
    with WorkerPool([], 60) as alone:
        assert _root_cause(alone, [lost, *exits]) == exits[1]
        assert _root_cause(alone, [lost, exits[0]]) == lost
        killed = Failed("reader 1", "death", "was killed by SIGKILL", "")
        assert _root_cause(alone, [lost, exits[1], killed]) == killed


def test_what_a_reporter_returns_is_the_answer_to_the_worker() -> None:
    class Doubles(Sums):
        def report(self, message: object) -> object:
            super().report(message)
            return 2 * message if isinstance(message, int) and message < 8 else None

    reporter = Doubles()
    with StopSignals() as signals, WorkerPool(["asker 0"], 60) as pool:
        pool.start("asker 0", ask, 3)
        assert supervise(pool, reporter, signals) is None
    assert reporter.sums == [3, 6, 12]
