"""A pool's life: its arguments, scripts, forks, threads, and what is left of it."""

import gc
import os
import pstats
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import tandem.parallel as synk
from tandem.config.hardware import available_cores, cuda_device_count
from tandem.errors import InputError
from tandem.ops.region import Region
from tandem.parallel import Pool, rank, worker
from tandem.parallel.messages import Release
from tests.support.faulty_ops import CALLBACKS, FAULT, CallBack, CallPool, CountFunctions
from tests.support.parallel_scripts import start_parallel
from tests.support.tiny import descendants, finish, open_files, shared_memory

ROWS = np.random.default_rng(3).normal(size=(7, 3))
BAD = np.where(np.arange(7)[:, None] == 6, FAULT, ROWS)  # in the last rank's rows

needs_proc = pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="only Linux shows what a process does"
)


def left_over() -> tuple[set[int], set[str], int]:
    """Processes, names in /dev/shm, and open files."""
    return descendants(), shared_memory(), open_files()


# Arguments


def test_the_size_and_the_masters_rank(pool: Pool) -> None:
    assert pool.get_n_gpu() == pool.ranks == {1: 1, 2: 2, 3: 3}[pool.ranks]
    assert pool.master_rank == {1: 0, 2: 0, 3: 1}[pool.ranks]


REFUSED: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (ValueError, "n_parallel is 0", {"n_parallel": 0}),
    (TypeError, "n_parallel is an integer, not '2'", {"n_parallel": "2"}),
    (TypeError, "n_parallel is an integer, not 2.0", {"n_parallel": 2.0}),
    (ValueError, "master_rank is 2; there are 2 ranks", {"n_parallel": 2, "master_rank": 2}),
    (ValueError, "master_rank is -1", {"n_parallel": 2, "master_rank": -1}),
    (TypeError, "master_rank is an integer", {"n_parallel": 2, "master_rank": "0"}),
    (ValueError, "threads is 0", {"n_parallel": 2, "threads": 0}),
    (TypeError, "threads is an integer", {"n_parallel": 2, "threads": 1.5}),
    (ValueError, "timeout is 0", {"n_parallel": 2, "timeout": 0}),
    (ValueError, "timeout is nan", {"n_parallel": 2, "timeout": float("nan")}),
    (TypeError, "timeout is a number", {"n_parallel": 2, "timeout": "30"}),
    (ValueError, "precision is 'float16'", {"n_parallel": 2, "precision": "float16"}),
    (ValueError, "n_parallel is 2, for 3 devices", {"n_parallel": 2, "devices": ["cpu"] * 3}),
    (ValueError, "devices is empty", {"devices": []}),
    (InputError, "all are GPUs or all cpu", {"devices": ["cpu", "cuda:0"]}),
    (InputError, "no device 'gpu0'", {"devices": ["gpu0"]}),
    (ValueError, "use_gpu is True", {"devices": ["cpu"], "use_gpu": True}),
]


@pytest.mark.parametrize(("error", "text", "arguments"), REFUSED, ids=lambda value: str(value)[:40])
def test_arguments_that_are_refused(
    error: type[Exception], text: str, arguments: dict[str, Any]
) -> None:
    before = left_over()
    with pytest.raises(error, match=text):
        Pool(**({"use_gpu": False} if "devices" not in arguments else {}) | arguments)
    assert left_over() == before


@pytest.mark.skipif(cuda_device_count() > 0, reason="there is a GPU")
def test_gpus_that_are_not_there() -> None:
    with pytest.raises(InputError, match="use_gpu is True; no GPU was found"):
        Pool(2, use_gpu=True)
    with pytest.raises(InputError, match="no GPU was found"):
        Pool(devices=["cuda:0", "cuda:0"])


def test_one_rank_for_each_core(monkeypatch: pytest.MonkeyPatch) -> None:
    from tandem.parallel import devices

    monkeypatch.setattr(devices, "available_cores", lambda: (0, 2, 5))
    monkeypatch.setattr(devices, "cuda_device_count", lambda: 0)
    assert devices.choose_devices(None, None, None) == ["cpu"] * 3
    assert devices.choose_devices(2, None, None) == ["cpu"] * 2


def test_threads_are_divided(one: Pool) -> None:
    import torch

    assert torch.get_num_threads() == 1
    one.close()
    one.start(1, use_gpu=False)
    assert torch.get_num_threads() == len(available_cores())
    one.close()
    one.start(1, use_gpu=False, threads=1, max_n_var=5, max_dim=3)
    assert torch.get_num_threads() == 1


# Again


def test_a_pool_is_started_again(one: Pool) -> None:
    """Functions, private and resident variables are kept, and rows are forgotten."""
    x, private = pt.dmatrix("x"), pytensor.shared(np.zeros(3), "private")
    resident = one.shared(np.zeros(3), "resident")
    updates = [(v, v + x.mean(axis=0)) for v in (private, resident)]
    f = one.function([x], (x.sum(), "sum"), updates=updates)
    f(ROWS)
    one.close()
    one.close()
    for call in (
        lambda: f(ROWS),
        lambda: f.as_theano(ROWS),
        lambda: one.gather(private),
        lambda: one.function([x], x.sum()),
        lambda: one.shared(ROWS),
        one.get_n_gpu,
        one.distribute,
    ):
        with pytest.raises(RuntimeError, match="the pool is closed"):
            call()
    one.start(1, use_gpu=False, threads=1)
    with pytest.raises(RuntimeError, match="the pool is open"):
        one.start(1, use_gpu=False, threads=1)
    assert f(ROWS) == pytest.approx(ROWS.sum())
    for variable in (private, resident):
        np.testing.assert_allclose(variable.get_value(), 2 * ROWS.mean(axis=0), rtol=1e-12)


@pytest.mark.slow
def test_a_pool_of_another_size_begins_with_the_masters_values(tmp_path: Path) -> None:
    x, private = pt.dmatrix("x"), pytensor.shared(np.zeros(3), "private")
    with Pool(2, use_gpu=False, threads=1) as pool:
        resident = pool.shared(np.zeros(3), "resident")
        updates = [(v, v + x.mean(axis=0)) for v in (private, resident)]
        f = pool.function([x], (x.sum(), "sum"), updates=updates)
        for ranks, master in ((2, 0), (3, 2), (1, 0), (2, 1)):
            pool.close()
            pool.start(ranks, use_gpu=False, threads=1, master_rank=master)
            values = [variable.get_value() for variable in (private, resident)]
            for variable, value in zip((private, resident), values, strict=True):
                for rank in range(ranks):
                    np.testing.assert_array_equal(pool.get_value(rank, variable), value)
            pool.reduce([private, resident], in_place=False)
            assert f(ROWS) == pytest.approx(ROWS.sum())
            pool.all_reduce([private, resident])
            for variable, value in zip((private, resident), values, strict=True):
                expected = value + ROWS.mean(axis=0)
                np.testing.assert_allclose(variable.get_value(), expected, rtol=1e-12)
            f(ROWS[:1])
            pool.set_value(0, private, np.full(3, 7.0))


def test_another_precision_compiles_again(one: Pool) -> None:
    x = pt.fmatrix("x")
    f = one.function([x], (x.dot(x.T), "gather"))
    rows = np.random.default_rng(0).normal(size=(64, 512)).astype("float32")
    exact = f(rows)
    one.close()
    one.start(1, use_gpu=False, threads=1, precision="bfloat16")
    rounded = f(rows)
    one.close()
    one.start(1, use_gpu=False, threads=1)
    np.testing.assert_array_equal(f(rows), exact)
    assert not np.array_equal(rounded, exact)


def test_a_function_that_cannot_be_sent_spoils_no_other() -> None:
    class Local(CallBack):
        pass

    x = pt.dmatrix("x")
    with Pool(1, use_gpu=False, threads=1) as pool:
        bad, good = pool.function([x], Local()(x).sum()), pool.function([x], (x.sum(), "sum"))
        for _ in range(2):
            with pytest.raises(InputError, match="put it in a module"):
                bad(ROWS)
            assert good(ROWS) == pytest.approx(ROWS.sum())
        with pytest.raises(InputError, match="put it in a module"):
            pool.distribute()


def test_workers_drop_functions_that_the_program_no_longer_has(two: Pool) -> None:
    x = pt.dmatrix("x")
    count = two.function([x], (CountFunctions()(x), "max"))
    before = count(ROWS[:4])[0, 0]
    assert before > 0
    for number in range(10):
        assert two.function([x], (x.sum() + number, "max"))(np.zeros((2, 3))) == number
    gc.collect()
    assert count(ROWS[:4])[0, 0] <= before + 2


# Where it must not be used


@pytest.mark.parametrize("name", ["fork", "distribute", "get_n_gpu"])
def test_a_worker_is_no_master(two: Pool, name: str) -> None:
    x = pt.dmatrix("x")
    f = two.function([x], CallPool(name)(x).sum())
    with pytest.raises(RuntimeError) as caught:
        f(BAD)
    assert "in worker 1" in caught.value.__notes__[-1]
    text = "a worker process can't" if name == "fork" else r"fork\(\) comes first"
    assert caught.match(text)


def test_a_call_within_a_call(two: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    x, s = pt.dmatrix("x"), pytensor.shared(0.0, "s")
    f = two.function([x], (CallBack()(x).sum(), "sum"))
    g = two.function([x], (x.sum(), "sum"))
    two.broadcast(s)
    rows = np.where(np.arange(7)[:, None] == 0, FAULT, ROWS)
    for call in (lambda: g(ROWS), lambda: two.gather(s), two.distribute):
        monkeypatch.setattr(f"{CallBack.__module__}.CALLBACKS", [call])
        with pytest.raises(RuntimeError, match="within which it can't be used"):
            f(rows)
        assert g(ROWS) == pytest.approx(ROWS.sum())
    assert not CALLBACKS


def test_another_thread_is_refused(two: Pool) -> None:
    x = pt.dmatrix("x")
    f = two.function([x], (x.sum(), "sum"))
    found: list[Exception] = []

    def call() -> None:
        for use in (lambda: f(ROWS), lambda: two.function([x], x.sum()), two.distribute):
            try:
                use()
            except RuntimeError as error:
                found.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert [str(error)[:31] for error in found] == ["a pool is used by one thread, t"] * 3
    assert f(ROWS) == pytest.approx(ROWS.sum())


def in_fork(work: Callable[[], None]) -> int:
    """Do something in a child of `os.fork` that ends as Python programs do; its exit status."""
    sys.stdout.flush()
    script = os.fork()
    if script:
        return os.waitstatus_to_exitcode(os.waitpid(script, 0)[1])
    status = 1
    try:
        work()
        status = 0
    finally:
        import atexit

        atexit._run_exitfuncs()
        os._exit(status)


@needs_proc
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_is_refused_and_ends_no_worker(two: Pool, capfd: pytest.CaptureFixture[str]) -> None:
    x = pt.dmatrix("x")
    f = two.function([x], (x.sum(), "sum"))
    f(ROWS)

    def work() -> None:
        for call in (lambda: f(ROWS), lambda: two.distribute(), lambda: two.start(2)):
            with pytest.raises(RuntimeError, match="of another process"):
                call()
        two.close()

    assert in_fork(work) == 0
    assert capfd.readouterr().err == ""  # where what runs at exit would complain
    assert f(ROWS) == pytest.approx(ROWS.sum())


# Programs


def run_script(text: str, folder: Path, *, status: int = 0) -> tuple[str, str]:
    """Run a script; assert that it ends in time and that nothing is left."""
    before = shared_memory()
    found = finish(start_parallel(folder, text), status, timeout=60)
    assert shared_memory() == before
    return found


def ended(out: str) -> float:
    """Seconds since a program printed that it was at its end."""
    return time.time() - float(out.split()[-1])


@pytest.mark.slow
def test_a_script_without_guard_or_close(tmp_path: Path) -> None:
    output, errors = run_script(
        """
        synk.fork(2, use_gpu=False, threads=1, profile_workers=True)
        try:
            synk.fork(2)
        except RuntimeError as error:
            assert "is open" in str(error)
        else:
            raise AssertionError
        f = synk.function([x], (x.sum(), "sum"))
        assert f(np.ones((5, 3))) == 15
        print(time.time())
        """,
        tmp_path,
    )
    assert errors == ""
    assert ended(output) < 10
    profile = pstats.Stats(str(tmp_path / "worker_1.prof"))
    assert any("worker.py" in key[0] for key in profile.stats)  # type: ignore[attr-defined]
    assert not (tmp_path / "worker_0.prof").exists()


@pytest.mark.slow
def test_an_exception_of_the_script(tmp_path: Path) -> None:
    output, errors = run_script(
        """
        synk.fork(2, use_gpu=False, threads=1)
        f = synk.function([x], (x.sum(), "sum"))
        assert f(np.ones((5, 3))) == 15
        print(time.time(), flush=True)
        raise KeyError("of the user")
        """,
        tmp_path,
        status=1,
    )
    assert errors.strip().splitlines()[-1] == "KeyError: 'of the user'"
    assert ended(output) < 10


@pytest.mark.slow
def test_a_script_that_only_forks(tmp_path: Path) -> None:
    run_script("synk.fork(2, use_gpu=False)", tmp_path)
    run_script("synk.fork(2, use_gpu=False); sys.exit(3)", tmp_path, status=3)
    run_script("synk.fork(2, use_gpu=False); os._exit(4)", tmp_path, status=4)


@pytest.mark.slow
def test_use_before_fork(tmp_path: Path) -> None:
    run_script(
        """
        s = pytensor.shared(1.0)
        data = synk.data(np.ones(3))
        for call in (
            lambda: synk.function([x], x.sum()), synk.distribute, lambda: synk.gather(s),
            lambda: synk.shared(1.0), synk.get_n_gpu,
        ):
            try:
                call()
            except RuntimeError as error:
                assert "fork() comes first" in str(error), error
            else:
                raise AssertionError(call)
        synk.close()
        """,
        tmp_path,
    )


@pytest.mark.slow
def test_a_fork_that_exits_ends_no_worker(tmp_path: Path) -> None:
    """Through `sys.exit`, with all that runs at exit; also a process of multiprocessing."""
    _, errors = run_script(
        """
        import multiprocessing
        synk.fork(2, use_gpu=False, threads=1)
        f = synk.function([x], (x.sum(), "sum"))
        f(np.ones((5, 3)))
        pid = os.fork()
        if not pid:
            sys.exit(5)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
        assert f(np.ones((5, 3))) == 15
        process = multiprocessing.get_context("fork").Process(target=sys.exit, args=(6,))
        process.start()
        process.join()
        assert process.exitcode == 6
        assert f(np.ones((5, 3))) == 15
        """,
        tmp_path,
    )
    assert errors == ""


@pytest.mark.slow
def test_interrupts_at_the_end(tmp_path: Path) -> None:
    """Ctrl-C while the pool is being closed ends the workers, and the program."""
    run_script(
        """
        synk.fork(3, use_gpu=False, threads=1)
        f = synk.function([x], (x.sum(), "sum"))
        f(np.ones((5, 3)))
        os.kill(synk._default.opened()._pool.handles[0].process.pid, signal.SIGSTOP)
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        began = time.time()
        try:
            synk.close()
        except KeyboardInterrupt:
            assert time.time() - began < 4
        else:
            raise AssertionError
        """,
        tmp_path,
    )


@pytest.mark.slow
def test_settings_are_the_first_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the thread that sends them takes."""
    from tandem.processes import worker_pool

    send = worker_pool._send

    def late(*arguments: Any) -> None:
        time.sleep(0.5)
        send(*arguments)

    monkeypatch.setattr(worker_pool, "_send", late)
    x = pt.dmatrix("x")
    with Pool(2, use_gpu=False, threads=1) as pool:
        assert pool.function([x], (x.sum(), "sum"))(ROWS) == pytest.approx(ROWS.sum())


@pytest.mark.slow
def test_four_ranks_and_several_pools() -> None:
    before = left_over()
    x = pt.dmatrix("x")
    with Pool(4, use_gpu=False, threads=1, master_rank=2) as four:
        f = four.function([x], (2 * x, "gather"))
        with Pool(2, use_gpu=False, threads=1) as other:
            g = other.function([x], (3 * x, "gather"))
            data = synk.data(ROWS)
            np.testing.assert_array_equal(f(data), 2 * ROWS)
            np.testing.assert_array_equal(g(data), 3 * ROWS)
        np.testing.assert_array_equal(f(ROWS), 2 * ROWS)
        with pytest.raises(RuntimeError, match="the pool is closed"):
            g(ROWS)
    del f, g, four, other, data
    assert descendants() == before[0]
    assert shared_memory() == before[1]


@needs_proc
@pytest.mark.slow
def test_nothing_is_left_of_pools() -> None:
    x, counts = pt.dmatrix("x"), []
    for _ in range(3):
        with Pool(2, use_gpu=False, threads=1) as pool:
            f = pool.function([x], (x.sum(), "sum"))
            f(ROWS)
            pool.shared(ROWS)
        del pool, f
        gc.collect()
        counts.append(left_over())
    assert counts[1] == counts[2]


def test_a_pool_that_starts_again_keeps_nothing_of_its_former_workers() -> None:
    pool, counts = Pool(2, use_gpu=False, threads=1), []
    for _ in range(4):
        pool.close()
        pool.start(2, use_gpu=False, threads=1)
        gc.collect()
        counts.append(open_files())
    pool.close()
    assert counts[-1] <= counts[0]


def test_a_pool_that_nobody_has_any_more_ends_its_workers() -> None:
    x, earlier = pt.dmatrix("x"), descendants()
    pool = Pool(2, use_gpu=False, threads=1)
    total = pool.function([x], (x.sum(), "sum"))
    total(ROWS)  # the worker is there by now, under its own name
    made = descendants() - earlier
    del pool, total
    gc.collect()
    assert made - descendants()


@pytest.fixture(autouse=True)
def no_callbacks() -> Iterator[None]:
    yield
    CALLBACKS.clear()


def test_small_arrays_of_a_pool_are_regions_where_it_asks_for_them() -> None:
    x: Any = pt.dmatrix("x")
    total = (pt.exp(x) / (1 + pt.sqr(x))).sum()
    for regions in (False, True):
        with Pool(1, use_gpu=False, regions=regions) as pool:
            f: Any = pool.function([x], (total, "sum"))
            pool.distribute()
            graphs = [variant.maker.fgraph for variant in f.local._variants.values()]
            ops = {type(node.op) for graph in graphs for node in graph.apply_nodes}
            assert (Region in ops) == regions


def test_a_worker_is_set_up_without_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []

    def note(*_: Any) -> Any:
        said.append(gc.isenabled())
        return SimpleNamespace(do=note)

    monkeypatch.setattr(rank, "open_rank", note)
    monkeypatch.setattr(gc, "freeze", lambda: said.append("frozen"))
    link: Any = SimpleNamespace(buffers=None)
    worker._Worker(link, link, link)._do(Release())
    assert said == [False, "frozen", True]
