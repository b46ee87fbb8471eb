"""The faults of Synkhronos, each of which these tests would bring to light."""

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import tandem.parallel as synk
from tandem.parallel import Pool, WorkerLost
from tests.support.tiny import descendants

ROWS = np.random.default_rng(5).normal(size=(7, 3))


def test_averages_weigh_rows_not_workers(two: Pool) -> None:
    x = pt.dmatrix("x")
    f = two.function([x], [pt.mean(x, axis=0), (pt.mean(x, axis=0), "uavg")])
    mean, by_worker = f(ROWS)
    np.testing.assert_allclose(mean, ROWS.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(
        by_worker, (ROWS[:3].mean(axis=0) + ROWS[3:].mean(axis=0)) / 2, rtol=1e-12
    )
    assert not np.allclose(mean, by_worker)


def test_averages_weigh_rows_not_slices(one: Pool) -> None:
    x = pt.dmatrix("x")
    f = one.function([x], pt.mean(x, axis=0))
    np.testing.assert_allclose(f(ROWS, num_slices=3), ROWS.mean(axis=0), rtol=1e-12)


@pytest.mark.parametrize("rows", [1, 7])
def test_a_shared_variable_updated_from_rows_is_averaged_over_rows(two: Pool, rows: int) -> None:
    x, s = pt.dmatrix("x"), pytensor.shared(np.zeros(3), name="s")
    two.function([x], updates=[(s, pt.mean(x, axis=0))])(ROWS[:rows])
    two.all_reduce(s)
    for rank in (0, 1):
        np.testing.assert_allclose(two.get_value(rank, s), ROWS[:rows].mean(axis=0), rtol=1e-12)


def test_slices_update_once_and_from_the_old_values(one: Pool) -> None:
    x, s = pt.dmatrix("x"), pytensor.shared(np.full(3, 2.0), name="s")
    f = one.function([x], pt.sum(s) * x.shape[0], updates=[(s, s * pt.mean(x, axis=0))])
    f(ROWS, num_slices=4)
    np.testing.assert_allclose(s.get_value(), 2 * ROWS.mean(axis=0), rtol=1e-12)


def test_a_subset_of_outputs_holds_for_one_call(two: Pool) -> None:
    x = pt.dmatrix("x")
    f = two.function([x], [(pt.sum(x), "sum"), (pt.max(x), "max")])
    assert len(f(ROWS, output_subset=[1])) == 1
    assert len(f(ROWS, output_subset=None)) == 2
    assert f(ROWS)[1] == ROWS.max()


def test_data_is_broadcast_and_set(two: Pool) -> None:
    s = pytensor.shared(np.zeros((7, 3)), name="s")
    two.function([], pt.sum(s))
    two.broadcast(s, synk.data(ROWS))
    for rank in (0, 1):
        np.testing.assert_array_equal(two.get_value(rank, s), ROWS)
    two.set_value(1, s, synk.data(-ROWS))
    np.testing.assert_array_equal(two.get_value(1, s), -ROWS)
    np.testing.assert_array_equal(two.get_value(0, s), ROWS)


def test_the_masters_rank_is_accessible(two: Pool) -> None:
    s = pytensor.shared(np.zeros(3), name="s")
    two.function([], pt.sum(s))
    two.set_value(0, s, np.ones(3))
    np.testing.assert_array_equal(two.get_value(0, s), np.ones(3))
    np.testing.assert_array_equal(s.get_value(), np.ones(3))
    np.testing.assert_array_equal(two.get_value(1, s), np.zeros(3))


def test_a_row_number_equal_to_the_length_is_refused(two: Pool) -> None:
    x, s = pt.dmatrix("x"), pytensor.shared(ROWS, name="s")
    f = two.function([x], (pt.sum(x), "sum"))
    g = two.function([], (pt.sum(s), "sum"), sliceable_shareds=[s])
    assert f(ROWS, batch=[6]) == pytest.approx(ROWS[6].sum())
    for batch in ([7], [-8], 8):
        with pytest.raises(IndexError):
            f(ROWS, batch=batch)
    for batch_s in ([7], 8):
        with pytest.raises(IndexError):
            g(batch_s=batch_s)


def test_arrays_are_taken_where_data_is(two: Pool) -> None:
    x, w = pt.dmatrix("x"), pt.dvector("w")
    f = two.function([x], (pt.sum(x.dot(w)), "sum"), bcast_inputs=[w])
    wanted = pytest.approx(ROWS.sum())
    assert f(ROWS, np.ones(3)) == wanted
    assert f(ROWS.tolist(), [1.0, 1, 1]) == wanted
    assert f(synk.data(ROWS), np.ones(3)) == wanted
    s = pytensor.shared(np.zeros((1, 3)), name="s")
    two.function([], pt.sum(s))
    two.scatter(s, ROWS)
    np.testing.assert_array_equal(two.gather(s, nd_up=0), ROWS)


def descriptors() -> list[int]:
    """How many files this process and each of its children have open."""
    folders = [Path(f"/proc/{process}/fd") for process in (os.getpid(), *sorted(descendants()))]
    return [len([*folder.iterdir()]) for folder in folders]


@pytest.mark.parametrize("make", [np.asarray, synk.data], ids=["array", "Data"])
def test_fresh_minibatches_leave_no_memory_behind(two: Pool, make: object) -> None:
    x = pt.dmatrix("x")
    f = two.function([x], (pt.sum(x), "sum"))
    counts = []
    for _ in range(2):
        for number in range(20):
            rows = np.full((50, 3), float(number))
            assert f(make(rows)) == rows.sum()  # type: ignore[operator]
        counts.append(descriptors())
    assert counts[0] == counts[1]


def test_workers_drop_different_units(two: Pool) -> None:
    x = pt.dmatrix("x")
    random = pt.random.RandomStream(3)
    with pytest.raises(ValueError, match="row_index"):
        two.function([x], pt.mean(x * random.uniform(size=x.shape)))
    from tandem.ops import dropout

    dropped = dropout(x, 3, 0, synk.row_index(), rate=0.5, layer=0)
    f = two.function([x], (dropped, "gather"))
    kept = f(np.ones((40, 8)))
    assert 0 < kept.mean() < 1
    assert not np.array_equal(kept[:20], kept[20:])
    np.testing.assert_array_equal(kept, f.as_theano(np.ones((40, 8))))


def test_without_nccl_variables_are_reduced(two: Pool) -> None:
    s = pytensor.shared(np.ones(3), name="s")
    two.function([], pt.sum(s))
    for nccl in (True, False):
        two.broadcast(s, np.ones(3))
        two.all_reduce(s, "sum", nccl)
        np.testing.assert_array_equal(two.get_value(1, s), np.full(3, 2.0))


def test_functions_may_follow_distribute(two: Pool) -> None:
    x = pt.dmatrix("x")
    for factor in (1.0, 2.0):
        f = two.function([x], (pt.sum(factor * x), "sum"))
        two.distribute()
        two.distribute()
        assert f(ROWS) == pytest.approx(factor * ROWS.sum())


def test_a_chain_of_many_ops_reaches_the_workers(two: Pool) -> None:
    x = pt.dmatrix("x")
    y = x
    for _ in range(500):
        y = pt.sin(y)
    f = two.function([x], (pt.max(y), "max"), mode="FAST_COMPILE")
    wanted = ROWS
    for _ in range(500):
        wanted = np.sin(wanted)
    assert f(ROWS) == pytest.approx(wanted.max())


def test_one_worker_is_enough(one: Pool) -> None:
    x = pt.dmatrix("x")
    assert one.function([x], (pt.sum(x), "sum"))(ROWS) == pytest.approx(ROWS.sum())


@pytest.mark.slow
def test_a_killed_worker_is_reported_and_nobody_waits() -> None:
    before = descendants()
    x = pt.dmatrix("x")
    with Pool(2, use_gpu=False, threads=1) as pool:
        f = pool.function([x], (pt.sum(x), "sum"))
        f(ROWS)
        (worker,) = descendants() - before
        os.kill(worker, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(WorkerLost, match=r"worker 1 .*(SIGKILL|signal 9)"):
            f(ROWS)
        assert time.monotonic() - began < 5
        with pytest.raises(RuntimeError):
            f(ROWS)
