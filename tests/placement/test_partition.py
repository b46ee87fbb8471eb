"""A graph partitioned over ranks computes what the whole graph does, with few bytes moved."""

from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.compile.mode import Mode
from pytensor.graph.basic import Apply
from pytensor.graph.op import Op

import tandem.placement
from tandem.placement import (
    OpStrategy,
    Partial,
    Placement,
    Replicate,
    Shard,
    Single,
    partition,
    place,
    rule,
    simulate,
)
from tests.support.placed_graphs import (
    PYTHON,
    PlacedGraph,
    fewest_bytes,
    joined,
    random_graph,
)


def check(graph: PlacedGraph, ranks: int) -> None:
    """Compare all ranks' outputs, put together, with the whole graph."""
    found = simulate(graph.outputs, graph.given, graph.wanted, ranks, graph.values, mode=PYTHON)
    for number, (output, expected) in enumerate(zip(graph.outputs, graph.whole(), strict=True)):
        placement = graph.wanted.get(output, Replicate())
        whole = joined([own[number] for own in found], placement)
        np.testing.assert_allclose(whole, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "seed", [*range(12), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(12, 24))]
)
def test_random_graphs_equal_the_whole(seed: int) -> None:
    ranks = 1 + seed % 4
    check(random_graph(seed, ranks), ranks)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24, 300))
def test_many_random_graphs_equal_the_whole(seed: int) -> None:
    ranks = 2 + seed % 4
    check(random_graph(seed, ranks, nodes=16), ranks)


# What is moved


SHAPES = [(4, 6), (6, 4), (4, 4)]


def small_graph(seed: int) -> PlacedGraph:
    """A graph of at most 12 nodes, some of whose inputs and outputs have placements."""
    rng = np.random.default_rng(seed)
    a, b, c = (
        pt.tensor(name, dtype="float64", shape=shape)
        for name, shape in zip("abc", SHAPES, strict=True)
    )
    forms = [
        lambda: pt.dot(pt.tanh(pt.dot(a, b)), c),
        lambda: pt.exp(pt.dot(a, b)).sum(axis=0) + c.sum(axis=1),
        lambda: pt.special.log_softmax(pt.dot(c, a), axis=1),
        lambda: pt.grad(pt.tanh(pt.dot(a, b)).sum(), a) * 2,
        lambda: pt.dot(a.T, c) + b,
    ]
    y = forms[rng.integers(len(forms))]()
    options: list[Placement] = [Replicate(), Shard(0), Shard(1), Shard(0)]
    given = {x: options[rng.integers(3)] for x in (a, b, c)}
    wanted = {y: options[rng.integers(3)] if y.type.ndim == 2 else Shard(0)}
    return PlacedGraph([y], given, wanted, {})


def total_received(graph: PlacedGraph, ranks: int) -> float:
    return sum(
        partition(
            graph.outputs, given=graph.given, wanted=graph.wanted, ranks=ranks, rank=rank
        ).received
        for rank in range(ranks)
    )


def check_bytes(seed: int) -> None:
    """Compare what a small graph moves with the best of all choices."""
    graph = small_graph(seed)
    total = total_received(graph, 2)
    fewest = fewest_bytes(graph.outputs, graph.given, graph.wanted, 2, most=total)
    # Each node is decided when it is met, so a later one may prefer another.
    assert total <= 1.7 * fewest


GRADIENTS = {4, 5, 8, 10, 12, 17, 22, 28}  # seeds of the largest graphs, of 15 nodes


@pytest.mark.parametrize("seed", sorted({*range(30)} - GRADIENTS))
def test_small_graphs_move_little_more_than_the_best_of_all_choices(seed: int) -> None:
    check_bytes(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", sorted(GRADIENTS))
def test_small_gradients_move_little_more_than_the_best_of_all_choices(seed: int) -> None:
    check_bytes(seed)


def test_all_ranks_choose_the_same_of_equal_conversions() -> None:
    """However the objects of their variables hash."""

    def chosen() -> list[tuple[str, Placement, Placement]]:
        v = pt.tensor("v", dtype="float64", shape=(4, 6))
        outputs = [place(v, placement) for placement in (Shard(1), Shard(0), Single())]
        part = partition(outputs, given={v: Partial()}, wanted={}, ranks=2, rank=0)
        return [(c.kind, c.source, c.target) for c in part.conversions]

    first = chosen()
    assert all(chosen() == first for _ in range(20))


@pytest.mark.parametrize(
    ("placements", "kinds"),
    [
        ((Replicate(), Shard(1), Shard(0)), ["all-reduce"]),  # columns, then rows
        ((Shard(0), Replicate(), Replicate()), ["all-gather"]),  # by rows of the minibatch
        ((Shard(0), Shard(1), Shard(1)), ["all-gather"] * 3),
        ((Single(), Single(), Single()), ["broadcast"]),
    ],
)
def test_a_perceptron_moves_as_few_bytes_as_any_choice(
    placements: tuple[Placement, ...], kinds: list[str]
) -> None:
    x, first, second = (
        matrix(*shape) for shape in (("x", 8, 8), ("first", 8, 8), ("second", 8, 4))
    )
    y = pt.dot(pt.tanh(pt.dot(x, first)), second)
    given = dict(zip((x, first, second), placements, strict=True))
    graph = PlacedGraph([y], given, {}, {})
    part = partition([y], given=given, wanted={}, ranks=2, rank=0)
    assert [conversion.kind for conversion in part.conversions] == kinds
    total = total_received(graph, 2)
    if Single() not in placements:
        assert fewest_bytes([y], given, {}, 2, most=total) == total


def matrix(name: str, *shape: int) -> Any:
    return pt.tensor(name, dtype="float64", shape=shape)


def test_a_conversion_is_made_once_for_all_that_need_it() -> None:
    x, w, v = matrix("x", 4, 6), matrix("w", 6, 8), matrix("v", 6, 8)
    outputs = [pt.dot(x, w), pt.dot(x, v), pt.exp(pt.dot(x, w))]
    given = {x: Shard(0), w: Shard(1), v: Shard(1)}
    part = partition(outputs, given=given, wanted=dict.fromkeys(outputs, Shard(1)), ranks=2, rank=1)
    assert [(c.kind, c.name, c.received) for c in part.conversions] == [("all-gather", "x", 96)]
    assert part.received == 96


def test_a_product_is_not_computed_again_to_save_bytes() -> None:
    """Gathering x would take fewer, but every rank would then compute the whole product."""
    x, w = matrix("x", 8, 4), matrix("w", 4, 6)
    y = pt.sort(pt.dot(x, w), axis=0).sum(axis=0)  # sorting has no rule
    part = partition([y], given={x: Shard(0)}, wanted={}, ranks=2, rank=0)
    assert [(c.kind, c.name) for c in part.conversions] == [("all-gather", "Dot of x")]


def test_partial_sums_pass_what_is_linear_alone() -> None:
    x, w = matrix("x", 4, 6), matrix("w", 6, 8)
    product = pt.dot(x, w)
    given = {x: Shard(1), w: Shard(0)}
    linear, other = 2 * product / 3 + 1, pt.exp(product)
    part = partition([linear], given=given, wanted={linear: Partial()}, ranks=3, rank=0)
    assert part.conversions == []
    part = partition([other], given=given, wanted={}, ranks=3, rank=0)
    assert [(c.kind, c.name) for c in part.conversions] == [("all-reduce", "Dot of x")]


def test_a_mean_divides_by_the_length_of_the_whole() -> None:
    x = pt.tensor("x", dtype="float64", shape=(7,))
    value = np.arange(7.0) ** 2
    found = simulate([x.mean()], {x: Shard(0)}, {}, 3, {x: value})
    assert [part[0] for part in found] == [value.mean()] * 3


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((4, 6), (6, 5)),
        pytest.param((3, 4, 6), (6, 5), marks=pytest.mark.slow),
        ((3, 4, 6), (3, 5, 6)),
    ],
)
def test_products_by_at_are_divided_as_those_by_dot(
    left: tuple[int, ...], right: tuple[int, ...]
) -> None:
    x, y = matrix("x", *left), matrix("y", *right)
    z = x @ (y if right[-2] == 6 else y.swapaxes(1, 2))
    outputs = [z, pt.grad((z**2).sum(), y)]
    rng = np.random.default_rng(4)
    values = {x: rng.normal(size=left), y: rng.normal(size=right)}
    for p in (Replicate(), *map(Shard, range(len(left)))):
        for q in (Single(), *map(Shard, range(len(right)))):
            check(PlacedGraph(outputs, {x: p, y: q}, {outputs[1]: q}, values), 3)
            part = partition(outputs, given={x: p, y: q}, wanted={}, ranks=3, rank=0)
            assert part.without_rule == []
    if len(left) == 2:
        part = partition([z], given={x: Shard(1), y: Shard(0)}, wanted={}, ranks=3, rank=0)
        assert [c.kind for c in part.conversions] == ["all-reduce"]


def whole_of_both(outputs: list[Any], given: dict[Any, Any], values: dict[Any, Any]) -> Any:
    """What two ranks have of outputs that are replicated, and the whole graph's."""
    graph = PlacedGraph(outputs, given, {}, values)
    found = simulate(outputs, given, {}, 2, values, mode=PYTHON)
    return [(*own, expected) for *own, expected in zip(*found, graph.whole(), strict=True)]


@pytest.mark.parametrize("placement", [Shard(0), Single(1), Replicate(), Partial()])
@pytest.mark.parametrize("op", ["max", "min"])
def test_what_is_missing_is_no_largest_or_smallest_element(placement: Placement, op: Any) -> None:
    """Terms of a maximum or minimum are no zeros, whatever they are made of."""
    x, value = matrix("x", 4, 3), np.random.default_rng(5).normal(size=(4, 3))
    found = simulate([x], {x: placement}, {x: Partial(op)}, 3, {x: value})
    combine = {"max": np.maximum, "min": np.minimum}[op]
    np.testing.assert_array_equal(combine.reduce([part for (part,) in found]), value)


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int32", "float16", "complex64"])
def test_terms_are_of_dtypes_in_which_they_can_be_added(dtype: str) -> None:
    """Of bool there is no sum; 100 + 100 is -56 in int8, but not if it is added in float64."""
    x = pt.tensor("x", dtype=dtype, shape=(4, 3))
    value = np.full((4, 3), 100).astype(dtype)
    added = pt.add(x[0], x[3])
    outputs = [x[1], added, added / np.float64(4)]
    if dtype != "complex64":
        outputs.append(pt.cast(added, "float64"))
    with np.errstate(over="ignore"):
        for *own, expected in whole_of_both(outputs, {x: Shard(0)}, {x: value}):
            for part in own:
                np.testing.assert_array_equal(part, expected)


def test_small_integers_may_be_terms_of_sums_of_floats() -> None:
    x, n = matrix("x", 4, 3), pt.tensor("n", dtype="int8", shape=(3,))
    y = x.sum(axis=0) + n
    part = partition([y], given={x: Shard(0)}, wanted={y: Partial()}, ranks=2, rank=0)
    assert part.conversions == []


def test_shapes_that_are_not_known_are_allowed_of_what_is_replicated() -> None:
    x, u = matrix("x", 8, 3), pt.tensor("u", dtype="float64", shape=(None, 3))
    rng = np.random.default_rng(4)
    values = {x: rng.normal(size=(8, 3)), u: rng.normal(size=(8, 3))}
    outputs = [u.max(axis=0) + x.sum(axis=0), u + x, pt.dot(u.T, x), u.mean() * x]
    for *own, expected in whole_of_both(outputs, {x: Shard(0)}, values):
        for part in own:
            np.testing.assert_allclose(part, expected, rtol=1e-12)


@pytest.mark.parametrize("shape", [(), (1,), (4,), (4, 4)])
def test_only_one_column_for_each_row_is_divided_with_the_rows(shape: tuple[int, ...]) -> None:
    x, columns = matrix("x", 4, 3), pt.tensor("c", dtype="int64", shape=shape)
    values = {x: np.arange(12.0).reshape(4, 3), columns: np.arange(np.prod(shape)).reshape(shape)}
    values[columns] = (values[columns] % 3).astype(np.int64)
    chosen = x[pt.arange(4), columns]
    outputs = [chosen, pt.inc_subtensor(chosen, 1.0)]
    for *own, expected in whole_of_both(outputs, {x: Shard(0)}, values):
        for part in own:
            np.testing.assert_array_equal(part, expected)


def test_weights_that_are_fixed_stay() -> None:
    x, w = matrix("x", 100, 4), matrix("w", 4, 2)
    y = pt.dot(x, w)
    where: dict[str, Any] = {"given": {x: Shard(0), w: Shard(1)}, "wanted": {y: Shard(0)}}
    moved = partition([y], **where, ranks=2, rank=0)
    assert [c.name for c in moved.conversions] == ["w"]
    part = partition([y], **where, ranks=2, rank=0, fixed=[w])
    assert "w" not in [c.name for c in part.conversions]
    with pytest.raises(ValueError, match="w is fixed, and would have to be moved"):
        partition([w], given=where["given"], wanted={}, ranks=2, rank=0, fixed=[w])


# Uneven and empty shards


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_shards_may_be_uneven_or_empty(ranks: int, rows: int) -> None:
    x, w = matrix("x", rows, 3), matrix("w", 3, 4)
    y = pt.tanh(pt.dot(x, w))
    gradient = pt.grad(y.sum(), w)
    rng = np.random.default_rng(1)
    graph = PlacedGraph(
        [y, gradient, y.mean()],
        {x: Shard(0), w: Shard(1)},
        {y: Shard(0), gradient: Shard(1)},
        {v: rng.normal(size=v.type.shape) for v in (x, w)},
    )
    check(graph, ranks)


def test_parts_of_4096_over_three_ranks() -> None:
    part = [
        partition([], given={w: Shard(1)}, wanted={}, ranks=3, rank=rank).shared[w]
        for rank, w in enumerate([pytensor.shared(np.zeros((2, 4096)), shape=(2, 4096))] * 3)
    ]
    assert [shape for _, shape in part] == [(2, 1365), (2, 1365), (2, 1366)]
    assert [index[1] for index, _ in part] == [
        slice(0, 1365), slice(1365, 2730), slice(2730, 4096),
    ]  # fmt: skip


# Neon's statements: A = single; B = replicate(A); C = shard(A); B = B * sum(C, 1); A = B * 3


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_five_statements_of_neon(ranks: int) -> None:
    value = np.random.default_rng(2).normal(size=(5, 6))
    a = pytensor.shared(value, "A", shape=(5, 6))
    b = place(a, Replicate())
    c = place(a, Shard(1))
    b = b * c.sum(axis=1, keepdims=True)
    updated = b * 3
    given = {a: Single()}
    found = simulate([b, updated], given, {b: Replicate(), updated: Single()}, ranks, {a: value})
    expected = value * value.sum(1, keepdims=True)
    for rank, (whole, single) in enumerate(found):
        np.testing.assert_allclose(whole, expected, rtol=1e-12)
        assert (single is None) == (rank > 0)
    np.testing.assert_allclose(found[0][1], 3 * expected, rtol=1e-12)
    part = partition([b, updated], given=given, wanted={updated: Single()}, ranks=2, rank=1)
    kinds = [conversion.kind for conversion in part.conversions]
    assert kinds == ["broadcast", "all-reduce"]  # A is whole then: its slice takes no bytes
    assert a not in part.shared
    assert a not in part.inputs


def test_names_that_are_imported_later_are_listed() -> None:
    assert {"partition", "place", "rule", "simulate", "explain"} <= {*dir(tandem.placement)}


# What cannot be


def test_with_one_rank_the_graph_is_unchanged() -> None:
    x, w = matrix("x", 4, 6), matrix("w", 6, 8)
    y = pt.dot(x, w)
    part = partition([y], given={x: Shard(0), w: Shard(1)}, wanted={}, ranks=1, rank=0)
    assert part.outputs == [y]
    assert part.inputs == {x: x, w: w}
    assert part.conversions == []
    assert part.token is None


def test_an_op_without_a_rule_is_computed_from_whole_tensors() -> None:
    x = matrix("x", 4, 6)
    y = pt.sort(x, axis=0)
    value = np.random.default_rng(3).normal(size=(4, 6))
    found = simulate([y], {x: Shard(1)}, {y: Shard(1)}, 2, {x: value})
    np.testing.assert_array_equal(joined([p[0] for p in found], Shard(1)), np.sort(value, axis=0))
    part = partition([y], given={x: Shard(1)}, wanted={}, ranks=2, rank=0)
    assert part.without_rule == ["SortOp"]
    with pytest.raises(NotImplementedError, match="SortOp: no rule says how"):
        partition([y], given={x: Shard(1)}, wanted={}, ranks=2, rank=0, strict=True)


def test_refusals() -> None:
    x = pt.matrix("x")
    with pytest.raises(ValueError, match="x: what is split over ranks needs a shape"):
        partition([pt.exp(x)], given={x: Shard(0)}, wanted={}, ranks=2, rank=0)
    with pytest.raises(ValueError, match=r"shard\(2\): a tensor of 2 axes has no axis 2"):
        partition([x], given={x: Shard(2)}, wanted={}, ranks=2, rank=0)
    with pytest.raises(ValueError, match=r"single\(2\): there are 2 ranks"):
        partition([x], given={x: Single(2)}, wanted={}, ranks=2, rank=0)
    with pytest.raises(ValueError, match="rank 2 is none of 2 ranks"):
        partition([x], given={}, wanted={}, ranks=2, rank=2)
    mask = pt.tensor("mask", dtype="bool", shape=(2,))
    with pytest.raises(ValueError, match="mask: a sum needs numbers, and its type is bool"):
        partition([mask], given={mask: Partial()}, wanted={}, ranks=2, rank=0)
    with pytest.raises(ValueError, match="a sum needs numbers, and its type is bool"):
        partition([place(mask, Partial())], given={}, wanted={}, ranks=2, rank=0)
    numbers = pt.tensor("numbers", dtype="int32", shape=(2,))
    placed = [place(numbers, Partial())]
    (found, *_), *_ = simulate(placed, {}, {}, 2, {numbers: np.array([3, 4], "int32")})
    np.testing.assert_array_equal(found, [3, 4])
    with pytest.raises(ValueError, match="has no axis 3"):
        place(x, Shard(3))
    with pytest.raises(ValueError, match="axis must be an int of at least 0"):
        Shard(-1)
    with pytest.raises(ValueError, match="op must be one of sum, max, min"):
        Partial("mean")  # type: ignore[arg-type]


def test_what_is_no_partition_is_refused_by_a_sentence() -> None:
    x = matrix("x", 4, 6)
    y = pt.exp(x)

    def refuse(message: str, outputs: Any, given: Any, wanted: Any, kind: Any = ValueError) -> None:
        with pytest.raises(kind, match=message):
            partition(outputs, given=given, wanted=wanted, ranks=3, rank=0)

    refuse("x: 'shard' is no placement, expected Replicate", [y], {x: "shard"}, {}, TypeError)
    refuse("x: <class .*Replicate'> is no placement", [y], {x: Replicate}, {}, TypeError)
    refuse("outputs: Exp of x is a variable", y, {x: Shard(0)}, {}, TypeError)
    refuse("Exp of x is wanted, but is none of the outputs", [y], {}, {pt.exp(x): Shard(0)})
    refuse("Exp of x is given a placement, but is computed", [y + 1], {y: Shard(0)}, {})
    refuse(r"single\(5\): there are 3 ranks", [place(x, Single(5))], {}, {})
    weights = pytensor.shared(np.zeros((6, 5)), name="w")
    refuse("w: .* needs a shape .* shape=value.shape", [x @ weights], {weights: Shard(1)}, {})
    with pytest.raises(TypeError, match="'x' is no placement"):
        place(x, "x")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="x has no value among `values`"):
        simulate([y], {x: Shard(0)}, {}, 3, {})
    with pytest.raises(ValueError, match=r"x: its value has shape \(3, 3\), expected \(4, 6\)"):
        simulate([y], {x: Shard(0)}, {}, 3, {x: np.zeros((3, 3))})


class Whole(Op):
    """The identity."""

    __props__ = ("choices",)

    def __init__(self, choices: Any) -> None:
        self.choices = choices

    def make_node(self, x: Any) -> Apply:  # type: ignore[override]
        return Apply(self, [x], [x.type()])

    def perform(self, node: Apply, inputs: Any, outputs: Any) -> None:
        outputs[0][0] = inputs[0]


@rule.register(Whole)
def _(op: Whole, node: Apply, ranks: int) -> Any:
    return op.choices and [*op.choices]


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        (None, "the rule of Whole returns None, expected a list of OpStrategy"),
        ((Shard(0),), r"returns \[Shard\(axis=0\)\], expected a list of OpStrategy"),
        (
            (OpStrategy(Shard(0), Shard(0)),),
            "lists inputs=Shard.* expected a tuple with .* each of 1",
        ),  # type: ignore[arg-type]
        (
            (OpStrategy((Shard(0),) * 2, (Shard(0),)),),
            "expected a tuple with a placement for each of 1",
        ),
        (
            (OpStrategy((Shard(0),), (Shard(7),)),),
            "lists outputs=.*: a tensor of 2 axes has no axis 7",
        ),
        ((OpStrategy((Shard(0),), (None,)),), "None is no placement"),  # type: ignore[arg-type]
    ],
)
def test_choices_that_are_none_of_a_node_are_refused(choices: Any, message: str) -> None:
    x = matrix("x", 4, 6)
    with pytest.raises(ValueError, match=message):
        partition([Whole(choices)(x)], given={x: Shard(0)}, wanted={}, ranks=2, rank=0)


def test_a_shared_variable_has_its_own_value() -> None:
    weights = pytensor.shared(np.arange(12.0).reshape(3, 4), name="w", shape=(3, 4))
    found = simulate([weights.sum(axis=1)], {weights: Shard(1)}, {}, 2, {})
    np.testing.assert_array_equal(found[1][0], [6, 22, 38])


def test_a_place_is_left_out_of_a_graph_that_is_not_partitioned() -> None:
    x = matrix("x", 2, 3)
    function = pytensor.function([x], pt.grad(place(x, Shard(0)).sum(), x), mode=Mode("py"))
    assert "Place" not in str(function.maker.fgraph.apply_nodes)
    np.testing.assert_array_equal(function(np.ones((2, 3))), np.ones((2, 3)))
