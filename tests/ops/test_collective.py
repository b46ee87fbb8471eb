"""The communicating Ops: their meaning, bytes, gradients and order."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.compile.mode import Mode
from pytensor.graph.traversal import applys_between

from tandem.ops.collective import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    Gather,
    Reduce,
    ReduceScatter,
    Scatter,
    Slice,
    Vary,
    first_token,
    placeholder,
)
from tests.support.collectives import SHAPES, Make, combined, kinds, parts_for
from tests.support.op_checks import MODE

PLAIN = Mode("py", None)  # without rewrites, which change the order of sums


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_combine_is_what_numpy_computes(ranks: int) -> None:
    inputs: list[Any] = []
    values: list[np.ndarray] = []
    outputs: list[Any] = []
    expected: list[np.ndarray] = []
    for shape in SHAPES:
        for make in kinds(ranks, shape):
            parts = parts_for(make, ranks)
            symbols = [pt.tensor(dtype="float32", shape=part.shape) for part in parts]
            results = make(0).combine(symbols)
            assert len(results) == ranks
            inputs += symbols
            values += parts
            outputs += results
            expected += combined(make(0), parts)
    function = pytensor.function(inputs, outputs, mode=PLAIN, on_unused_input="ignore")
    for found, wanted in zip(function(*values), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)
        assert found.dtype == wanted.dtype


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_shapes_are_those_of_the_results(ranks: int) -> None:
    for shape in SHAPES:
        for make in kinds(ranks, shape):
            for rank, result in enumerate(combined(make(0), parts_for(make, ranks))):
                op = make(rank)
                y, token = op(pt.tensor(dtype="float32", shape=op.input_shape), first_token())
                assert y.type.shape == result.shape
                assert (token.type.dtype, token.type.shape) == ("float32", ())
                lengths = [n.data.item() for n in op.infer_shape(None, y.owner, [])[0]]
                assert tuple(lengths) == result.shape


def test_a_constant_is_not_computed_before_the_ranks_meet() -> None:
    gathered, token = AllGather(0, 2, 0, (4,), 0)(pt.constant(np.ones(2)), first_token())
    function = pytensor.function([], [gathered, token], mode=MODE)
    assert [type(n.op) for n in function.maker.fgraph.toposort()] == [AllGather]
    with pytest.raises(RuntimeError, match=r"AllGather 0 .* needs the other ranks"):
        function()


# Of a tensor of 7 rows and 3 columns, float32, with three ranks: 2, 2 and 3 rows, 1 column each.
BYTES: list[tuple[Callable[[int], Collective], tuple[int, int, int]]] = [
    (lambda rank: AllGather(0, 3, rank, (7, 3), 0), (60, 60, 48)),
    (lambda rank: AllGather(0, 3, rank, (7, 3), 1), (56, 56, 56)),
    (lambda rank: ReduceScatter(0, 3, rank, (7, 3), 0, "sum"), (48, 48, 72)),
    (lambda rank: AllReduce(0, 3, rank, (7, 3), "sum"), (112, 112, 112)),  # 2 x 7 + 14 elements
    (lambda rank: AllReduce(0, 3, rank, (5,), "sum"), (4 * (2 + 4), 4 * (4 + 3), 4 * (4 + 3))),
    (lambda rank: AllReduce(0, 3, rank, (), "max"), (4, 4, 8)),  # the last adds the one element
    (lambda rank: AllToAll(0, 3, rank, (7, 3), 0, 1), (20, 20, 16)),
    (lambda rank: AllToAll(0, 3, rank, (7, 3), 1, 0), (16, 16, 24)),
    (lambda rank: Broadcast(0, 3, rank, (7, 3), 1), (84, 0, 84)),
    (lambda rank: Scatter(0, 3, rank, (7, 3), 0, 0), (0, 24, 36)),
    (lambda rank: Gather(0, 3, rank, (7, 3), 0, 2), (0, 0, 48)),
    (lambda rank: Reduce(0, 3, rank, (7, 3), "sum", 0), (56 + 56, 56, 56)),
    (lambda rank: Vary(0, 3, rank, (7, 3)), (0, 0, 0)),
    (lambda rank: Slice(0, 3, rank, (7, 3), 0), (0, 0, 0)),
]


@pytest.mark.parametrize(("make", "expected"), BYTES)
def test_bytes_are_those_counted_by_hand(
    make: Callable[[int], Collective], expected: tuple[int, ...]
) -> None:
    assert tuple(make(rank).received("float32") for rank in range(3)) == expected
    assert make(1).received("float64") == 2 * expected[1]


class Joint:
    """One graph of all ranks, of the graph of each: every Op is what it combines to."""

    def __init__(self, outputs: list[list[Any]]) -> None:
        self._nodes: dict[int, dict[int, Any]] = {}
        self._known: dict[Any, Any] = {}
        for node in applys_between([], [v for found in outputs for v in found]):
            if isinstance(node.op, Collective):
                self._nodes.setdefault(node.op.number, {})[node.op.rank] = node

    def __getitem__(self, variable: Any) -> Any:
        if variable not in self._known:
            node = variable.owner
            if node is None:
                self._known[variable] = variable
            elif isinstance(node.op, Collective):
                self._combine(node.op)
            else:
                clone = node.clone_with_new_inputs([self[v] for v in node.inputs], strict=False)
                self._known.update(zip(node.outputs, clone.outputs, strict=True))
        return self._known[variable]

    def _combine(self, op: Collective) -> None:
        nodes = [self._nodes[op.number][rank] for rank in range(op.ranks)]
        assert {type(node.op) for node in nodes} == {type(op)}
        results = op.combine([self[node.inputs[0]] for node in nodes])
        for node, result in zip(nodes, results, strict=True):
            self._known[node.outputs[0]] = result
            self._known[node.outputs[1]] = first_token()


def order(token: Any) -> list[int]:
    """The numbers of the Ops that have passed a token on, the first one first."""
    found: list[int] = []
    while token.owner is not None:
        found.insert(0, token.owner.op.number)
        token = token.owner.inputs[1]
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_gradient_of_a_divided_perceptron_is_that_of_the_whole(ranks: int) -> None:
    """Each rank has columns of w and rows of v, and some rows of the result."""
    rng = np.random.default_rng(ranks)
    w, v = pt.tensor(dtype="float64", shape=(7, 9)), pt.tensor(dtype="float64", shape=(9, 6))
    x = pt.tensor(dtype="float64", shape=(5, 7))
    wanted = pt.grad(pt.sum((pt.tanh(x @ w) @ v) ** 3), [w, v, x])
    gradients, ends = [], [9 * rank // ranks for rank in range(ranks + 1)]
    for rank in range(ranks):
        own, token = slice(ends[rank], ends[rank + 1]), pt.scalar(dtype="float32")
        varied, second = Vary(0, ranks, rank, (5, 7))(x, token)
        partial = pt.tanh(varied @ w[:, own]) @ v[own]
        y, last = ReduceScatter(1, ranks, rank, (5, 6), 0, "sum")(partial, second)
        assert order(last) == [0, 1]
        *found, backward = pt.grad(pt.sum(y**3), [w, v, x, token])
        # The gradient's Ops begin behind the last one of the forward pass, and go back.
        assert order(backward) == [0, 1, ~1, ~0]
        gradients.append(found)
    joint = Joint(gradients)
    sums = [sum(joint[found[at]] for found in gradients) for at in (0, 1)]
    of_x = [joint[found[2]] for found in gradients]  # each rank's is the whole
    values = [rng.normal(size=n.type.shape) for n in (w, v, x)]
    results = pytensor.function([w, v, x], [*wanted, *sums, *of_x], mode=PLAIN)(*values)
    for index, result in enumerate(results[3:]):
        np.testing.assert_allclose(result, results[min(index, 2)], rtol=1e-12, atol=1e-12)


LINEAR = [make for make in kinds(3, (5, 7)) if getattr(make(0), "op", "sum") == "sum"]


@pytest.mark.parametrize("make", LINEAR, ids=lambda make: str(make(0)))
def test_a_pullback_is_that_of_what_is_combined(make: Make) -> None:
    """Each rank's gradient of its own cost, against that of the summed cost of all."""
    xs, weights, costs, found = [], [], [], []
    is_common = isinstance(make(0), Slice | Vary)
    for rank in range(3):
        op = make(rank)
        x = xs[0] if xs and is_common else pt.tensor(dtype="float64", shape=op.input_shape)
        y, token = op(x, first_token())
        if isinstance(op, AllReduce):  # whose result all ranks have, and each uses in its own way
            y, token = Vary(9, 3, rank, y.type.shape)(y, token)
        weights.append(pt.tensor(dtype="float64", shape=y.type.shape))
        costs.append(pt.sum(weights[-1] * y**2))
        found.append(pt.grad(costs[-1], x))
        xs.append(x)
    joint = Joint([[*costs, *found]])
    total = sum(joint[cost] for cost in costs)
    wanted = pt.grad(total, xs, disconnected_inputs="ignore")
    inputs = [*dict.fromkeys(xs), *weights]
    rng = np.random.default_rng(1)
    values = [rng.normal(size=variable.type.shape) for variable in inputs]
    outputs = [*wanted, *(joint[gradient] for gradient in found)]
    results = pytensor.function(inputs, outputs, mode=PLAIN)(*values)
    for result, whole in zip(results[3:], results[:3], strict=True):
        np.testing.assert_allclose(result, whole, rtol=1e-12, atol=1e-12)


def test_ops_that_the_cost_does_not_use_keep_their_place_in_the_gradient() -> None:
    x, token = pt.vector("x", shape=(4,), dtype="float64"), pt.scalar(dtype="float32")
    y, second = AllGather(0, 2, 0, (8,), 0)(x, token)
    _, third = AllGather(1, 2, 0, (8,), 0)(2 * x, second)
    z, _ = AllReduce(2, 2, 0, (8,), "sum")(y, third)
    _, backward = pt.grad(pt.sum(z**2), [x, token])
    assert order(backward) == [0, 1, 2, ~0]


def test_whole_numbers_have_no_gradient() -> None:
    x, labels = pt.vector("x", shape=(4,), dtype="float64"), pt.vector(shape=(4,), dtype="int64")
    token = pt.scalar(dtype="float32")
    y, second = AllGather(0, 2, 0, (8,), 0)(x, token)
    indices, third = AllGather(1, 2, 0, (8,), 0)(labels, second)
    z, _ = AllGather(2, 2, 0, (16,), 0)(y[indices], third)
    gradient, backward = pt.grad(pt.sum(z), [x, token])
    assert gradient.type.shape == (4,)
    assert order(backward) == [0, 1, 2, ~2, ~0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: AllReduce(0, 2, 0, (4,), "max"),
        lambda: ReduceScatter(0, 2, 0, (4,), 0, "min"),
        lambda: Reduce(0, 2, 0, (4,), "max", 0),
    ],
)
def test_a_largest_element_has_no_gradient(make: Callable[[], Collective]) -> None:
    x = pt.vector("x", shape=(4,), dtype="float64")
    with pytest.raises(NotImplementedError, match="has no gradient"):
        pt.grad(pt.sum(make()(x, first_token())[0]), x)


def test_equal_conversions_are_not_folded_or_merged() -> None:
    x = pt.vector("x", shape=(4,), dtype="float64")
    y, token = AllGather(0, 2, 0, (8,), 0)(np.ones(4), first_token())
    z, token = AllGather(1, 2, 0, (8,), 0)(x, token)
    w, token = AllGather(2, 2, 0, (8,), 0)(x, token)
    function = pytensor.function([x], [y + z + w], mode=MODE)
    nodes = function.maker.fgraph.toposort()
    assert [n.op.number for n in nodes if isinstance(n.op, AllGather)] == [0, 1, 2]
    with pytest.raises(RuntimeError, match=r"AllGather 0 of a tensor of shape \(8,\) needs the"):
        function(np.ones(4))


def test_what_needs_no_message_runs_anywhere() -> None:
    x = pt.matrix("x", shape=(5, 3), dtype="float64")
    y, token = Slice(0, 2, 1, (5, 3), 0)(x, first_token())
    z, token = Vary(1, 2, 1, (3, 3))(y, token)
    value = np.arange(15.0).reshape(5, 3)
    found, last = pytensor.function([x], [z + 1, token], mode=MODE)(value)
    np.testing.assert_array_equal(found, value[2:] + 1)
    assert last == 0


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: AllGather("1", 2, 0, (4,), 0), TypeError, "number must be an int, got '1'"),
        (lambda: AllGather(1, 0, 0, (4,), 0), ValueError, "ranks must be at least 1, got 0"),
        (lambda: AllGather(1, 2, 2, (4,), 0), ValueError, "rank must be below ranks, 2, got 2"),
        (lambda: AllGather(1, 2, 0, (-4,), 0), ValueError, "axis must be at least 0, got -4"),
        (lambda: AllGather(1, 2, 0, (4,), 1), ValueError, r"must be an axis of \(4,\), got 1"),
        (lambda: Scatter(1, 2, 0, (4,), -1, 0), ValueError, "axis must be at least 0, got -1"),
        (lambda: Broadcast(1, 2, 0, (4,), 2), ValueError, "root must be below ranks, 2, got 2"),
        (lambda: Reduce(1, 2, 0, (4,), "mean", 0), ValueError, "sum, max, min, got 'mean'"),
        (lambda: AllToAll(1, 2, 0, (4, 4), 1, 1), ValueError, "must differ, both are 1"),
    ],
)
def test_bad_arguments_are_named(
    make: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make()


def test_bad_inputs_are_named() -> None:
    op = AllGather(1, 2, 1, (5, 3), 0)
    with pytest.raises(ValueError, match=r"at rank 1 of 2 must have the shape \(3, 3\), got"):
        op(pt.matrix(shape=(2, 3)), first_token())
    with pytest.raises(ValueError, match="must have the shape"):
        op(pt.vector(), first_token())
    with pytest.raises(ValueError, match=r"must have the shape \(0, 0\)"):
        Broadcast(1, 2, 1, (5, 3), 0)(pt.matrix(shape=(5, 3)), first_token())
    with pytest.raises(TypeError, match=r"a token must be float32 \(\), got"):
        op(pt.matrix(), pt.vector(dtype="float32"))
    with pytest.raises(TypeError, match="a sum needs numbers, got bool"):
        AllReduce(1, 2, 1, (2,), "sum")(pt.vector(dtype="bool"), first_token())
    assert placeholder(2, "int64").type.shape == (0, 0)
