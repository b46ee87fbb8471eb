import math
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.graph.traversal import ancestors

from alex_net import AlexNet
from tandem.layers import Training
from tandem.ops import (
    LRN,
    Conv2d,
    Conv2dInputGrad,
    Conv2dWeightGrad,
    DropoutMask,
    LRNGrad,
    MaxPool2d,
    MaxPool2dGrad,
)
from tests.support.op_checks import MODE, plain_python

LAYERS = ("conv1", "conv2", "conv3", "conv4", "conv5", "fc6", "fc7", "fc8")
SHAPES = {"input": (3, 227, 227), "conv1": (96, 55, 55), "pool1": (96, 27, 27)}
SHAPES |= {"conv2": (256, 27, 27), "pool2": (256, 13, 13), "conv3": (384, 13, 13)}
SHAPES |= {"conv4": (384, 13, 13), "conv5": (256, 13, 13), "pool5": (256, 6, 6)}
SHAPES |= {"fc6": (4096,), "fc7": (4096,), "fc8": (1000,)}
PARAMETER_SHAPES = {
    "conv1.weight": (96, 3, 11, 11),
    "conv2.weight": (256, 48, 5, 5),
    "conv3.weight": (384, 256, 3, 3),
    "conv4.weight": (384, 192, 3, 3),
    "conv5.weight": (256, 192, 3, 3),
    "fc6.weight": (9216, 4096),
    "fc7.weight": (4096, 4096),
    "fc8.weight": (4096, 1000),
}


@pytest.fixture(autouse=True)
def _plain_python():
    with plain_python():
        yield


class Inputs:
    """Symbols for a minibatch of `batch` pictures."""

    def __init__(self, net, batch=2, static=True):
        side = net.crop_size if static else None
        batch = batch if static else None
        shape = (batch, 3, side, side)
        self.images = pt.tensor("images", dtype=net.dtype, shape=shape)
        self.labels = pt.tensor("labels", dtype="int64", shape=(batch,))
        self.indices = pt.tensor("indices", dtype="int64", shape=(batch,))
        self.valid, self.seed, self.epoch = (pt.lscalar(n) for n in ("valid", "seed", "epoch"))

    @property
    def keys(self):
        return Training(self.seed, self.epoch, self.indices)

    @property
    def all(self):
        return [self.images, self.labels, self.indices, self.valid, self.seed, self.epoch]


def compiled(inputs, outputs):
    return pytensor.function(inputs.all, outputs, mode=MODE, on_unused_input="ignore")


def training_step(net, **options):
    """Cost and every gradient."""
    inputs = Inputs(net, **options)
    logits = net.logits(inputs.images, inputs.keys)
    cost = net.cost(logits, inputs.labels, inputs.valid)
    return compiled(inputs, [cost, *pytensor.grad(cost, [*net.parameters.values()])])


def validation_step(net, **options):
    inputs = Inputs(net, **options)
    logits = net.logits(inputs.images, None)
    return compiled(inputs, [logits, net.cost(logits, inputs.labels, inputs.valid)])


def minibatch(net, batch=2, valid=None):
    rng = np.random.default_rng(5)
    images = 100 * rng.normal(size=(batch, 3, net.crop_size, net.crop_size))
    labels = rng.integers(0, net.classes, batch)
    valid = np.int64(batch if valid is None else valid)
    return images.astype(net.dtype), labels, np.arange(7, 7 + batch), valid, 1, 2


def tiny(dtype="float64", **options):
    """A network whose activations are of ordinary size, so that every gradient can be seen."""
    net = AlexNet(**{"crop_size": 67, "classes": 3, "width": 0.02, "dtype": dtype, **options})
    rng = np.random.default_rng(3)
    for name, variable in net.parameters.items():
        shape = variable.type.shape
        fan_in = math.prod(shape[1:]) if len(shape) == 4 else shape[0]
        std = math.sqrt(2 / fan_in) if net.parameters.declared[name].kind == "weight" else 0.1
        variable.set_value((std * rng.normal(size=shape)).astype(dtype))
    return net


@pytest.fixture(scope="module")
def training_graph():
    """Of the whole network."""
    return training_step(AlexNet()).maker.fgraph


def ops_of(graph):
    return Counter(type(node.op) for node in graph.apply_nodes)


# What the network is


def test_layers_and_parameters_have_the_names_order_and_shapes_of_the_table():
    net = AlexNet()
    assert net.shapes == SHAPES
    names = [f"{layer}.{kind}" for layer in LAYERS for kind in ("weight", "bias")]
    assert list(net.parameters) == list(net.parameters.declared) == names
    for name, variable in net.parameters.items():
        kind = name.split(".")[1]
        tags = net.parameters.declared[name]
        assert tags.kind == kind
        outputs = PARAMETER_SHAPES[name.replace("bias", "weight")]
        bias = outputs[:1] if len(outputs) == 4 else outputs[1:]
        assert variable.type.shape == (PARAMETER_SHAPES[name] if kind == "weight" else bias)
        assert variable.get_value(borrow=True).shape == variable.type.shape
    sizes = (variable.get_value(borrow=True).size for variable in net.parameters.values())
    assert sum(sizes) == 60_965_224


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_initial_values_have_the_tables_biases_and_no_mean(dtype):
    biases = dict(zip(LAYERS, (0, 0.1, 0, 0.1, 0, 0.1, 0.1, 0), strict=True))
    net = AlexNet(crop_size=67, classes=50, width=0.25, dtype=dtype)
    net.initialize(seed=4)
    for name, variable in net.parameters.items():
        layer, kind = name.split(".")
        value = variable.get_value()
        assert value.dtype == np.dtype(dtype)
        if kind == "bias":
            np.testing.assert_array_equal(value, np.full(value.shape, biases[layer], dtype))
        else:
            assert abs(value.mean()) < 5 * value.std() / math.sqrt(value.size)
    assert all((net.parameters[name].get_value() == v).all() for name, v in net.initial_values(4))


def test_small_pictures():
    net = AlexNet(crop_size=67, classes=10)
    assert net.shapes["pool5"] == (256, 1, 1)
    assert net.parameters["fc6.weight"].type.shape == (256, 4096)
    assert net.parameters["fc8.weight"].type.shape == (4096, 10)


@pytest.mark.parametrize("width", [0.001, 0.02, 0.1, 0.33, 0.5, 1.5])
def test_groups_divide_the_filters_at_every_width(width):
    net = AlexNet(crop_size=67, classes=10, width=width)
    assert all(layer.filters % 2 == 0 and layer.filters >= 2 for layer in net.convolutions)
    assert net.shapes["fc8"] == (10,)
    logits = net.logits(Inputs(net, batch=4).images, None)
    assert logits.type.shape == (4, 10)


def test_width_is_a_factor_on_filters_and_units():
    net = AlexNet(width=0.5)
    filters = [layer.filters for layer in net.convolutions]
    assert filters == [48, 128, 192, 192, 128]
    assert [layer.units for layer in net.fully_connected] == [2048, 2048, 1000]


@pytest.mark.parametrize(
    ("crop_size", "layer"),
    [(66, "pool5"), (35, "pool5"), (34, "pool2"), (18, "pool1"), (10, "conv1"), (0, "conv1")],
)
def test_a_crop_too_small_is_refused_with_the_layer_that_vanishes(crop_size, layer):
    message = f"at crop_size {crop_size}, {layer} has no output left; the smallest .* is 67"
    with pytest.raises(ValueError, match=message):
        AlexNet(crop_size=crop_size)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"classes": 0}, ValueError, "classes must be at least 1, got 0"),
        ({"width": 0.0}, ValueError, "width must be positive, got 0.0"),
        ({"width": float("nan")}, ValueError, "width must be positive, got nan"),
        ({"dtype": "float16"}, TypeError, "dtype must be float32 or float64, got 'float16'"),
    ],
)
def test_arguments_out_of_range_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        AlexNet(**options)


@pytest.mark.parametrize(
    ("shape", "dtype", "error"),
    [
        ((2, 3, 227, 226), "float32", ValueError),
        ((2, 1, 227, 227), "float32", ValueError),
        ((3, 227, 227), "float32", TypeError),
        ((2, 3, 227, 227), "float64", TypeError),
    ],
)
def test_images_that_do_not_fit_are_refused(shape, dtype, error):
    with pytest.raises(error, match=r"images must .* got"):
        AlexNet().logits(pt.tensor(dtype=dtype, shape=shape), None)


# What it computes


def test_gradients_agree_with_finite_differences():
    net = tiny()
    step = training_step(net)
    data = minibatch(net)
    _, *gradients = step(*data)
    rng = np.random.default_rng(0)
    for variable, gradient in zip(net.parameters.values(), gradients, strict=True):
        value = variable.get_value()
        largest = np.unravel_index(np.abs(gradient).argmax(), gradient.shape)
        anywhere = tuple(rng.integers(0, n) for n in gradient.shape)
        for at in (largest, anywhere):
            slope = slope_along(variable, value, at, lambda: step(*data)[0])
            np.testing.assert_allclose(gradient[at], slope, rtol=1e-4, atol=1e-8)
        assert gradient[largest] != 0


def slope_along(variable, value, at, cost, epsilon=1e-6):
    """Central difference of the cost by one entry of a parameter."""
    costs = []
    for sign in (1, -1):
        moved = value.copy()
        moved[at] += sign * epsilon
        variable.set_value(moved)
        costs.append(float(cost()))
    variable.set_value(value)
    return (costs[0] - costs[1]) / (2 * epsilon)


def test_single_precision_agrees_with_double():
    """In the same graph; a factor of the wrong type or a lost term would show at once."""
    results = []
    for dtype in ("float32", "float64"):
        net = tiny(dtype)
        results.append(training_step(net)(*minibatch(net)))
    for single, double in zip(*results, strict=True):
        assert single.dtype == np.dtype("float32")
        np.testing.assert_allclose(single, double, rtol=1e-3, atol=1e-4 * np.abs(double).max())


def test_rows_that_are_not_valid_do_not_count():
    net = tiny()
    step = training_step(net, batch=3)
    images, labels, indices, _, *keys = minibatch(net, batch=3)
    whole = step(images, labels, indices, 2, *keys)
    images[2], labels[2], indices[2] = -images[2], 0, 0
    changed = step(images, labels, indices, 2, *keys)
    alone = training_step(net, batch=2)(images[:2], labels[:2], indices[:2], 2, *keys)
    for a, b, c in zip(whole, changed, alone, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-15)
        np.testing.assert_allclose(a, c, rtol=1e-9, atol=1e-12)


def test_a_minibatch_without_valid_rows_costs_nothing_and_teaches_nothing():
    net = tiny()
    for value in training_step(net)(*minibatch(net, valid=0)):
        assert not value.any()


def test_dropout_follows_the_dataset_index_and_the_epoch():
    net = tiny(width=0.05)
    step = training_step(net)
    images, labels, indices, valid, seed, epoch = minibatch(net)
    cost = step(images, labels, indices, valid, seed, epoch)[0]
    turned = step(images[::-1], labels[::-1], indices[::-1], valid, seed, epoch)[0]
    np.testing.assert_allclose(cost, turned, rtol=1e-12)
    assert step(images, labels, indices, valid, seed, epoch + 1)[0] != cost
    assert step(images, labels, indices + 1, valid, seed, epoch)[0] != cost
    assert step(images, labels, indices, valid, seed + 1, epoch)[0] != cost


@pytest.mark.parametrize("static", [True, False])
def test_validation(static):
    net = tiny(classes=8)
    data = minibatch(net, batch=4, valid=3)
    logits, cost = validation_step(net, batch=4, static=static)(*data)
    labels = data[1]
    losses = [
        math.log(sum(math.exp(v) for v in row)) - row[y]
        for row, y in zip(logits, labels, strict=True)
    ]
    np.testing.assert_allclose(cost, sum(losses[:3]) / 3, rtol=1e-10)


# The graph


@pytest.mark.parametrize("norm_before_pool", [False, True])
def test_the_order_of_pooling_and_normalisation(norm_before_pool):
    net = AlexNet(67, 10, norm_before_pool=norm_before_pool)
    logits = net.logits(Inputs(net).images, None)
    nodes = [variable.owner for variable in ancestors([logits]) if variable.owner is not None]
    norms = [node for node in nodes if isinstance(node.op, LRN)]
    assert len(norms) == 2
    for node in norms:
        before = node.inputs[0].owner.op
        assert isinstance(before, MaxPool2d) != norm_before_pool
    pools = [node.inputs[0].owner.op for node in nodes if isinstance(node.op, MaxPool2d)]
    assert sum(isinstance(op, LRN) for op in pools) == (2 if norm_before_pool else 0)
    assert net.shapes == AlexNet(67, 10).shapes


def test_training_computes_nothing_that_nobody_asks_for(training_graph):
    found = ops_of(training_graph)
    expected = {
        Conv2d: 5,
        Conv2dInputGrad: 4,  # none for the images
        Conv2dWeightGrad: 5,
        MaxPool2d: 3,
        MaxPool2dGrad: 3,
        LRN: 2,
        LRNGrad: 2,
        DropoutMask: 2,
    }
    assert {op: found[op] for op in expected} == expected
    names = {op.__name__ for op in found}
    assert not names & {"Shape", "Shape_i", "MakeVector", "Assert", "SpecifyShape", "CheckAndRaise"}


def test_every_length_in_the_graph_is_known_and_nothing_is_in_double_precision(training_graph):
    for node in training_graph.apply_nodes:
        for variable in (*node.inputs, *node.outputs):
            assert variable.type.dtype != "float64", node
        for output in node.outputs:
            assert None not in output.type.shape, node


def test_validation_holds_no_mask():
    net = AlexNet(crop_size=67, classes=10)
    found = ops_of(validation_step(net).maker.fgraph)
    assert DropoutMask not in found
    assert found[Conv2d] == 5


def test_looking_at_the_network_does_not_touch_its_values():
    """Else every process that only builds the graph would hold a quarter of a gigabyte."""
    # In a process that keeps no freed memory, as one does that other tests have computed in.
    script = (
        "from tests.test_alex_net import AlexNet, resident_bytes\n"
        "zeros = AlexNet().parameters['fc6.weight'].get_value(borrow=True)\n"
        "print(zeros.nbytes, resident_bytes(zeros))"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert found.stdout == f"{9216 * 4096 * 4} 0\n", found.stderr


def resident_bytes(array):
    """How much of an array's own pages the kernel has mapped, from /proc."""
    first, last = array.ctypes.data, array.ctypes.data + array.nbytes
    pages = range(first // 4096 + 1, last // 4096)
    try:
        with Path("/proc/self/pagemap").open("rb") as file:
            file.seek(8 * pages.start)
            entries = np.frombuffer(file.read(8 * len(pages)), np.uint64)
    except OSError as error:
        pytest.skip(f"the kernel does not tell which pages are mapped: {error}")
    return 4096 * int((entries >> np.uint64(63)).sum())


@pytest.mark.parametrize(("crop_size", "width"), [(227, 1.0), (67, 1.0), (67, 0.25)])
def test_a_unit_of_a_small_network_varies_as_in_the_papers(crop_size: int, width: float) -> None:
    """Inputs times squared deviation is what the variance of a unit's sum follows."""
    net = AlexNet(crop_size, 1000, width)
    inputs = dict(zip(LAYERS, (363, 1200, 2304, 1728, 1728, 9216, 4096, 4096), strict=True))
    for name, value in net.initial_values(seed=3):
        layer, kind = name.split(".")
        if kind == "weight":
            std = 0.005 if layer in ("fc6", "fc7") else 0.01
            fan_in = np.prod(value.shape[1:]) if value.ndim == 4 else value.shape[0]
            assert fan_in * value.var() == pytest.approx(inputs[layer] * std**2, rel=0.05), name
            if (crop_size, width) == (227, 1.0):
                assert fan_in == inputs[layer]
