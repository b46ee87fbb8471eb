"""Caffe's GoogLeNet and VGG: the outputs of their networks, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
import torch

from tandem.artifacts.checkpoint import read_checkpoint
from tandem.backend import device_mode
from tandem.convert import cli
from tandem.layers import LayeredNetwork
from tandem.layers.network import build_network
from tandem.models.googlenet import GoogLeNet
from tandem.models.vgg import VGG11
from tests.support import torch_networks as plain
from tests.support.caffe_files import Layers, caffemodel, random_blobs

CLASSES, SIDE = 4, 80
NARROW = ["--width", "0.125", "--crop_size", SIDE]


def convert(*arguments: object) -> int:
    return cli.run_conversion([str(argument) for argument in arguments], None)


def shapes(net: LayeredNetwork) -> dict[str, tuple[int, ...]]:
    return {name: parameter.shape for name, parameter in net.parameters.declared.items()}


def convolution(weight: np.ndarray, stride: int = 1) -> dict[str, Any]:
    return {"pad": [weight.shape[-1] // 2], "stride": [stride], "kernel_size": [weight.shape[-1]]}


def googlenet(heads: bool = True) -> tuple[Layers, dict[str, Any]]:
    net = GoogLeNet(SIDE, CLASSES, 0.125, "float32", auxiliaries=heads)
    blobs = random_blobs(shapes(net))
    blobs = {name.replace(".", "/"): blob for name, blob in blobs.items()}
    layers: Layers = []
    for name, (weight, _) in blobs.items():
        if weight.ndim == 4:
            options = convolution(weight, 2 if name == "conv1/7x7_s2" else 1)
            layers.append((name, "Convolution", options))
        else:
            layers.append((name, "InnerProduct", {}))
        if name in ("conv1/7x7_s2", "conv2/3x3"):
            options = {"local_size": 5, "alpha": 1e-4, "beta": 0.75}
            layers.append((f"{name}_norm", "LRN", options))
    # As in Caffe's file, the output comes last.
    return layers, blobs


def vgg11() -> tuple[Layers, dict[str, Any]]:
    blobs = random_blobs(shapes(VGG11(SIDE, CLASSES, 0.125, "float32")))
    names = [f"conv{s}_{n + 1}" for s, count in enumerate((1, 1, 2, 2, 2), 1) for n in range(count)]
    renamed = dict(zip([*names, "fc6", "fc7", "fc8"], blobs.values(), strict=True))
    layers: Layers = [
        (name, "Convolution", convolution(weight))
        if weight.ndim == 4
        else (name, "InnerProduct", {})
        for name, (weight, _) in renamed.items()
    ]
    return layers, renamed


def caffes_outputs(peer: plain.PlainNetwork, blobs: dict[str, Any], rgb: np.ndarray) -> np.ndarray:
    """Of the blobs in a network without any scaling, for BGR pictures."""
    peer.std = (1.0, 1.0, 1.0)
    own = iter(peer.state_dict().values())
    arrays = (array for pair in blobs.values() for array in pair)
    if isinstance(peer, plain.PlainGoogLeNet):
        own = iter(
            peer.state_dict()[f"{name.replace('/', '.')}.{kind}"]
            for name in blobs
            for kind in ("weight", "bias")
        )
    with torch.no_grad():
        for tensor, array in zip(own, arrays, strict=True):
            tensor.copy_(torch.from_numpy(array).reshape(tensor.shape))
        return peer.eval()(torch.from_numpy(rgb[:, ::-1].copy())).numpy()


def our_outputs(target: Path, rgb: np.ndarray) -> np.ndarray:
    checkpoint = read_checkpoint(target)
    net = build_network(checkpoint.network)
    for name, variable in net.parameters.items():
        variable.set_value(checkpoint.weights[name])
    x = pt.tensor("x", dtype="float32", shape=(None, 3, SIDE, SIDE))
    return pytensor.function([x], net.logits(x, None), mode=device_mode("cpu"))(rgb)


@pytest.mark.parametrize(
    ("name", "modern"),
    [
        ("VGG11", False),
        ("VGG11", True),
        pytest.param("GoogLeNet", False, marks=pytest.mark.slow),
        pytest.param("GoogLeNet", True, marks=pytest.mark.slow),
        ("GoogLeNet without heads", False),
    ],
)
def test_the_outputs_are_caffes(name: str, modern: bool, tmp_path: Path) -> None:
    if name == "VGG11":
        layers, blobs = vgg11()
        peer: plain.PlainNetwork = plain.PlainVGG(11, SIDE, CLASSES, 0.125)
        mean, resize = [123.68, 116.779, 103.939], "shorter_side"
    else:
        heads = name == "GoogLeNet"
        layers, blobs = googlenet(heads)
        peer = plain.PlainGoogLeNet(CLASSES, 0.125, heads, head_side=1)
        mean, resize = [123, 117, 104], "squash"
    source, target = tmp_path / "net.caffemodel", tmp_path / "x.safetensors"
    source.write_bytes(caffemodel(blobs, modern=modern, layers=layers).SerializeToString())
    assert convert(source, target, *NARROW) == 0
    network = read_checkpoint(target).network
    assert network.network.endswith(name.partition(" ")[0])
    assert (network.classes, network.resize) == (CLASSES, resize)
    assert network.options == ({"auxiliaries": False} if "without" in name else {})
    np.testing.assert_allclose(np.load(tmp_path / "x_mean.npy")[:, 9, 9], mean)
    rgb = 60 * np.random.default_rng(5).normal(size=(2, 3, SIDE, SIDE)).astype(np.float32)
    theirs = caffes_outputs(peer, blobs, rgb)
    assert np.ptp(theirs, axis=0).min() > 1e-3
    ours = our_outputs(target, rgb)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4 * np.abs(theirs).max())


@pytest.mark.parametrize(
    ("layer", "option", "value", "message"),
    [
        ("conv2/3x3", "pad", [0], "conv2/3x3: pad is [0], expected 1"),
        ("conv1/7x7_s2", "stride", [1], "conv1/7x7_s2: stride is [1], expected 2"),
        ("inception_3a/5x5", "group", 2, "inception_3a/5x5: group is [2], expected 1"),
        ("conv2/3x3_norm", "local_size", 3, "conv2/3x3_norm: local_size is [3], expected 5"),
        ("conv2/3x3_norm", "k", 2.0, "expected 0.0001, 0.75, 1"),
    ],
)
def test_other_settings_are_refused(
    layer: str,
    option: str,
    value: Any,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    layers, blobs = googlenet()
    source, target = tmp_path / "net.caffemodel", tmp_path / "x.safetensors"
    net = caffemodel(blobs, changes={layer: {option: value}}, layers=layers)
    source.write_bytes(net.SerializeToString())
    assert convert(source, target, *NARROW) == 2
    assert message in capsys.readouterr().err
    assert not target.exists()


def test_an_incomplete_network_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "net.caffemodel", tmp_path / "x.safetensors"
    for left_out, message in (
        ("inception_4b/3x3", "has no inception_4b.3x3.weight and 1 more"),
        ("inception_3a/1x1", "not those of AlexNet"),
    ):
        layers, blobs = googlenet()
        layers = [layer for layer in layers if layer[0] != left_out]
        source.write_bytes(caffemodel(blobs, layers=layers).SerializeToString())
        assert convert(source, target, *NARROW) == 2
        assert message in capsys.readouterr().err
    layers, blobs = vgg11()
    blobs["fc7"] = blobs["fc7"][:1]
    source.write_bytes(caffemodel(blobs, layers=layers).SerializeToString())
    assert convert(source, target, *NARROW) == 2
    assert "fc7: found 1 blobs, expected 2" in capsys.readouterr().err
    assert not target.exists()
