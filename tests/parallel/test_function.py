"""Data-parallel functions against PyTensor's, NumPy's loops, and one rank with slices."""

import logging
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tandem.parallel as synk
from tandem.errors import InputError
from tandem.parallel import Function, Pool
from tandem.split import edges
from tests.support.faulty_ops import Raise

ROWS = np.random.default_rng(7).normal(size=(11, 3))

OPS = ("avg", "uavg", "sum", "prod", "max", "min", "gather")

COLUMNS: dict[str, Callable[[Any], Any]] = {
    "avg": lambda x: x.mean(axis=0),
    "uavg": lambda x: x.mean(axis=0),
    "sum": lambda x: x.sum(axis=0),
    "prod": lambda x: x.prod(axis=0),
    "max": lambda x: x.max(axis=0),
    "min": lambda x: x.min(axis=0),
    "gather": lambda x: 2 * x,
}
"""What each op of an output makes whole again: of NumPy's arrays, and of variables."""


def parts(rows: np.ndarray, ranks: int, slices: int = 1) -> list[np.ndarray]:
    """The rows of each slice of each rank, of those that have any."""
    found = []
    for lo, hi in pairwise(edges(len(rows), ranks)):
        found += [rows[lo + a : lo + b] for a, b in pairwise(edges(hi - lo, slices)) if b > a]
    return found


def by_loops(op: str, rows: np.ndarray, ranks: int, slices: int = 1) -> np.ndarray:
    """Fold what each part returns."""
    if op == "uavg":
        every = [part.mean(axis=0) for part in parts(rows, ranks, slices)]
        return sum(every[1:], every[0]) / len(every)
    return COLUMNS[op](rows)


def same(ranks: int, values: Sequence[Any]) -> None:
    """Assert that all ranks' values have the same bits."""
    assert len(values) == ranks
    for value in values[1:]:
        np.testing.assert_array_equal(value, values[0])


def of_all_ops(pool: Pool) -> Function:
    x = pt.dmatrix("x")
    return pool.function([x], [(COLUMNS[op](x), op) for op in OPS], name="all ops")


@pytest.mark.parametrize("slices", [1, 2, 5])
def test_every_output_op(pool: Pool, slices: int) -> None:
    results = shared_functions(pool).all_ops(ROWS, num_slices=slices)
    for op, result in zip(OPS, results, strict=True):
        expected = by_loops(op, ROWS, pool.ranks, slices)
        assert result.dtype == expected.dtype
        assert result.shape == expected.shape
        if op in ("max", "min", "gather"):
            np.testing.assert_array_equal(result, expected)
        else:
            np.testing.assert_allclose(result, expected, rtol=1e-12)


def test_ops_by_way_of_the_cpu_are_the_same(pool: Pool) -> None:
    x = pt.dmatrix("x")
    f = pool.function([x], [(COLUMNS[op](x), f"c_{op}") for op in OPS])
    for result, plain in zip(f(ROWS), shared_functions(pool).all_ops(ROWS), strict=True):
        np.testing.assert_array_equal(result, plain)


def test_the_masters_own_output(pool: Pool) -> None:
    x = pt.dmatrix("x")
    f = pool.function([x], [(x.sum(axis=0), None), (x.shape[0], None)])
    bounds = edges(len(ROWS), pool.ranks)
    lo, hi = bounds[pool.master_rank : pool.master_rank + 2]
    total, count = f(ROWS)
    np.testing.assert_allclose(total, ROWS[lo:hi].sum(axis=0), rtol=1e-12)
    assert count == hi - lo
    last = edges(hi - lo, 2)[1]
    np.testing.assert_allclose(f(ROWS, num_slices=2)[0], ROWS[lo + last : hi].sum(axis=0))


def test_the_masters_own_output_without_rows(two: Pool) -> None:
    x = pt.dmatrix("x")
    f = two.function([x], [(x.sum(), None), (x.sum(), "sum")])
    nothing, total = f(ROWS[:1])
    assert nothing is None
    assert total == pytest.approx(ROWS[0].sum())


def test_sums_of_integers_are_exact(pool: Pool) -> None:
    x = pt.lvector("x")
    numbers = np.arange(1, 20) * 10**17
    f = pool.function([x], [(x.sum(), "sum"), (x.prod(), "prod"), (x.max(), "max")])
    total, product, most = f(numbers, num_slices=3)
    assert total == numbers.sum()
    assert product == numbers.prod()
    assert most == numbers.max()


def test_sums_of_narrow_integers_widen(pool: Pool) -> None:
    x = pt.bvector("x")
    f = pool.function([x], [(x.max(), "sum"), (x.max(), "prod")])
    numbers = np.full(8, 100, np.int8)
    for slices in (1, 2):
        found, parts = f(numbers, num_slices=slices), slices * pool.ranks
        assert [value.dtype for value in found] == [np.int64] * 2
        assert found == [100 * parts, 100**parts]


def test_a_masked_array_is_refused(pool: Pool) -> None:
    x = pt.dvector("x")
    with pytest.raises(InputError, match=r"input 0 \(x\): found a masked array with 1 of 3"):
        pool.function([x], x.sum())(np.ma.masked_equal([1.0, 2.0, 3.0], 2))
    for take in (synk.data, pool.shared, lambda value: pool.broadcast(pool.shared(ROWS), value)):
        with pytest.raises(InputError, match="found a masked array with 3 of 33"):
            take(np.ma.masked_less(ROWS, np.sort(ROWS.ravel())[3]))


def test_scalars_are_gathered_to_a_vector(pool: Pool) -> None:
    x = pt.dvector("x")
    f = pool.function([x], (x.sum(), "gather"))
    expected = [part.sum() for part in parts(ROWS[:, 0], pool.ranks, 2)]
    np.testing.assert_allclose(f(ROWS[:, 0], num_slices=2), expected, rtol=1e-12)


def test_a_result_is_the_callers(pool: Pool) -> None:
    """The next call, and writes of variables, leave it alone."""
    x, w = pt.dmatrix("x"), pool.shared(np.ones(3), "w")
    f = pool.function([x], [(2 * x, "gather"), (w, "max"), (w, None)], updates=[(w, w + 1)])
    first = f(ROWS)
    copies = [result.copy() for result in first]
    f(-ROWS)
    w.set_value(np.zeros(3))
    for result, copy in zip(first, copies, strict=True):
        np.testing.assert_array_equal(result, copy)
        result[...] = 0
    np.testing.assert_array_equal(f(ROWS)[0], 2 * ROWS)


def test_n_ranks_are_one_rank_with_n_slices(pool: Pool, one: Pool) -> None:
    """Bit for bit: outputs of every op, and variables after their average."""
    x, w = pt.dmatrix("x"), np.linspace(0.1, 1, 3)
    results = []
    for each, slices in ((pool, 1), (one, pool.ranks)):
        private, resident = pytensor.shared(w, "private"), each.shared(w, "resident")
        new = pt.exp(-x).mean(axis=0)
        f = each.function(
            [x],
            [(pt.exp(COLUMNS[op](x)), op) for op in OPS],
            updates=[(private, private * new), (resident, resident - 0.1 * new)],
        )
        found = []
        for rows in (ROWS, ROWS[:7], ROWS[::-1], ROWS[:1]):
            found += f(rows, num_slices=slices)
            each.all_reduce([private, resident])
            for variable in (private, resident):
                same(each.ranks, [each.get_value(rank, variable) for rank in range(each.ranks)])
                found.append(variable.get_value())
        results.append(found)
    for result, expected in zip(*results, strict=True):
        np.testing.assert_array_equal(result, expected)


UPDATE_OPS = ("avg", "uavg", "sum", "prod", "max", "min", "inc", None)


def folded_update(op: str | None, old: np.ndarray, rows: np.ndarray, slices: int) -> np.ndarray:
    """A rank's new value of ``old * mean(rows)`` by slices."""
    every = parts(rows, 1, slices)
    if not every:
        return old
    new = [old * part.mean(axis=0) for part in every]
    if op is None:
        return new[-1]
    if op == "inc":
        return old + sum(value - old for value in new)
    if op == "avg":
        return sum(v * len(p) for v, p in zip(new, every, strict=True)) / len(rows)
    if op == "uavg":
        return sum(new) / len(new)
    fold = {"sum": np.sum, "prod": np.prod, "max": np.max, "min": np.min}[op]
    return fold(new, axis=0)


@pytest.mark.parametrize("is_resident", [False, True], ids=["private", "resident"])
def test_every_update_op(pool: Pool, is_resident: bool) -> None:
    """Each rank writes its own, once, from the values before the call."""
    x, old = pt.dmatrix("x"), np.array([0.5, -2, 3])
    make = pool.shared if is_resident else pytensor.shared
    variables = [make(old, str(op)) for op in UPDATE_OPS]
    f = pool.function(
        [x],
        (x.sum(), "sum"),
        updates=[(v, v * x.mean(axis=0), op) for v, op in zip(variables, UPDATE_OPS, strict=True)],
    )
    bounds = edges(len(ROWS), pool.ranks)
    for slices in (1, 3):
        pool.broadcast(variables, [old] * len(variables))
        f(ROWS, num_slices=slices)
        for rank, (lo, hi) in enumerate(pairwise(bounds)):
            values = pool.get_value(rank, variables)
            for op, value in zip(UPDATE_OPS, values, strict=True):
                expected = folded_update(op, old, ROWS[lo:hi], slices)
                np.testing.assert_allclose(value, expected, rtol=1e-12)


def test_updates_that_gather_change_the_shape(pool: Pool) -> None:
    x, s = pt.dmatrix("x"), pytensor.shared(np.zeros((0, 3)), "s")
    f = pool.function([x], updates=[(s, 2 * x, "gather")])
    assert f(ROWS, num_slices=2) is None
    assert pool.get_lengths(s) == [b - a for a, b in pairwise(edges(len(ROWS), pool.ranks))]
    np.testing.assert_array_equal(pool.gather(s, nd_up=0), 2 * ROWS)


def test_an_integer_counter(pool: Pool) -> None:
    x, n = pt.dmatrix("x"), pytensor.shared(np.int64(5), "n")
    f = pool.function([x], updates=[(n, n + x.shape[0], "inc")])
    f(ROWS, num_slices=4)
    assert pool.reduce(n, "sum", in_place=False) == 5 * pool.ranks + len(ROWS)
    g = pool.function([x], updates=[(n, n + 1)])
    g(ROWS)
    with pytest.raises(TypeError, match=r"the update of 'n' is int64.* .max. to count calls"):
        g(ROWS, num_slices=2)


BATCHES = {
    "none": None,
    "int": 5,
    "numpy": np.int32(5),
    "slice": slice(2, 9),
    "step": slice(1, None, 3),
    "backwards": slice(None, None, -2),
    "list": [3, 0, -1, 3, 7],
    "array": np.array([10, 2, 2, 5], "uint8"),
    "booleans": np.arange(11) % 3 == 1,
}


@pytest.mark.parametrize("make", [np.asarray, synk.data, np.ndarray.tolist])
@pytest.mark.parametrize("kind", BATCHES)
def test_every_kind_of_batch(three: Pool, kind: str, make: Callable[[Any], Any]) -> None:
    f, batch = shared_functions(three).gather, BATCHES[kind]
    rows = make(ROWS)
    picked = ROWS[: int(batch)] if isinstance(batch, int | np.integer) else ROWS[batch]
    expected = picked.reshape(-1, 3)
    for slices in (1, 2):
        np.testing.assert_array_equal(f(rows, batch=batch, num_slices=slices), expected)


class _Functions:
    """Functions of a pool that several tests call."""

    def __init__(self, pool: Pool) -> None:
        x = pt.dmatrix("x")
        self.gather = pool.function([x], (1 * x, "gather"))
        self.all_ops = of_all_ops(pool)
        self.sliceable = pytensor.shared(np.zeros((0, 3)), "rows")
        y = pt.dmatrix("y")
        self.sliced = pool.function(
            [],
            [(COLUMNS[op](self.sliceable), op) for op in OPS],
            sliceable_shareds=[self.sliceable],
        )
        self.both = pool.function(
            [y],
            [((y * self.sliceable).sum(axis=0), "sum"), (y - self.sliceable, "gather")],
            sliceable_shareds=[self.sliceable],
        )


_MADE: dict[int, _Functions] = {}


def shared_functions(pool: Pool) -> _Functions:
    if id(pool) not in _MADE:
        _MADE[id(pool)] = _Functions(pool)
    return _MADE[id(pool)]


def test_a_batch_beyond_the_rows_is_told_to_nobody(three: Pool) -> None:
    f = shared_functions(three).gather
    calls = f.times.calls
    for batch in (12, -1, slice(0, 12), [11], [-12], np.ones(10, bool)):
        with pytest.raises(IndexError, match="batch"):
            f(ROWS, batch=batch)
    for batch in (True, 1.0, "1", [[1]], [1.0]):
        with pytest.raises((TypeError, ValueError)):
            f(ROWS, batch=batch)
    assert f.times.calls == calls
    np.testing.assert_array_equal(f(ROWS), ROWS)


def test_minibatches_hold_the_rows_already(three: Pool) -> None:
    x, y = pt.dmatrices("x", "y")
    f = three.function([x, y], (x - y, "gather"))
    picked = np.array([7, 1, 4, 4])
    minibatch = synk.data(ROWS[picked], minibatch=True)
    np.testing.assert_array_equal(f(ROWS, minibatch, batch=picked), np.zeros((4, 3)))
    np.testing.assert_array_equal(f(minibatch, 2 * ROWS, batch=picked), -ROWS[picked])
    np.testing.assert_array_equal(f(minibatch, minibatch), np.zeros((4, 3)))
    with pytest.raises(ValueError, match="a minibatch has fewer"):
        f(ROWS, minibatch, batch=5)


def test_inputs_of_records_are_taken(pool: Pool) -> None:
    records = np.zeros(4, [("label", "u1"), ("value", "f8")])  # which are not aligned
    records["value"] = range(4)
    x = pt.dvector("x")
    f = pool.function([x], (2 * x, "gather"))
    np.testing.assert_array_equal(f(records["value"]), [0, 2, 4, 6])
    w = pool.shared(records["value"], "of records")
    np.testing.assert_array_equal(w.get_value(), range(4))
    records["value"] *= 2
    pool.broadcast(w, records["value"])
    np.testing.assert_array_equal(w.get_value(), [0, 2, 4, 6])


def test_row_numbers_count_over_the_whole_call(pool: Pool) -> None:
    x = pt.dmatrix("x")
    f = pool.function([x], (pt.stack([synk.row_index(), 2 * synk.row_index()], axis=1), "gather"))
    numbers = np.arange(len(ROWS))
    for slices in (1, 3):
        np.testing.assert_array_equal(f(ROWS, num_slices=slices)[:, 0], numbers)
        np.testing.assert_array_equal(f(ROWS, num_slices=slices)[:, 1], 2 * numbers)
    np.testing.assert_array_equal(f(ROWS, batch=[5, 4, 3])[:, 0], [0, 1, 2])
    np.testing.assert_array_equal(f.as_theano(ROWS)[:, 0], numbers)
    v = pytensor.shared(ROWS)
    of_variable = pool.function([], (synk.row_index(), "gather"), sliceable_shareds=[v])
    np.testing.assert_array_equal(of_variable.as_theano(), numbers)


def test_a_variable_that_is_cut_is_not_updated(pool: Pool) -> None:
    held = pytensor.shared(np.arange(8.0), "held")
    double = pool.function([], updates=[(held, held * 2)], sliceable_shareds=[held])
    for named in ({"num_slices": 2}, {"batch_s": [0]}):
        with pytest.raises(ValueError, match=r"the function updates .held., one of its slice"):
            double(**named)


LOCAL_BATCHES = {
    "none": None,
    "int": 2,
    "numpy": np.int64(3),
    "slice": slice(1, 3),
    "step": slice(None, None, 2),
    "backwards": slice(None, None, -1),
    "list": [2, 0, 2, 1],
    "booleans": np.array([True, False, True]),
    "nothing": [],
}


def picked_rows(rows: np.ndarray, batch: Any) -> np.ndarray:
    if isinstance(batch, int | np.integer):
        return rows[:batch]
    return rows[batch].reshape(-1, 3) if batch is not None else rows


@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize("kind", LOCAL_BATCHES)
def test_every_kind_of_batch_s(pool: Pool, kind: str, slices: int) -> None:
    about, batch = shared_functions(pool), LOCAL_BATCHES[kind]
    every = np.arange(9.0 * pool.ranks).reshape(-1, 3) / 7
    pool.scatter(about.sliceable, every)
    local = [picked_rows(part, batch) for part in parts(every, pool.ranks)]
    if kind == "nothing":
        with pytest.raises(ValueError, match="there is no row"):
            about.sliced(batch_s=batch, num_slices=slices)
        return
    results = about.sliced(batch_s=batch, num_slices=slices)
    everything = np.concatenate(local)
    for op, result in zip(OPS, results, strict=True):
        if op == "uavg":
            means = [p.mean(axis=0) for rows in local for p in parts(rows, 1, slices)]
            np.testing.assert_allclose(result, np.mean(means, axis=0), rtol=1e-12)
        else:
            np.testing.assert_allclose(result, COLUMNS[op](everything), rtol=1e-12)
    total, differences = about.both(2 * everything, batch_s=batch, num_slices=slices)
    np.testing.assert_allclose(total, (2 * everything**2).sum(axis=0), rtol=1e-12)
    np.testing.assert_array_equal(differences, everything)


def test_batch_s_for_each_rank(three: Pool) -> None:
    about = shared_functions(three)
    three.scatter(about.sliceable, ROWS)  # 3, 4 and 4 rows
    each = [slice(0, 1), [], np.array([3, 1, 0])]
    expected = np.concatenate([ROWS[:1], ROWS[[10, 8, 7]]])
    for slices in (1, 2):
        results = about.sliced(batch_s=each, num_slices=slices)
        np.testing.assert_array_equal(results[OPS.index("gather")], 2 * expected)
        np.testing.assert_allclose(results[OPS.index("avg")], expected.mean(axis=0), rtol=1e-12)
    with pytest.raises(ValueError, match="2 members, for 3 workers"):
        about.sliced(batch_s=each[:2])
    for batch in ([3], [-4], 4):
        with pytest.raises(IndexError, match="batch_s of worker 0"):
            about.sliced(batch_s=batch)
    with pytest.raises(ValueError, match="'rows' has"):
        about.both(ROWS[:4], batch_s=each)
    with pytest.raises(TypeError, match="no sliceable"):
        about.gather(ROWS, batch_s=1)
    with pytest.raises(TypeError, match="no scattered input"):
        about.sliced(batch=1)


def test_sliceables_that_stand_for_a_variable(pool: Pool) -> None:
    """Also what givens compute from them is sliced."""
    x, z = pt.dmatrix("x"), pt.dmatrix("z")
    s, t = pytensor.shared(ROWS, "s"), pool.shared(np.ones((2, 3)), "t")
    f = pool.function(
        [], [(x.sum(axis=0), "sum"), (z, "gather")], givens=[(z, 3 * x)], sliceable_shareds=[(x, s)]
    )
    pool.scatter(s, ROWS)
    for slices in (1, 2):
        total, tripled = f(num_slices=slices)
        np.testing.assert_allclose(total, ROWS.sum(axis=0), rtol=1e-12)
        np.testing.assert_array_equal(tripled, 3 * ROWS)
    g = pool.function([], (t.sum(), "sum"), sliceable_shareds=[t])
    assert g(num_slices=2) == 6 * pool.ranks
    assert g(batch_s=[1]) == 3 * pool.ranks


def test_broadcast_inputs(pool: Pool) -> None:
    x, w, b = pt.dmatrix("x"), pt.dvector("w"), pt.dscalar("b")
    f = pool.function([x], (x.dot(w) + b, "gather"), bcast_inputs=[w, b])
    expected = ROWS.dot([1.0, 2, 3]) + 0.5
    vector = np.array([1.0, 2, 3])
    for first in (vector, [1, 2, 3], synk.data(vector), vector.astype("float32")):
        for slices in (1, 2):
            result = f(ROWS, first, 0.5, num_slices=slices)
            np.testing.assert_allclose(result, expected, rtol=1e-12)
    np.testing.assert_allclose(f(ROWS, b=0.5, w=vector), expected, rtol=1e-12)
    np.testing.assert_allclose(f(ROWS, vector, synk.data(0.5), batch=[2, 1]), expected[[2, 1]])
    for narrow in ("int8", "float32", "bool"):
        ones = synk.data(np.ones(3, narrow))
        result = f(synk.data(ROWS), ones, synk.data(np.ones((), narrow)))
        np.testing.assert_allclose(result, ROWS.sum(axis=1) + 1, rtol=1e-12)


def test_a_function_without_rows_is_computed_by_all(pool: Pool) -> None:
    w, s = pt.dvector("w"), pytensor.shared(np.zeros(3), "s")
    f = pool.function(
        [], [w.sum(), (w, "gather"), (s, "sum")], bcast_inputs=[w], updates={s: s + w}
    )
    mean, joined, total = f(np.arange(3.0))
    assert mean == 3
    np.testing.assert_array_equal(joined, np.tile(np.arange(3.0), pool.ranks))
    np.testing.assert_array_equal(total, np.zeros(3))
    np.testing.assert_array_equal(pool.gather(s), np.tile(np.arange(3.0), (pool.ranks, 1)))
    with pytest.raises(ValueError, match="nothing to slice"):
        f(np.arange(3.0), num_slices=2)


def test_inputs_are_cast_up(pool: Pool) -> None:
    x, n = pt.fmatrix("x"), pt.lvector("n")
    f = pool.function([x, n], [(x, "gather"), (n, "gather")])
    small, numbers = np.arange(12).reshape(4, 3).astype("int16"), np.arange(4, dtype="int8")
    for make in (np.asarray, synk.data, np.asfortranarray, lambda a: a[::-1][::-1]):
        found, counted = f(make(small), make(numbers))
        assert (found.dtype, counted.dtype) == (np.dtype("float32"), np.dtype("int64"))
        np.testing.assert_array_equal(found, small)
        np.testing.assert_array_equal(counted, numbers)
    picked, _ = f(synk.data(small), synk.data(numbers), batch=[3, 0])
    np.testing.assert_array_equal(picked, small[[3, 0]])


def test_inputs_are_refused_with_what_was_expected(pool: Pool) -> None:
    x, w = pt.fmatrix("x"), pt.lvector()
    f = pool.function([x], (x.sum(), "sum"), bcast_inputs=[w])
    fine, one = np.ones((2, 3), "float32"), np.ones(1, "int64")
    position = r"input 0 \(x\) is float32 with 2 axes; got"
    cast, made = r'cast it by astype\("float32"\)', 'make it with dtype="float32"'
    for value, remedy in ((ROWS, cast), (synk.data(ROWS), made)):
        text = rf"{position} float64 with 2 axes, \(11, 3\): {remedy}$"
        with pytest.raises(TypeError, match=text):
            f(value, one)
    for value in (fine[0], synk.data(fine[0])):
        with pytest.raises(TypeError, match=rf"{position} float32 with 1 axis, \(3,\)$"):
            f(value, one)
    for value in (np.ones(1), [1.5], synk.data(np.ones(1))):
        text = r"input 1 is int64 with 1 axis; got float64 with 1 axis, \(1,\)$"
        with pytest.raises(TypeError, match=text):
            f(fine, value)
    with pytest.raises(TypeError, match=position):
        f("text", one)
    with pytest.raises(TypeError, match=r"input 0 \(x\) is no array"):
        f([[1.0], [1.0, 2.0]], one)
    with pytest.raises(TypeError, match="missing: input 1"):
        f(fine)
    with pytest.raises(TypeError, match="3 inputs are given, the function has 2"):
        f(fine, one, one)
    with pytest.raises(TypeError, match="no input 'y'"):
        f(fine, y=one)
    with pytest.raises(TypeError, match="'x' is given twice"):
        f(fine, one, x=fine)
    assert f(fine, one) == 6


def test_known_lengths_are_checked(pool: Pool) -> None:
    """By PyTensor for one function, before any worker is told."""
    x = pt.tensor("x", shape=(None, 3), dtype="float64")
    f = pool.function([x], (x.sum(axis=0), "sum"))
    np.testing.assert_allclose(f(ROWS), ROWS.sum(axis=0))
    for value in (ROWS[:, :2], synk.data(ROWS[:, :2])):
        with pytest.raises(TypeError, match=r"\(any, 3\); got float64 with 2 axes, \(11, 2\)"):
            f(value)


def test_unequal_lengths(pool: Pool) -> None:
    x, y = pt.dmatrices("x", "y")
    f = pool.function([x, y], ((x * y).sum(), "sum"))
    with pytest.raises(ValueError, match="differ in length"):
        f(ROWS, ROWS[:5])
    with pytest.raises(ValueError, match="differ in length"):
        f.as_theano(ROWS, ROWS[:5])
    assert f(ROWS, ROWS[:5], batch=5) == pytest.approx((ROWS[:5] ** 2).sum())


def test_num_slices_is_a_number(pool: Pool) -> None:
    f = shared_functions(pool).gather
    for number in (0, -1, 1.5, True, "2", None):
        with pytest.raises(ValueError, match="num_slices"):
            f(ROWS, num_slices=number)
    np.testing.assert_array_equal(f(ROWS, num_slices=np.int8(100)), ROWS)


def test_no_row_at_all(pool: Pool) -> None:
    f = shared_functions(pool).all_ops
    with pytest.raises(ValueError, match="there is no row"):
        f(ROWS[:0])
    with pytest.raises(ValueError, match="there is no row"):
        f(ROWS, batch=[])


@pytest.mark.parametrize("is_resident", [False, True], ids=["private", "resident"])
def test_a_rank_without_rows_is_neither_called_nor_read(three: Pool, is_resident: bool) -> None:
    """Its variable keeps its bits, also a NaN's, which the average does not read."""
    x = pt.dmatrix("x")
    s = (three.shared if is_resident else pytensor.shared)(np.zeros(3), "s")
    f = three.function([x], Raise("ValueError")(x).sum(), updates=[(s, s + x.mean(axis=0))])
    three.broadcast(s)
    poison = np.array([0x7FF8DEADBEEF0001, 0xFFF0000000000000, 1], "uint64").view("float64")
    three.set_value(0, s, poison)
    three.set_value(2, s, np.zeros(3))
    f(ROWS[:2], num_slices=4)  # 0, 1 and 1 rows
    np.testing.assert_array_equal(three.get_value(0, s).view("uint64"), poison.view("uint64"))
    result = three.reduce(s, in_place=False)
    three.all_reduce(s)
    for rank in range(3):
        np.testing.assert_array_equal(three.get_value(rank, s), result)
    np.testing.assert_allclose(result, ROWS[:2].mean(axis=0), rtol=1e-12)


@pytest.mark.parametrize("slices", [1, 2])
def test_updates_that_need_no_row_are_made_without_rows(pool: Pool, slices: int) -> None:
    x, w, held = pt.dmatrix("x"), pt.dvector("w"), pytensor.shared(ROWS, "held")
    step, total = pytensor.shared(np.int64(0), "step"), pytensor.shared(0.0, "total")
    copy = pool.shared(np.zeros(2), "copy")
    counted = (step, step + 1, "max")
    f = pool.function(
        [x], x.sum(), bcast_inputs=[w], updates=[counted, (copy, w), (total, x.sum(), "sum")]
    )
    g = pool.function([], (held.sum(), "sum"), updates=[counted], sliceable_shareds=[held])
    assert f(ROWS[:1], [1.0, 2.0], num_slices=slices) == pytest.approx(ROWS[0].sum())
    assert pool.gather(step).tolist() == [1] * pool.ranks
    assert pool.gather(copy).tolist() == [[1, 2]] * pool.ranks
    others = pool.ranks - 1  # which have no row
    np.testing.assert_allclose(pool.gather(total), [0] * others + [ROWS[0].sum()])
    g(batch_s=[*[[]] * others, [0]], num_slices=slices)
    assert pool.gather(step).tolist() == [2] * pool.ranks


def test_a_subset_of_outputs(pool: Pool) -> None:
    x, s = pt.dmatrix("x"), pytensor.shared(0.0, "s")
    f = pool.function(
        [x], [(x.sum(), "sum"), (x, "gather"), (x.max(), "max")], updates=[(s, s + 1)]
    )
    for _ in range(2):
        (most,) = f(ROWS, output_subset=[2])
        assert most == ROWS.max()
        total, largest = f(ROWS, output_subset=np.array([2, 0]), num_slices=2)
        assert total == pytest.approx(ROWS.sum())
        assert largest == ROWS.max()
        assert f(ROWS, output_subset=[]) == []
        assert len(f(ROWS, output_subset=None)) == 3
    assert s.get_value() == 8
    with pytest.raises(ValueError, match="no output 3, of 3"):
        f(ROWS, output_subset=[3])
    with pytest.raises(TypeError, match="no integer"):
        f(ROWS, output_subset=["0"])
    with pytest.raises(TypeError, match="output_subset is a list of integers, not 1"):
        f(ROWS, output_subset=1)


def test_as_theano_is_serial(pool: Pool) -> None:
    x, w, s = pt.dmatrix("x"), pt.dscalar("w"), pytensor.shared(np.zeros(3), "s")
    new, output = s + w * x.mean(axis=0), pt.tanh(x).sum(axis=0)
    f = pool.function([x], [output, x.shape[0] * 1.0], bcast_inputs=[w], updates=[(s, new)])
    serial = pytensor.function([x, w], [output, x.shape[0] * 1.0], updates=[(s, new)])
    pool.distribute()
    for value in (ROWS, synk.data(ROWS), synk.data(ROWS.astype("float32"))):
        s.set_value(np.zeros(3))
        expected = [*serial(np.asarray(value, "float64"), 2.0), s.get_value()]
        s.set_value(np.zeros(3))
        found = [*f.as_theano(value, w=2), s.get_value()]
        for result, wanted in zip(found, expected, strict=True):
            np.testing.assert_allclose(result, wanted, rtol=1e-12)
    others = [rank for rank in range(pool.ranks) if rank != pool.master_rank]
    for rank in others:
        np.testing.assert_array_equal(pool.get_value(rank, s), np.zeros(3))


def test_functions_may_follow_distribute(two: Pool) -> None:
    x = pt.dmatrix("x")
    for factor in (1.0, 2.0):
        f = two.function([x], (pt.sum(factor * x), "sum"))
        two.distribute()
        two.distribute()
        assert f(ROWS) == pytest.approx(factor * ROWS.sum())


def test_outputs_come_as_they_were_asked_for(pool: Pool) -> None:
    x = pt.dmatrix("x")
    assert pool.function([x], (x.sum(), "sum"))(ROWS).shape == ()
    assert pool.function([x], x.mean())(ROWS) == pytest.approx(ROWS.mean())
    assert isinstance(pool.function([x], [x.mean()])(ROWS), list)
    assert pool.function([x], [])(ROWS) == []
    assert pool.function([x])(ROWS) is None


def test_options_and_names(pool: Pool) -> None:
    x = pt.dmatrix("x")
    f = pool.function([x], (x.sum(), "sum"), name="total", mode="FAST_COMPILE")
    assert f.name == "total"
    assert "total" in repr(f)
    assert f(ROWS) == pytest.approx(ROWS.sum())
    assert pool.function([x], x.sum()).name is None
    with pytest.raises(TypeError, match="name is a text"):
        pool.function([x], x.sum(), name=len)
    with pytest.raises(TypeError, match="no argument 'profile'"):
        pool.function([x], x.sum(), profile=True)
    with pytest.raises(TypeError, match="mode"):
        pool.function([x], x.sum(), mode=pytensor.compile.mode.Mode())
    with pytest.raises(ValueError, match="SLOW_RUN"):
        pool.function([x], x.sum(), mode="SLOW_RUN")


def test_times_are_counted(pool: Pool) -> None:
    x = pt.dmatrix("x")
    f = pool.function([x], (x.sum(), "sum"))
    for _ in range(3):
        f(ROWS)
    times = f.times
    assert times.calls == 3
    assert times.function > 0
    assert min(times.excerpt, times.straggler, times.reduce) >= 0


def test_arguments_of_function_are_refused(one: Pool) -> None:
    x, n, s = pt.dmatrix("x"), pt.lvector("n"), pytensor.shared(np.zeros(3), "s")
    noise = pt.random.normal(size=x.shape, rng=pt.random.default_rng(1))
    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (TypeError, "inputs is a list", {"inputs": x}),
        (TypeError, "a tensor variable is needed", {"inputs": [s]}),
        (TypeError, "a scattered one has rows", {"inputs": [pt.dscalar()]}),
        (ValueError, "given twice", {"inputs": [x, x]}),
        (ValueError, "the op is 'mean'", {"inputs": [x], "outputs": (x, "mean")}),
        (TypeError, "an average would be rounded", {"inputs": [n], "outputs": n.sum()}),
        (ValueError, "row_index", {"inputs": [x], "outputs": pt.mean(x * noise)}),
        (TypeError, r"\(variable, op\) is needed", {"inputs": [x], "outputs": (x, "sum", 1)}),
        (TypeError, "is needed, not 3$", {"inputs": [x], "outputs": [3]}),
        (ValueError, "the op is 'add'", {"inputs": [x], "updates": [(s, s, "add")]}),
        (TypeError, "updates", {"inputs": [x], "updates": [s]}),
        (TypeError, "sliceable_shareds", {"inputs": [], "sliceable_shareds": [x]}),
        (TypeError, "sliceable_shareds", {"inputs": [], "sliceable_shareds": [(x, s, s)]}),
    ]
    for error, text, arguments in cases:
        with pytest.raises(error, match=text):
            one.function(**arguments)


def test_uneven_rows_are_logged_once(
    two: Pool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(two, "_has_logged_weights", False)
    x, s = pt.dmatrix("x"), pytensor.shared(np.zeros(3), "s")
    f = two.function([x], updates=[(s, x.mean(axis=0))])
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            f(ROWS)
            two.all_reduce(s)
    (record,) = [r for r in caplog.records if "averaged by the rows" in r.getMessage()]
    assert "'s' is averaged" in record.getMessage()
    assert "[5, 6]" in record.getMessage()


@st.composite
def calls(draw: st.DrawFn, ranks: int) -> tuple[int, Any, int]:
    """A length, a batch and a number of slices."""
    length = draw(st.integers(0, 3 * ranks + 1))
    numbers = st.integers(-length, max(0, length - 1))
    edge = st.integers(-length, length)
    batch = draw(
        st.one_of(
            st.none(),
            st.integers(0, length),
            st.builds(slice, edge, edge, st.sampled_from([None, 1, 2, 3])),
            st.lists(numbers, max_size=3 * ranks if length else 0),
            st.lists(st.booleans(), min_size=length, max_size=length).map(
                lambda mask: np.array(mask, bool)
            ),
        )
    )
    return length, batch, draw(st.integers(1, 4))


def check_a_call(pool: Pool, call: tuple[int, Any, int], by_data: bool) -> None:
    length, batch, slices = call
    f, rows = shared_functions(pool).all_ops, np.random.default_rng(length).normal(size=(length, 3))
    taken = rows if batch is None else rows[:batch] if isinstance(batch, int) else rows[batch]
    taken = taken.reshape(-1, 3)
    given_rows = synk.data(rows) if by_data else rows
    if not len(taken):
        with pytest.raises(ValueError, match="there is no row"):
            f(given_rows, batch=batch, num_slices=slices)
        return
    for op, result in zip(OPS, f(given_rows, batch=batch, num_slices=slices), strict=True):
        expected = by_loops(op, taken, pool.ranks, slices)
        if op in ("max", "min", "gather"):
            np.testing.assert_array_equal(result, expected)
        else:
            np.testing.assert_allclose(result, expected, rtol=1e-12, atol=1e-14)


quick = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@quick
@given(data=st.data(), by_data=st.booleans())
def test_any_call(one: Pool, two: Pool, three: Pool, data: st.DataObject, by_data: bool) -> None:
    pool = data.draw(st.sampled_from([one, two, three]))
    check_a_call(pool, data.draw(calls(pool.ranks)), by_data)


@pytest.mark.slow
def test_any_call_on_four_ranks() -> None:
    with Pool(4, use_gpu=False, threads=1, master_rank=3) as four:

        @settings(quick, max_examples=1000)
        @given(call=calls(4), by_data=st.booleans())
        def check(call: tuple[int, Any, int], by_data: bool) -> None:
            check_a_call(four, call, by_data)

        check()


@pytest.mark.slow
@settings(quick, max_examples=1500)
@given(data=st.data(), by_data=st.booleans())
def test_any_call_many_times(
    one: Pool, two: Pool, three: Pool, data: st.DataObject, by_data: bool
) -> None:
    pool = data.draw(st.sampled_from([one, two, three]))
    check_a_call(pool, data.draw(calls(pool.ranks)), by_data)
