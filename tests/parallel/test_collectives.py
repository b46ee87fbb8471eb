"""Collectives on private and resident variables, and the rows from which these were computed."""

import os
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import tandem.parallel as synk
from tandem.errors import InputError
from tandem.memory import HostBuffer
from tandem.parallel import Pool
from tandem.parallel.messages import Extent
from tandem.parallel.residents import HostResidents
from tandem.split import edges
from tests.support.tiny import open_files

ROWS = np.random.default_rng(11).normal(size=(11, 3))
OPS = ("avg", "sum", "prod", "max", "min")

Make = Callable[..., Any]


@pytest.fixture(params=["private", "resident"])
def make(request: pytest.FixtureRequest, pool: Pool) -> Iterator[Make]:
    """Makes a shared variable that all ranks have, each with its own value: rank, rank + 1, ..."""

    def variable(shape: Sequence[int] = (4,), dtype: str = "float64", name: str = "v") -> Any:
        zeros = np.zeros(shape, dtype)
        found = pool.shared(zeros, name) if request.param == "resident" else shared(zeros, name)
        for rank, value in enumerate(values(pool, shape, dtype)):
            pool.set_value(rank, found, value)
        return found

    return iter([variable]).__next__()


def shared(value: Any, name: str = "v") -> Any:
    """A private variable whose shape is free."""
    return pytensor.shared(np.asarray(value), name)


def values(pool: Pool, shape: Sequence[int] = (4,), dtype: str = "float64") -> list[np.ndarray]:
    """What `make` gives the ranks."""
    count = int(np.prod(shape))
    numbers = [np.arange(count) / (1 if dtype.startswith("int") else 3) + r for r in range(3)]
    return [n.reshape(shape).astype(dtype) for n in numbers[: pool.ranks]]


def every(pool: Pool, variable: Any) -> list[np.ndarray]:
    return [pool.get_value(rank, variable) for rank in range(pool.ranks)]


def equal(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> None:
    assert len(found) == len(expected)
    for value, wanted in zip(found, expected, strict=True):
        np.testing.assert_array_equal(value, wanted, strict=True)


def reduced(op: str, found: Sequence[np.ndarray], weights: Sequence[float] = ()) -> np.ndarray:
    if op == "avg":
        return np.average(found, axis=0, weights=weights or None)
    fold = {"sum": np.sum, "prod": np.prod, "max": np.max, "min": np.min}[op]
    return (
        np.asarray(fold(found, axis=0, dtype=found[0].dtype))
        if op in ("sum", "prod")
        else (np.asarray(fold(found, axis=0)))
    )


# Each of them


@pytest.mark.parametrize("shape", [(4,), (), (0,), (2, 3)])
def test_every_rank_has_its_value(pool: Pool, make: Make, shape: tuple[int, ...]) -> None:
    v = make(shape)
    equal(every(pool, v), values(pool, shape))
    equal([v.get_value()], values(pool, shape)[pool.master_rank :][:1])
    assert pool.get_shapes(v) == [shape] * pool.ranks
    if shape:
        assert pool.get_lengths([v]) == [[shape[0]] * pool.ranks]


def test_a_value_is_a_copy(pool: Pool, make: Make) -> None:
    v = make()
    for rank in range(pool.ranks):
        pool.get_value(rank, v)[...] = -1
    joined = pool.gather(v)
    joined[...] = -1
    pool.reduce(v, "sum", in_place=False)[...] = -1
    equal(every(pool, v), values(pool))


def test_values_may_be_the_memory_of_residents(pool: Pool) -> None:
    one, other = pool.shared(np.arange(4.0)), pool.shared(np.ones(4))
    pool.broadcast([one, other], [v.get_value(borrow=True) for v in (other, one)])
    equal(every(pool, one), [np.ones(4)] * pool.ranks)
    equal(every(pool, other), [np.arange(4.0)] * pool.ranks)
    pool.broadcast(other, other.get_value(borrow=True)[::-1])
    equal(every(pool, other), [np.arange(4.0)[::-1]] * pool.ranks)
    private = shared(np.zeros(4))
    pool.broadcast([one, private], [np.full(4, 7.0), one.get_value(borrow=True)])
    equal(every(pool, private), [np.ones(4)] * pool.ranks)


@pytest.mark.parametrize("make_value", [np.asarray, np.ndarray.tolist, synk.data])
def test_values_of_every_kind_are_set(pool: Pool, make: Make, make_value: Make) -> None:
    v, new = make((2, 3)), np.arange(6.0).reshape(2, 3) / 7
    rows = np.arange(6.0 * pool.ranks).reshape(-1, 3) / 7
    pool.broadcast(v, make_value(new))
    equal(every(pool, v), [new] * pool.ranks)
    pool.scatter(v, make_value(rows))
    equal(every(pool, v), [rows[2 * r : 2 * r + 2] for r in range(pool.ranks)])
    last = pool.ranks - 1
    pool.set_value(last, v, make_value(-new))
    equal(every(pool, v)[:last], [rows[2 * r : 2 * r + 2] for r in range(last)])
    equal(every(pool, v)[last:], [-new])
    pool.set_value(0, v, make_value(rows), batch=[1, 0])
    equal(every(pool, v)[:1], [rows[[1, 0]]])
    pool.scatter(v, make_value(rows), batch=slice(None, None, -1))
    equal([pool.gather(v, nd_up=0)], [rows[::-1]])


def test_numbers_are_values(pool: Pool) -> None:
    """As inputs, where they are represented exactly."""
    v, n = shared(np.zeros(3, "float32")), shared(np.float32(0), "n")
    pool.broadcast([v, n], [[1, 2, 3], 2.5])
    equal(every(pool, v), [np.array([1, 2, 3], "float32")] * pool.ranks)
    equal(every(pool, n), [np.array(2.5, "float32")] * pool.ranks)
    with pytest.raises(TypeError, match="'v' is float32 with 1 axis; got what is no array"):
        pool.broadcast(v, [[1], [2, 3]])
    with pytest.raises(TypeError, match="'v' is float32 with 1 axis; got float64 with 1 axis"):
        pool.broadcast(v, [0.1, 0.2, 0.3])


def test_the_masters_value_is_broadcast(pool: Pool, make: Make) -> None:
    v = make()
    pool.broadcast(v)
    equal(every(pool, v), [values(pool)[pool.master_rank]] * pool.ranks)
    v.set_value(np.full(4, 7.0))
    pool.broadcast([v], [None])
    equal(every(pool, v), [np.full(4, 7.0)] * pool.ranks)


def test_values_are_gathered(pool: Pool, make: Make) -> None:
    v = make((2, 3))
    equal([pool.gather(v)], [np.stack(values(pool, (2, 3)))])
    equal([pool.gather(v, nd_up=0)], [np.concatenate(values(pool, (2, 3)))])
    equal(every(pool, v), values(pool, (2, 3)))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "complex64", "int64", "int8"])
def test_values_are_reduced(pool: Pool, make: Make, op: str, dtype: str) -> None:
    if op == "avg" and dtype.startswith("int"):
        return
    if op in ("max", "min") and dtype.startswith("complex"):
        return
    v = make((7,), dtype)
    expected = reduced(op, values(pool, (7,), dtype))
    result = pool.reduce(v, op, in_place=False)
    widened = op in ("sum", "prod") and dtype.startswith("int")
    assert result.dtype == ("int64" if widened else dtype)
    expected = getattr(np, op)(values(pool, (7,), dtype), axis=0) if widened else expected
    tolerance = {"float64": 1e-12, "float16": 2e-3}.get(dtype, 1e-6)
    np.testing.assert_allclose(result, expected, rtol=tolerance)
    equal(every(pool, v), values(pool, (7,), dtype))
    assert pool.reduce(v, f"c_{op}") is None
    after = values(pool, (7,), dtype)
    after[pool.master_rank] = result.astype(dtype)  # in place it wraps
    equal(every(pool, v), after)
    for rank, value in enumerate(values(pool, (7,), dtype)):
        pool.set_value(rank, v, value)
    pool.all_reduce(v, op)
    equal(every(pool, v), [result.astype(dtype)] * pool.ranks)
    pool.all_reduce(v, f"c_{op}", nccl=False)


def test_scalars_and_nothing_are_reduced(pool: Pool, make: Make) -> None:
    for shape in ((), (0,), (1,)):
        v = make(shape)
        pool.all_reduce(v, "sum")
        equal(every(pool, v), [reduced("sum", values(pool, shape)).reshape(shape)] * pool.ranks)


def test_several_at_once_and_by_name(pool: Pool) -> None:
    a, b = shared(np.zeros(2), f"a {id(pool)}"), pool.shared(np.zeros((2, 2)), f"b {id(pool)}")
    c = shared(np.int64(3), f"c {id(pool)}")
    three = [a, b.name, c]
    pool.broadcast([a, b, c])
    assert pool.broadcast(three, [[1.0, 2.0], None, synk.data(np.int64(4))]) is None
    found = pool.get_value(0, (a.name, c.name))
    equal(found, [np.array([1.0, 2]), np.array(4)])
    assert pool.get_shapes(three) == [[s] * pool.ranks for s in ((2,), (2, 2), ())]
    pool.all_reduce(three, "sum")
    equal([a.get_value()], [np.array([1.0, 2]) * pool.ranks])
    assert c.get_value() == 4 * pool.ranks
    assert len(pool.gather(three)) == 3
    assert len(pool.reduce([a], in_place=False)) == 1


# Private variables


def test_shapes_may_differ(pool: Pool) -> None:
    v = shared(np.zeros((0, 3)))
    pool.scatter(v, ROWS)
    bounds = edges(len(ROWS), pool.ranks)
    lengths = [hi - lo for lo, hi in pairwise(bounds)]
    assert pool.get_lengths(v) == lengths
    assert pool.get_shapes(v) == [(length, 3) for length in lengths]
    equal(every(pool, v), [ROWS[lo:hi] for lo, hi in pairwise(bounds)])
    equal([pool.gather(v, nd_up=0)], [ROWS])
    if pool.ranks > 1:
        for refused in (pool.gather, pool.reduce, pool.all_reduce):
            with pytest.raises(ValueError, match="'v' has different shapes"):
                refused(v)
    pool.all_gather(v)
    equal(every(pool, v), [ROWS] * pool.ranks)
    pool.all_reduce(v)
    assert pool.get_shapes(v) == [(11, 3)] * pool.ranks
    pool.set_value(pool.ranks - 1, v, ROWS[:2])
    assert pool.get_lengths(v)[-1] == 2
    pool.broadcast(v, ROWS[:5])
    assert pool.get_lengths(v) == [5] * pool.ranks


def test_the_master_changes_a_shape(pool: Pool) -> None:
    v = shared(np.zeros((2, 3)))
    pool.broadcast(v)
    v.set_value(ROWS)
    assert pool.get_lengths(v)[pool.master_rank] == 11
    np.testing.assert_array_equal(pool.get_value(pool.master_rank, v), ROWS)
    pool.broadcast(v)
    equal(every(pool, v), [ROWS] * pool.ranks)


def test_all_gather_changes_the_shape(pool: Pool) -> None:
    v = shared(np.ones((1, 2)))
    pool.all_gather([v])
    assert pool.get_shapes(v) == [(pool.ranks, 2)] * pool.ranks


# Resident variables


def test_a_flat_vector_and_its_parts(pool: Pool) -> None:
    made = pool.flat({"w": (2, 3), "b": (3,), "n": ()}, "float32", "all")
    assert sorted(made.views) == ["b", "n", "w"]
    assert not made.vector.get_value().any()
    for rank in range(pool.ranks):
        pool.set_value(rank, made.views["w"], np.full((2, 3), rank, "float32"))
        pool.set_value(rank, made.views["b"], np.full(3, 2 * rank, "float32"))
    pool.all_reduce(made.vector, "sum")
    total = sum(range(pool.ranks))
    for rank in range(pool.ranks):
        assert (pool.get_value(rank, made.views["w"]) == total).all()
        assert (pool.get_value(rank, made.views["b"]) == 2 * total).all()
    made.vector.zero() if hasattr(made.vector, "zero") else None
    assert not made.views["w"].get_value().any()


def test_residents_grow_in_number(pool: Pool) -> None:
    """Memory is enlarged while earlier variables are in use."""
    first = pool.shared(np.arange(5.0), "first")
    x = pt.dmatrix("x")
    f = pool.function([x], (x.sum() + first.sum(), "gather"), updates=[(first, first + 1)])
    f(ROWS)
    more = [pool.shared(np.full(300_000, float(number))) for number in range(3)]
    f(ROWS)
    pool.all_reduce([first, *more])
    equal(every(pool, first), [np.arange(5.0) + 2] * pool.ranks)
    for number, variable in enumerate(more):
        for value in every(pool, variable):
            assert (value == number).all()


def test_residents_beyond_half_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that is refused leaves those that fit."""
    residents, kind = HostResidents(), np.dtype("u1")
    residents.join([HostBuffer.create(), HostBuffer.create()], 0)
    pages = {"SC_PHYS_PAGES": 8, "SC_PAGE_SIZE": 1 << 20}
    monkeypatch.setattr("os.sysconf", pages.__getitem__)
    assert residents.allocate(5 << 20, kind) == (0, 0)
    assert residents.allocate(2 << 20, kind) == (0, 5 << 20)
    with pytest.raises(InputError, match="this machine has 8 MiB of memory"):
        residents.allocate(2 << 20, kind)
    assert residents.allocate(1 << 20, kind) == (0, 7 << 20)


# Rows


@pytest.fixture
def averaged(pool: Pool, make: Make) -> tuple[Any, Any]:
    """A variable, and a function that sets it to its rows' mean."""
    x, v = pt.dmatrix("x"), make((3,), name="mean")
    return v, pool.function([x], updates=[(v, x.mean(axis=0))])


def equally(rows: np.ndarray, ranks: int) -> np.ndarray:
    return np.mean([rows[lo:hi].mean(axis=0) for lo, hi in pairwise(edges(len(rows), ranks))], 0)


def test_an_average_weighs_by_rows(pool: Pool, averaged: Any) -> None:
    v, f = averaged
    for rows in (ROWS, ROWS[:4], ROWS[:1], ROWS[:9]):
        f(rows)
        inner = pool.reduce(v, in_place=False)
        pool.all_reduce(v)
        np.testing.assert_allclose(v.get_value(), rows.mean(axis=0), rtol=1e-12)
        equal(every(pool, v), [inner] * pool.ranks)
    f(ROWS, batch=[1, 2, 3, 4], num_slices=2)
    pool.reduce(v)
    np.testing.assert_allclose(v.get_value(), ROWS[1:5].mean(axis=0), rtol=1e-12)


def test_equal_and_given_weights(pool: Pool, averaged: Any) -> None:
    v, f = averaged
    f(ROWS)
    before = every(pool, v)
    np.testing.assert_allclose(
        pool.reduce(v, in_place=False, weights="equal"), equally(ROWS, pool.ranks), rtol=1e-12
    )
    given = [float(rank + 1) for rank in range(pool.ranks)]
    for weights in (given, tuple(given), np.array(given)):
        result = pool.reduce(v, in_place=False, weights=weights)
        np.testing.assert_allclose(result, np.average(before, axis=0, weights=given), rtol=1e-12)
    only = [0.0] * (pool.ranks - 1) + [2.0]
    pool.all_reduce(v, weights=only)
    equal(every(pool, v), [before[-1]] * pool.ranks)


def by_collective(pool: Pool, v: Any) -> None:
    pool.set_value(pool.ranks - 1, v, np.ones(3))


def by_all_reduce(pool: Pool, v: Any) -> None:
    pool.all_reduce(v, "sum")


def by_the_user(pool: Pool, v: Any) -> None:
    v.set_value(np.full(3, 5.0))


def by_another_function(pool: Pool, v: Any) -> None:
    pool.function([], updates=[(v, 2 * v)])()


def in_the_master(pool: Pool, v: Any) -> None:
    pool.function([], updates=[(v, 2 * v)]).as_theano()


@pytest.mark.parametrize(
    "write", [by_collective, by_all_reduce, by_the_user, by_another_function, in_the_master]
)
def test_any_other_write_clears_the_rows(pool: Pool, averaged: Any, write: Make) -> None:
    v, f = averaged
    f(ROWS)
    write(pool, v)
    expected = np.mean(every(pool, v), axis=0)
    np.testing.assert_allclose(pool.reduce(v, in_place=False), expected, rtol=1e-12)


def test_sums_leave_out_ranks_without_rows(three: Pool) -> None:
    x, v = pt.dmatrix("x"), shared(np.zeros(3))
    f = three.function([x], updates=[(v, x.sum(axis=0))])
    three.broadcast(v, [np.nan] * 3)
    f(ROWS[:2])
    np.testing.assert_allclose(
        three.reduce(v, "sum", in_place=False), ROWS[:2].sum(axis=0), rtol=1e-12
    )
    for op in ("max", "min", "prod"):
        assert np.isfinite(three.reduce(v, op, in_place=False)).all()
    three.all_reduce(v, "sum")
    np.testing.assert_allclose(v.get_value(), ROWS[:2].sum(axis=0), rtol=1e-12)


def test_sums_have_what_ranks_have_added_up_before(two: Pool) -> None:
    x, v = pt.dmatrix("x"), shared(np.zeros(3))
    f = two.function([x], updates=[(v, v + x.sum(axis=0))])
    two.broadcast(v)
    f(ROWS)
    f(ROWS[:1])  # of which one rank has none
    two.all_reduce(v, "sum")
    np.testing.assert_allclose(v.get_value(), ROWS.sum(axis=0) + ROWS[0], rtol=1e-12)


@pytest.mark.parametrize("writes", ["views", "vector", "one view"])
def test_rows_of_a_flat_vector(pool: Pool, writes: str) -> None:
    """A function writes all parts, the vector, or one part from rows; averages are of either."""
    made = pool.flat({"w": (3,), "b": (3,)}, "float64")
    x, mean = pt.dmatrix("x"), pt.dmatrix("x").mean()
    mean = x.mean()
    if writes == "views":
        updates = [(view, pt.zeros(3) + mean) for view in made.views.values()]
    elif writes == "one view":
        w, b = made.views.values()
        updates = [(w, pt.zeros(3) + mean), (b, 0.9 * b)]
    else:
        updates = [(made.vector, pt.zeros_like(made.vector) + mean)]
    f = pool.function([x], updates=updates)
    for averaged in (made.vector, made.views["w" if writes == "one view" else "b"]):
        f(ROWS)
        np.testing.assert_allclose(
            pool.reduce(averaged, in_place=False)[:3], np.full(3, ROWS.mean()), rtol=1e-12
        )
    f(ROWS)
    pool.set_value(0, made.views["w"], np.zeros(3))
    expected = np.mean(every(pool, made.vector), axis=0)
    np.testing.assert_allclose(pool.reduce(made.vector, in_place=False), expected, rtol=1e-12)
    f(ROWS)
    made.vector.set_value(np.ones_like(made.vector.get_value()))
    for written in (made.vector, *made.views.values()):
        expected = np.mean(every(pool, written), axis=0)
        np.testing.assert_allclose(pool.reduce(written, in_place=False), expected, rtol=1e-12)


def test_updates_that_use_no_row_are_equal(pool: Pool) -> None:
    x, v = pt.dmatrix("x"), shared(np.zeros(3))
    f = pool.function([x], x.mean(), updates=[(v, v + 1)])
    pool.broadcast(v)
    for rank in range(pool.ranks):
        pool.set_value(rank, v, np.full(3, float(rank)))
    f(ROWS)
    np.testing.assert_allclose(v.get_value(), pool.master_rank + 1)
    pool.all_reduce(v)
    np.testing.assert_allclose(v.get_value(), np.mean(range(pool.ranks)) + 1, rtol=1e-12)


# Errors, before any worker is told


def test_errors_change_nothing(pool: Pool, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    v, n = make((2, 3)), shared(np.zeros(2, "int64"), "n")
    other, scalar = make((2, 3), name="other"), shared(1.0, "scalar")
    ok, wide, yes = np.ones((2, 3)), np.ones((2, 3, 1)), shared(np.ones(2, bool), "yes")
    ranks = pool.ranks
    pool.broadcast([n, scalar, yes])
    cases: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (
            TypeError,
            "'v' is float64 with 2 axes",
            lambda: pool.broadcast(v, wide),
        ),
        (TypeError, "got complex128", lambda: pool.broadcast(v, 1j * ok)),
        (TypeError, "float64", lambda: pool.broadcast(n, np.ones(2))),
        (TypeError, "'n' is int64", lambda: pool.broadcast(n, synk.data(np.ones(2)))),
        (TypeError, "a list or tuple", lambda: pool.broadcast([v, n], ok)),
        (TypeError, "2 variables", lambda: pool.broadcast([v, n], [ok])),
        (TypeError, "shared variable is needed", lambda: pool.broadcast(pt.dmatrix(), ok)),
        (TypeError, "shared variable is needed", lambda: pool.gather(3)),
        (ValueError, "given twice", lambda: pool.all_reduce([v, v])),
        (ValueError, "no shared variable", lambda: pool.all_reduce("no such name")),
        (TypeError, "needs a value", lambda: pool.scatter(v, None)),
        (TypeError, "needs a value", lambda: pool.scatter([v, n], [ok, None])),
        (TypeError, "needs a value", lambda: pool.set_value(0, v, None)),
        (TypeError, "no rows", lambda: pool.scatter(scalar, 1.0)),
        (IndexError, "3 rows", lambda: pool.scatter(v, ok, batch=3)),
        (IndexError, "index 2", lambda: pool.set_value(0, v, ok, batch=[2])),
        (ValueError, "no rank", lambda: pool.set_value(ranks, v, ok)),
        (ValueError, "no rank", lambda: pool.set_value(-1, v, ok)),
        (ValueError, "no rank", lambda: pool.get_value(ranks, v)),
        (TypeError, "rank", lambda: pool.get_value("0", v)),
        (TypeError, "rank", lambda: pool.set_value(0.0, v, ok)),
        (ValueError, "nd_up", lambda: pool.gather(v, nd_up=2)),
        (ValueError, "no axis", lambda: pool.gather(scalar, nd_up=0)),
        (ValueError, "no axis", lambda: pool.all_gather(scalar)),
        (TypeError, "no first axis", lambda: pool.get_lengths(scalar)),
        (ValueError, "no reduction 'mean'", lambda: pool.all_reduce(v, "mean")),
        (ValueError, "no reduction None", lambda: pool.reduce(v, None)),
        (TypeError, "would be rounded", lambda: pool.all_reduce(n)),
        (TypeError, "would be rounded", lambda: pool.reduce(n, "c_avg")),
        (ValueError, "weights", lambda: pool.all_reduce(v, weights="row")),
        (ValueError, "weights", lambda: pool.all_reduce(v, weights=[1.0] * (ranks + 1))),
        (ValueError, "weights", lambda: pool.all_reduce(v, weights=[0.0] * ranks)),
        (ValueError, "weights", lambda: pool.all_reduce(v, weights=[-1.0] * ranks)),
        (ValueError, "weights", lambda: pool.all_reduce(v, weights=[np.nan] * ranks)),
        (ValueError, "weights", lambda: pool.all_reduce(v, "sum", weights=[1.0] * ranks)),
        (TypeError, "weights", lambda: pool.all_reduce(v, weights=3)),
        (TypeError, "weights", lambda: pool.all_reduce(v, weights=["a"] * ranks)),
        (TypeError, "bool", lambda: pool.all_reduce(yes, "sum")),
    ]
    team = pool.opened()
    before = every(pool, v)
    for error, text, call in cases:
        with monkeypatch.context() as patch:
            patch.setattr(team, "_send", forbidden)
            with pytest.raises(error, match=text):
                call()
        # Together with a variable that is fine, too.
    with pytest.raises(TypeError):
        pool.broadcast([other, v], [-ok, wide])
    equal(every(pool, v), before)
    equal(every(pool, other), before)


def forbidden(*_: object) -> None:
    raise AssertionError("a worker was told")


def test_a_residents_shape_is_fixed(pool: Pool) -> None:
    v = pool.shared(np.zeros((2, 3)), "fixed")
    for call in (
        lambda: pool.broadcast(v, np.ones((3, 3))),
        lambda: pool.set_value(0, v, np.ones((1, 3))),
        lambda: pool.scatter(v, np.ones((2 * pool.ranks + 1, 3))),
    ):
        with pytest.raises(ValueError, match="'fixed' has the shape"):
            call()
    with pytest.raises(TypeError, match="'fixed' is resident"):
        pool.all_gather(v)
    equal(every(pool, v), [np.zeros((2, 3))] * pool.ranks)


def test_a_name_of_several_variables(pool: Pool) -> None:
    pool.broadcast([shared(1.0, "twice"), shared(2.0, "twice")])
    with pytest.raises(ValueError, match="2 shared variables of this pool with the name 'twice'"):
        pool.gather("twice")


def test_variables_of_other_kinds_are_refused(pool: Pool) -> None:
    from tandem.backend import device_shared

    for variable in (pytensor.shared(np.random.default_rng(0)), device_shared(np.ones(2))):
        with pytest.raises(TypeError):
            pool.broadcast(variable)


# Memory


def mappings(pid: int) -> int:
    return len(Path(f"/proc/{pid}/maps").read_text().splitlines())


def workers(pool: Pool) -> list[int]:
    if not pool.opened().sees_memory:
        pytest.skip("of processes of this machine")
    return [handle.process.pid for handle in pool.opened()._pool.handles]  # type: ignore[union-attr]


def test_freed_data_is_dropped_by_all(two: Pool) -> None:
    """Over 200 fresh minibatches neither descriptors nor mappings add up, in any process."""
    x, v = pt.dmatrix("x"), shared(np.zeros((4, 3)))
    f = two.function([x], (x.sum(), "sum"))
    counts = []
    for start in (0, 20, 200):
        for number in range(start, start + 20 if start < 200 else 400):
            minibatch = synk.data(np.full((4, 3), float(number)), minibatch=True)
            assert f(minibatch) == f(np.full((4, 3), float(number))) == 12 * number
            two.broadcast(v, minibatch)
        del minibatch
        f(ROWS)
        pids = [os.getpid(), *workers(two)]
        counts.append([(open_files(pid), mappings(pid)) for pid in pids])
    first, *_, last = counts
    for before, after in zip(first, last, strict=True):
        assert after[0] <= before[0] + 1
        assert after[1] <= before[1] + 5


def test_a_call_that_repeats_drops_what_was_freed(two: Pool) -> None:
    x, v = pt.dmatrix("x"), shared(np.ones(3))
    of_rows, repeats = two.function([x], (x.sum(), "sum")), two.function([], (v.sum(), "sum"))
    rows = synk.data(ROWS)
    of_rows(rows)
    repeats()
    (pid,) = workers(two)
    before = open_files(pid)
    del rows
    repeats()
    assert open_files(pid) < before


def test_data_that_is_freed_and_used_again(two: Pool) -> None:
    x = pt.dmatrix("x")
    f = two.function([x], (x.sum(), "sum"))
    rows = synk.data(ROWS)
    for length in (11, 3, 400):
        rows.set_value(np.ones((length, 3)))
        assert f(rows) == 3 * length
        rows.set_length(1)
        assert f(rows) == 3
        rows.free_memory()
        with pytest.raises(ValueError, match="there is no row"):
            f(rows)


def test_vectors_for_which_ranks_wait_are_reduced_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a fault in one that they see leaves nobody waiting, where not all are seen."""
    tasks: list[Any] = []
    with Pool(2, use_gpu=False, threads=1) as pool:
        resident, own = pool.shared(ROWS, "resident"), shared(ROWS, "own")
        pool.set_value(1, own, ROWS)
        monkeypatch.setattr(type(pool.opened()), "sees_memory", False)
        monkeypatch.setattr(pool, "_run", lambda team, task: tasks.append(task))
        pool.all_reduce([resident, own])
    assert [type(vector.where) for vector in tasks[-1].vectors] == [int, Extent]
