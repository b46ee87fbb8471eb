"""Functions of rows, on any number of workers: python functions_of_rows.py 2"""

import multiprocessing
import sys
from itertools import pairwise

import numpy as np
import pytensor as theano
import pytensor.tensor as T

import tandem.parallel as synk

WORKERS = int(sys.argv[1])
rng = np.random.default_rng(WORKERS)
heights = rng.normal(size=(103, 6))
changes = rng.normal(size=(103, 6))
grades = rng.integers(0, 50, 103)
scale = rng.normal(size=(6, 4))

# Data needs no pool.
early = synk.data(heights)
assert early.shape == heights.shape

count = synk.fork(
    n_parallel=WORKERS,
    use_gpu=False,
    master_rank=WORKERS - 1,
    profile_workers=False,
    max_n_var=40,
    max_dim=5,
    threads=1,
    precision="float32",
    regions=False,
    timeout=60.0,
)
assert count == WORKERS

x, d, y = T.dmatrix("x"), T.dmatrix("d"), T.dmatrix("y")
g = T.lvector("g")
shift = T.dscalar("shift")
z = (x + d).dot(y)

# Every way to reduce an output, some by way of the CPU, as the names of Synkhronos have it.
OUTPUTS = {
    "mean": (T.mean(z, axis=0), "avg"),
    "mean by default": T.mean(z, axis=0),
    "total": (T.sum(z, axis=0), "sum"),
    "product": (T.prod(x, axis=0), "prod"),
    "highest": (T.max(z, axis=0), "max"),
    "lowest": (T.min(z, axis=0), "min"),
    "rows": (z, "gather"),
    "highest grade": (T.max(g), "max"),
    "sum of grades": (T.sum(g), "c_sum"),
    "mean, CPU": (T.mean(z), "c_avg"),
    "product, CPU": (T.prod(x, axis=0), "c_prod"),
    "highest, CPU": (T.max(z), "c_max"),
    "lowest, CPU": (T.min(z), "c_min"),
    "rows, CPU": (T.exp(x[:, 0]), "c_gather"),
}
f = synk.function(
    inputs=[x, d, g], outputs=list(OUTPUTS.values()), bcast_inputs=[y], name="statistics"
)
uneven = synk.function([x], [(T.mean(x), "avg"), (T.mean(x), "uavg"), (x.shape[0], None)])
single = synk.function([x], T.mean(x, axis=0), givens={d: 2 * x})
with_givens = synk.function(
    [x], (T.sum(z), "sum"), bcast_inputs=[y, shift], givens=[(d, x * shift)]
)
numbered = synk.function([x], (x[:, 0] * 0 + synk.row_index(), "gather"))
synk.distribute()
synk.distribute()
assert f.name == "statistics"


def expected(rows=slice(None)):
    a, b, c = heights[rows], changes[rows], grades[rows]
    s = (a + b).dot(scale)
    return [
        *(s.mean(0), s.mean(0), s.sum(0), a.prod(0), s.max(0), s.min(0), s),
        *(c.max(), c.sum(), s.mean(), a.prod(0), s.max(), s.min(), np.exp(a[:, 0])),
    ]


def check(found, wanted):
    assert len(found) == len(wanted)
    for name, one, other in zip(OUTPUTS, found, wanted, strict=False):
        assert np.shape(one) == np.shape(other), name
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12, err_msg=name)


# Arrays, data, and both; by place and by name.
serial = f.as_theano(heights, changes, grades, scale)
check(serial, expected())
check(f(heights, changes, grades, scale), expected())
check(f(early, synk.data(changes), grades, synk.data(scale)), expected())
check(f(heights, y=scale, g=grades, d=changes), expected())
check(f(x=heights, d=changes, g=grades.tolist(), y=scale.tolist()), expected())
built = f.build_inputs(heights, changes, grades, scale)
assert all(isinstance(one, synk.Data) for one in built)
check(f(*built), expected())
check(f.as_theano(*(one.data for one in built)), expected())

# Inputs of smaller dtypes are cast up: whole numbers are the same in float32.
small = [np.round(one).astype("float32") for one in (heights, changes, scale)]
check(
    f(synk.data(small[0]), small[1], grades.astype("int16"), synk.data(small[2])),
    f.as_theano(*(one.astype("float64") for one in small[:2]), grades, small[2].astype("float64")),
)

# Rows that are selected before they are scattered.
mask = grades > 20
shuffled = rng.permutation(103)[:41]
for batch in (
    *(50, np.int32(7), 1, 103, slice(10, 90), slice(5, 6), slice(None), slice(None, None, -3)),
    *(shuffled, shuffled.tolist(), shuffled.astype(np.int16), [3, 3, -1], mask),
):
    rows = slice(batch) if isinstance(batch, (int, np.integer)) else batch
    check(f(*built, batch=batch), expected(rows))
    check(f(*built, batch=batch, num_slices=3), expected(rows))
    check(f(heights, changes, grades, scale, batch=batch), expected(rows))

# Slices, more than rows too; some outputs, and all of them again.
for slices in (1, 2, 5, 200):
    check(f(*built, num_slices=slices), expected())
highest, mean = f(*built, output_subset=[0, 4])[::-1]
np.testing.assert_allclose(mean, expected()[0], rtol=1e-12)
np.testing.assert_allclose(highest, expected()[4], rtol=1e-12)
assert len(f(*built, output_subset=[2])) == 1
check(f(*built, output_subset=None), expected())
check(f(*built), expected())

# An average weighs rows, not workers, and says so where it does not.
for rows in (1, 2, 3, 7, 103):
    average, by_worker, own = uneven(heights, batch=rows)
    np.testing.assert_allclose(average, heights[:rows].mean(), rtol=1e-12)
    edges = [rows * i // WORKERS for i in range(WORKERS + 1)]
    parts = [heights[a:b].mean() for a, b in pairwise(edges) if b > a]
    np.testing.assert_allclose(by_worker, np.mean(parts), rtol=1e-12)
    assert own is None or own == edges[-1] - edges[-2]

result = single(heights)
assert isinstance(result, np.ndarray)
np.testing.assert_allclose(result, heights.mean(0), rtol=1e-12)
np.testing.assert_allclose(
    with_givens(heights, scale, shift=0.5), (1.5 * heights).dot(scale).sum(), rtol=1e-12
)
np.testing.assert_array_equal(numbered(heights), np.arange(103))
np.testing.assert_array_equal(numbered(heights, batch=shuffled, num_slices=3), np.arange(41))

# Data: written in place, grown, shrunk, cast, freed, and the same memory in a process of ours.
table = synk.data(value=heights[:50], oversize=1.5, name="table")
assert (table.name, table.alloc_size, len(table)) == ("table", 450, 50)
table[3] = 0
assert not table[3].any()
assert table[2:4].shape == (2, 6)
table[:] = heights[50:100]
np.testing.assert_allclose(single(table), heights[50:100].mean(0), rtol=1e-12)
table.set_value(heights[:70])
assert table.alloc_size == 450
np.testing.assert_allclose(single(table), heights[:70].mean(0), rtol=1e-12)
table.set_length(20, oversize=1.5)
np.testing.assert_array_equal(table.data, heights[:20])
np.testing.assert_allclose(single(table), heights[:20].mean(0), rtol=1e-12)
table.set_shape((100, 6), oversize=2)
assert (table.shape, table.alloc_size) == ((100, 6), 1200)
table[:] = heights[:100]
np.testing.assert_allclose(single(table), heights[:100].mean(0), rtol=1e-12)
table.free_memory()
assert table.alloc_size == 0
table.set_value(heights.astype("float32"))
np.testing.assert_allclose(single(table), heights.mean(0), rtol=1e-5)
whole = synk.data(dtype="int32", ndim=1)
assert whole.condition_data([1, 2]).dtype == np.int32
assert whole.condition_data([1.7], force_cast=True).tolist() == [1]
whole.set_value([1.5, 2.5], force_cast=True)
assert whole.data.tolist() == [1, 2]
cast = synk.data([1.5, 2.5], dtype="int32", force_cast=True)
assert cast.data.tolist() == [1, 2]
like = synk.data(var=x, shape=(4, 6), minibatch=True)
assert (like.dtype, like.ndim, like.size, like.minibatch) == ("float64", 2, 24, True)
forced = uneven.build_inputs(heights.astype("float32"), force_cast=True, oversize=1.2)
assert forced.dtype == "float64"
assert forced.alloc_size > forced.size

# The rows of a minibatch are those of the batch, in its order; other inputs are whole sets.
part = synk.data(changes[:41], minibatch=True)
rows = heights[shuffled], changes[:41], grades[shuffled]
serial = f.as_theano(*rows, scale)
check(f(early, part, grades, scale, batch=shuffled), serial)
parts = f.build_inputs(*rows, scale, minibatch=[True, True, True, False])
check(f(*parts, batch=41), serial)


def double(shared):
    shared[:] *= 2


child = multiprocessing.get_context("fork").Process(target=double, args=(table,))
child.start()
child.join()
assert child.exitcode == 0
np.testing.assert_allclose(single(table), 2 * heights.mean(0), rtol=1e-5)

# A function after `distribute`, and what a call took.
late = synk.function([x], (T.sum(theano.shared(3.0) * x), "sum"))
np.testing.assert_allclose(late(early), 3 * heights.sum(), rtol=1e-12)
times = late.times
assert times.calls == 1
assert all(part >= 0 for part in (times.excerpt, times.function, times.straggler, times.reduce))

assert synk.get_n_gpu() >= 0
synk.close()
print("functions of rows:", WORKERS)
