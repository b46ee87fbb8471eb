"""The layer and the phase of each node of a trainer's functions, and its work."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.graph.basic import Apply
from pytensor.graph.fg import FunctionGraph
from pytensor.tensor.variable import TensorVariable

from tandem.backend import device_mode, device_shared
from tandem.config.schema import Config
from tandem.layers import (
    Builder,
    LayeredNetwork,
    Network,
    Training,
    average_pool,
    concatenate,
    global_average_pool,
    max_pool,
    relu,
    response_norm,
)
from tandem.layers.network import NetworkDescription, build_network
from tandem.layers.parameter import layer_of
from tandem.ops.work import CONVOLUTIONS, KINDS, work_of
from tandem.optim import OPTIMIZERS
from tandem.training.attribution import INPUT, TOTALS, NodeOrigin, layers_of
from tandem.training.compiled_network import CompiledNetwork
from tests.support.trainer_memory import host_memory

BATCH = 2


class Branched(LayeredNetwork):
    """A residual block, branches that are joined, and an auxiliary head: no two layers alike."""

    def build(self, net: Builder, x: TensorVariable) -> TensorVariable:
        x = relu(net.convolution("conv1", x, 5, 7, 2, bias=0.0))
        x = max_pool(response_norm(x), 3, 2)
        y = relu(net.batch_norm("block.bn1", net.convolution("block.conv1", x, 7, 3)))
        y = net.batch_norm("block.bn2", net.convolution("block.conv2", y, 9, 3))
        x = relu(y + net.convolution("block.shortcut", x, 9, 1))
        joined = concatenate(
            [
                relu(net.convolution("join.a", x, 11, 1, bias=0.0)),
                relu(net.convolution("join.b", max_pool(x, 3, 1, 1), 13, 1, bias=0.0)),
                relu(net.convolution("join.c", x, 18, 3, groups=9, bias=0.0)),
            ]
        )
        head = relu(net.convolution("head.conv", average_pool(joined, 2, 2), 3, 1, bias=0.0))
        head = net.dropout(relu(net.fully_connected("head.fc", head, 17)), 0.5)
        net.auxiliary(net.fully_connected("head.last", head, self.classes), 0.3)
        x = net.dropout(global_average_pool(joined), 0.4)
        return net.fully_connected("last", x, self.classes)


BLOCK = ("block.conv2", "block.bn2", "block.shortcut")
JOINED = ("join.a", "join.b", "join.c")
OF_IMAGES = {
    # the shape of an activation, or of its gradient, and the layers to which it may belong
    (3, 31, 31): (INPUT,),
    (5, 16, 16): ("conv1",),
    (5, 7, 7): ("conv1",),
    (9, 7, 7): BLOCK,
    (11, 7, 7): ("join.a",),
    (13, 7, 7): ("join.b",),
    (18, 7, 7): ("join.c",),
    (42, 7, 7): JOINED,
    (42, 3, 3): JOINED,
    (3, 3, 3): ("head.conv",),
}


def compiled(network: Network, **settings: Any) -> CompiledNetwork:
    config = Config(
        crop_size=network.crop_size, batch_size=BATCH, precision="float32", threads=1, **settings
    )
    optimizer = OPTIMIZERS.make(config.optimizer, dict(config))
    memory = host_memory(network, optimizer, BATCH, config.freeze)
    mean = np.full((3, network.crop_size, network.crop_size), 100, np.float32)
    return CompiledNetwork(network, config, optimizer, mean, memory)


def graph_of(model: CompiledNetwork, name: str) -> FunctionGraph:
    graph: FunctionGraph = model.functions.compiled(name)[0].maker.fgraph
    return graph


def forward_pass(network: Network) -> FunctionGraph:
    """The forward pass of training alone, heads included, rewritten as a trainer's function is."""
    images = pt.tensor(dtype="float32", shape=(BATCH, *network.images().type.shape[1:]))
    epoch, indices = (pt.tensor(dtype="int64", shape=shape) for shape in ((), (BATCH,)))
    training = Training(pt.constant(np.int64(3)), epoch, indices, rows=BATCH)
    outputs = [network.logits(images, training)]
    outputs += [head for head, _ in training.auxiliary]
    outputs += [*training.statistics.values()]
    parameters: Any = {
        v: device_shared(np.zeros(v.type.shape, "float32"), name)
        for name, v in network.parameters.items()
    }
    function = pytensor.function(
        [images, epoch, indices],
        outputs,
        givens=parameters,
        mode=device_mode(),
        on_unused_input="ignore",
    )
    graph: FunctionGraph = function.maker.fgraph
    return graph


def large(nodes: Iterable[Apply]) -> Counter[Any]:
    """Ops of large results, each with its shape."""
    return Counter(
        (str(node.op), v.type.shape)
        for node in nodes
        for v in node.outputs[:1]
        if v.type.ndim == 4 or work_of(node).kind == "product"
    )


def check(network: Network, **settings: Any) -> dict[str, dict[Apply, NodeOrigin]]:
    """Check what holds for any network; return the places by function."""
    model = compiled(network, **settings)
    known = {layer_of(name) for name in network.parameters}
    places = {}
    for function in ("gradients", "update", "validation"):
        found = places[function] = layers_of(graph_of(model, function))
        assert found.keys() == graph_of(model, function).apply_nodes
        assert {place.layer for place in found.values()} <= known | {INPUT, TOTALS}
        for node, place in found.items():
            check_kind(node, place)
            for v in node.inputs:  # it belongs to the parameter that it takes
                name = str(v.name).rpartition("/")[2]
                if v.owner is None and name in network.parameters:
                    assert place.layer == layer_of(name)
    passes: dict[str, set[str]] = {name: set() for name in ("forward", "backward", "update")}
    for found in places.values():
        for place in found.values():
            passes[place.phase].add(place.layer)
    assert passes["forward"] - {INPUT, TOTALS} == known
    trained = known - {*settings.get("freeze", ())}
    assert passes["update"] - {TOTALS} == passes["backward"] == trained
    gradients = places["gradients"]
    forward = [n for n, place in gradients.items() if place.phase == "forward"]
    crop = Counter({key: n for key, n in large(forward).items() if "CropMirror" in key[0]})
    assert large(forward) - crop == large(forward_pass(network).apply_nodes)
    return places


def check_kind(node: Apply, place: NodeOrigin) -> None:
    """Whether a node's kind of work is one of its phase, and none is hidden in another kind."""
    work, name = work_of(node), type(node.op).__name__
    assert work.kind in KINDS
    assert "gradient" not in work.kind or place.phase == "backward"
    if work.kind in ("lrn", "norm", "relu", "pool", "crop"):
        assert place.phase == "forward"
    of = {"Conv2d": 0, "Conv2dInputGrad": 1, "Conv2dWeightGrad": 2}.get(name)
    convolution = max((c for c in CONVOLUTIONS if work.kind.startswith(c)), key=len, default="")
    if of is None:
        assert not convolution
    else:
        assert convolution == CONVOLUTIONS[of]
        assert (place.phase == "forward") == (of == 0)
    assert (work.kind == "product") == (name == "Dot")
    assert (work.kind == "update") <= (place.phase == "update")


def test_layers_of_branches_and_heads_are_told_by_shapes() -> None:
    found = check(Branched(31, 4, 1.0, "float32"))["gradients"]
    seen = set()
    for node, place in found.items():
        shape = node.outputs[0].type.shape[1:]
        takes_parameter = any(v.owner is None and "." in (v.name or "") for v in node.inputs)
        if node.outputs[0].type.ndim == 4 and not takes_parameter and shape in OF_IMAGES:
            seen.add((shape, place.phase))
            assert place.layer in OF_IMAGES[shape], node
    assert {shape for shape, phase in seen if phase == "forward"} == OF_IMAGES.keys()
    layers = {
        (type(node.op).__name__, place.phase): place.layer
        for node, place in found.items()
        if type(node.op).__name__ in ("LRN", "LRNGrad", "MaxPool2dGrad", "AveragePool2d", "Join")
    }
    assert layers["LRN", "forward"] == layers["LRNGrad", "backward"] == "conv1"


def test_a_layer_has_the_gradients_of_what_follows_it() -> None:
    """In AlexNet ReLU, normalisation and pooling belong to the layer before them."""
    network = build_network(NetworkDescription(67, 5, 0.05))
    gradients, update, _ = check(network).values()
    counted = Counter(
        (place.layer, place.phase, work_of(node).kind)
        for node, place in gradients.items()
        if work_of(node).kind in ("relu", "lrn", "pool")
        or work_of(node).kind.removesuffix(" gradient") in ("relu", "lrn", "pool")
    )
    for layer in ("conv1", "conv2", "conv5", "conv3", "fc6", "fc7"):
        kinds = {"relu"}
        kinds |= {"pool"} if layer in ("conv1", "conv2", "conv5") else set()
        kinds |= {"lrn"} if layer in ("conv1", "conv2") else set()
        expected = {("forward", kind): 1 for kind in kinds}
        expected |= {("backward", f"{kind} gradient"): 1 for kind in kinds}
        assert {key[1:]: n for key, n in counted.items() if key[0] == layer} == expected
    masks = [p.layer for n, p in gradients.items() if work_of(n).kind == "dropout"]
    assert sorted(masks) == ["fc6", "fc7"]
    assert {p.phase for p in update.values()} == {"update"}
    totals = [node for node, place in update.items() if place.layer == TOTALS]
    assert all(node.outputs[0].type.ndim == 0 for node in totals)


def test_a_frozen_layer_has_no_backward_pass() -> None:
    check(build_network(NetworkDescription(67, 5, 0.05)), freeze=("conv1", "conv2"))


def test_a_step_in_one_function_is_refused() -> None:
    step = compiled(build_network(NetworkDescription(67, 5, 0.05))).functions.compiled("step")[0]
    with pytest.raises(ValueError, match=r"the gradient of .* is not stored before its update"):
        layers_of(step.maker.fgraph)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("network", "crop", "width"),
    [
        ("tandem.models.resnet:ResNet50", 64, 0.2),
        ("tandem.models.googlenet:GoogLeNet", 224, 0.1),
        ("tandem.models.mobilenet:MobileNetV2", 64, 0.5),
        ("tandem.models.densenet:DenseNet100", 32, 1.0),
        ("tandem.models.vgg:VGG16", 32, 0.1),
    ],
)
def test_every_node_has_a_place(network: str, crop: int, width: float) -> None:
    check(build_network(NetworkDescription(crop, 5, width, network=network)))
