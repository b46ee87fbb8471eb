"""Graphs as data: names, shapes, errors, and JSON that decides no code."""

import copy
import functools
import json
import math
import random
import sys
from dataclasses import dataclass
from typing import Any

import pytest

from tandem.errors import InputError
from tandem.nn import Input, layers
from tandem.nn.graph import MOST_NODES, Graph, Node, importable_name
from tests.support.layer_cases import CASES
from tests.support.own_layers import Scaled, Shapeless


def small() -> Graph:
    """A graph with most kinds of layers."""
    return Graph.chained(
        [
            Input((8, 8, 3)),
            layers.Rescaling(1 / 255),
            layers.Conv2D(4, 3, padding="same", kernel_initializer="he_normal"),
            layers.BatchNormalization(trainable=False),
            layers.Residual([], [layers.Conv2D(4, 1), layers.ReLU(6)]),
            layers.Concatenated([layers.MaxPooling2D()], [layers.AveragePooling2D()]),
            layers.DepthwiseConv2D(3, name="deep"),
            layers.Flatten(),
            layers.Dropout(0.5),
            layers.Dense(10, "softmax", bias_initializer={"class": "Constant", "value": 0.1}),
        ],
        norm_rows=16,
    )


def test_names_are_numbered_by_kind_and_graph() -> None:
    assert [*small().layers] == [
        "input_layer",
        "rescaling",
        "conv2d",
        "batch_normalization",
        "conv2d_1",
        "re_lu",
        "add",
        "max_pooling2d",
        "average_pooling2d",
        "concatenate",
        "deep",
        "flatten",
        "dropout",
        "dense",
    ]


def test_given_names_are_left_out_of_the_numbers() -> None:
    given = [layers.Dense(2), layers.Dense(3, name="dense"), layers.Dense(4)]
    assert [*Graph.chained([Input((5,)), *given]).layers] == [
        "input_layer",
        "dense_1",
        "dense",
        "dense_2",
    ]


def test_a_name_of_two_layers_is_refused() -> None:
    given = [layers.Dense(2, name="a"), layers.Dense(3, name="a")]
    with pytest.raises(InputError, match="found several layers of the name 'a', expected a name"):
        Graph.chained([Input((5,)), *given])


def test_parameters_come_in_the_order_of_layers() -> None:
    graph = small()
    assert [(p.name, p.shape) for p in graph.parameters] == [
        ("conv2d.weight", (4, 3, 3, 3)),
        ("conv2d.bias", (4,)),
        *((f"batch_normalization.{n}", (4,)) for n in ("weight", "bias")),
        *((f"batch_normalization.running_{n}", (4,)) for n in ("mean", "var")),
        ("conv2d_1.weight", (4, 4, 1, 1)),
        ("conv2d_1.bias", (4,)),
        ("deep.weight", (8, 1, 3, 3)),
        ("deep.bias", (8,)),
        ("dense.weight", (32, 10)),
        ("dense.bias", (10,)),
    ]
    assert graph.total_parameters == sum(math.prod(p.shape) for p in graph.parameters)
    assert graph.frozen == ("batch_normalization",)
    assert graph.input_shape == (8, 8, 3)
    assert graph.output_shape == (10,)


def test_flops_are_those_of_products_and_sums() -> None:
    graph = Graph.chained(
        [Input((8, 8, 3)), layers.Conv2D(4, 3), layers.Flatten(), layers.Dense(10, use_bias=False)]
    )
    assert graph.flops == 36 * 4 * (2 * 27 + 1) + 2 * 144 * 10


def test_a_layer_that_is_called_twice_has_its_parameters_once() -> None:
    symbol, shared = Input((5,)), layers.Dense(5)
    graph = Graph.traced(symbol, shared(shared(symbol)) + symbol)
    assert [p.name for p in graph.parameters] == ["dense.weight", "dense.bias"]
    assert graph.nodes == (
        Node("input_layer"),
        Node("dense", (0,)),
        Node("dense", (1,)),
        Node("add", (2, 0)),
    )
    again = Graph.from_json(graph.to_json())
    assert again.nodes == graph.nodes


def test_a_shared_layer_has_inputs_of_one_shape() -> None:
    symbol, shared = Input((5,)), layers.Dense(4)
    with pytest.raises(InputError, match="dense called on inputs of different shapes"):
        Graph.traced(symbol, shared(shared(symbol)))


def test_a_normalisation_whose_averages_are_learnt_is_called_once() -> None:
    """Of two calls only one could report the statistics that the averages take up."""
    symbol, norm = Input((5,)), layers.BatchNormalization()
    with pytest.raises(InputError, match=r"several calls of batch_normalization, .*expected one"):
        Graph.traced(symbol, norm(norm(symbol)))
    kept = layers.BatchNormalization(trainable=False)
    assert Graph.traced(symbol, kept(kept(symbol))).total_parameters == 20


def test_a_graph_is_replayed_on_another_symbol_with_its_parameters() -> None:
    inner = Graph.chained([Input((5,)), layers.Dense(5), layers.Dense(5, name="second")])
    symbol = Input((5,))
    graph = Graph.traced(symbol, inner.replayed(inner.replayed(symbol)))
    assert [*graph.layers] == ["input_layer", "dense", "second"]
    assert [node.layer for node in graph.nodes[1:]] == ["dense", "second"] * 2


@pytest.mark.parametrize(
    ("last", "output"),
    [
        (layers.Dense(3), "linear"),
        (layers.Dense(3, "softmax"), "softmax"),
        (layers.Dense(3, "sigmoid"), "sigmoid"),
        (layers.Dense(3, "tanh"), "linear"),
        (layers.Softmax(), "softmax"),
        (layers.Activation("sigmoid"), "sigmoid"),
        (Scaled(), "linear"),
    ],
)
def test_the_activation_at_the_end_is_known(last: layers.Layer, output: str) -> None:
    assert Graph.chained([Input((5,)), last]).output == output


def test_a_softmax_of_channels_is_not_one_of_classes() -> None:
    assert Graph.chained([Input((4, 4, 2)), layers.Conv2D(3, 1, activation="softmax")]).output == (
        "linear"
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda x: layers.Dense(3)(x),
            r"dense: found an input of shape \(28, 28, 1\), expected \(units,\): put a Flatten",
        ),
        (lambda x: layers.Conv2D(3, 30, name="c")(x), r"c: found an input .*at least 30 rows"),
        (lambda x: layers.Conv2D(4, 3, groups=2)(x), r"conv2d: found 1 channels for 2 groups"),
        (lambda x: layers.Conv2D(3, 3, groups=2), r"conv2d: found 3 filters in 2 groups"),
        (lambda x: layers.Conv2D(3, 3, 2, dilation_rate=2), r"conv2d: found strides .*to be 1"),
        (lambda x: layers.Conv2D(3, 3, data_format="channels_first"), "expected channels_last"),
        (lambda x: layers.Conv2D(3, 3, padding="full"), 'found "full", expected valid or same'),
        (lambda x: layers.Conv2D(3, 3, activation="relo"), "did you mean relu"),
        (lambda x: layers.Conv2D(3, 3, activation=abs), 'found "abs", expected one of linear'),
        (lambda x: layers.Dense(3, kernel_initializer="he_norml"), "did you mean he_normal"),
        (lambda x: layers.Dense(0), "units: found 0, expected a whole number from 1"),
        (lambda x: layers.Dense(2.5), "units: found 2.5, expected a whole number from 1"),
        (lambda x: layers.Dense(True), "units: found true, expected a whole number from 1"),
        (lambda x: layers.Dense(3, name="a/b"), "name: found .*, expected at most 100 letters"),
        (lambda x: layers.Dropout(1.0), "rate: found 1.0, expected a number of at least 0"),
        (lambda x: layers.BatchNormalization(axis=1)(x), "axis 1, expected -1"),
        (lambda x: layers.MaxPooling2D()(layers.Flatten()(x)), r"\(784,\), expected \(row, col"),
        (lambda x: layers.Flatten()(x) + x, r"add: found inputs: \(28, 28, 1\) and \(784,\)"),
        (lambda x: layers.Add()([x]), "add: found inputs: 1, expected at least two"),
        (lambda x: layers.Flatten()([x, x]), "flatten: found 2 inputs, expected one"),
        (lambda x: layers.Concatenate()([x, layers.Flatten()(x)]), "differ in that axis alone"),
        (lambda x: layers.Dense(3)([[1.0]]), "dense: found a call on list, expected one on symb"),
        (lambda x: layers.ZeroPadding2D(2**20)(x), "at most 2147483648 elements"),
        (lambda x: layers.Residual([layers.ReLU()]), "Residual: found 1 paths"),
        (lambda x: layers.Residual([], [3])(x), "found int in a list of layers"),
        (lambda x: layers.Residual([], [layers.ReLU])(x), "found ReLU in a list of layers"),
        (lambda x: Shapeless()(x), r"shapeless: found an output of shape \[3\]"),
        (lambda x: Input(()), "row_shape: found .*, expected one to three lengths"),
        (lambda x: Input((1, 2, 3, 4)), "expected one to three lengths"),
        (lambda x: Input((None, 3)), "expected one to three lengths"),
        (lambda x: Graph.chained([layers.Dense(3)]), "found Dense at first, expected an Input"),
        (lambda x: Graph.chained([]), "found NoneType at first, expected an Input"),
        (lambda x: Graph.traced(x, Input((3,))), "does not depend on the input"),
        (lambda x: Graph.traced(x, layers.Add()([x, Input((28, 28, 1))])), "found 2 inputs"),
        (lambda x: Graph.traced(x, 3), "found int, expected symbols"),
    ],
)
def test_what_cannot_be_used_is_refused_with_found_and_expected(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        make(Input((28, 28, 1)))
    assert "found" in str(error.value)
    assert "expected" in str(error.value)


def test_a_sum_with_a_number_is_none_of_layers() -> None:
    with pytest.raises(TypeError):
        Input((3,)) + 1


# JSON


@pytest.mark.parametrize("case", CASES)
def test_the_json_of_each_layer_makes_the_same_one(case: str) -> None:
    make, shapes = CASES[case]
    if len(shapes) > 1:
        shapes = shapes[:1] * len(shapes)
    symbol, layer = Input(shapes[0]), make(layers)
    graph = Graph.traced(symbol, layer([symbol] * len(shapes)))
    written = json.loads(json.dumps(graph.to_json(), allow_nan=False))
    again = Graph.from_json(written)
    assert again.to_json() == graph.to_json() == written
    assert again.parameters == graph.parameters
    assert again.shapes == graph.shapes
    assert {type(each) for each in again.layers.values()} == {layers.InputLayer, type(layer)}


def test_json_keeps_names_order_and_rows() -> None:
    graph = small()
    again = Graph.from_json(json.loads(json.dumps(graph.to_json())))
    assert again.to_json() == graph.to_json()
    assert again.parameters == graph.parameters
    assert again.norm_rows == 16
    assert again.frozen == graph.frozen


def test_an_own_layer_is_made_only_of_a_class_that_is_given() -> None:
    graph = Graph.chained([Input((5,)), Scaled(3)])
    written = graph.to_json()
    assert written["layers"]["scaled"] == {"class": "tests.support.own_layers:Scaled", "power": 3}
    again = Graph.from_json(written, layers=[Scaled])
    assert isinstance(again.layers["scaled"], Scaled)
    assert again.layers["scaled"].power == 3
    with pytest.raises(InputError, match=r'found the own layer "tests.*Scaled", expected one that'):
        Graph.from_json(written)


@pytest.mark.parametrize("kind", ["os:system", "this", "antigravity:fly", "tests.lacking:Layer"])
def test_no_name_in_json_is_imported(kind: str) -> None:
    written = small().to_json()
    written["layers"]["dense"] = {"class": kind}
    before = {*sys.modules}
    with pytest.raises(InputError, match="dense: found the"):
        Graph.from_json(written)
    assert {*sys.modules} == before


def test_classes_that_others_cannot_import_are_refused() -> None:
    @dataclass(frozen=True, eq=False)
    class Local(Scaled):
        pass

    for thing, name in ((Local, "Local"), (lambda x: x, "lambda")):
        with pytest.raises(InputError, match=f"found .*{name}.*: put it into a module"):
            importable_name("layers", thing)
    with pytest.raises(InputError, match="put it into a module"):
        Graph.chained([Input((5,)), Local()]).to_json()
    Local.__module__, Local.__qualname__ = "__main__", "Local"
    with pytest.raises(InputError, match=r"found __main__:Local, .*: put it into a module"):
        Graph.chained([Input((5,)), Local()]).to_json()
    with pytest.raises(InputError, match=r"expected subclasses of nn\.layers\.Layer"):
        Graph.from_json(small().to_json(), layers=[int])  # type: ignore[list-item]


def test_own_values_must_be_plain() -> None:
    graph = Graph.chained([Input((5,)), Scaled(power={1, 2})])  # type: ignore[arg-type]
    with pytest.raises(InputError, match="scaled: power: found a set, expected text, a number"):
        graph.to_json()


def test_graphs_are_bounded() -> None:
    written = Graph.chained([Input((5,)), layers.ReLU()]).to_json()
    deep = copy.deepcopy(written)
    deep["nodes"] = [["input_layer", []], *(["re_lu", [n]] for n in range(MOST_NODES))]
    with pytest.raises(InputError, match=f"a list of at most {MOST_NODES}"):
        Graph.from_json(deep)
    deep["nodes"].pop()
    assert len(Graph.from_json(deep).shapes) == MOST_NODES
    wide = copy.deepcopy(written)
    wide["nodes"] = [["input_layer", []], ["re_lu", [0] * 100_001]]
    with pytest.raises(InputError, match="too many inputs of nodes"):
        Graph.from_json(wide)
    large = Graph.chained([Input((5,)), layers.Dense(2**20)]).to_json()
    large["layers"]["more"] = {**large["layers"]["dense"]}
    large["nodes"].append(["more", [1]])
    with pytest.raises(InputError, match=f"{2**40 + 7 * 2**20} parameters, expected at most"):
        Graph.from_json(large)


JUNK: list[Any] = [
    None,
    True,
    -1,
    0,
    2.5,
    1e308,
    10**40,
    2**24,
    "",
    "os:system",
    "softmax",
    [],
    [0],
    [3, 3, 3, 3],
    [[1, 2], [3]],
    {},
    {"class": "HeNormal", "stddev": 1},
    {"class": {}},
    "\ud800",
    math.nan,
    math.inf,
]


@functools.cache
def nested() -> Any:
    value: Any = []
    for _ in range(100_000):
        value = [value]
    return value


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every mapping or list in a value, with each of its keys."""
    found, pending = [], [value]
    while pending:
        each = pending.pop()
        keys = each.keys() if isinstance(each, dict) else range(len(each))
        found += [(each, key) for key in keys]
        pending += [each[key] for key in keys if isinstance(each[key], dict | list)]
    return found


def mutated(value: Any, rng: random.Random) -> Any:
    """A copy of JSON of which one or two parts are replaced, deleted, added or swapped."""
    value = copy.deepcopy(value)
    for _ in range(rng.randint(1, 2)):
        holder, key = rng.choice(places(value))
        kind = rng.randrange(5)
        if kind < 2:
            holder[key] = copy.deepcopy(rng.choice(JUNK))
        elif kind == 2:
            del holder[key]
        elif kind == 3:
            other, place = rng.choice(places(value))
            holder[key] = copy.deepcopy(other[place])
        elif isinstance(holder, dict):
            holder[rng.choice(["extra", "name", "class", 3])] = rng.choice(JUNK)
        else:
            holder.insert(key, rng.choice(JUNK))
    if rng.random() < 0.02:
        holder, key = rng.choice(places(value))
        holder[key] = nested()
    return value


def test_mutated_json_is_a_graph_or_refused() -> None:
    """Every fault is an InputError, and nothing is imported, reserved or recursed into."""
    written, rng, refused = small().to_json(), random.Random(0), 0
    written["layers"]["own"] = {"class": "tests.support.own_layers:Scaled", "power": 3}
    written["nodes"].append(["own", [len(written["nodes"]) - 1]])
    before = {*sys.modules}
    for junk in [*JUNK, nested()]:
        with pytest.raises(InputError):
            Graph.from_json(junk)
    for _ in range(800):
        try:
            Graph.from_json(mutated(written, rng), layers=[Scaled]).to_json()
        except InputError:
            refused += 1
    assert {*sys.modules} == before
    assert 400 < refused < 800
