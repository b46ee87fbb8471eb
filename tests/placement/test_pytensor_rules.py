"""Every choice of the rules for PyTensor's own Ops computes what the whole node does."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytensor.scalar as ps
import pytensor.tensor as pt
import pytest
from pytensor.graph.basic import Constant
from pytensor.tensor.elemwise import Elemwise
from pytensor.tensor.extra_ops import CumOp
from pytensor.tensor.math import Min
from pytensor.tensor.shape import SpecifyShape
from pytensor.tensor.special import log_softmax, softmax

from tandem.placement import Shard
from tandem.placement.simulation import simulate
from tandem.placement.static_lengths import with_static_lengths
from tests.support.rule_checks import check_choices


def new(*shape: int, dtype: str = "float64") -> Any:
    return pt.tensor(dtype=dtype, shape=shape)


X, Y, ROW, COLUMN = new(5, 3), new(5, 3), new(1, 3), new(5, 1)
SQUARE, CUBE, VECTOR, THREE = new(3, 3), new(2, 6, 3), new(5), new(3)
FLAGS = new(5, 3, dtype="bool")
LABELS, ROWS = new(5, dtype="int64"), new(4, dtype="int64")  # from 0 to 2
a, b = ps.float64("a"), ps.float64("b")
BOTH = Elemwise(ps.Composite([a, b], [a + b, a * b]))

ELEMENTWISE: dict[str, Callable[[], Any]] = {
    "add": lambda: pt.add(X, Y, ROW),
    "subtract": lambda: X - COLUMN,
    "multiply": lambda: pt.mul(X, Y, COLUMN),
    "divide": lambda: X / ROW,
    "negative": lambda: -X,
    "cast": lambda: pt.cast(X, "complex128"),
    "choose": lambda: pt.switch(FLAGS, X, ROW),
    "exp": lambda: pt.exp(X),
    "two results": lambda: BOTH(X, ROW)[0],
    "fill": lambda: pt.second(X, ROW),
    "fill with a number": lambda: pt.second(X, VECTOR[0].dimshuffle("x", "x")),
}
REDUCED: dict[str, Callable[[], Any]] = {
    "sum": lambda: X.sum(),
    "sum of columns": lambda: X.sum(axis=0),
    "sum of two axes": lambda: CUBE.sum(axis=(0, 2)),
    "largest": lambda: X.max(axis=0),
    "largest of few": lambda: X.max(axis=1),
    "smallest": lambda: Min(axis=(1,))(X),
    "product": lambda: pt.prod(X, axis=0),
    "argmax": lambda: pt.argmax(X, axis=1),
    "argmax of cubes": lambda: pt.argmax(CUBE, axis=0),
    "matrices": lambda: pt.dot(X, SQUARE),
    "row and matrix": lambda: pt.dot(ROW, SQUARE),
    "product by @": lambda: X @ SQUARE,
    "products": lambda: CUBE @ CUBE.swapaxes(1, 2),
    "products with one matrix": lambda: CUBE @ SQUARE,
    "softmax": lambda: softmax(X, axis=1),
    "softmax of columns": lambda: softmax(X, axis=0),
    "log-softmax": lambda: log_softmax(CUBE, axis=-1),
    "running sum": lambda: CumOp(axis=0)(X),
    "running product": lambda: CumOp(axis=1, mode="mul")(X),
}
SHAPED: dict[str, Callable[[], Any]] = {
    "join": lambda: pt.join(0, X, SQUARE),
    "join from the last axis": lambda: pt.join(-1, X, Y, COLUMN),
    "split": lambda: pt.split(X, [2, 3], n_splits=2, axis=0)[0],
    "split from the last axis": lambda: pt.split(X, [1, 2], n_splits=2, axis=-1)[0],
    "transposed": lambda: CUBE.dimshuffle(2, 0, 1),
    "more axes": lambda: X.dimshuffle("x", 1, "x", 0),
    "fewer axes": lambda: ROW.dimshuffle(1),
    "flat": lambda: CUBE.reshape((36,)),
    "flat rows": lambda: CUBE.reshape((2, 18)),
    "other rows": lambda: CUBE.reshape((4, 9)),
    "split rows": lambda: CUBE.reshape((2, 2, 3, 3)),
    "repeated": lambda: pt.alloc(THREE, 4, 3),
    "repeated rows": lambda: pt.alloc(ROW, 4, 3),
    "vector": lambda: pt.stack([VECTOR[0], THREE[1]]),
    "shape": lambda: SpecifyShape()(X, 5, 3),
}
INDEXED: dict[str, Callable[[], Any]] = {
    "row": lambda: X[1],
    "column": lambda: X[:, -1],
    "rows": lambda: X[1:4],
    "turned columns": lambda: X[:, ::-2],
    "behind a number": lambda: CUBE[1, :, 1:],
    "set row": lambda: pt.set_subtensor(X[1], THREE),
    "add to a column": lambda: pt.inc_subtensor(X[:, 1], VECTOR),
    "add a number to a column": lambda: pt.inc_subtensor(X[:, 1], VECTOR[0]),
    "set rows": lambda: pt.set_subtensor(X[1:3], SQUARE[:2]),
    "set equal rows": lambda: pt.set_subtensor(X[1:3], ROW),
    "add a column to columns": lambda: pt.inc_subtensor(X[:, 1:], COLUMN),
    "add to a row of cubes": lambda: pt.inc_subtensor(CUBE[:, 1], ROW),
    "add rows to cubes": lambda: pt.inc_subtensor(CUBE[:, :, 0], new(6)),
    "chosen rows": lambda: X[ROWS],
    "chosen columns": lambda: X[:, ROWS],
    "one of each row": lambda: X[pt.arange(5), LABELS],
    "one column of each row": lambda: X[pt.arange(5), LABELS[:1]],
    "add to one of each row": lambda: pt.inc_subtensor(X[pt.arange(5), LABELS], VECTOR),
    "set one of each row": lambda: pt.set_subtensor(X[pt.arange(5), LABELS], VECTOR[0]),
    "add the same to one of each row": lambda: pt.inc_subtensor(
        new(4, 3, 2)[pt.arange(4), new(4, dtype="int64")], new(2)
    ),
    "add to chosen rows": lambda: pt.inc_subtensor(X[ROWS], new(4, 3)),
    "add a row to chosen rows": lambda: pt.inc_subtensor(X[ROWS], ROW),
    "set chosen rows": lambda: pt.set_subtensor(X[np.array([0, 3, 2, 1])], new(4, 3)),
}
CASES = ELEMENTWISE | REDUCED | SHAPED | INDEXED


def value_of(variable: Any, rng: np.random.Generator) -> Any:
    """A value for an input, other than 0."""
    if isinstance(variable, Constant):
        return variable.data
    shape, dtype = variable.type.shape, variable.type.dtype
    if dtype == "bool":
        return rng.random(shape) < 0.5
    if dtype == "int64":
        return rng.integers(3, size=shape)
    return rng.choice([-1, 1], shape) * rng.uniform(0.5, 2, shape)


@pytest.mark.parametrize("name", CASES)
def test_the_parts_of_all_ranks_make_the_whole(name: str) -> None:
    """Shards of the lengths 5, 3, 6 and 2 are even, uneven and empty."""
    (y,) = with_static_lengths([CASES[name]()])
    node, rng = y.owner, np.random.default_rng(7)
    # Its inputs may be computed, such as from a vector; as inputs of the node they are free.
    free = node.clone_with_new_inputs(
        [x if isinstance(x, Constant) or x.owner is None else x.type() for x in node.inputs]
    )
    arrays = [value_of(x, rng) for x in free.inputs]
    found = [check_choices(free, arrays, ranks) for ranks in (2, 3, 4)]
    assert all(found)


@pytest.mark.parametrize(
    ("build", "values", "expected"),
    [
        (lambda x: pt.sum(x, dtype="int64"), np.full(4, 0.4), 1),  # 1.6, rounded once
        (lambda x: x[x > 0].sum(), np.arange(6.0), 15),
    ],
)
def test_what_no_part_computes_is_computed_of_the_whole(
    build: Callable[[Any], Any], values: np.ndarray, expected: int
) -> None:
    x = new(len(values))
    assert simulate([build(x)], {x: Shard(0)}, {}, 2, {x: values}) == [[expected]] * 2
