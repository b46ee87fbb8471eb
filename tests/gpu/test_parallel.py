"""Pools of two ranks on one GPU, against pools on the processor."""

import os
import signal
from collections.abc import Iterator

import numpy as np
import pytensor.tensor as pt
import pytest
import torch

from tandem.memory import HostBuffer
from tandem.parallel import Pool, WorkerLost
from tandem.parallel.gpu import Gpu, RankGpu
from tandem.parallel.selection import Selection
from tests.support import parallel_work

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

LONG = 1_000_000_000  # cycles: about half a second


@pytest.fixture(scope="module")
def host() -> Iterator[Pool]:
    with Pool(2, use_gpu=False, threads=1) as pool:
        yield pool


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(devices=["cuda:0", "cuda:0"]) as pool:
        yield pool


def test_functions_compute_what_they_do_on_the_host(pool: Pool, host: Pool) -> None:
    found, expected = parallel_work.compute(pool), parallel_work.compute(host)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-5, err_msg=name)


def test_collectives_leave_the_bits_of_the_host(pool: Pool, host: Pool) -> None:
    found, expected = parallel_work.exchange(pool), parallel_work.exchange(host)
    assert pool.rank.residents.has_opened, "averages went through the host"
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].tobytes() == value.tobytes(), name


def test_slices_are_workers(pool: Pool) -> None:
    """Two ranks do, in the same order, what one does with two slices: of sums, on the GPU."""
    x = pt.fmatrix("x")
    outputs = [x.sum(axis=0), (x.max(axis=0), "max"), (x * 3, "gather")]
    rows = np.random.default_rng(2).normal(size=(500, 300)).astype("float32")
    by_ranks = pool.function([x], outputs)(pool.data(rows))
    with Pool(devices=["cuda:0"]) as one:
        by_slices = one.function([x], outputs)(rows, num_slices=2)
    for found, expected in zip(by_ranks, by_slices, strict=True):
        assert found.tobytes() == expected.tobytes()


def test_the_host_does_not_wait_for_rows() -> None:
    gpu = RankGpu(Gpu(0))
    buffer = HostBuffer.create(64 << 20)
    array = buffer.array((16384, 1024), "float32")
    array[:] = np.arange(16384, dtype="float32")[:, None]
    gpu.lock(buffer)
    gpu.enter()
    try:
        chosen = Selection(4096, 0, 1, np.arange(4096)[::-1].copy())
        gpu.upload_rows(0, array, chosen, (0, 4096), "float32")  # which allocates
        gpu.wait()
        torch.cuda._sleep(LONG)
        side_by_side = gpu.upload_rows(0, array, Selection(16384), (100, 9000), "float32")
        gathered = gpu.upload_rows(0, array, chosen, (0, 4096), "float32")
        assert not torch.cuda.current_stream().query(), "the host has waited"
        gpu.wait()
        assert torch.equal(side_by_side[:, 5].cpu(), torch.arange(100.0, 9000))
        assert torch.equal(gathered[:, 0].cpu(), torch.arange(4095.0, -1, -1))
    finally:
        gpu.leave()


def test_after_a_worker_is_killed_the_values_of_the_master_are_sent_again() -> None:
    x = pt.fvector("x")
    with Pool(devices=["cuda:0", "cuda:0"]) as pool:
        w = pool.shared(np.float32([1, 2]), "w")
        f = pool.function([x], (x.sum() + w.sum(), "sum"), updates={w: w + x.sum()})
        f(np.float32([1, 1]))
        pool.all_reduce(w)
        (handle,) = pool._team._pool.handles  # type: ignore[union-attr]
        os.kill(handle.process.pid, signal.SIGKILL)  # type: ignore[union-attr, arg-type]
        with pytest.raises(WorkerLost, match="worker 1"):
            pool.all_reduce(w)
        value = w.get_value()
        pool.start(devices=["cuda:0", "cuda:0"])
        assert pool.gather(w).tolist() == [value.tolist()] * 2
        assert f(np.float32([1, 1])) == 2 + 2 * value.sum()
        pool.all_reduce(w, "sum")
        np.testing.assert_array_equal(pool.get_value(1, w), 2 * (value + 1))
    np.testing.assert_array_equal(w.get_value(), 2 * (value + 1))
