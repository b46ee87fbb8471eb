"""Pools whose ranks mpirun or torchrun has started, on one machine and on two.

What pools compute is tested by the tests of this folder, which `tests.support.rank_pool` executes
as the master of such a pool.
"""

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.distributed import PeerLost, local_groups
from tandem.distributed.mpi import find_mpirun
from tandem.errors import InputError
from tandem.memory import HostBuffer
from tandem.parallel import Pool
from tandem.parallel.rank_messages import Messenger, key_path
from tandem.parallel.rank_team import share_memory
from tests.support import parallel_work
from tests.support.machines import CABLE, two_machines
from tests.support.ranks import Job, Starter, need_ranks, need_two_machines, run_ranks
from tests.support.tiny import ROOT, python_path

slow = pytest.mark.slow
both = pytest.mark.parametrize("by", ["mpirun", pytest.param("torchrun", marks=slow)])
RANK_POOL = ("-m", "tests.support.rank_pool")
CENTRAL = "test_every_output_op or test_values_are_gathered"


@pytest.fixture(autouse=True)
def _own_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def run(ranks: int, *words: str, by: Starter = "mpirun", timeout: float = 200) -> str:
    """Run a program as ranks, which has to succeed; return its output."""
    need_ranks(by)
    result = run_ranks(ranks, words[0], words[1:], timeout, by)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    return result.stdout


def assert_same_bits(file: Path, pool: Pool) -> None:
    """Compare what a pool of ranks has computed with what one of processes does."""
    expected = parallel_work.compute(pool) | parallel_work.exchange(pool)
    with np.load(file) as found:
        assert set(found) == set(expected)
        for name, value in expected.items():
            assert found[name].dtype == value.dtype, name
            np.testing.assert_array_equal(found[name], value, err_msg=name)


@both
def test_ranks_compute_the_bits_of_processes(by: Starter, two: Pool, tmp_path: Path) -> None:
    """And central tests of functions and collectives are passed by such a pool."""
    files = [f"tests/parallel/test_{name}.py" for name in ("collectives", "function")]
    words = [*RANK_POOL, "0", str(tmp_path / "found.npz"), *files, "-k", CENTRAL]
    printed = run(2, *words, by=by)  # which succeeds as pytest does
    assert "memory: NearResidents" in printed  # that of one machine is shared
    assert_same_bits(tmp_path / "found.npz", two)


@slow
def test_ranks_that_share_no_memory_compute_the_same_bits(two: Pool, tmp_path: Path) -> None:
    """As those of several machines."""
    words = [*RANK_POOL, "0", str(tmp_path / "apart.npz"), "tests/parallel/test_collectives.py"]
    assert "memory: RankResidents" in run(2, *words)
    assert_same_bits(tmp_path / "apart.npz", two)


@slow
def test_three_ranks_compute_the_bits_of_processes(three: Pool, tmp_path: Path) -> None:
    run(3, *RANK_POOL, "1", str(tmp_path / "found.npz"))
    assert_same_bits(tmp_path / "found.npz", three)


@slow
def test_ranks_on_gpus_compute_the_bits_of_processes(two: Pool, tmp_path: Path) -> None:
    run(2, *RANK_POOL, "0", str(tmp_path / "gpus.npz"))
    assert_same_bits(tmp_path / "gpus.npz", two)


@slow
@pytest.mark.parametrize(("by", "ranks"), [("mpirun", 2), ("mpirun", 3), ("torchrun", 2)])
@pytest.mark.parametrize("files", ["collectives function", "faults pool graphs data"])
def test_pools_of_ranks_pass_the_tests_of_pools(by: Starter, ranks: int, files: str) -> None:
    paths = [f"tests/parallel/test_{name}.py" for name in files.split()]
    run(ranks, *RANK_POOL, str(ranks // 3), "-", *paths, by=by)


@slow
@pytest.mark.parametrize(("by", "ranks"), [("mpirun", 1), ("mpirun", 3), ("torchrun", 2)])
@pytest.mark.parametrize("name", ["functions_of_rows", "shared_variables", "training"])
def test_the_programs_run_as_they_are(by: Starter, ranks: int, name: str) -> None:
    found = run(ranks, f"tests/parallel/programs/{name}.py", str(ranks), by=by)
    assert found.splitlines()[-1].endswith(f": {ranks}")


@slow
@both
@pytest.mark.parametrize("example", ["parallel_rnn", "parallel_alex_net"])
def test_the_examples_print_what_processes_do(by: Starter, example: str) -> None:
    command = [sys.executable, "-m", f"examples.{example}"]
    alone = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert run(2, "-m", f"examples.{example}", by=by) == alone


# What can't be had


REFUSED = """
import pytest, tandem.parallel as synk
with pytest.raises(ValueError, match="3 ranks are asked for, and .* has started 2"):
    synk.fork(3, use_gpu=False)
with pytest.raises(ValueError, match="1 ranks are asked for"):
    synk.fork(devices=["cpu"])
synk.fork(2, use_gpu=False, threads=1)
f = synk.function([])
with pytest.raises(RuntimeError, match="the pool is open"):
    synk.fork()
with pytest.raises(RuntimeError, match="are one pool, which has been made"):
    synk.Pool(2)
synk.close()
with pytest.raises(RuntimeError, match="are one pool, which has been made"):
    synk.fork(2)
with pytest.raises(RuntimeError, match="the pool is closed; its ranks have ended"):
    f()
print("refused")
"""


@slow
@both
def test_another_number_and_another_pool_are_refused(by: Starter, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(REFUSED)
    assert run(2, str(tmp_path / "script.py"), by=by) == "refused\n"


# A rank is lost


LOST = """
import sys, time
import pytensor.tensor as pt
import tandem.parallel as synk
from tests.support.faulty_ops import Wait
synk.fork(use_gpu=False, threads=1, timeout=2.0)
x = pt.dmatrix("x")
f = synk.function([x], Wait(sys.argv[1], True)(x).sum())
f([[13.0]] * 4)
"""


@slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("by", ["mpirun", "torchrun"])
def test_a_lost_rank_ends_all_with_its_name(
    by: Starter, number: signal.Signals, tmp_path: Path
) -> None:
    need_ranks(by)
    (tmp_path / "script.py").write_text(LOST)
    started = Job(2, str(tmp_path / "script.py"), [str(tmp_path / "here")], by)
    started.wait_until((tmp_path / "here").exists, 90)
    lost = started.find("worker 1")
    os.kill(lost, number)
    killed = time.monotonic()
    result = started.finish(60)
    assert time.monotonic() - killed < 40
    assert result.returncode != 0
    text = result.stdout + result.stderr
    if number == signal.SIGSTOP:
        assert "error: the pool has ended: worker 1: has given no sign of life" in text
    elif by == "mpirun":  # MPICH kills the others at once, and knows no more
        assert f"PID {lost} " in text
    else:
        assert "worker 1 has ended" in text or "rank      : 1" in text


FAILS = """
import tandem.parallel as synk
with synk.Pool(use_gpu=False, threads=1) as pool:
    raise ZeroDivisionError("of the script")
"""


@slow
@both
def test_an_exception_of_the_script_ends_all(by: Starter, tmp_path: Path) -> None:
    need_ranks(by)
    (tmp_path / "script.py").write_text(FAILS)
    result = run_ranks(2, str(tmp_path / "script.py"), by=by)
    assert result.returncode == 1
    assert result.stderr.count("ZeroDivisionError: of the script") == 1


# Two machines


@slow
@pytest.mark.parametrize("by", ["mpirun", "torchrun"])
def test_two_machines_compute_the_bits_of_processes(by: Starter, two: Pool, tmp_path: Path) -> None:
    need_two_machines()
    words = [*RANK_POOL, "0", str(tmp_path / "found.npz")]
    environment = {**os.environ, "PYTHONPATH": python_path(), "GLOO_SOCKET_IFNAME": CABLE}
    with two_machines() as pair:
        before = pair.sent(0)
        commands = [[*pair.mpirun(str(find_mpirun()), 1), sys.executable, *words]]
        if by == "torchrun":
            run_one = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
            place = ["--master-addr", pair.addresses[0], "--master-port", "29500"]
            commands = [
                [*pair.on(n), *run_one, "--node-rank", str(n), *place, *words] for n in (0, 1)
            ]
        started = [subprocess.Popen(each, cwd=ROOT, env=environment) for each in commands]
        assert [process.wait(200) for process in started] == [0] * len(started)
        assert pair.sent(0) > before
    assert_same_bits(tmp_path / "found.npz", two)


# Messages are signed


class Post:
    """A rank of two threads, whose bytes pass by queues."""

    def __init__(self, group: Any, queues: list["queue.Queue[np.ndarray]"]) -> None:
        self._group, self._queues = group, queues
        self.rank, self.size, self.starter = group.rank, group.size, "torchrun"
        self.barrier, self.all_gather_object = group.barrier, group.all_gather_object

    def send_bytes(self, sent: list[tuple[int, np.ndarray]]) -> None:
        for rank, vector in sent:
            self._queues[rank].put(vector)

    def receive_bytes(self, rank: int) -> np.ndarray:
        return self._queues[self.rank].get(timeout=10)


def meet(make: Callable[[Any], Any]) -> list[Any]:
    """Do something as two ranks at once; return the results or exceptions."""
    queues: list[queue.Queue[np.ndarray]] = [queue.Queue(), queue.Queue()]
    found: list[Any] = [None, None]

    def do(group: Any) -> None:
        try:
            found[group.rank] = make(Post(group, queues))
        except Exception as error:
            found[group.rank] = error

    threads = [threading.Thread(target=do, args=(group,)) for group in local_groups(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_ranks_share_memory_where_all_can_open_it(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = meet(share_memory)
    first.buffers[0].resize(16)
    first.buffers[0].array(2, np.float64)[:] = 1, 2
    np.testing.assert_array_equal(second.buffers[0].array(2, np.float64), [1, 2])

    def refuse(path: str, name: str) -> HostBuffer:
        if name.endswith("1"):  # by the first rank
            raise InputError("not permitted")
        return HostBuffer.create(0, name)

    monkeypatch.setattr(HostBuffer, "open", refuse)
    assert [type(found) for found in meet(share_memory)] == [Post, Post]


@pytest.fixture
def messengers() -> list[Any]:
    return meet(lambda post: Messenger(post))


def test_messages_arrive_with_their_arrays(messengers: list[Messenger]) -> None:
    first, second = messengers
    for message in [("task", []), ("task", []), ("other", [np.arange(3), np.ones((200, 300))])]:
        first.send({1: message})
        found = second.receive(0)
        assert found[0] == message[0]
        for one, other in zip(found[1], message[1], strict=True):
            np.testing.assert_array_equal(one, other)
    assert key_path().stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("fault", ["changed", "again", "back"])
def test_a_message_of_nobody_is_not_opened(messengers: list[Messenger], fault: str) -> None:
    first, second = messengers
    first.send({1: ("task", [])})
    post: Any = second._group
    data = post._queues[1].get()
    if fault == "changed":
        data = data.copy()
        data[-1] ^= 1
    if fault == "again":
        post._queues[1].put(data)
        second.receive(0)
    post._queues[0 if fault == "back" else 1].put(data)
    with pytest.raises(PeerLost, match="was not signed"):
        first.receive(1) if fault == "back" else second.receive(0)


def test_a_key_that_others_can_read_is_refused() -> None:
    meet(lambda post: Messenger(post))
    key_path().chmod(0o640)
    for error in meet(lambda post: Messenger(post)):
        assert isinstance(error, InputError)
        assert "rank 0 has no key" in str(error)
        assert "can be read by others" in str(error)


def test_machines_with_different_keys_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    keys = iter([b"a" * 32, b"b" * 32])
    monkeypatch.setattr("tandem.parallel.rank_messages._user_key", lambda path: next(keys))
    for error in meet(lambda post: Messenger(post)):
        assert isinstance(error, InputError)
        assert "has another key" in str(error)
