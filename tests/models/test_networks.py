"""The networks of `tandem.models` against the same networks in plain PyTorch."""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
import torch

from tandem.backend import device_mode
from tandem.layers import LayeredNetwork, Training
from tandem.layers.losses import mean_over_valid, negative_log_likelihood
from tandem.models.googlenet import area_averages
from tests.support import torch_networks as plain

CLASSES = 5


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small networks gain nothing by more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclass(frozen=True)
class Case:
    """A small network and its peer."""

    name: str  # module:class
    peer: Callable[[], plain.PlainNetwork]
    crop_size: int
    width: float = 0.125
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return self.name.partition(":")[2] + "".join(f"-{value}" for _, value in self.options)

    def build(self, dtype: str = "float64") -> LayeredNetwork:
        kind = kind_of(self.name)
        net = kind(self.crop_size, CLASSES, self.width, dtype, **dict(self.options))
        if hasattr(net, "head_dropout"):
            net.head_dropout = 0.0
        return net

    def plain(self, net: LayeredNetwork) -> plain.PlainNetwork:
        peer = self.peer()
        for module in peer.modules():
            if hasattr(module, "dropout") or hasattr(module, "head_dropout"):
                module.dropout = module.head_dropout = 0.0  # type: ignore[assignment]
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        peer.to(getattr(torch, net.dtype))
        peer.load({name: variable.get_value() for name, variable in net.parameters.items()})
        return peer


def kind_of(name: str) -> type[LayeredNetwork]:
    module, _, kind = name.partition(":")
    return getattr(importlib.import_module(f"tandem.models.{module}"), kind)


DRY = (("dropout", 0.0),)
CIFAR = 16
QUICK = [
    Case("vgg:VGG11", lambda: plain.PlainVGG(11, 32, CLASSES, 0.125), 32, options=DRY),
]
SLOW = [
    Case("mobilenet:MobileNetV2", lambda: plain.PlainMobileNetV2(CLASSES, 0.125), 64, options=DRY),
    Case("resnet:ResNet20", lambda: plain.PlainCifarResNet(20, CLASSES, 0.25), CIFAR, 0.25),
    Case("vgg:VGG16", lambda: plain.PlainVGG(16, 32, CLASSES, 0.125), 32, options=DRY),
    Case("vgg:VGG19", lambda: plain.PlainVGG(19, 32, CLASSES, 0.125), 32, options=DRY),
    Case("vgg:VGG11BN", lambda: plain.PlainVGG(11, 32, CLASSES, 0.125, True), 32, options=DRY),
    Case("resnet:ResNet18", lambda: plain.PlainResNet(18, CLASSES, 0.125), 64),
    Case("resnet:ResNet34", lambda: plain.PlainResNet(34, CLASSES, 0.125), 64),
    Case("resnet:ResNet50", lambda: plain.PlainResNet(50, CLASSES, 0.125), 64),
    Case(
        "resnet:ResNet20",
        lambda: plain.PlainCifarResNet(20, CLASSES, 0.25, projection=True),
        CIFAR,
        0.25,
        options=(("shortcut", "projection"),),
    ),
    Case("resnet:ResNet32", lambda: plain.PlainCifarResNet(32, CLASSES, 0.25), CIFAR, 0.25),
    Case(
        "wide_resnet:WideResNet",
        lambda: plain.PlainWideResNet(16, 0.5, CLASSES),
        CIFAR,
        0.5,
        options=(("depth", 16),),
    ),
    Case(
        "googlenet:GoogLeNet",
        lambda: plain.PlainGoogLeNet(CLASSES, 0.125, head_side=2),
        112,
        options=DRY,
    ),
    Case("googlenet:GoogLeNetBN", lambda: plain.PlainGoogLeNetBN(CLASSES, 0.125), 96, options=DRY),
    Case("densenet:DenseNet121", lambda: plain.PlainDenseNet(121, CLASSES, 0.125), 64),
    Case("densenet:DenseNet100", lambda: plain.PlainDenseNet(100, CLASSES, 0.25), CIFAR, 0.25),
]
CASES = [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)]

PARAMETERS = {
    "resnet:ResNet18": 11_689_512,
    "resnet:ResNet34": 21_797_672,
    "resnet:ResNet50": 25_557_032,
    "vgg:VGG11": 132_863_336,
    "vgg:VGG16": 138_357_544,
    "resnet:ResNet101": 44_549_160,
    "resnet:ResNet152": 60_192_808,
    "vgg:VGG19": 143_667_240,
    "vgg:VGG11BN": 132_868_840,
    "vgg:VGG16BN": 138_365_992,
    "vgg:VGG19BN": 143_678_248,
    "googlenet:GoogLeNetBN": 13_004_888,
    "googlenet:GoogLeNet": 13_378_280,
    "densenet:DenseNet121": 7_978_856,
    "densenet:DenseNet161": 28_681_000,
    "densenet:DenseNet169": 14_149_480,
    "densenet:DenseNet201": 20_013_928,
    "mobilenet:MobileNetV2": 3_504_872,
}
CIFAR_PARAMETERS = {
    "resnet:ResNet20": 269_722,
    "resnet:ResNet32": 464_154,
    "resnet:ResNet44": 658_586,
    "resnet:ResNet56": 853_018,
    "resnet:ResNet110": 1_727_962,
    "densenet:DenseNet100": 769_162,
}


def trained_numbers(net: LayeredNetwork) -> int:
    """How many numbers an optimizer steps."""
    declared = net.parameters.declared.values()
    return sum(int(np.prod(parameter.shape)) for parameter in declared if parameter.trainable)


@pytest.mark.parametrize(("name", "number"), PARAMETERS.items())
def test_the_published_number_of_parameters(name: str, number: int) -> None:
    assert trained_numbers(kind_of(name)(224, 1000, 1.0, "float32")) == number


@pytest.mark.parametrize(("name", "number"), CIFAR_PARAMETERS.items())
def test_the_published_number_of_parameters_for_cifar(name: str, number: int) -> None:
    assert trained_numbers(kind_of(name)(32, 10, 1.0, "float32")) == number


@pytest.mark.parametrize(
    ("depth", "width", "number"), [(28, 10, 36_479_194), (16, 4, 2_748_890), (40, 4, 8_949_210)]
)
def test_the_published_number_of_parameters_of_wide_networks(
    depth: int, width: float, number: int
) -> None:
    net = kind_of("wide_resnet:WideResNet")(32, 10, width, "float32", depth=depth)
    assert trained_numbers(net) == number


@pytest.mark.parametrize(
    ("name", "number"), [("googlenet:GoogLeNetBN", 6_624_904), ("googlenet:GoogLeNet", 6_998_552)]
)
def test_the_published_number_of_parameters_without_auxiliary_heads(name: str, number: int) -> None:
    net = kind_of(name)(224, 1000, 1.0, "float32", auxiliaries=False)
    assert trained_numbers(net) == number


@pytest.mark.parametrize(
    ("width", "filters"),
    [
        (0.35, [16, 8, 8, 16, 24, 32, 56, 112, 1280]),
        (0.75, [24, 16, 24, 24, 48, 72, 120, 240, 1280]),
        (1.4, [48, 24, 32, 48, 88, 136, 224, 448, 1792]),
    ],
)
def test_mobilenets_of_other_widths_have_the_published_filters(
    width: float, filters: list[int]
) -> None:
    """Multiples of 8, not below 90 % of what is wanted; the last are never fewer than 1280."""
    declared = kind_of("mobilenet:MobileNetV2")(32, 10, width, "float32").parameters.declared
    blocks = (1, 2, 4, 7, 11, 14, 17)  # the first of each stage
    names = [f"features.{n}.conv.{2 if n == 1 else 3}.weight" for n in blocks]
    found = [
        declared[name].shape[0] for name in ("features.0.0.weight", *names, "features.18.0.weight")
    ]
    assert found == filters


class Graphs:
    """Training and validation of a network on symbolic minibatches."""

    def __init__(self, net: LayeredNetwork, batch: int) -> None:
        side = net.crop_size
        self.images = pt.tensor("images", dtype=net.dtype, shape=(batch, 3, side, side))
        self.labels = pt.tensor("labels", dtype="int64", shape=(batch,))
        keys = (pt.constant(np.asarray(value)) for value in (1, 0, np.arange(batch)))
        self.training = Training(*keys, rows=batch)
        self.logits = net.logits(self.images, self.training)
        self.cost = self._loss(self.logits)
        for logits, weight in self.training.auxiliary:
            self.cost += weight * self._loss(logits)
        self.net = net

    def _loss(self, logits: pt.TensorVariable) -> pt.TensorVariable:
        rows = self.labels.shape[0]
        return mean_over_valid(negative_log_likelihood(logits, self.labels), rows)

    def compiled(self, outputs: list[Any], **options: Any) -> Any:
        return pytensor.function(
            [self.images, self.labels],
            outputs,
            mode=device_mode("cpu"),
            on_unused_input="ignore",
            **options,
        )

    def trained(self) -> dict[str, Any]:
        declared = self.net.parameters.declared
        return {n: v for n, v in self.net.parameters.items() if declared[n].trainable}


def set_values(net: LayeredNetwork) -> None:
    """Random values of ordinary size for every array."""
    rng = np.random.default_rng(3)
    for name, value in net.initial_values(seed=4):
        kind = net.parameters.declared[name].kind
        if kind in ("bias", "shift"):
            value = 0.1 * rng.normal(size=value.shape)
        elif kind == "scale" or name.endswith("running_var"):
            value = rng.uniform(0.5, 1.5, value.shape)
        elif kind == "average":
            value = 0.2 * rng.normal(size=value.shape)
        net.parameters[name].set_value(np.asarray(value, net.dtype))


def minibatch(net: LayeredNetwork, batch: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(5)
    images = 60 * rng.normal(size=(batch, 3, net.crop_size, net.crop_size))
    return images.astype(net.dtype), rng.integers(0, CLASSES, batch)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_outputs_gradients_and_statistics_are_those_of_pytorch(case: Case) -> None:
    batch, net = 4, case.build()
    set_values(net)
    peer, graphs = case.plain(net), Graphs(net, batch)
    images, labels = minibatch(net, batch)
    given = torch.from_numpy(images), torch.from_numpy(labels)

    peer.eval()
    (valid,) = graphs.compiled([net.logits(graphs.images, None)])(images, labels)
    np.testing.assert_allclose(valid, peer(given[0]).detach(), rtol=1e-8, atol=1e-9)

    peer.train()
    loss = peer.loss(*given)
    loss.backward()
    trained = graphs.trained()
    wanted = [graphs.cost, *pytensor.grad(graphs.cost, [*trained.values()])]
    found = graphs.compiled([*wanted, *graphs.training.statistics.values()])(images, labels)
    np.testing.assert_allclose(found[0], loss.item(), rtol=1e-9)
    theirs = {name: variable.grad.numpy() for name, variable in peer.named_parameters()}
    largest = max(np.abs(gradient).max() for gradient in theirs.values())
    for name, gradient in zip(trained, found[1:], strict=False):
        expected = theirs[name].T if theirs[name].ndim == 2 else theirs[name]
        scale = np.abs(expected).max() + 1e-6 * largest  # some are 0 but for rounding
        np.testing.assert_allclose(gradient, expected, rtol=1e-6, atol=1e-7 * scale, err_msg=name)
    averages = dict(peer.named_buffers())
    for name, statistic in zip(graphs.training.statistics, found[1 + len(trained) :], strict=True):
        keep = net.parameters.declared[name].keep
        updated = keep * net.parameters[name].get_value() + (1 - keep) * statistic
        np.testing.assert_allclose(updated, averages[name], rtol=1e-8, atol=1e-9, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["resnet:ResNet20", "googlenet:GoogLeNetBN", "googlenet:GoogLeNet"]
)
def test_the_losses_of_forty_steps_are_those_of_pytorch(name: str) -> None:
    """In float64, with momentum and decay, validated by the running averages at the end."""
    case = next(case for case in [*QUICK, *SLOW] if case.name == name)
    net, batch, steps = case.build(), 4, 40
    net.initialize(seed=4)
    peer, graphs = case.plain(net), Graphs(net, batch)
    rate, momentum, decay = 0.01 if "BN" in name or "Res" in name else 1e-4, 0.9, 1e-4
    trained, updates = graphs.trained(), []
    gradients = pytensor.grad(graphs.cost, [*trained.values()])
    for weight, gradient in zip(trained.values(), gradients, strict=True):
        velocity = pytensor.shared(np.zeros(weight.type.shape, net.dtype), shape=weight.type.shape)
        faster = momentum * velocity - rate * (gradient + decay * weight)
        updates += [(velocity, faster), (weight, weight + faster)]
    for average, statistic in graphs.training.statistics.items():
        array, keep = net.parameters[average], net.parameters.declared[average].keep
        updates.append((array, keep * array + (1 - keep) * statistic))
    step = graphs.compiled([graphs.cost], updates=updates)
    optimizer = torch.optim.SGD(peer.parameters(), rate, momentum, weight_decay=decay)
    rng = np.random.default_rng(6)
    images, labels = minibatch(net, 4 * batch)
    ours, theirs = [], []
    for _ in range(steps):
        rows = rng.permutation(4 * batch)[:batch]
        ours += step(images[rows], labels[rows])
        loss = peer.loss(torch.from_numpy(images[rows]), torch.from_numpy(labels[rows]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        theirs.append(loss.item())
    assert np.mean(theirs[-10:]) < 0.95 * np.mean(theirs[:5])
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    peer.eval()
    (valid,) = graphs.compiled([net.logits(graphs.images, None)])(images[:batch], labels[:batch])
    expected = peer(torch.from_numpy(images[:batch])).detach()
    np.testing.assert_allclose(valid, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("pictures", [0, 2])
def test_averages_of_areas(pictures: int) -> None:
    values = np.random.default_rng(0).normal(size=(pictures, 5, 7, 9)).astype("float32")
    x = pt.tensor("x", dtype="float32", shape=(None, 5, 7, 9))
    found = pytensor.function([x], area_averages(x, 3), mode=device_mode())(values)
    expected = torch.nn.functional.adaptive_avg_pool2d(torch.from_numpy(values), 3)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
