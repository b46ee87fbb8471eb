"""Exceptions in workers and in the master, and workers that are killed or stopped."""

import gc
import os
import pickle
import signal
import subprocess
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import tandem.parallel as synk
from tandem.parallel import Pool, WorkerLost
from tandem.parallel.messages import Define, SentFunction
from tandem.parallel.worker import fault_of
from tests.support.faulty_ops import FAULT, CallBack, NotPicklable, Raise, Signal
from tests.support.parallel_scripts import start_parallel
from tests.support.tiny import (
    find_process,
    finish,
    group_members,
    is_gone,
    kill,
    open_files,
    shared_memory,
    wait_until,
)

ROWS = np.random.default_rng(3).normal(size=(7, 3))
TIMEOUT = 2.0  # seconds, of pools whose workers are stopped

needs_proc = pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="only Linux shows what a process does"
)


def bad_in(*rows: int) -> np.ndarray:
    """Rows of which some are such that Ops fail: of two ranks, the first has 0 to 2."""
    found = ROWS.copy()
    found[list(rows)] = FAULT
    return found


# Exceptions


@pytest.mark.parametrize(
    ("rows", "in_worker"),
    [([6], True), ([0], False), ([0, 6], False)],
    ids=["worker", "master", "both"],
)
@pytest.mark.parametrize("kind", ["ValueError", "KeyError", "OSError"])
def test_an_exception_is_raised_in_the_caller(
    two: Pool, kind: str, rows: list[int], in_worker: bool
) -> None:
    x, s = pt.dmatrix("x"), pytensor.shared(np.zeros(3), "average")
    f = two.function([x], (Raise(kind)(x).sum(), "sum"), updates=[(s, s + x.mean(axis=0))])
    error_of = {"ValueError": ValueError, "KeyError": KeyError, "OSError": OSError}[kind]
    for slices in (1, 2):
        with pytest.raises(error_of, match=f"row of {FAULT}") as caught:
            f(bad_in(*rows), num_slices=slices)
        assert type(caught.value) is error_of
        notes = "\n".join(caught.value.__notes__)
        assert ("in worker 1:\nTraceback" in notes) == in_worker
        if in_worker:
            assert "faulty_ops.py" in notes
        assert "undefined until the next broadcast: 'average'" in notes
        # All have answered: the next call gets its own answers.
        assert f(ROWS) == pytest.approx(ROWS.sum())
    two.broadcast(s, np.zeros(3))
    f(ROWS)
    two.all_reduce(s)
    np.testing.assert_allclose(s.get_value(), ROWS.mean(axis=0), rtol=1e-12)


def test_an_exception_of_every_rank(three: Pool) -> None:
    """That of the master is raised, else that of the first worker; none twice."""
    x = pt.dmatrix("x")
    f = three.function([x], (Raise("ValueError")(x).sum(), "sum"))
    for rows, worker in (([0, 3, 6], None), ([0, 6], 0), ([6], 2), ([0], 0)):
        with pytest.raises(ValueError, match="row of") as caught:
            f(bad_in(*rows))
        notes = "\n".join(caught.value.__notes__)
        for rank in range(3):
            assert (f"in worker {rank}" in notes) == (rank == worker)
        assert "undefined" not in notes
        assert f(ROWS) == pytest.approx(ROWS.sum())


def test_an_exception_that_pickle_alone_cannot_send(two: Pool) -> None:
    x = pt.dmatrix("x")
    f = two.function([x], (Raise("NotPicklable")(x).sum(), "sum"))
    with pytest.raises(NotPicklable, match="one") as caught:
        f(bad_in(6))
    assert "in worker 1:\nTraceback" in "\n".join(caught.value.__notes__)
    with pytest.raises(Exception, match="one") as caught:
        f(bad_in(0))
    assert isinstance(caught.value, NotPicklable | TypeError)  # PyTensor makes it again
    assert f(ROWS) == pytest.approx(ROWS.sum())


@pytest.fixture
def collected() -> Iterator[None]:
    """Functions of a test are gone behind it, so that `distribute` sends them no more."""
    yield
    gc.collect()


@pytest.mark.usefixtures("collected")
def test_an_exception_at_a_compile(two: Pool) -> None:
    x = pt.dmatrix("x")
    f = two.function([x], (Raise("ValueError", at_compile="worker")(x).sum(), "sum"))
    good = two.function([x], (x.sum(), "sum"))
    for _ in range(2):
        with pytest.raises(ValueError, match="compiled") as caught:
            f(ROWS)
        assert "in worker 1:" in "\n".join(caught.value.__notes__)
        assert good(ROWS) == pytest.approx(ROWS.sum())


@pytest.mark.usefixtures("collected")
def test_a_variable_of_a_failed_distribution_is_sent_again(two: Pool) -> None:
    x, s = pt.dmatrix("x"), pytensor.shared(1.0, "s")
    f = two.function([x], (Raise("ValueError", at_compile="worker")(x).sum() * s, "sum"))
    with pytest.raises(ValueError, match="compiled"):
        f(ROWS)
    s.set_value(5.0)
    assert two.get_value(1, s) == 5.0


def test_results_that_do_not_fit_together(two: Pool) -> None:
    """The master finds it after all have answered."""
    x = pt.dmatrix("x")
    f = two.function([x], (x, "sum"))
    with pytest.raises(ValueError, match="partial results of shapes"):
        f(ROWS)
    assert (f(ROWS[:6]) == ROWS[:3] + ROWS[3:6]).all()


def test_shapes_of_a_failed_call_are_known(two: Pool) -> None:
    """Of the ranks that have computed, where another, or the master's fold, has failed."""
    x, s = pt.dmatrix("x"), pytensor.shared(np.zeros((0, 3)), "s")
    f = two.function([x], (Raise("ValueError")(x), "sum"), updates=[(s, 2 * x)])
    f(ROWS[:4])
    with pytest.raises(ValueError, match="row of"):
        f(bad_in(0))
    np.testing.assert_array_equal(two.get_value(1, s), 2 * ROWS[3:])
    assert two.get_lengths(s) == [2, 4]
    with pytest.raises(ValueError, match="partial results of shapes"):
        f(ROWS[:5])
    np.testing.assert_array_equal(two.gather(s, nd_up=0), 2 * ROWS[:5])


# Ends of workers


class Faulty:
    """A pool of two ranks whose worker comes to an end, with functions and variables of it."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        x = pt.dmatrix("x")
        self.private = pytensor.shared(np.arange(3.0), "private")
        self.resident = pool.shared(np.arange(3.0), "resident")
        variables = [self.private, self.resident]
        self.function = pool.function(
            [x], (CallBack()(x).sum(), "sum"), updates=[(v, v + x.mean(axis=0)) for v in variables]
        )
        self.dying = {
            number: pool.function([x], (Signal(number)(x).sum(), "sum"))
            for number in (signal.SIGKILL, signal.SIGSTOP)
        }

    @property
    def pid(self) -> int:
        (handle,) = self.pool._team._pool.handles  # type: ignore[union-attr]
        return handle.process.pid  # type: ignore[union-attr,return-value]


@pytest.fixture(scope="module")
def kept() -> Iterator[Faulty]:
    with Pool(2, use_gpu=False, threads=1, timeout=TIMEOUT) as pool:
        yield Faulty(pool)


@pytest.fixture
def faulty(kept: Faulty) -> Faulty:
    """An open pool, of which a test before may have lost the worker."""
    team = kept.pool._team
    if team is None or not team.is_open:
        kept.pool.start(2, use_gpu=False, threads=1, timeout=TIMEOUT)
    return kept


def check_lost(faulty: Faulty, call: Callable[[], Any], number: int, seconds: float = 1.0) -> None:
    """Assert that a call says which worker was lost, and how, in time, and leaves nothing."""
    pid, began = faulty.pid, time.monotonic()
    with pytest.raises(WorkerLost) as caught:
        call()
    took = time.monotonic() - began
    if number == signal.SIGKILL:
        assert str(caught.value).startswith("worker 1 was killed by SIGKILL")
        assert took < seconds
    else:
        assert str(caught.value).startswith("worker 1 has given no sign of life for")
        assert took < TIMEOUT + 2 + seconds
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(RuntimeError, match="the pool is closed"):
        faulty.pool.gather(faulty.private)


def check_again(faulty: Faulty, ranks: int = 2, master: int = 0) -> None:
    """Start the pool again: workers begin with the master's values, functions work."""
    values = [v.get_value() for v in (faulty.private, faulty.resident)]
    faulty.pool.start(ranks, use_gpu=False, threads=1, timeout=TIMEOUT, master_rank=master)
    for variable, value in zip((faulty.private, faulty.resident), values, strict=True):
        for rank in range(ranks):
            np.testing.assert_array_equal(faulty.pool.get_value(rank, variable), value)
    assert faulty.function(ROWS) == pytest.approx(ROWS.sum())
    faulty.pool.all_reduce([faulty.private, faulty.resident])
    for variable, value in zip((faulty.private, faulty.resident), values, strict=True):
        np.testing.assert_allclose(variable.get_value(), value + ROWS.mean(axis=0), rtol=1e-12)


@needs_proc
def test_a_killed_worker_is_reported_and_the_pool_starts_again(faulty: Faulty) -> None:
    before = shared_memory()
    faulty.pool.set_value(1, faulty.private, np.full(3, 9.0))
    faulty.pool.set_value(0, faulty.private, np.full(3, 4.0))
    check_lost(faulty, lambda: faulty.dying[signal.SIGKILL](bad_in(6)), signal.SIGKILL, 3.0)
    assert shared_memory() == before
    check_again(faulty)


slow = pytest.mark.slow

NUMBERS = pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"]
)


def collectives(faulty: Faulty) -> dict[str, Callable[[], Any]]:
    pool, private, resident = faulty.pool, faulty.private, faulty.resident
    return {
        "call": lambda: faulty.function(ROWS),
        "broadcast": lambda: pool.broadcast(private),
        "scatter": lambda: pool.scatter(private, np.arange(6.0)),
        "gather": lambda: pool.gather(private),
        "all_gather": lambda: pool.all_gather(private),
        "reduce": lambda: pool.reduce(private),
        "all_reduce": lambda: pool.all_reduce(private),
        "all_reduce of a resident": lambda: pool.all_reduce(resident),
        "set_value": lambda: pool.set_value(1, private, np.zeros(3)),
        "get_value": lambda: pool.get_value(1, private),
        "distribute": lambda: (
            pool.function([], pt.constant(1.0) * private.sum()),
            pool.distribute(),
        ),
    }


COLLECTIVES = (
    *("call", "broadcast", "scatter", "gather", "all_gather", "reduce", "all_reduce"),
    *("all_reduce of a resident", "set_value", "get_value", "distribute"),
)


@slow
@needs_proc
@pytest.mark.parametrize("name", COLLECTIVES)
@NUMBERS
def test_a_worker_ends_between_calls(faulty: Faulty, name: str, number: int) -> None:
    faulty.function(ROWS)
    faulty.pool.all_reduce(faulty.resident)  # its loop is compiled before time is taken
    os.kill(faulty.pid, number)
    check_lost(faulty, collectives(faulty)[name], number, 1.5)


@slow
@needs_proc
@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_worker_ends_while_the_master_waits(faulty: Faulty, name: str) -> None:
    faulty.function(ROWS)
    pid = faulty.pid
    os.kill(pid, signal.SIGSTOP)
    timer = threading.Timer(0.3, os.kill, (pid, signal.SIGKILL))
    timer.start()
    check_lost(faulty, collectives(faulty)[name], signal.SIGKILL, 1.5)
    timer.join()


@slow
@needs_proc
@NUMBERS
def test_a_worker_ends_in_a_function(faulty: Faulty, number: int) -> None:
    faulty.function(ROWS)
    check_lost(faulty, lambda: faulty.dying[number](bad_in(6)), number, 3.0)


@slow
@needs_proc
@NUMBERS
def test_a_worker_ends_at_a_compile(faulty: Faulty, number: int) -> None:
    x = pt.dmatrix("x")
    faulty.function(ROWS)
    f = faulty.pool.function([x], (Signal(number, at_compile=True)(x).sum(), "sum"))
    check_lost(faulty, lambda: f(ROWS), number, 3.0)
    check_again(faulty)
    with pytest.raises(WorkerLost):
        f(ROWS)


@slow
@needs_proc
@NUMBERS
def test_a_worker_ends_before_its_first_message(faulty: Faulty, number: int) -> None:
    faulty.pool.close()
    faulty.pool.start(2, use_gpu=False, threads=1, timeout=TIMEOUT)
    counters = faulty.pool._team._pool.table.counters  # type: ignore[union-attr]
    assert wait_until(lambda: counters[1], 60)  # before that, a process may take its time
    os.kill(faulty.pid, number)
    check_lost(faulty, faulty.pool.distribute, number, 1.5)


@slow
@needs_proc
@NUMBERS
def test_a_worker_ends_while_a_large_message_is_written(faulty: Faulty, number: int) -> None:
    """One that fills the pipe."""
    faulty.function(ROWS)
    team, pid = faulty.pool.opened(), faulty.pid
    large = SentFunction(99, bytes(10**7), (), 0, 0, 0, (), (), (), (), {})
    os.kill(pid, signal.SIGSTOP)
    timer = threading.Timer(0.5, os.kill, (pid, number))
    timer.start()
    check_lost(faulty, lambda: team.run(Define((), (large,)), lambda: None), number, 2.0)
    timer.join()


@slow
@needs_proc
def test_a_worker_that_exits(faulty: Faulty) -> None:
    x = pt.dmatrix("x")
    f = faulty.pool.function([x], (Raise("SystemExit")(x).sum(), "sum"))
    with pytest.raises(WorkerLost, match="worker 1 ended with exit status"):
        f(bad_in(6))
    check_again(faulty)


@slow
@needs_proc
def test_the_first_of_several_workers(tmp_path: Path) -> None:
    """The other workers are ended too; the pool starts again in another size."""
    with Pool(3, use_gpu=False, threads=1, timeout=TIMEOUT, master_rank=1) as pool:
        x = pt.dmatrix("x")
        f = pool.function([x], (Signal(signal.SIGKILL)(x).sum(), "sum"))
        f(ROWS)
        handles = pool._team._pool.handles  # type: ignore[union-attr]
        pids = [handle.process.pid for handle in handles]  # type: ignore[union-attr]
        with pytest.raises(WorkerLost, match="worker 2 was killed by SIGKILL"):
            f(bad_in(6))
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
        for ranks, master in ((2, 1), (1, 0), (3, 0)):
            pool.start(ranks, use_gpu=False, threads=1, master_rank=master)
            assert f(ROWS) == pytest.approx(ROWS.sum())
            pool.close()


@slow
@needs_proc
def test_lost_workers_leave_no_descriptors(faulty: Faulty) -> None:
    import gc

    counts = []
    for _ in range(3):
        faulty.function(ROWS)
        os.kill(faulty.pid, signal.SIGKILL)
        with pytest.raises(WorkerLost):
            faulty.function(ROWS)
        check_again(faulty)
        gc.collect()
        counts.append(open_files())
    assert counts[2] <= counts[0]


@slow
@needs_proc
def test_slow_work_is_not_silence(faulty: Faulty) -> None:
    """A worker may compute for longer than the timeout, also while it keeps the lock."""
    x = pt.dmatrix("x")
    f = faulty.pool.function([x], (Raise("nothing", seconds=3 * TIMEOUT)(x).sum(), "sum"))
    assert np.isfinite(f(bad_in(6)))


@slow
@needs_proc
def test_an_exception_of_a_signal_handler(faulty: Faulty) -> None:
    """It ends the call and closes the pool, and is not taken for the end of a worker."""

    def handle(*_: object) -> None:
        raise TimeoutError("of the user")

    x = pt.dmatrix("x")
    f = faulty.pool.function([x], (Raise("nothing", seconds=30)(x).sum(), "sum"))
    f(ROWS)
    former = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(TimeoutError, match="of the user"):
            f(bad_in(6))
    finally:
        signal.signal(signal.SIGALRM, former)
    with pytest.raises(RuntimeError, match="the pool is closed"):
        f(ROWS)
    check_again(faulty)


# Interrupts, and the end of the master

FORK = """
synk.fork(3, use_gpu=False, threads=1, timeout=3.0)
rows = np.ones((6, 3))
"""


def start(text: str, folder: Path) -> "subprocess.Popen[str]":
    return start_parallel(folder, FORK + textwrap.dedent(text), folder / "mark")


def start_until_marked(text: str, folder: Path) -> "subprocess.Popen[str]":
    """Start a script, and return when it has made the file that it is given."""
    process = start(text, folder)
    assert wait_until((folder / "mark").exists, 60, process), kill(process)
    return process


INTERRUPTED = """
where = sys.argv[1]
f = synk.function([x], (Wait(where, {in_worker})(x).sum(), "sum"))
rows[{row}] = FAULT
try:
    f(rows)
except KeyboardInterrupt:
    try:
        synk.distribute()
    except RuntimeError as error:
        print(error, flush=True)
    raise
"""


@slow
@needs_proc
@pytest.mark.parametrize(
    ("in_worker", "row"), [(True, 5), (False, 0)], ids=["waiting", "computing"]
)
@pytest.mark.parametrize("whole_group", [False, True], ids=["master", "group"])
def test_ctrl_c_in_a_call(tmp_path: Path, in_worker: bool, row: int, whole_group: bool) -> None:
    process = start_until_marked(INTERRUPTED.format(in_worker=in_worker, row=row), tmp_path)
    time.sleep(0.3)
    began = time.monotonic()
    (os.killpg if whole_group else os.kill)(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert time.monotonic() - began < 6
    assert process.returncode in (130, -signal.SIGINT), err
    assert "the pool is closed" in out
    assert err.strip().splitlines()[-1] == "KeyboardInterrupt"
    assert is_gone(process.pid)


@slow
@needs_proc
@pytest.mark.parametrize("is_stopped", [False, True], ids=["running", "stopped"])
@pytest.mark.parametrize("in_call", [False, True], ids=["idle", "in a call"])
def test_the_master_dies(tmp_path: Path, is_stopped: bool, in_call: bool) -> None:
    process = start_until_marked(
        f"""
        f = synk.function([x], (Wait(sys.argv[1], True)(x).sum(), "sum"))
        f(rows)
        if {in_call}:
            rows[5] = FAULT
            f(rows)
        open(sys.argv[1], "w").close()
        time.sleep(60)
        """,
        tmp_path,
    )
    members = [member for member in group_members(process.pid) if member != process.pid]
    assert len(members) >= 2
    if is_stopped:
        os.kill(find_process(process.pid, "worker 1"), signal.SIGSTOP)
    process.kill()
    process.communicate()
    assert is_gone(process.pid, 15)


SUSPENDED = """
f = synk.function([x], (x.sum(), "sum"))
f(rows)
open(sys.argv[1], "w").close()
end = time.time() + 16
while time.time() < end:
    try:
        assert f(rows) == 18
    except synk.WorkerLost as error:
        sys.exit(str(error))
    time.sleep(0.05)
"""


@slow
@needs_proc
@pytest.mark.parametrize("whole_group", [False, True], ids=["master", "group"])
def test_a_suspended_program(tmp_path: Path, whole_group: bool) -> None:
    """Ctrl-Z suspends all processes, and nothing is lost; the master alone loses its workers."""
    process = start_until_marked(SUSPENDED, tmp_path)
    stop = os.killpg if whole_group else os.kill
    stop(process.pid, signal.SIGSTOP)
    time.sleep(11)  # their timeout, and the time for a loaded machine to notice
    stop(process.pid, signal.SIGCONT)
    _, errors = finish(process, 0 if whole_group else 1, timeout=60)
    if whole_group:
        assert errors == ""
    else:
        assert "ended because this program gave no sign of life" in errors


@slow
@needs_proc
def test_a_lost_worker_ends_the_program(tmp_path: Path) -> None:
    """Uncaught, `WorkerLost` is an exception as any other; the status is 1."""
    process = start(
        """
        f = synk.function([x], (Signal(signal.SIGKILL)(x).sum(), "sum"))
        rows[3] = FAULT
        f(rows)
        """,
        tmp_path,
    )
    last = finish(process, 1, timeout=60)[1].strip().splitlines()[-1]
    assert last.startswith("tandem.parallel.team.WorkerLost: worker 1 was killed by SIGKILL")


@slow
@needs_proc
def test_the_modules_pool_starts_again(tmp_path: Path) -> None:
    process = start(
        """
        s = pytensor.shared(np.zeros(3), "s")
        f = synk.function([x], (Signal(signal.SIGKILL)(x).sum(), "sum"), updates=[(s, s + 1)])
        assert f(rows) == 18
        rows[5] = FAULT
        try:
            f(rows)
        except synk.WorkerLost:
            pass
        rows[5] = 1
        for ranks, master in ((2, 1), (1, 0), (3, 2)):
            assert synk.fork(ranks, use_gpu=False, master_rank=master, max_n_var=3) == ranks
            before = s.get_value()
            assert f(rows) == 18
            assert (synk.gather(s) == before + 1).all()
            synk.close()
        """,
        tmp_path,
    )
    assert finish(process) == ("", "")


def test_synk_is_the_modules_name() -> None:
    assert synk.WorkerLost is WorkerLost
    assert issubclass(WorkerLost, RuntimeError)


@pytest.mark.parametrize("error", [NotPicklable("one", "two"), ValueError("it is bad")])
def test_an_exception_arrives_as_it_is(error: Exception) -> None:
    error.add_note("a note")
    found = pickle.loads(pickle.dumps(fault_of(error))).error
    assert type(found) is type(error)
    assert str(found) == str(error)
    assert vars(found) == vars(error)


@slow
def test_an_exception_that_cannot_arrive_is_described() -> None:
    error = ValueError("it is bad")
    error.connection = lambda: None  # type: ignore[attr-defined]
    fault = fault_of(error)
    assert fault.error is None
    assert "it is bad" in fault.description
