"""What pools on the processor and on GPUs compute alike."""

from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt

from tandem.parallel import Pool, row_index

ROWS = np.random.default_rng(5).normal(size=(11, 6)).astype("float32")
BATCHES: list[Any] = [None, slice(1, 9), slice(None, None, -3), [3, 0, 9, 3, 1, 10]]


def compute(pool: Pool) -> dict[str, np.ndarray]:
    """Call functions with arrays and `Data`, on all kinds of batches, in slices."""
    x, offset = pt.fmatrix("x"), pt.fvector("offset")
    total, count = pool.shared(np.ones(6, "float32"), "total"), pool.shared(np.arange(3), "count")
    private, part = pytensor.shared(np.float32([1, 2]), "private"), pool.shared(ROWS[:4], "part")
    y = x * 2 - offset
    f = pool.function(
        [x],
        [y.mean(axis=0), (y, "gather"), (y.max(), "max"), (x.shape[0], "sum"), (total, None)],
        bcast_inputs=[offset],
        updates=[
            (total, total + x.sum(axis=0), "inc"),
            (count, count + 1, "inc"),
            (private, private * 2, "sum"),
        ],
    )
    numbers = pool.function([x], [(x[:, 0] + row_index(), "gather")])
    rows = pool.function([], [(part.sum(axis=0), "sum")], sliceable_shareds=[part])
    found: dict[str, np.ndarray] = {}
    data = pool.data(ROWS.astype("float16"), dtype="float16"), pool.data(ROWS)
    data[1].set_value(np.concatenate([ROWS, ROWS]))  # its memory grows
    data[1].set_length(len(ROWS))
    shift = np.float32([1, 2, 3, 4, 5, 6])
    for i, batch in enumerate(BATCHES):
        for slices in (1, 3):
            for name, value in (("array", ROWS), ("half", data[0]), ("data", data[1])):
                for j, result in enumerate(f(value, shift, batch=batch, num_slices=slices)):
                    found[f"{name} {i} {slices} {j}"] = result
        found[f"numbers {i}"] = numbers(data[1], batch=batch)[0]
    for local in (None, [2, 0, 1], slice(1, 4)):
        found[f"rows {local}"] = rows(batch_s=local, num_slices=2)[0]
    found["whole"] = f.as_theano(ROWS, shift)[1]
    for variable in (total, count, private):
        found[f"all {variable.name}"] = pool.gather(variable)
    return found


def exchange(pool: Pool) -> dict[str, np.ndarray]:
    """Use every collective on variables that differ between ranks."""
    values = {"a": ROWS, "b": np.arange(7, dtype="float64"), "n": np.arange(5)}
    variables = [pool.shared(value, name) for name, value in values.items()]
    flat = pool.flat({"u": (3, 5), "v": (70,), "w": ()}, "float32")
    ranks, found = range(pool.ranks), {}

    def differ() -> None:
        for rank in ranks:
            pool.set_value(rank, variables, [value * (rank + 2) for value in values.values()])
            pool.set_value(rank, list(flat.views.values()), [
                np.full(shape, rank + 1 / (i + 3), "float32")
                for i, shape in enumerate(((3, 5), (70,), ()))
            ])  # fmt: skip

    def keep(name: str) -> None:
        for variable in (*variables, flat.vector, *flat.views.values()):
            for rank in ranks:
                found[f"{name} {variable.name} {rank}"] = pool.get_value(rank, variable)

    shares = [float(rank) for rank in ranks] if pool.ranks > 1 else [1.0]
    for op in ("avg", "c_avg", "sum", "prod", "max", "min"):
        differ()
        if op == "avg":
            pool.set_value(0, variables[0], np.full_like(ROWS, np.nan))
            pool.all_reduce(variables[0], op, weights=shares)  # rank 0 is not read
            pool.all_reduce([flat.vector, variables[1]], op)
        elif op == "c_avg":
            pool.all_reduce(list(flat.views.values()), op)
            pool.reduce(variables[:2], op)
        else:
            pool.all_reduce([*variables, flat.views["v"]], op)
        keep(op)
    pool.broadcast(flat.vector)
    keep("broadcast")
    found["reduced"] = pool.reduce(variables[2], "sum", in_place=False)
    return found
