"""Configurations as graphs: order, names, refusals, and JSON that decides no code."""

import copy
import math
import random
import sys
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
import scipy.special
import torch

from tandem.errors import InputError
from tandem.keras.graph import MOST_NODES, GraphData, read_graph
from tandem.keras.lowering import lowers, own_lowerings
from tandem.keras.network import KerasNetwork, joined
from tandem.keras.weights import read_weights
from tests.support.keras_models import (
    DEVICE,
    json_of,
    keras,
    network_of,
    ours,
    random_rows,
    ravelled,
    theirs,
    training_pass,
)


def several() -> Any:
    """Nested and shared models and layers, two inputs of other kinds, and three outputs."""
    m = keras.layers
    pictures = keras.Input((8, 8, 3), name="pictures")
    words = keras.Input((4,), dtype="int32", name="words")
    inside = keras.Input((8, 8, 2))
    both = m.Conv2D(2, 3, padding="same", name="both")
    block = keras.Model(inside, [both(inside), m.ReLU()(both(both(inside)))], name="block")
    stem = keras.Sequential([m.Conv2D(2, 1), m.BatchNormalization(name="norm")], name="stem")
    x, y = block(stem(pictures))
    x = block(keras.Model(inside, m.Add()([inside, inside]), name="twice")(x))[1] + y * 2
    z = m.Flatten()(m.Embedding(5, 3)(words))
    shared = m.Dense(4, activation="sigmoid", kernel_regularizer="l1", name="shared")
    ends = [shared(z), shared(m.Dense(12)(m.Flatten()(x)))]
    return keras.Model(
        {"words": words, "pictures": pictures}, [*ends, m.Softmax(name="classes")(m.Dense(3)(z))]
    )


def small() -> Any:
    m = keras.layers
    x = keras.Input((6, 6, 2))
    y = m.Conv2D(3, 3, padding="same", activation="relu")(x)
    y = m.Concatenate()([y, x * 2.0])
    y = keras.Sequential([m.MaxPooling2D(), m.BatchNormalization()])(y)
    y = m.LSTM(2)(m.TimeDistributed(m.Flatten())(y))
    return keras.Model(x, m.Dense(2, "softmax")(keras.ops.reshape(y, (-1, 2))))


def test_models_inside_models_shared_layers_and_several_ends() -> None:
    model = several()
    network = network_of(model)
    assert network.graph.inputs == ("pictures", "words")  # as Keras flattens mappings
    assert network.input_shapes == [tuple(x.shape[1:]) for x in model.inputs]
    assert network.output_shapes == [(4,), (4,), (3,)]
    assert network.output_names == model.output_names
    assert network.own_activation == ["sigmoid", "sigmoid", "softmax"]
    rows = random_rows(model)
    found, slopes = ours(network, rows)
    outputs = model(dict(zip(("pictures", "words"), rows, strict=True)))
    expected = torch.cat(outputs, 1).detach().numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert {"block.both.weight", "shared.bias"} <= {*slopes}
    assert network.untrained == ("stem.norm.running_mean", "stem.norm.running_var")
    penalty = network.regularization()
    assert penalty is not None
    value = pytensor.function([], penalty, mode=DEVICE)()
    np.testing.assert_allclose(value, sum(loss.item() for loss in model.losses), rtol=1e-5)


def test_calls_are_in_the_order_in_which_keras_runs_them() -> None:
    m, x = keras.layers, keras.Input((2, 3))
    shared, deep = m.Dense(3), m.Dense(3)(m.Dense(3)(x))
    named = {name: m.Dense(3)(x) for name in ("query", "value", "key")}
    ends = [m.Dense(1)(x), shared(m.Add()([x, deep, m.ReLU()(shared(x))])), m.Dense(2)(deep)]
    ends.append(m.MultiHeadAttention(1, 2)(**named))
    model = keras.Model.from_config(keras.Model(x, ends).get_config())
    by_depth = model._nodes_by_depth
    expected = [node.operation.name for n in sorted(by_depth, reverse=True) for node in by_depth[n]]
    assert [node.layer for node in read_graph(json_of(model)).nodes] == expected


@pytest.mark.parametrize("output", ["linear", "sigmoid", "softmax"])
def test_logits_are_those_before_the_activation_of_outputs(output: Any) -> None:
    model = several()
    network = network_of(model, output=output)
    images = network.images()
    logits = network.logits(images, None)
    rows = ravelled(random_rows(model))
    raw, found, expected = pytensor.function(
        [images],
        [logits, network.predictions(logits), joined(network.outputs(images, None))],
        mode=DEVICE,
    )(rows)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    is_other = abs(raw - expected).max(0) > 1e-3
    assert [bool(is_other[n]) for n in (0, 4, 8)] == [
        output == own for own in ("sigmoid", "sigmoid", "softmax")
    ]


@pytest.mark.parametrize(
    ("function", "from_logits", "expected"),
    [
        ("sparse_categorical_crossentropy", True, scipy.special.softmax),
        ("binary_crossentropy", True, lambda x, axis: scipy.special.expit(x)),
        ("sparse_categorical_crossentropy", False, lambda x, axis: x),
        (None, False, scipy.special.softmax),
    ],
)
def test_probabilities_are_of_logits_as_the_loss_takes_them(
    function: str | None, from_logits: bool, expected: Any
) -> None:
    x = keras.Input((3,))
    loss = {"name": "loss", "function": function, "options": {"from_logits": from_logits}}
    objective = None if function is None else {"losses": [loss]}
    network = network_of(keras.Model(x, keras.layers.Dense(4)(x)), objective=objective)
    values = np.random.default_rng(0).normal(size=(5, 4))
    logits = pt.dmatrix("logits")
    found = pytensor.function([logits], network.probabilities(logits), mode=DEVICE)(values)
    np.testing.assert_allclose(found, expected(values, axis=1), rtol=1e-12)


def test_layers_that_are_not_trained_are_known() -> None:
    m = keras.layers
    parts = [m.Dense(3, name="dense"), m.BatchNormalization(name="norm")]
    base = keras.Sequential([keras.Input((4,)), *parts], name="base")
    base.trainable = False
    x = keras.Input((4,))
    model = keras.Model(x, m.Dense(2)(m.Normalization(name="scales")(base(x))))
    network = network_of(model)
    statistics = ("scales.mean", "scales.variance")
    assert network.frozen == ("base.dense", "base.norm", *statistics)
    rows = random_rows(model)
    found, _ = ours(network, rows, training_pass())
    np.testing.assert_allclose(found, theirs(model, rows, training=True)[0], rtol=1e-5, atol=1e-5)


def test_a_layer_is_trained_as_it_says_itself() -> None:
    """Whatever a model or wrapper around it says."""
    m, x = keras.layers, keras.Input((4, 3))
    parts = [m.Dense(3, name="a"), m.BatchNormalization(name="norm"), m.Dense(2, name="b")]
    base = keras.Sequential([keras.Input((4, 3)), *parts], name="base")
    base.trainable = False
    for part in parts[1:]:
        part.trainable = True
    model = keras.Model(x, m.TimeDistributed(m.Dense(2), trainable=False)(base(x)))
    network = network_of(model)
    assert network.frozen == ("base.a",)
    assert len(model.trainable_variables) == len(network.parameters) - 4
    rows = random_rows(model)
    found, _ = ours(network, rows, training_pass())
    np.testing.assert_allclose(found, theirs(model, rows, training=True)[0], rtol=1e-4, atol=1e-5)


def test_frozen_cells_and_their_layers_are_known() -> None:
    m, x = keras.layers, keras.Input((4, 3))
    cells = [m.LSTMCell(2, trainable=False, name="a"), m.GRUCell(3, name="b")]
    one = m.RNN(m.LSTMCell(2, trainable=False, name="c"), name="one", return_sequences=True)
    model = keras.Model(x, m.RNN(cells, name="several")(one(x)))
    network = network_of(model)
    frozen = [n for n in network.parameters if any(n.startswith(f"{f}.") for f in network.frozen)]
    assert frozen == [*read_weights(model)][:6]


def test_open_lengths_are_given() -> None:
    m = keras.layers
    model = keras.Sequential([keras.Input((None,), dtype="int32"), m.Embedding(4, 3)])
    model.add(m.GlobalMaxPooling1D())
    values = json_of(model)
    with pytest.raises(InputError, match=r"found the shape \(None,\), expected known lengths"):
        KerasNetwork(None, 3, 1.0, "float32", model=values)
    network = KerasNetwork(None, 3, 1.0, "float32", model=values, input_shapes=[[7]])
    assert network.input_shapes == [(7,)]


def test_losses_of_masked_steps_are_refused() -> None:
    m = keras.layers
    x = keras.Input((4,), dtype="int32")
    network = network_of(keras.Model(x, m.Dense(2, name="d")(m.Embedding(3, 2, mask_zero=True)(x))))
    logits = network.logits(network.images(), training_pass())
    with pytest.raises(InputError, match="d: found an output with a mask"):
        network.cost(logits, logits, pt.constant(np.int64(3)))


class Scaled:
    """The name of a layer of one's own."""


@lowers(Scaled)
def scaled(layer: Any, x: Any) -> Any:
    return x * layer.parameter("gain", x.type.shape[1:]) + layer.number("offset")


def own_layer() -> Any:
    class Scaled(keras.layers.Layer):
        def __init__(self, offset: float, **options: Any) -> None:
            super().__init__(**options)
            self.offset = offset

        def build(self, shape: Any) -> None:
            self.gain = self.add_weight(shape=shape[1:], name="gain", initializer="ones")

        def call(self, x: Any) -> Any:
            return x * self.gain + self.offset

        def get_config(self) -> Any:
            return {**super().get_config(), "offset": self.offset}

    x = keras.Input((3,))
    return keras.Model(x, Scaled(0.5)(x))


def test_layers_of_ones_own_are_lowered() -> None:
    model = own_layer()
    rows = random_rows(model)
    (found, slopes), (expected, exact) = ours(network_of(model), rows), theirs(model, rows)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    np.testing.assert_allclose(slopes["scaled.gain"], exact["scaled.gain"], rtol=1e-6)


def test_a_model_has_only_the_lowerings_of_its_own_layers() -> None:
    x = keras.Input((4, 3))
    assert own_lowerings(json_of(keras.Model(x, keras.layers.Dense(2)(x)))) == {}
    wrapped = keras.Model(x, keras.layers.TimeDistributed(own_layer())(x))
    for model in (own_layer(), wrapped):
        assert list(own_lowerings(json_of(model))) == ["own:Scaled"]


def with_layer(**values: Any) -> Any:
    """JSON of a Sequential model of one Dense whose configuration differs."""
    m = keras.layers
    model = json_of(keras.Sequential([keras.Input((4,)), m.Dense(3, name="d")]))
    layer = model["config"]["layers"][1]
    for key, value in values.items():
        (layer if key in layer else layer["config"])[key] = value
    return model


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"class_name": "Densen"},
            r"d: found Densen, .* did you mean Dense\?; give one by @tandem",
        ),
        (
            {"module": "my.module", "class_name": "Mine"},
            r"d: found Mine, a layer of your own, .*@ta",
        ),
        ({"class_name": "RandomFlip"}, "d: found RandomFlip, expected rand_mirror=True of distrib"),
        ({"class_name": "Lambda"}, "d: found Lambda, for which there is no lowering"),
        ({"units": 0}, "d: found units 0, expected a whole number from 1"),
        ({"units": 2.5}, "d: found units 2.5, expected a whole number"),
        ({"units": 2**24 + 1}, "d: found units 16777217"),
        ({"use_bias": 1}, "d: found use_bias 1, expected true or false"),
        ({"activation": "relo"}, "d: found activation .*did you mean relu"),
        ({"activation": {"class_name": "function", "config": "f"}}, "expected an activation"),
        ({"activation": {"value": "a lambda's code"}}, "d: found activation .*an activation"),
        ({"activation": {"class_name": "Own", "config": {"name": "relu"}}}, "an activation"),
        ({"kernel_constraint": {"class_name": "NonNeg"}}, "d: found kernel_constraint, expected n"),
        ({"kernel_regularizer": "l3"}, "d: found kernel_regularizer"),
        ({"activity_regularizer": "l3"}, "d: found activity_regularizer"),
        ({"lora_rank": 4}, "d: found lora_rank, expected none"),
        ({"quantum": 4}, 'd: found quantum "4", expected none: quantum is not supported'),
        ({"dtype": "mixed_float16"}, 'd: found dtype "mixed_float16", expected float32'),
        ({"name": "a/b"}, 'found a layer named "a/b"'),
    ],
)
def test_what_cannot_be_used_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        KerasNetwork(None, 3, 1.0, "float32", model=with_layer(**change))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x, m: keras.ops.sum(x), "axis null, expected axes of 2 but the first"),
        (lambda x, m: keras.ops.max(x, axis=0, keepdims=True), "axes of 2 but the first"),
        (lambda x, m: keras.ops.transpose(x), "axes"),
        (lambda x, m: keras.ops.reshape(x, (2, -1)), "newshape .*expected -1, for the batch"),
        (lambda x, m: m.Lambda(lambda v: v)(x), "found Lambda, for which there is no lowering"),
        (lambda x, m: m.Dropout(1.0)(x), "rate 1, expected less than 1"),
        (
            lambda x, m: m.Softmax()(m.Embedding(3, 2, mask_zero=True)(x)),
            "found a mask of 2 axes",
        ),
    ],
)
def test_what_mixes_rows_or_is_code_is_refused(make: Any, message: str) -> None:
    x = keras.Input((4,), batch_size=2)
    with pytest.raises(InputError, match=message):
        KerasNetwork(None, 4, 1.0, "float32", model=json_of(keras.Model(x, make(x, keras.layers))))


@pytest.mark.parametrize("kind", ["Maximum", "Minimum", "Multiply"])
def test_joins_that_a_mask_of_one_input_changes_are_refused(kind: str) -> None:
    m, x = keras.layers, keras.Input((4,), dtype="int32")
    inputs = [m.Embedding(3, 2)(x), m.Embedding(3, 2, mask_zero=True)(x)]
    with pytest.raises(InputError, match="found inputs with masks, expected inputs without them"):
        network_of(keras.Model(x, getattr(m, kind)()(inputs)))


def test_subclassed_models_are_refused() -> None:
    class Own(keras.Model):
        def call(self, x: Any) -> Any:
            return x

    with pytest.raises(InputError, match='found "Own", expected a Functional or Sequential model'):
        read_graph(json_of(Own()))


# Hostile JSON


def test_models_are_bounded() -> None:
    layer = json_of(keras.Sequential([keras.Input((1,)), keras.layers.ReLU()]))
    layer = layer["config"]["layers"][1]
    many = with_layer()
    many["config"]["layers"] += [{**layer, "name": f"r{n}"} for n in range(MOST_NODES)]
    with pytest.raises(InputError, match="too many layers or calls"):
        read_graph(many)
    large = with_layer(units=2**24)
    more = {**large["config"]["layers"][1], "name": "more"}
    large["config"]["layers"].append(more)
    with pytest.raises(InputError, match=r"more\.weight: found \d+ parameters up to here"):
        KerasNetwork(None, 3, 1.0, "float32", model=large)
    model = with_layer()
    model["config"]["layers"][0]["config"]["batch_shape"] = [None, 2**40]
    with pytest.raises(InputError, match="too large"):
        KerasNetwork(None, 3, 1.0, "float32", model=model)


JUNK: list[Any] = [
    *(None, True, -1, 0, 2.5, 1e308, 10**40, 2**24, "", "os:system", "softmax", "\ud800"),
    *([], [0], [3, 3, 3, 3], [[1, 2], [3]], {}, {"class_name": {}}, {"class_name": "HeNormal"}),
    *({"class_name": "__keras_tensor__", "config": {}}, {"class_name": "__numpy__", "config": {}}),
    *(math.nan, math.inf, {"class_name": "__slice__", "config": {"start": []}}),
]


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
    """A copy of JSON of which one or two parts are replaced, deleted or swapped."""
    value = copy.deepcopy(value)
    for _ in range(rng.randint(1, 2)):
        holder, key = rng.choice(places(value))
        kind = rng.randrange(4)
        if kind < 2:
            holder[key] = copy.deepcopy(rng.choice(JUNK))
        elif kind == 2:
            del holder[key]
        else:
            other, place = rng.choice(places(value))
            holder[key] = copy.deepcopy(other[place])
    return value


@pytest.mark.parametrize("count", [20, pytest.param(1500, marks=pytest.mark.slow)])
def test_mutated_json_is_a_network_or_refused(count: int) -> None:
    """Every fault is an InputError, and nothing is imported, reserved or recursed into."""
    written, rng, refused = json_of(small()), random.Random(count), 0
    assert isinstance(read_graph(written), GraphData)
    nested: Any = []
    for _ in range(100_000):
        nested = [nested]
    for junk in [*JUNK, nested]:
        with pytest.raises(InputError):
            read_graph(junk)
    KerasNetwork(None, 2, 1.0, "float32", model=written)
    before = {*sys.modules}
    for _ in range(count):
        try:
            KerasNetwork(None, 2, 1.0, "float32", model=mutated(written, rng))
        except InputError:
            refused += 1
    assert {*sys.modules} == before
    assert count / 5 < refused < count
