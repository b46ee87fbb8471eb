"""Networks that declare their parameters by the layers of their graph."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.graph.traversal import ancestors

from tandem import layers
from tandem.errors import InputError
from tandem.layers import Builder, LayeredNetwork, Training
from tandem.ops import Dropout
from tests.support.op_checks import MODE

STD = (2.0, 4.0, 8.0)
Build = Callable[[Builder, Any], Any]


def network(build: Build, classes: int = 3, width: float = 1.0) -> LayeredNetwork:
    class Written(LayeredNetwork):
        def build(self, net: Builder, x: pt.TensorVariable) -> pt.TensorVariable:
            return build(net, x)

    return Written(4, classes, width, "float64")


def training_pass() -> Training:
    return Training(pt.lscalar(), pt.lscalar(), pt.lvector())


def small(net: Builder, x: Any) -> Any:
    x = net.dropout(net.convolution("conv", x, 6, 3, input_std=STD, bias=0.5), 0.5)
    x = net.dropout(layers.relu(net.batch_norm("bn", x)), 0.25)
    if net.training is not None:
        net.auxiliary(net.fully_connected("head", x, 3), 0.25)
    return net.fully_connected("fc", x, 3)


def test_layers_declare_what_they_need_in_order() -> None:
    net = network(small)
    averages = ["bn.running_mean", "bn.running_var"]
    names = ["conv.weight", "conv.bias", "bn.weight", "bn.bias", *averages]
    names += [f"{layer}.{kind}" for layer in ("head", "fc") for kind in ("weight", "bias")]
    assert [*net.parameters] == names
    assert net.parameters.declared["conv.weight"].shape == (6, 3, 3, 3)
    assert net.parameters.declared["fc.weight"].shape == (96, 3)
    assert net.parameters.declared["conv.bias"].mean == 0.5
    assert net.shapes == {"input": (3, 4, 4), "conv": (6, 4, 4), "head": (3,), "fc": (3,)}


def test_each_graph_numbers_its_layers_of_dropout_anew() -> None:
    net = network(small)
    for _ in range(2):
        outputs = [net.logits(net.images(), training := training_pass())]
        outputs += [head for head, _ in training.auxiliary]
        ops = {v.owner.op for v in ancestors(outputs) if v.owner}
        found = {(op.layer, op.rate) for op in ops if isinstance(op, Dropout)}
        assert found == {(0, 0.5), (1, 0.25)}


def test_heads_are_of_training_alone() -> None:
    net, training = network(small), training_pass()
    net.logits(net.images(), training)
    assert [weight for _, weight in training.auxiliary] == [0.25]
    used = {*ancestors([net.logits(net.images(), None)])}
    assert net.parameters["head.weight"] not in used
    assert net.parameters["fc.weight"] in used


def test_weights_are_divided_in_place_of_pictures() -> None:
    def build(net: Builder, x: Any) -> Any:
        return net.fully_connected("fc", net.convolution("conv", x, 2, 3, 2, 0, input_std=STD), 3)

    net = network(build)
    net.initialize(1)
    x, p = net.images(), net.parameters
    divided = x / np.array(STD)[:, np.newaxis, np.newaxis]
    y = layers.convolution(divided, p["conv.weight"], stride=2)
    y = layers.fully_connected(layers.flatten(y, 2), *p.of("fc"))
    values = np.random.default_rng(0).normal(size=(2, 3, 4, 4))
    found, expected = pytensor.function([x], [net.logits(x, None), y], mode=MODE)(values)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("build", "options", "error", "message"),
    [
        (small, {"classes": 0}, ValueError, "Written: classes must be at least 1, got 0"),
        (small, {"width": 0.0}, ValueError, "Written: width must be positive, got 0.0"),
        (small, {"width": float("nan")}, ValueError, "Written: width must be positive, got nan"),
        (small, {"width": float("inf")}, ValueError, "Written: width must be positive, got inf"),
        (
            lambda net, x: net.fully_connected("fc", layers.max_pool(x, 5, 1), 3),
            {},
            ValueError,
            "Written: at crop_size 4: .*a window of 5 does not fit",
        ),
        (
            lambda net, x: net.fully_connected("fc", x[:, :, pt.lvector()], 3),
            {},
            ValueError,
            "fc: the shape of its input must be known",
        ),
        (
            lambda net, x: net.fully_connected("a", net.fully_connected("a", x, 3), 3),
            {},
            InputError,
            "a.weight is declared twice",
        ),
    ],
)
def test_what_cannot_be_built_is_refused(
    build: Build, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        network(build, **options)
