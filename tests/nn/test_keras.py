"""Layers, initializers and whole graphs against Keras 3 on PyTorch, with the same weights."""

import dataclasses
import inspect
import os
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
import torch

from tandem import nn
from tandem.backend import device_mode
from tandem.layers import Training
from tandem.layers.choices import CategoricalHinge, CrossEntropy, KLDivergence, MeanSquaredError
from tandem.layers.network import NetworkDescription, build_network
from tandem.nn.graph import Graph
from tandem.nn.initializers import Initializer, find_initializer
from tandem.nn.layers import LAYERS
from tests.support.layer_cases import (
    CASES,
    channels_first,
    channels_last,
    graph_of,
    random_values,
)
from tests.support.lazily import Lazily

os.environ.setdefault("KERAS_BACKEND", "torch")
keras = Lazily("keras")

DEVICE = device_mode(strict=True)
BATCH = 3


@pytest.fixture(scope="module", autouse=True)
def _float64() -> Any:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_dtype_policy(before)


def keras_weight(name: str, value: np.ndarray, depthwise: bool = False) -> np.ndarray:
    """A parameter of ours in Keras's layout."""
    if not name.endswith(".weight") or value.ndim != 4:
        return value
    if depthwise:  # (channel * multiplier, 1, row, column) to (row, column, channel, multiplier)
        multiplier = value.shape[0] // 4 if value.shape[0] % 4 == 0 else value.shape[0] // 3
        return value.reshape(-1, multiplier, *value.shape[2:]).transpose(2, 3, 0, 1)
    return value.transpose(2, 3, 1, 0)


def assert_close(found: Any, expected: Any) -> None:
    """Keras multiplies matrices and takes means in float32 in places, whatever its policy."""
    if isinstance(expected, torch.Tensor):
        expected = expected.detach().numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def averaged_by_loops(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """The mean of the pixels in each window of padding "same"; PyTorch's backend of Keras repeats
    pixels at edges instead where it pads the ends of an axis differently, unlike the others."""
    axes = []
    for length, size, stride in zip(x.shape[1:3], layer.pool_size, layer.strides, strict=True):
        count = -(-length // stride)
        before = max(0, (count - 1) * stride + size - length) // 2
        firsts = [number * stride - before for number in range(count)]
        axes.append([(max(0, first), first + size) for first in firsts])
    rows = [
        torch.stack([x[:, a:b, c:d].mean(dim=(1, 2)) for c, d in axes[1]], 1) for a, b in axes[0]
    ]
    return torch.stack(rows, 1)


def differentiated(inputs: list[Any], parameters: dict[str, Any], y: Any, slope: np.ndarray) -> Any:
    """Function of inputs: the output, and the gradients of its product with a slope."""
    trained = [v for name, v in parameters.items() if "running" not in name]
    cost = (y * pt.constant(slope)).sum()
    gradients = pytensor.grad(cost, [*inputs, *trained])
    return pytensor.function(inputs, [y, *gradients], mode=DEVICE, on_unused_input="ignore")


@pytest.mark.parametrize("case", CASES)
def test_values_gradients_and_shapes_are_those_of_keras(case: str) -> None:
    make, shapes = CASES[case]
    ours, theirs = make(nn.layers), make(keras.layers)
    inputs, parameters, y = graph_of(ours, shapes)
    rows = [random_values((BATCH, *shape), number) for number, shape in enumerate(shapes)]
    tensors = [torch.from_numpy(row).requires_grad_() for row in rows]
    given: Any = tensors[0] if len(tensors) == 1 else tensors
    theirs(given)
    depthwise = isinstance(ours, nn.layers.DepthwiseConv2D)
    values = {name: variable.get_value() for name, variable in parameters.items()}
    theirs.set_weights([keras_weight(name, v, depthwise) for name, v in values.items()])
    expected = theirs(given)
    if case.startswith("average pool same"):
        expected = averaged_by_loops(theirs, given)
    assert ours.output_shape(*shapes) == tuple(expected.shape[1:])
    batched = [(None, *shape) for shape in shapes]
    theirs_shape = theirs.compute_output_shape(batched[0] if len(batched) == 1 else batched)
    assert (None, *ours.output_shape(*shapes)) == tuple(theirs_shape)

    slope = random_values(tuple(expected.shape), 5)
    outputs = differentiated(inputs, parameters, y, channels_first(slope))(
        *map(channels_first, rows)
    )
    assert_close(channels_last(outputs[0]), expected)
    trained = [variable.value for variable in theirs.trainable_variables]
    gradients = torch.autograd.grad(
        (expected * torch.from_numpy(slope)).sum(), [*tensors, *trained]
    )
    names = [name for name in parameters if "running" not in name]
    assert len(names) == len(trained)
    for found, exact in zip(outputs[1 : 1 + len(rows)], gradients, strict=False):
        assert_close(channels_last(found), exact)
    for name, found, exact in zip(
        names, outputs[1 + len(rows) :], gradients[len(rows) :], strict=True
    ):
        assert_close(keras_weight(name, found, depthwise), exact)


def training(batch: int) -> Training:
    seed, epoch = pt.constant(np.int64(1)), pt.constant(np.int64(0))
    return Training(seed, epoch, pt.constant(np.arange(batch)), rows=32)


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # of Keras's variables
@pytest.mark.parametrize("shape", [(4, 3, 2), (5,)])
def test_batch_normalisation_in_training_is_that_of_keras(shape: tuple[int, ...]) -> None:
    ours = nn.layers.BatchNormalization(momentum=0.7)
    theirs = keras.layers.BatchNormalization(momentum=0.7)
    pass_ = training(BATCH)
    inputs, parameters, y = graph_of(ours, [shape], training=pass_)
    row = random_values((BATCH, *shape), 1)
    tensor = torch.from_numpy(row).requires_grad_()
    theirs(tensor)
    before = [variable.get_value() for variable in parameters.values()]
    theirs.set_weights(before)
    expected = theirs(tensor, training=True)
    slope = random_values(row.shape, 5)
    outputs = differentiated(inputs, parameters, y, channels_first(slope))(channels_first(row))
    assert_close(channels_last(outputs[0]), expected)
    gradients = torch.autograd.grad(
        (expected * torch.from_numpy(slope)).sum(),
        [tensor, *(v.value for v in theirs.trainable_variables)],
    )
    assert_close(channels_last(outputs[1]), gradients[0])
    for found, exact in zip(outputs[2:], gradients[1:], strict=True):
        assert_close(found, exact)
    names = ["it.running_mean", "it.running_var"]
    mean, variance = pytensor.function(
        inputs, [pass_.statistics[name] for name in names], mode=DEVICE
    )(channels_first(row))
    count = row.size // shape[-1]
    after = theirs.get_weights()[2:]
    assert_close(0.7 * before[2] + 0.3 * mean, after[0])
    # Keras keeps the biased variance.
    assert_close(0.7 * before[3] + 0.3 * variance * (count - 1) / count, after[1])


INITIALIZERS: dict[str, dict[str, float]] = {
    "glorot_uniform": {},
    "glorot_normal": {},
    "he_uniform": {},
    "he_normal": {},
    "lecun_uniform": {},
    "lecun_normal": {},
    "zeros": {},
    "ones": {},
    "Constant": {"value": 0.3},
    "RandomNormal": {"mean": 0.5, "stddev": 0.2},
    "RandomUniform": {"minval": -0.1, "maxval": 0.4},
    "TruncatedNormal": {"mean": -0.2, "stddev": 0.3},
}


@pytest.mark.parametrize("name", INITIALIZERS)
def test_initial_values_have_the_spread_and_range_of_keras(name: str) -> None:
    """Deviations of 30,000 numbers agree within 2 %; ranges where distributions have an end."""
    arguments = INITIALIZERS[name]
    ours: Any = {"class": name, **arguments} if arguments else name
    theirs: Any = name if not arguments else getattr(keras.initializers, name)(**arguments)
    layers = [
        (nn.layers.Dense(200, kernel_initializer=ours), (300,), (300, 200)),
        (nn.layers.Conv2D(40, 5, kernel_initializer=ours), (9, 9, 30), (5, 5, 30, 40)),
    ]
    for layer, inputs, shape in layers:
        parameter = layer.declare("it", inputs)[0]
        found = parameter.initial_value(3, 0, "float64")
        expected = keras.initializers.get(theirs)(shape, dtype="float64").numpy()
        assert found.size == expected.size
        std = expected.std()
        np.testing.assert_allclose(found.std(), std, rtol=0.02, atol=1e-7)
        np.testing.assert_allclose(found.mean(), expected.mean(), atol=0.03 * std + 1e-6)
        for part in (0.01, 0.99):
            quantiles = [np.quantile(values, part) for values in (found, expected)]
            assert abs(quantiles[0] - quantiles[1]) <= 0.1 * std + 1e-6
        # Keras's truncation lets a few numbers through on PyTorch, ours none.
        if parameter.distribution == "truncated":
            assert abs(found - parameter.mean).max() <= 2 * parameter.std
        elif "uniform" in name.lower():
            assert abs(found.min() - expected.min()) <= 0.01 * std
            assert abs(found.max() - expected.max()) <= 0.01 * std


def test_the_depthwise_kernel_has_the_fans_of_keras() -> None:
    ours = nn.layers.DepthwiseConv2D(5, depth_multiplier=4).declare("it", (9, 9, 200))[0]
    theirs = keras.initializers.GlorotUniform(seed=1)((5, 5, 200, 4), dtype="float64").numpy()
    np.testing.assert_allclose(ours.std, theirs.std(), rtol=0.02)


def test_names_and_defaults_are_those_of_keras() -> None:
    for name in INITIALIZERS:
        if not INITIALIZERS[name]:
            theirs = keras.initializers.get(name)
            assert type(find_initializer(name)).__name__ == type(theirs).__name__
    to_snake_case = keras.src.utils.naming.to_snake_case
    for name, kind in LAYERS.items():
        if name == "LocalResponseNormalization":
            continue
        theirs = getattr(keras.layers, name)
        assert kind.default_name() == to_snake_case(name)
        known = inspect.signature(theirs.__init__).parameters
        for field in dataclasses.fields(kind):
            if field.name in ("name", "trainable", "row_shape"):
                continue
            assert field.name in known, f"{name}.{field.name}"
            default = field.default
            if known[field.name].default is inspect.Parameter.empty:
                continue
            if isinstance(default, Initializer):
                default = to_snake_case(type(default).__name__)
            assert default == known[field.name].default, f"{name}.{field.name}"


def convnet(m: Any, symbol: Any) -> Any:
    """A network with every kind of join, of a module of layers."""
    x = m.Conv2D(4, 3, padding="same", use_bias=False)(symbol)
    x = m.BatchNormalization()(x)
    x = m.ReLU()(x)
    left = m.Conv2D(4, 3, strides=2, padding="same")(x)
    right = m.AveragePooling2D(2, padding="same")(x)
    x = m.Add()([left, right])
    shared = m.Conv2D(4, 1, activation="tanh")
    x = m.Concatenate()([shared(x), shared(shared(x))])
    return m.Dense(5, "softmax")(m.Dropout(0.5)(m.Flatten()(x)))


def test_a_whole_network_predicts_and_costs_what_it_does_in_keras() -> None:
    symbol, theirs_input = nn.Input((7, 6, 2)), keras.Input((7, 6, 2))
    graph = Graph.traced(symbol, convnet(nn.layers, symbol))
    theirs = keras.Model(theirs_input, convnet(keras.layers, theirs_input))
    assert theirs.count_params() == graph.total_parameters
    assert len(theirs.layers) == len(graph.layers)
    options = {"graph": graph.to_json(), "output": "softmax"}
    network = build_network(
        NetworkDescription(None, 5, 1.0, network="tandem.nn.network:GraphNetwork", options=options),
        "float64",
    )
    network.initialize(1)
    # Keras lists parameters in the order of its layers, which is ours but for parallel paths.
    by_layer = {name.partition(".")[0] for name in network.parameters}
    weights = {name: v.get_value() for name, v in network.parameters.items()}
    for name, layer in zip(
        [n for n in graph.layers if n in by_layer],
        [each for each in sorted_like(theirs, graph) if each.weights],
        strict=True,
    ):
        layer.set_weights(
            [keras_weight(n, w) for n, w in weights.items() if n.partition(".")[0] == name]
        )
    images, labels = network.images(), pt.lvector()
    logits, costs = network.logits(images, None), []
    for loss in (CrossEntropy(), KLDivergence(), MeanSquaredError(), CategoricalHinge()):
        network.loss = loss
        costs.append(network.cost(logits, labels, pt.constant(np.int64(BATCH))))
    outputs = [network.predictions(logits), *costs]
    function = pytensor.function([images, labels], outputs, mode=DEVICE)
    rows, classes = random_values((BATCH, 7, 6, 2), 1), np.array([0, 4, 2])
    predicted, *found = function(channels_first(rows), classes)
    expected, one_hot = theirs(rows).detach(), np.eye(5)[classes]
    assert_close(predicted, expected)
    losses = keras.losses.CategoricalCrossentropy, keras.losses.KLDivergence
    losses += keras.losses.MeanSquaredError, keras.losses.CategoricalHinge
    exact = [float(loss()(one_hot, expected)) for loss in losses]
    np.testing.assert_allclose(found, exact, rtol=1e-5)


def sorted_like(theirs: Any, graph: Graph) -> list[Any]:
    """Keras's layers in our graph's order: both name them in the order of their making."""
    kinds: dict[str, list[Any]] = {}
    for layer in sorted(theirs.layers, key=lambda layer: (len(layer.name), layer.name)):
        kinds.setdefault(type(layer).__name__, []).append(layer)
    return [kinds[type(layer).__name__].pop(0) for layer in graph.layers.values()]


def branched(api: Any, seed: int) -> Any:
    """A network of many branches, of which each layer has a number of units of its own."""
    rng, x = np.random.default_rng(seed), api.Input((3,))
    symbols, unread = [x], {0}
    for number in range(8):
        chosen = sorted({*rng.integers(0, len(symbols), 2).tolist()})
        several = [symbols[n] for n in chosen]
        symbols.append(
            api.layers.Dense(10 + number)(
                api.layers.Concatenate()(several) if several[1:] else several[0]
            )
        )
        unread = {*unread, len(symbols) - 1} - {*chosen}
    ends = [symbols[n] for n in rng.permutation(sorted(unread))]
    return api.Model(
        x, api.layers.Dense(2)(api.layers.Concatenate()(ends) if ends[1:] else ends[0])
    )


@pytest.mark.parametrize("seed", range(8))
def test_weights_have_the_order_of_keras_where_a_graph_has_branches(seed: int) -> None:
    theirs = branched(keras, seed)
    ours = branched(nn, seed)
    expected = [value.shape for value in theirs.get_weights()]
    assert [value.shape for value in ours.get_weights()] == expected
    ours.set_weights(theirs.get_weights())
    for one, other in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other.astype(np.float32))
