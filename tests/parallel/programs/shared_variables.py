"""Shared variables that differ between workers: python shared_variables.py 2"""

import sys
from itertools import pairwise

import numpy as np
import pytensor as theano
import pytensor.tensor as T

import tandem.parallel as synk

WORKERS = int(sys.argv[1])
LAST = WORKERS - 1
rng = np.random.default_rng(WORKERS)
points = rng.normal(size=(10 * WORKERS + 3, 4))
labels = rng.integers(0, 9, len(points))
sizes = [len(points) * (i + 1) // WORKERS - len(points) * i // WORKERS for i in range(WORKERS)]
starts = np.cumsum([0, *sizes])
shares = [points[a:b] for a, b in pairwise(starts)]

assert synk.fork(devices=["cpu"] * WORKERS, threads=1) == WORKERS
s_x = theano.shared(np.ones((5, 4)), name="s_x")
s_n = theano.shared(np.zeros(5, np.int64), name="s_n")
weights = theano.shared(np.zeros((4, 2)), name="weights")
resident = synk.shared(np.arange(6.0).reshape(3, 2), name="resident")
p, n = T.dmatrix("p"), T.lvector("n")

# Sliceable variables: named themselves, or in the place of an input by way of givens.
f = synk.function(
    [],
    [T.mean(s_x.dot(weights), axis=0), (T.sum(s_x, axis=0), "sum"), (s_x[:, 0], "gather")],
    sliceable_shareds=[s_x],
)
g = synk.function(
    [],
    [(T.max(n), "max"), (T.sum(p * n[:, None]), "sum")],
    givens=[(p, s_x), (n, s_n)],
    sliceable_shareds=[s_x, s_n],
)
beside = synk.function([n], (T.sum(s_x[:, 0] * n), "sum"), sliceable_shareds=[s_x])
of_resident = synk.function([p], (T.sum(p[:, :3].dot(resident)), "sum"))
synk.distribute()

assert synk.get_lengths(s_x) == [5] * WORKERS
assert [tuple(shape) for shape in synk.get_shapes(s_x)] == [(5, 4)] * WORKERS

# Scatter, gather: arrays and Data, one variable and several, selected rows.
synk.scatter(s_x, points)
assert synk.get_lengths(s_x) == sizes
np.testing.assert_array_equal(synk.gather(s_x, nd_up=0), points)
synk.scatter([s_x, s_n], [synk.data(points[::-1]), labels])
np.testing.assert_array_equal(synk.gather(s_x, nd_up=0), points[::-1])
np.testing.assert_array_equal(synk.gather([s_n], nd_up=0)[0], labels)
for batch in (10, slice(0, 8), slice(None, None, 2), [3, 1, 2, 2, 0], np.arange(6)[::-1]):
    rows = slice(batch) if isinstance(batch, int) else batch
    synk.scatter(s_x, points, batch=batch)
    np.testing.assert_array_equal(synk.gather(s_x, nd_up=0), points[rows])
synk.scatter([s_x, s_n], [points, synk.data(labels)])

# Broadcast: the master's own value, an array, Data.
matrix = rng.normal(size=(4, 2))
weights.set_value(matrix)
synk.broadcast("weights")
synk.broadcast([weights, resident], [synk.data(2 * matrix), np.ones((3, 2))], nccl=False)
for rank in range(WORKERS):
    np.testing.assert_array_equal(synk.get_value(rank, weights), 2 * matrix)
    np.testing.assert_array_equal(synk.get_value(rank, resident), np.ones((3, 2)))
synk.broadcast(weights, matrix)
assert np.shape(synk.gather(weights, nccl=False)) == (WORKERS, 4, 2)

# Whole variables, and what `batch_s` selects within each worker, with and without slices.
wanted = [points.dot(matrix).mean(0), points.sum(0), points[:, 0]]
local = rng.integers(0, 10, 7)
by_worker = [slice(i, 6 + i) for i in range(WORKERS)]
lists = [rng.integers(0, 10, 3 + i) for i in range(WORKERS)]
CASES = [
    (None, [slice(None)] * WORKERS),
    (4, [slice(4)] * WORKERS),
    (slice(2, 9), [slice(2, 9)] * WORKERS),
    (local, [local] * WORKERS),
    (local.tolist(), [local] * WORKERS),
    (by_worker, by_worker),
    (lists, lists),
    ([one.tolist() for one in lists], lists),
]
for batch_s, taken in CASES:
    if WORKERS == 1 and isinstance(batch_s, list) and isinstance(batch_s[0], int):
        continue  # covered by the array
    rows = np.concatenate([share[one] for share, one in zip(shares, taken, strict=True)])
    for slices in (1, 3, 20):
        mean, total, gathered = f(batch_s=batch_s, num_slices=slices)
        np.testing.assert_allclose(mean, rows.dot(matrix).mean(0), rtol=1e-12)
        np.testing.assert_allclose(total, rows.sum(0), rtol=1e-12, atol=1e-12)
        np.testing.assert_array_equal(gathered, rows[:, 0])
highest, total = g()
assert highest == labels.max()
np.testing.assert_allclose(total, (points * labels[:, None]).sum(), rtol=1e-12)
highest, total = g(batch_s=slice(0, 5), num_slices=2)
chosen = np.concatenate([np.arange(a, a + 5) for a in starts[:-1]])
assert highest == labels[chosen].max()
np.testing.assert_allclose(total, (points * labels[:, None])[chosen].sum(), rtol=1e-12)
np.testing.assert_allclose(beside(labels), (points[:, 0] * labels).sum(), rtol=1e-12)

# Access by rank, the master's too; values that differ between workers.
for rank in range(WORKERS):
    synk.set_value(rank, s_x, np.full((2, 4), float(rank)))
    assert (synk.get_value(rank, s_x) == rank).all()
synk.set_value(0, s_x, points, batch=[2, 0])
np.testing.assert_array_equal(synk.get_value(0, s_x), points[[2, 0]])
synk.set_value(
    rank=LAST, shared_vars=[weights, resident], values=[synk.data(-matrix), [[7.0, 7]] * 3]
)
np.testing.assert_array_equal(synk.get_value(LAST, [weights])[0], -matrix)
assert (synk.get_value(LAST, resident) == 7).all()
assert synk.get_value(0, resident)[0, 0] == (7 if WORKERS == 1 else 1)
synk.broadcast([weights, resident], [matrix, np.ones((3, 2))])
np.testing.assert_allclose(of_resident(points), 2 * points[:, :3].sum(), rtol=1e-12, atol=1e-12)

# Reductions: of one variable or several, in place or not, every op.
numbers = theano.shared(np.zeros(3), name="numbers")
counts = synk.shared(np.zeros(2, np.int64), name="counts")
keep = synk.function([], T.sum(numbers) + T.sum(counts))
values = rng.normal(size=(WORKERS, 3))
whole = rng.integers(1, 9, (WORKERS, 2))


def reset():
    for rank in range(WORKERS):
        synk.set_value(rank, [numbers, counts], [values[rank], whole[rank]])


OPS = {"avg": np.mean, "sum": np.sum, "prod": np.prod, "max": np.max, "min": np.min}
for op, oracle in OPS.items():
    variables, found = (
        ([numbers], [values]) if op == "avg" else ([numbers, counts], [values, whole])
    )
    for in_place in (False, True):
        reset()
        results = synk.reduce(variables, op=op, in_place=in_place, nccl=False)
        if in_place:
            results = [synk.get_value(0, one) for one in variables]
        for result, one in zip(results, found, strict=True):
            np.testing.assert_allclose(result, oracle(one, axis=0), rtol=1e-12)
        if not in_place:
            np.testing.assert_array_equal(synk.get_value(0, numbers), values[0])
        if WORKERS > 1:
            np.testing.assert_array_equal(synk.get_value(LAST, numbers), values[LAST])
    reset()
    synk.all_reduce(variables, op=op, nccl=False)
    for rank in range(WORKERS):
        for variable, one in zip(variables, found, strict=True):
            np.testing.assert_allclose(
                synk.get_value(rank, variable), oracle(one, axis=0), rtol=1e-12
            )
own = np.arange(1.0, WORKERS + 1)
for weighing in ("equal", own.tolist()):
    reset()
    synk.all_reduce(numbers, weights=weighing)
    by = np.ones(WORKERS) if weighing == "equal" else own
    np.testing.assert_allclose(
        synk.get_value(LAST, numbers), (by / by.sum()).dot(values), rtol=1e-12
    )
reset()
np.testing.assert_allclose(
    synk.reduce(numbers, in_place=False, weights=own.tolist()),
    (own / own.sum()).dot(values),
    rtol=1e-12,
)
synk.scatter(s_x, points)
synk.all_gather(s_x, nccl=False)
assert synk.get_lengths(s_x) == [len(points)] * WORKERS
np.testing.assert_array_equal(synk.get_value(LAST, s_x), points)

# Updates are local, one for each op when rows are taken in slices; all from the old values.
state = {op: theano.shared(np.ones(4), name=op) for op in ("avg", "sum", "max", "min", "prod")}
state["inc"] = theano.shared(np.full(4, 10.0), name="inc")
state["plain"] = theano.shared(np.ones(4), name="plain")
news = {
    "avg": T.mean(p, axis=0) * state["avg"],
    "sum": T.sum(p, axis=0) * state["sum"],
    "max": T.max(p, axis=0),
    "min": T.min(p, axis=0),
    "prod": T.prod(p, axis=0),
    "inc": state["inc"] + T.sum(p, axis=0),
    "plain": T.mean(p, axis=0) * state["plain"],
}
step = synk.function(
    [p],
    (T.sum(state["avg"]) * p.shape[0], "sum"),
    updates=[
        (state[op], new) if op == "plain" else (state[op], new, op) for op, new in news.items()
    ],
)
before = {op: variable.get_value() for op, variable in state.items()}
LOCAL = {"avg": np.mean, "plain": np.mean, "sum": np.sum, "max": np.max, "min": np.min}
for slices in (1, 4):
    synk.broadcast(list(state.values()), [before[op] for op in state])
    assert step(points, num_slices=slices) == 4 * len(points)
    for rank, share in enumerate(shares):
        for op, variable in state.items():
            wanted = {"prod": np.prod, "inc": np.sum, **LOCAL}[op](share, axis=0)
            np.testing.assert_allclose(
                synk.get_value(rank, variable), wanted + 10 * (op == "inc"), rtol=1e-12, atol=1e-12
            )

# An average of what rows have updated is that of all rows, unless equal weights are asked for.
synk.broadcast(list(state.values()), [before[op] for op in state])
step(points)
synk.all_reduce(state["plain"])
np.testing.assert_allclose(synk.get_value(LAST, state["plain"]), points.mean(0), rtol=1e-12)
step(points)
synk.all_reduce([state["max"], state["sum"]], op="max")
np.testing.assert_allclose(synk.get_value(LAST, state["max"]), points.max(0), rtol=1e-12)

# Values that change shape between calls, and a fresh pool with the master's values.
s_x.set_value(points[:6])
synk.broadcast(s_x)
np.testing.assert_allclose(f()[0], points[:6].dot(matrix).mean(0), rtol=1e-12)
synk.close()
try:
    f()
except RuntimeError as error:
    closed = str(error)
assert "close" in closed or "fork" in closed
print("shared variables:", WORKERS)
