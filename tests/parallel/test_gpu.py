"""Pools on GPUs: ranks by a fake CUDA driver, and whole pools on GPUs that are host memory."""

import gc
import logging
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytensor.tensor as pt
import pytest

from tandem.backend import device_mode
from tandem.distributed import PeerLost, local_groups, peer_to_peer
from tandem.distributed.kernels import average_into_all
from tandem.errors import InputError
from tandem.memory import HostBuffer
from tandem.parallel import Pool, WorkerLost
from tandem.parallel.buffers import ReceivedBuffers
from tandem.parallel.description import describe
from tandem.parallel.gpu import Gpu, RankGpu
from tandem.parallel.gpu_residents import LEAST_BLOCK, CudaResidents
from tandem.parallel.local_function import LocalFunction, Share
from tandem.parallel.messages import ArrayLocation, Call, Extent
from tandem.parallel.rank import open_rank
from tandem.parallel.selection import Selection
from tandem.parallel.worker import RankSettings
from tests.support import parallel_work
from tests.support.fake_cuda import FakeDriver, FakeMachine
from tests.support.simulated_pool import SimulatedGpu, simulated_gpus
from tests.support.threads import run_threads

# By a fake driver


@dataclass(frozen=True)
class FakeGpu(Gpu):
    """A device of a fake machine; PyTorch works on the host beside it."""

    machine: Any = None
    torch_device = "cpu"

    def driver(self) -> Any:
        return FakeDriver(self.machine, self.number)

    def compile_average(self, driver: Any, dtype: np.dtype) -> Any:
        return driver.average


class FakeRank:
    """A rank in a thread of its own, with residents on a fake GPU."""

    def __init__(self, machine: FakeMachine, device: int, rank: int) -> None:
        self.gpu = RankGpu(FakeGpu(device, machine))
        self.driver: Any = self.gpu.driver
        self.residents, self.rank = CudaResidents(self.gpu), rank

    def array(self, extent: Extent) -> Any:
        buffer = self.residents._buffers[extent.block]
        return buffer.array(extent.shape, extent.dtype, extent.offset)

    def write_later(self, extent: Extent, value: np.ndarray) -> None:
        """Let the GPU write a value, as a function does for which the host does not wait."""
        array = self.array(extent)
        self.gpu.stream.work.append(lambda: self.driver.write(array, value))

    def read(self, extent: Extent) -> np.ndarray:
        return self.driver.read(self.array(extent))


class FakePool:
    def __init__(self, machine: FakeMachine, devices: Sequence[int]) -> None:
        self.ranks = [FakeRank(machine, device, rank) for rank, device in enumerate(devices)]
        for each, group in zip(self.ranks, local_groups(len(devices)), strict=True):
            each.residents.join(group, each.rank)

    def allocate(self, shape: tuple[int, ...], dtype: str) -> Extent:
        """Reserve an extent in the master, and let the others follow."""
        master, kind = self.ranks[0].residents, np.dtype(dtype)
        nbytes = int(np.prod(shape)) * kind.itemsize
        block, start = master.allocate(nbytes, kind)
        for rank in self.ranks[1:]:
            rank.residents.extend(master.blocks)
        return Extent(start, kind.str, shape, block)

    def run(self, call: Any) -> None:
        run_threads([lambda rank=rank: call(rank) for rank in self.ranks])

    def reduce(self, extent: Extent, op: str, shares: Sequence[float]) -> None:
        self.run(lambda rank: rank.residents.open(extent))
        assert all(rank.residents.reduces(extent, op) for rank in self.ranks)
        self.run(lambda rank: rank.residents.reduce(extent, op, shares))

    def close(self) -> None:
        self.run(lambda rank: rank.residents.release())
        self.run(lambda rank: rank.residents.leave())


ALL_APART = frozenset(frozenset(pair) for pair in ((0, 1), (0, 2), (1, 2)))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_to_peer, "BLOCK", 1024)


@pytest.mark.parametrize("apart", [frozenset(), ALL_APART])
@pytest.mark.parametrize("devices", [(0, 0), (0, 1, 2)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_residents_are_averaged_to_the_bits_of_the_host(
    devices: tuple[int, ...], apart: Any, dtype: str
) -> None:
    machine = FakeMachine(3, apart=apart)
    pool = FakePool(machine, devices)
    before = pool.allocate((70,), dtype)
    extent = pool.allocate((40, 25), dtype)
    rng = np.random.default_rng(1)
    shares: dict[str, list[float]] = {
        "avg": [0.0, *([1 / (len(devices) - 1)] * (len(devices) - 1))],
        "sum": [1.0] * len(devices),
    }
    for op in ("avg", "sum", "avg"):
        values = [rng.normal(size=extent.shape).astype(dtype) for _ in devices]
        if op == "avg":
            values[0][...] = np.nan  # of a rank that had no row
        for rank, value in zip(pool.ranks, values, strict=True):
            rank.write_later(extent, value)
        pool.reduce(extent, op, shares[op])
        vectors = [value.reshape(-1).copy() for value in values]
        average_into_all(vectors, shares[op])
        for rank in pool.ranks:
            rank.gpu.wait()
            assert rank.read(extent).tobytes() == vectors[0].tobytes()
            assert not rank.read(before).any()
    pool.close()
    assert not any(rank.driver.locked for rank in pool.ranks)
    assert not any(allocation.opened for allocation in machine.allocations)


def test_blocks_are_of_one_dtype_and_added_when_full() -> None:
    pool = FakePool(FakeMachine(), (0, 0))
    small = [pool.allocate((3,), dtype) for dtype in ("float32", "int64", "float32", "float64")]
    assert [extent.block for extent in small] == [0, 1, 0, 2]
    assert [extent.offset for extent in small] == [0, 0, 256, 0]
    large = pool.allocate((LEAST_BLOCK // 4,), "float32")
    assert (large.block, large.offset) == (3, 0)
    assert pool.allocate((1,), "float32").block == 4
    for rank in pool.ranks:
        assert rank.residents.blocks == (LEAST_BLOCK,) * 5
    pool.close()


def test_only_what_the_kernel_computes_is_opened() -> None:
    pool = FakePool(FakeMachine(), (0, 0))
    real, whole = pool.allocate((5,), "float32"), pool.allocate((5,), "int64")
    residents = pool.ranks[0].residents
    for extent, op in ((real, "max"), (real, "prod"), (whole, "sum")):
        assert residents.is_open(extent, op)
        assert not residents.reduces(extent, op)
    assert not residents.is_open(real, "avg")
    pool.reduce(real, "avg", [0.5, 0.5])
    assert residents.is_open(real, "sum")
    pool.close()


def test_a_system_that_forbids_sharing_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    pool = FakePool(FakeMachine(permits_sharing=False), (0, 0))
    for extent in (pool.allocate((5,), "float32"), pool.allocate((5,), "float64")):
        pool.run(lambda rank, extent=extent: rank.residents.open(extent))
        for rank in pool.ranks:
            assert rank.residents.is_open(extent, "avg")
            assert not rank.residents.reduces(extent, "avg")
            assert not rank.residents.has_opened
    messages = [m for m in caplog.messages if "by way of the host: memory of cuda:0" in m]
    assert len(messages) == len(pool.ranks)
    pool.close()


def test_a_rank_that_fails_in_an_exchange_ends_and_the_others_notice() -> None:
    pool = FakePool(FakeMachine(), (0, 0, 0))
    extent, ends = pool.allocate((3000,), "float32"), {}
    pool.reduce(extent, "sum", [1.0] * 3)

    def fail(*_: object) -> None:
        raise ValueError("the GPU is broken")

    opened: Any = pool.ranks[1].residents._opened[extent.block]
    opened.all_reduce._add = fail

    def reduce(rank: FakeRank) -> None:
        try:
            rank.residents.reduce(extent, "sum", [1.0] * 3)
        except PeerLost as error:
            ends[rank.rank] = error
            rank.residents._joined.close()  # as the end of the process does

    pool.run(reduce)
    assert isinstance(ends[1].__cause__, ValueError)
    assert sorted(ends) == [0, 1, 2]


def test_a_rank_alone_needs_nobody() -> None:
    pool = FakePool(FakeMachine(permits_sharing=False), (0,))
    extent = pool.allocate((5,), "float32")
    residents = pool.ranks[0].residents
    assert residents.is_open(extent, "avg")
    assert residents.reduces(extent, "min")
    residents.reduce(extent, "min", [1.0])
    pool.close()


def test_gathered_rows_are_not_replaced_while_they_are_copied() -> None:
    gpu = RankGpu(FakeGpu(0, FakeMachine()))
    array, rows = np.arange(12.0).reshape(6, 2), Selection(4, 0, 1, np.array([5, 0, 3, 3]))
    marks = []
    for part in ((0, 2), (2, 4)):
        tensor = gpu.upload_rows(1, array, rows, part, "float32")
        np.testing.assert_array_equal(tensor.numpy(), array[rows.indices[slice(*part)]])
        marks.append(gpu._areas[1].read.mark)
    # The host has waited for the first copy, not yet for the second.
    assert [mark.reached for mark in marks] == [True, False]
    gpu.wait()
    assert marks[1].reached


def test_rows_that_lie_side_by_side_are_read_where_they_are() -> None:
    gpu = RankGpu(FakeGpu(0, FakeMachine()))
    array = np.arange(12.0).reshape(6, 2)
    assert gpu.upload_rows(0, array, Selection(6), (1, 4), "float64").tolist() == (
        array[1:4].tolist()
    )
    assert gpu.upload(1, np.float32(3)[()], "float32").item() == 3
    assert not gpu._areas


def test_buffers_are_page_locked_until_they_grow_or_go() -> None:
    gpu = RankGpu(FakeGpu(0, FakeMachine()))
    locked: Any = gpu.driver.locked
    buffer, empty = HostBuffer.create(1000), HostBuffer.create(0)
    for _ in range(2):
        gpu.lock(buffer)
        gpu.lock(empty)
    assert len(locked) == 1
    (first,) = locked
    assert first == buffer.array(1000, np.uint8).ctypes.data
    buffer.resize(100_000)
    gpu.lock(buffer)
    assert list(locked) == [buffer.array(1, np.uint8).ctypes.data]
    buffer.close()
    del buffer
    gc.collect()
    assert not locked


def test_pages_that_can_not_be_locked_are_copied_all_the_same(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, buffer = RankGpu(FakeGpu(0, FakeMachine())), HostBuffer.create(1000)

    def refuse(pages: np.ndarray) -> None:
        raise InputError("1000 bytes of host memory can't be page-locked: CUDA error 2")

    monkeypatch.setattr(gpu.driver, "lock_pages", refuse)
    for _ in range(2):
        gpu.lock(buffer)
    assert caplog.messages == [
        "copies to cpu are slower: 1000 bytes of host memory can't be page-locked: CUDA error 2"
    ]


def test_a_call_is_done_when_its_inputs_have_been_copied() -> None:
    gpu = RankGpu(FakeGpu(0, FakeMachine()))
    x, y = pt.fmatrix("x"), pt.fvector("y")
    description, _ = describe([x], [(x + y, "gather")], [y], None, None, None, {})
    function = LocalFunction(description, partial(device_mode, "cpu", results="device"), gpu)
    array, indices = np.arange(12, dtype="float32").reshape(6, 2), np.array([5, 0, 3, 2])
    share = Share(0, 1, [Selection(4, 0, 1, indices)], (4,), None, 2, (0,))
    (fold,) = function.run([array, np.float64([1, 2])], share)
    np.testing.assert_array_equal(fold.value().numpy(), array[indices] + np.float32([1, 2]))
    assert gpu._areas[0].read.mark.reached


def test_a_worker_locks_the_inputs_of_a_call() -> None:
    buffers, (group,) = ReceivedBuffers(), local_groups(1)
    rank = open_rank(RankSettings(0, 1, SimulatedGpu(0), 1, "float32", False, 0.0), group, buffers)
    buffers.add(3, HostBuffer.create(48))
    buffers.add(4, HostBuffer.create(48))
    function: Any = SimpleNamespace(run=lambda inputs, share: None)
    rank.functions[0] = function
    rank.call(Call(0, (ArrayLocation(3, "<f4", (12,)),), (), None, None, 1, ()))
    assert rank.gpu is not None
    locked: Any = rank.gpu.driver.locked
    assert list(locked) == [buffers.buffer(3).array(1, np.uint8).ctypes.data]
    buffers.drop(3)
    gc.collect()
    assert not locked


# Whole pools


@pytest.fixture(scope="module")
def simulated() -> Iterator[Pool]:
    with simulated_gpus(2), Pool(threads=1) as pool:
        yield pool


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
        assert found[name].tobytes() == value.tobytes(), name


def test_functions_compute_the_bits_of_the_host(simulated: Pool, two: Pool) -> None:
    assert simulated.rank.gpu is not None
    assert_same(parallel_work.compute(simulated), parallel_work.compute(two))


def test_collectives_leave_the_bits_of_the_host(simulated: Pool, two: Pool) -> None:
    assert_same(parallel_work.exchange(simulated), parallel_work.exchange(two))
    assert simulated.rank.residents.has_opened


@pytest.mark.slow
def test_workers_that_have_given_up_memory_end_by_themselves() -> None:
    with simulated_gpus(2), Pool(threads=1) as pool:
        pool.all_reduce(pool.shared(np.float32([1, 2])))
        processes = [handle.process for handle in pool._team._pool.handles]
    assert [process.exitcode for process in processes] == [0]


@pytest.mark.slow
def test_results_are_the_callers(simulated: Pool) -> None:
    """Also where the memory of a result is used again by the next call."""
    x = simulated.data(np.ones((4, 2), "float32"))
    rows = pt.fmatrix("rows")
    f = simulated.function([rows], [(rows, "gather"), (rows.sum(), None)])
    first, own = f(x, batch=[0, 2, 1, 3])
    assert x.data.ctypes.data in simulated.rank.gpu.driver.locked  # type: ignore[union-attr]
    x[...] = 2
    f(x, batch=[0, 2, 1, 3])
    assert (first == 1).all()
    assert own == 4


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "permits_sharing"), [(1, False), (2, False), (3, True)])
def test_pools_of_any_size(ranks: int, permits_sharing: bool) -> None:
    names = [f"cuda:{rank % 3}" for rank in range(ranks)]
    with Pool(ranks, use_gpu=False, threads=1, master_rank=ranks - 1) as host:
        expected = {**parallel_work.compute(host), **parallel_work.exchange(host)}
    with simulated_gpus(3, permits_sharing):
        pool = Pool(devices=names, threads=1, master_rank=ranks - 1)
    with pool:
        found = {**parallel_work.compute(pool), **parallel_work.exchange(pool)}
    assert_same(found, expected)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_worker_that_is_stopped_in_an_exchange_is_reported() -> None:
    """The master waits for rank 0, which waits for the one that is stopped."""
    options: Any = {"devices": ["cuda:0", "cuda:0", "cuda:1"], "master_rank": 2, "threads": 1}
    with simulated_gpus(2), Pool(**options, timeout=2.0) as pool:
        w = pool.shared(np.float32([1, 2]), "w")
        pool.set_value(1, w, np.float32([4, 5]))
        pool.all_reduce(w)
        assert pool.gather(w).tolist() == [[2, 3]] * 3
        w.set_value(np.float32([5, 6]))
        pids = pool._team._pool.pids
        os.kill(pids["worker 1"], signal.SIGSTOP)
        with pytest.raises(WorkerLost, match=r"worker 1 .*no sign of life"):
            pool.all_reduce(w)
        pool.start(**options)
        assert pool.gather(w).tolist() == [[5, 6]] * 3
        pool.all_reduce(w, "sum")
        assert pool.get_value(1, w).tolist() == [15, 18]
    assert w.get_value().tolist() == [15, 18]
