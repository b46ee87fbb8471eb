"""The network of a graph: inputs, outputs, costs, own layers and losses, and its graphs."""

from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.graph.traversal import applys_between

from tandem.backend import device_mode
from tandem.errors import InputError
from tandem.layers import Training
from tandem.layers.checks import check_graph, choose_loss
from tandem.layers.choices import (
    BinaryCrossEntropy,
    CrossEntropy,
    MeanSquaredError,
)
from tandem.layers.network import GRAPH_NETWORK, NetworkDescription, build_network
from tandem.nn import Input, layers
from tandem.nn.graph import Graph
from tandem.ops import BatchNormInference, Conv2d
from tandem.ops.work import work_of
from tests.support.layer_cases import graph_of, random_values
from tests.support.own_layers import Scaled, Shrinking

DEVICE = device_mode(strict=True)


def network_of(
    *given: Any, crop_size: int | None = None, classes: int = 3, dtype: str = "float64", **more: Any
) -> Any:
    """A network with initial values, of layers or of a graph."""
    graph = given[0] if isinstance(given[0], Graph) else Graph.chained(given)
    options = {"graph": graph.to_json(), **more}
    description = NetworkDescription(
        crop_size, classes, 1.0, network=GRAPH_NETWORK, options=options
    )
    network = build_network(description, dtype)
    network.initialize(0)
    return network


def function_of(network: Any, build: Any, *others: Any) -> Any:
    images = network.images()
    return pytensor.function([images, *others], build(network.logits(images, None)), mode=DEVICE)


def test_pictures_of_three_colours_reach_the_graph() -> None:
    network = network_of(Input((6, 6, 3)), layers.Flatten(), layers.Dense(3), crop_size=6)
    assert network.shapes["input"] == (3, 6, 6)
    assert network.shapes["dense"] == (3,)
    pictures = random_values((2, 3, 6, 6), 1)
    weight = network.parameters["dense.weight"].get_value()
    expected = pictures.transpose(0, 2, 3, 1).reshape(2, -1) @ weight
    np.testing.assert_allclose(function_of(network, lambda y: y)(pictures), expected)


def test_a_graph_of_one_colour_takes_the_mean_which_is_exact_for_grey() -> None:
    given, dtype = [Input((9, 9, 1)), layers.Flatten()], "float32"
    network = network_of(*given, crop_size=9, classes=81, output="linear", dtype=dtype)
    assert network.shapes["input"] == (3, 9, 9)
    function = function_of(network, lambda y: y)
    pictures = 127 * random_values((50, 3, 9, 9), 1, dtype)
    expected = pictures.mean(axis=1).reshape(50, -1)
    np.testing.assert_allclose(function(pictures), expected, rtol=1e-4, atol=1e-4)
    grey = np.repeat(pictures[:, :1], 3, axis=1)
    assert np.array_equal(function(grey), grey[:, 0].reshape(50, -1))


@pytest.mark.parametrize("shape", [(5,), (4, 5), (3, 4, 2)])
def test_rows_of_arrays_keep_their_order(shape: tuple[int, ...]) -> None:
    classes = int(np.prod(shape))
    network = network_of(Input(shape), layers.Flatten(), classes=classes, output="linear")
    rows = random_values((2, *shape), 1)
    given = rows.transpose(0, 3, 1, 2) if rows.ndim == 4 else rows
    assert network.shapes["input"] == given.shape[1:]
    assert np.array_equal(function_of(network, lambda y: y)(given), rows.reshape(2, -1))


def test_images_of_another_shape_are_refused() -> None:
    network = network_of(Input((4, 5)), layers.Flatten(), layers.Dense(3))
    with pytest.raises(TypeError, match="images must be a 3-dimensional tensor of float64"):
        network.logits(pt.dmatrix(), None)
    with pytest.raises(ValueError, match=r"must have the shape \(batch, 4, 5\), got"):
        network.logits(pt.tensor(dtype="float64", shape=(None, 4, 6)), None)
    unknown = pt.tensor(dtype="float64", shape=(None, None, None))
    assert network.logits(unknown, None).type.shape == (None, 3)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"crop_size": 8}, r"crop_size: found 8, for a graph whose input .*\(6, 6, 2\)"),
        ({"classes": 4}, "classes: found 4, expected the graph's 3 outputs"),
        ({"output": "relu"}, "network_options: output of .* is "),
        ({"layers": ["tests.support.own_layers:Scald"]}, "did you mean .*Scaled"),
        ({"layers": ["pathlib:Path"]}, "layers: found pathlib:Path, expected a subclass"),
        ({"loss": "tests.support.own_layers:fourth_powr"}, "no function .*did you mean"),
        ({"loss": "tests.support.own_layers:not_a_function"}, "has no function 'not_a_function'"),
    ],
)
def test_what_does_not_fit_the_graph_is_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        network_of(Input((6, 6, 2)), layers.Flatten(), layers.Dense(3), **more)


def test_a_width_is_refused() -> None:
    options = {"graph": Graph.chained([Input((3,)), layers.Dense(3)]).to_json()}
    description = NetworkDescription(None, 3, 0.5, network=GRAPH_NETWORK, options=options)
    with pytest.raises(InputError, match=r"width: found 0\.5, expected 1"):
        build_network(description)


@pytest.mark.parametrize("last", ["activation", "layer"])
@pytest.mark.parametrize("output", ["softmax", "sigmoid"])
def test_the_last_activation_stands_between_logits_and_predictions(last: str, output: str) -> None:
    ends = [layers.Dense(3, output)] if last == "activation" else [layers.Dense(3)]
    if last == "layer":
        ends.append(layers.Softmax() if output == "softmax" else layers.Activation(output))
    network = network_of(Input((4,)), *ends, output=output)
    logits, predictions = function_of(network, lambda y: [y, network.predictions(y)])(
        rows := random_values((5, 4), 1)
    )
    np.testing.assert_allclose(logits, rows @ network.parameters["dense.weight"].get_value())
    powers = np.exp(logits)
    sums = powers.sum(axis=1, keepdims=True) if output == "softmax" else 1 + powers
    np.testing.assert_allclose(predictions, powers / sums)
    linear = network_of(Input((4,)), *ends, output="linear")
    np.testing.assert_allclose(function_of(linear, linear.predictions)(rows), predictions)


def test_outputs_of_images_are_flattened_in_order() -> None:
    graph = Graph.chained([Input((2, 3, 4)), layers.Activation("sigmoid")])
    network = network_of(graph, classes=24, output="sigmoid")
    rows = random_values((2, 2, 3, 4), 1)
    assert np.array_equal(
        function_of(network, lambda y: y)(rows.transpose(0, 3, 1, 2)), rows.reshape(2, -1)
    )
    with pytest.raises(InputError, match=r"output: found softmax of outputs of shape \(2, 3, 4\)"):
        network_of(graph, classes=24)


@pytest.mark.parametrize(
    ("output", "loss"), [("sigmoid", CrossEntropy()), ("softmax", BinaryCrossEntropy())]
)
def test_a_loss_of_another_output_is_refused(output: str, loss: Any) -> None:
    network = network_of(Input((4,)), layers.Dense(3), output=output)
    network.loss = loss
    with pytest.raises(InputError, match=f"found {loss.name} .*output is {output}, expected"):
        function_of(network, lambda y: network.cost(y, pt.lvector(), pt.constant(np.int64(2))))


def test_own_layers_and_losses_are_imported_by_the_options() -> None:
    network = network_of(
        Input((3,)),
        Scaled(2),
        layers=["tests.support.own_layers:Scaled"],
        loss="tests.support.own_layers:fourth_power",
        output="linear",
    )
    targets, valid = pt.dmatrix(), pt.lscalar()
    function = function_of(network, lambda y: network.cost(y, targets, valid), targets, valid)
    rows, wanted = random_values((4, 3), 1), random_values((4, 3), 2)
    expected = ((wanted - 4 * rows)[:3] ** 4).sum(axis=1).mean()
    np.testing.assert_allclose(function(rows, wanted, np.int64(3)), expected)
    choose_loss(network, CrossEntropy())
    with pytest.raises(InputError, match="loss is mse, or smoothed, and GraphNetwork has a cost"):
        choose_loss(network, MeanSquaredError())
    choose_loss(network_of(Input((3,)), layers.Dense(3)), MeanSquaredError())


def test_a_loss_that_is_no_number_for_each_row_is_refused() -> None:
    loss = "tests.support.own_layers:mean_fourth_power"
    network = network_of(Input((3,)), layers.Dense(3), loss=loss, output="linear")
    with pytest.raises(InputError, match="of mean_fourth_power, expected the loss of each row"):
        function_of(network, lambda y: network.cost(y, pt.dmatrix(), pt.lscalar()))


def test_a_layer_that_builds_another_shape_than_it_says_is_refused() -> None:
    network = network_of(Input((3,)), Shrinking(), layers=["tests.support.own_layers:Shrinking"])
    with pytest.raises(InputError, match=r"shrinking: found a graph of .*\('batch', 3\)"):
        network.logits(network.images(), None)


# Graphs of training and of predictions


def training(batch: int, **more: Any) -> Training:
    seed, epoch = pt.constant(np.int64(1)), pt.constant(np.int64(0))
    return Training(seed, epoch, pt.constant(np.arange(batch)), **more)


def test_two_calls_of_dropout_draw_masks_of_their_own() -> None:
    symbol, dropout = Input((1000,)), layers.Dropout(0.5)
    graph = Graph.traced(symbol, layers.Concatenate()([dropout(symbol), dropout(symbol)]))
    network = network_of(graph, classes=2000, output="linear")
    images = network.images()
    function = pytensor.function([images], network.logits(images, training(2)), mode=DEVICE)
    first, second = np.split(function(np.ones((2, 1000))), 2, axis=1)
    for mask in (first, second):
        assert {*np.unique(mask)} == {0.0, 2.0}
        assert 0.45 < mask.mean() / 2 < 0.55
    assert 0.45 < (first == second).mean() < 0.55


def normalised() -> list[Any]:
    return [
        Input((6, 6, 3)),
        layers.Conv2D(4, 3, use_bias=False),
        layers.BatchNormalization(),
        layers.ReLU(),
        layers.Conv2D(4, 3, padding="same", name="second"),
        layers.BatchNormalization(center=False, scale=False),
        layers.Activation("relu"),
        layers.GlobalAveragePooling2D(),
        layers.Dense(3, "softmax", name="last"),
    ]


def test_the_graph_of_training_depends_on_all_that_is_declared() -> None:
    network = network_of(*normalised())
    images, pass_ = network.images(), training(4)
    cost = network.cost(network.logits(images, pass_), pt.lvector(), pt.constant(np.int64(4)))
    check_graph(network, images, cost, pass_)
    assert [*pass_.statistics] == [
        f"batch_normalization{n}.running_{kind}" for n in ("", "_1") for kind in ("mean", "var")
    ]


def test_a_frozen_normalisation_uses_its_averages() -> None:
    network = network_of(*normalised())
    images, pass_ = network.images(), training(4, frozen=["batch_normalization"])
    network.logits(images, pass_)
    assert not any(name.startswith("batch_normalization.") for name in pass_.statistics)


def test_normalisations_are_in_the_weights_when_it_predicts() -> None:
    network = network_of(*normalised())
    for name, variable in network.parameters.items():
        value = random_values(variable.type.shape, len(name))
        variable.set_value(abs(value) + 0.1 if name.endswith("var") else value)
    images = network.images()
    predictions = network.predictions(network.logits(images, None))
    plain = pytensor.function([images], predictions, mode=pytensor.compile.mode.Mode("py", None))
    folded = pytensor.function([images], predictions, mode=DEVICE)
    kinds = [type(node.op) for node in folded.maker.fgraph.apply_nodes]
    assert BatchNormInference not in kinds
    assert kinds.count(Conv2d) == 2
    unfolded = {type(node.op) for node in plain.maker.fgraph.apply_nodes}
    assert BatchNormInference in unfolded
    rows = random_values((2, 3, 6, 6), 1)
    np.testing.assert_allclose(folded(rows), plain(rows), rtol=1e-10)


# Faults of PyDTNN


def test_tanh_is_not_the_tangent() -> None:
    inputs, _, y = graph_of(layers.Activation("tanh"), [(3,)])
    (x,) = inputs
    values = np.array([[-1.2, 0.4, 2.0]])
    found, slopes = pytensor.function([x], [y, pytensor.grad(y.sum(), x)], mode=DEVICE)(values)
    powers = np.exp(2 * values)
    np.testing.assert_allclose(found, (powers - 1) / (powers + 1))
    np.testing.assert_allclose(slopes, 1 - ((powers - 1) / (powers + 1)) ** 2)


@pytest.mark.parametrize("name", ["leaky_relu", "arctan", "log_sigmoid"])
def test_gradients_of_activations_pass_on_those_behind_and_before_them(name: str) -> None:
    """By finite differences, with layers on both sides: the chain rule."""
    network = network_of(
        Input((4,)), layers.Dense(5, name="before"), layers.Activation(name), layers.Dense(3)
    )
    rows, labels = random_values((6, 4), 1), np.array([0, 1, 2, 0, 1, 2])
    images, targets = network.images(), pt.lvector()
    cost = network.cost(network.logits(images, None), targets, pt.constant(np.int64(6)))
    weight = network.parameters["before.weight"]
    function = pytensor.function(
        [images, targets], [cost, pytensor.grad(cost, weight)], mode=DEVICE
    )
    before = weight.get_value()
    _, gradient = function(rows, labels)
    for place in np.ndindex(*before.shape):
        costs = []
        for step in (1e-6, -1e-6):
            moved = before.copy()
            moved[place] += step
            weight.set_value(moved)
            costs.append(function(rows, labels)[0])
        np.testing.assert_allclose(gradient[place], (costs[0] - costs[1]) / 2e-6, atol=1e-8)


@pytest.mark.parametrize(
    "given",
    [
        [layers.Conv2D(4, 3, padding="same", strides=2)],
        [layers.Conv2D(4, 3, dilation_rate=2, use_bias=False)],
        [layers.DepthwiseConv2D(3, depth_multiplier=2)],
        [layers.MaxPooling2D(3)],
        [layers.AveragePooling2D(2)],
        [layers.BatchNormalization()],
        [layers.LocalResponseNormalization()],
        [layers.ReLU(), layers.ZeroPadding2D(1)],
        [layers.Rescaling(2.0), layers.Rescaling(2.0, 1.0)],
        [layers.Residual([], [layers.Conv2D(3, 1)])],
        [layers.Flatten(), layers.Dense(7), layers.Dense(7, use_bias=False)],
    ],
)
def test_layers_count_the_operations_of_their_ops(given: list[Any]) -> None:
    ends = [] if any(isinstance(layer, layers.Dense) for layer in given) else [layers.Flatten()]
    graph = Graph.chained([Input((8, 8, 3)), *given, *ends])
    (units,) = graph.output_shape
    network = network_of(graph, crop_size=8, classes=units, output="linear", dtype="float32")
    images = pt.tensor(dtype="float32", shape=(2, 3, 8, 8))
    nodes = applys_between([images], [network.logits(images, None)])
    assert sum(work_of(node).flops for node in nodes) == 2 * graph.flops
