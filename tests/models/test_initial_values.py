"""What the networks of `tandem.models` begin with, and what they drop.

Their peers in PyTorch do not show it: they are given our weights, and drop nothing.
"""

import importlib
import math
from typing import Any

import pytensor.tensor as pt
import pytest
from pytensor.graph.traversal import ancestors

from tandem.layers import LayeredNetwork, Training
from tandem.ops import Dropout


def network(name: str, side: int, **options: Any) -> LayeredNetwork:
    module, _, kind = name.partition(":")
    made = getattr(importlib.import_module(f"tandem.models.{module}"), kind)
    return made(side, 1000, 1.0, "float32", **options)


# Deviation, as variance times a number, and distribution. ResNet, VGG, GoogLeNet with batch norm,
# DenseNet and MobileNet by torchvision's models, GoogLeNet by the fillers of BVLC's.
WEIGHTS = {
    "resnet:ResNet50": {
        "conv1.weight": (2 / (64 * 49), "normal"),
        "layer1.0.conv2.weight": (2 / (64 * 9), "normal"),
        "layer2.0.downsample.0.weight": (2 / 512, "normal"),
        "fc.weight": (1 / (3 * 2048), "uniform"),
    },
    "resnet:ResNet18": {"layer4.0.conv1.weight": (2 / (512 * 9), "normal")},
    "vgg:VGG11": {
        "features.3.weight": (2 / (128 * 9), "normal"),
        "classifier.0.weight": (1e-4, "normal"),
        "classifier.6.weight": (1e-4, "normal"),
    },
    "googlenet:GoogLeNet": {
        "conv1.7x7_s2.weight": (1 / (3 * 49), "uniform"),
        "inception_3a.3x3.weight": (1 / (96 * 9), "uniform"),
        "loss1.fc.weight": (1 / 2048, "uniform"),
        "loss3.classifier.weight": (1 / 1024, "uniform"),
    },
    "googlenet:GoogLeNetBN": {
        "conv1.conv.weight": (1e-4, "truncated"),
        "aux1.fc1.weight": (1e-4, "truncated"),
        "fc.weight": (1e-4, "truncated"),
    },
    "densenet:DenseNet121": {
        "features.conv0.weight": (2 / (3 * 49), "normal"),
        "features.denseblock1.denselayer1.conv2.weight": (2 / (128 * 9), "normal"),
        "features.transition1.conv.weight": (2 / 256, "normal"),
        "classifier.weight": (1 / (3 * 1024), "uniform"),
    },
    "mobilenet:MobileNetV2": {
        "features.0.0.weight": (2 / (32 * 9), "normal"),
        "features.1.conv.0.0.weight": (2 / (32 * 9), "normal"),  # of one channel each
        "classifier.1.weight": (1e-4, "normal"),
    },
}
RATES = {
    "googlenet:GoogLeNet": [0.7, 0.7, 0.4],
    "googlenet:GoogLeNetBN": [0.7, 0.7, 0.2],
    "vgg:VGG11": [0.5, 0.5],
    "mobilenet:MobileNetV2": [0.2],
    "resnet:ResNet50": [],
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_begin_as_published(name: str) -> None:
    declared = network(name, 224).parameters.declared
    for parameter, (variance, distribution) in WEIGHTS[name].items():
        assert declared[parameter].std == pytest.approx(math.sqrt(variance)), parameter
        assert declared[parameter].distribution == distribution, parameter
        assert declared[parameter].mean == 0


def test_biases_of_bvlc_s_googlenet_begin_at_a_fifth_but_for_the_outputs() -> None:
    declared = network("googlenet:GoogLeNet", 224).parameters.declared
    biases = {name: p.mean for name, p in declared.items() if p.kind == "bias"}
    zero = [name for name, mean in biases.items() if mean == 0]
    assert zero == [f"loss{number}.classifier.bias" for number in (1, 2, 3)]
    assert {mean for name, mean in biases.items() if name not in zero} == {0.2}


@pytest.mark.parametrize(
    ("name", "last", "side"),
    [("ResNet50", "bn3", 224), ("ResNet18", "bn2", 224), ("ResNet20", "bn2", 32)],
)
@pytest.mark.parametrize("zero_init", [False, True])
def test_blocks_begin_as_the_identity_if_asked(
    name: str, last: str, side: int, zero_init: bool
) -> None:
    declared = network(f"resnet:{name}", side, zero_init=zero_init).parameters.declared
    scales = {name: p.mean for name, p in declared.items() if p.kind == "scale"}
    changed = [scale for scale in scales if f".{last}." in scale]
    assert changed
    assert {scales[name] for name in changed} == {0.0 if zero_init else 1.0}
    assert {mean for name, mean in scales.items() if name not in changed} == {1.0}


@pytest.mark.parametrize("name", RATES)
def test_units_are_dropped_at_the_published_rates(name: str) -> None:
    """Each layer has a number of its own: layers of one number would drop alike."""
    net = network(name, 224)
    training = Training(pt.lscalar(), pt.lscalar(), pt.lvector())
    outputs = [net.logits(net.images(), training), *(head for head, _ in training.auxiliary)]
    ops = {v.owner.op for v in ancestors(outputs) if v.owner and isinstance(v.owner.op, Dropout)}
    found = sorted((op.layer, op.rate, op.factor) for op in ops)
    expected = [(number, rate, 1 / (1 - rate)) for number, rate in enumerate(RATES[name])]
    assert [op[:2] for op in found] == [op[:2] for op in expected]
    assert [op[2] for op in found] == pytest.approx([op[2] for op in expected])
    assert [weight for _, weight in training.auxiliary] == [0.3] * (len(expected) == 3) * 2
