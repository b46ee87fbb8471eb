"""Caffe's files: against Caffe's own arithmetic, in both formats and orders; what is refused."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from alex_net import AlexNet
from tandem.convert.caffe import CaffeNetwork, alexnet, read_layers, read_mean_proto
from tandem.errors import InputError
from tests.support.caffe_files import PROTO, caffemodel, fill_blob, random_blobs
from tests.support.op_checks import MODE, plain_python
from tests.support.slow_networks import caffe_logits

CLASSES = 4


def network(norm_before_pool: bool = True, dtype: str = "float32") -> AlexNet:
    return AlexNet(67, CLASSES, 0.05, dtype, norm_before_pool)


def shapes(net: AlexNet) -> dict[str, tuple[int, ...]]:
    return {name: variable.type.shape for name, variable in net.parameters.items()}


BLOBS = random_blobs(shapes(network()))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "net.caffemodel"


def read_caffemodel(path: Path) -> CaffeNetwork:
    return alexnet(path, read_layers(path))


def convert(path: Path, net: Any, into: AlexNet) -> dict[str, np.ndarray]:
    path.write_bytes(net.SerializeToString())
    return read_caffemodel(path).weights(into)


def our_logits(net: AlexNet, weights: dict[str, np.ndarray], images: np.ndarray) -> np.ndarray:
    for name, value in weights.items():
        assert value.dtype == np.float32
        net.parameters[name].set_value(value.astype(net.dtype))
    x = pt.tensor("x", dtype=net.dtype, shape=(None, 3, 67, 67))
    with plain_python():
        return pytensor.function([x], net.logits(x, None), mode=MODE)(images)


@pytest.mark.parametrize("modern", [False, True])
@pytest.mark.parametrize("norm_before_pool", [False, True])
def test_the_converted_network_computes_what_caffe_does(
    path: Path, modern: bool, norm_before_pool: bool
) -> None:
    net = network(norm_before_pool, "float64")
    message = caffemodel(BLOBS, norm_before_pool, modern)
    path.write_bytes(message.SerializeToString())
    read = read_caffemodel(path)
    assert (read.classes, read.norm_before_pool) == (CLASSES, norm_before_pool)
    # So bright that normalisation matters: the sums of squares come to thousands.
    rgb = 400 * np.random.default_rng(7).normal(size=(2, 3, 67, 67))
    expected = caffe_logits(BLOBS, rgb[:, ::-1], norm_before_pool)
    found = our_logits(net, read.weights(net), rgb)
    assert np.ptp(expected, axis=0).min() > 0.1
    # The scaled weights are rounded to float32.
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    other = network(not norm_before_pool, "float64")
    assert not np.allclose(our_logits(other, read.weights(net), rgb), expected, rtol=1e-2)
    assert not np.allclose(our_logits(net, read.weights(net), rgb[:, ::-1]), expected, rtol=1e-2)


def test_other_constants_of_normalisation_are_taken_into_account(path: Path) -> None:
    net = network(dtype="float64")
    changes = {name: {"alpha": 3e-4, "k": 2.5} for name in ("norm1", "norm2")}
    weights = convert(path, caffemodel(BLOBS, changes=changes), net)
    rgb = 400 * np.random.default_rng(8).normal(size=(2, 3, 67, 67))
    expected = caffe_logits(BLOBS, rgb[:, ::-1], True, alpha=3e-4, k=2.5)
    found = our_logits(net, weights, rgb)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def test_what_needs_no_factor_keeps_its_bits(path: Path) -> None:
    weights = convert(path, caffemodel(BLOBS), network())
    for name in ("conv4", "conv5", "fc6"):
        weight, bias = BLOBS[name]
        weight = weight if weight.ndim == 4 else weight.T
        assert weights[f"{name}.weight"].tobytes() == weight.tobytes()
        assert weights[f"{name}.bias"].tobytes() == bias.tobytes()
    for name in ("fc7", "fc8"):  # a factor of 2 for the dropout before
        assert (weights[f"{name}.weight"] == 2 * BLOBS[name][0].T).all()
        assert (weights[f"{name}.bias"] == BLOBS[name][1]).all()


def layer_of(net: Any, name: str) -> Any:
    return next(layer for layer in net.layers if layer.name == name)


TURNED = PROTO["BlobProto"](height=12, width=205)
SPOILERS: list[tuple[Callable[[Any], object], str]] = [
    (
        lambda net: net.layers.remove(layer_of(net, "norm2")),
        "found the layers Convolution, LRN, Pooling, .* not those of AlexNet",
    ),
    (lambda net: net.layers.remove(layer_of(net, "fc7")), "not those of AlexNet"),
    (lambda net: layer_of(net, "fc7").blobs[0].data.pop(), "found 168096 bytes of numbers for the"),
    (
        lambda net: layer_of(net, "fc6").blobs[0].MergeFrom(TURNED),
        r"fc6: fc6.weight is \(205, 12\), expected \(12, 205\)",
    ),
    (lambda net: layer_of(net, "conv3").blobs.pop(), "conv3: found 1 blobs, expected 2"),
    (lambda net: setattr(net.layers[1], "layer", "conv"), "before May 2014"),
]
OPTIONS: list[tuple[str, str, Any, str]] = [
    ("conv1", "stride", [2], r"stride is \[2\], expected 4"),
    ("conv3", "pad", [], r"pad is \[0\], expected 1"),
    ("conv4", "group", 1, r"group is \[1\], expected 2"),
    ("pool1", "pool", 1, r"pool is \[1\], expected 0"),
    ("pool5", "stride", 3, r"stride is \[3\], expected 2"),
    ("norm1", "local_size", 3, r"local_size is \[3\], expected 5"),
    ("norm1", "norm_region", 1, r"norm_region is \[1\]"),
    ("norm2", "beta", 0.5, "found beta 0.5"),
    ("norm2", "alpha", 0.0, "found beta 0.75, alpha 0.0"),
    ("norm2", "k", float("nan"), ".*k nan"),
]


@pytest.mark.parametrize(("spoil", "reason"), SPOILERS)
def test_other_networks_are_refused(path: Path, spoil: Callable, reason: str) -> None:
    net = caffemodel(BLOBS)
    spoil(net)
    with pytest.raises(InputError, match=reason) as caught:
        convert(path, net, network())
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(("layer", "option", "value", "reason"), OPTIONS)
def test_other_options_are_refused(path: Path, layer: str, option: str, value, reason: str) -> None:
    net = caffemodel(BLOBS, changes={layer: {option: value}})
    with pytest.raises(InputError, match=f"{layer}: {reason}"):
        convert(path, net, network())


def test_a_network_of_another_size(path: Path) -> None:
    with pytest.raises(InputError, match=r"conv1: conv1.weight is \(4, 3, 11, 11\), expected"):
        convert(path, caffemodel(BLOBS), AlexNet(67, CLASSES, 0.5, norm_before_pool=True))


def test_the_mean_image(tmp_path: Path) -> None:
    bgr = np.random.default_rng(9).uniform(0, 255, (3, 5, 5)).astype(np.float32)
    blob = PROTO["BlobProto"]()
    fill_blob(blob, bgr, modern=False)
    path = tmp_path / "mean.binaryproto"
    path.write_bytes(blob.SerializeToString())
    mean = read_mean_proto(path)
    assert mean.dtype == np.float32
    np.testing.assert_array_equal(mean, bgr[::-1])
    fill_blob(blob := PROTO["BlobProto"](), bgr[:, :4], modern=True)
    path.write_bytes(blob.SerializeToString())
    with pytest.raises(InputError, match=r"found the shape \(3, 4, 5\), expected \(3, S, S\)"):
        read_mean_proto(path)


@pytest.mark.parametrize("read", [read_caffemodel, read_mean_proto])
def test_files_that_are_none(tmp_path: Path, read: Callable[[Path], Any]) -> None:
    with pytest.raises(InputError, match="No such file"):
        read(tmp_path / "none")
    with pytest.raises(InputError, match="not a file"):
        read(tmp_path)
    for content in (b"", b"\0" * 50, b"PK\3\4 and so on", b"{}", b"\xff" * 50):
        (tmp_path / "x").write_bytes(content)
        with pytest.raises(InputError, match="expected a whole file of Caffe"):
            read(tmp_path / "x")


SOUND = caffemodel(BLOBS).SerializeToString()


@hypothesis_settings(
    max_examples=150,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.data())
def test_damage_is_refused_or_changes_numbers_alone(path: Path, data: st.DataObject) -> None:
    """Whatever the bytes are, there are either weights of the right shapes or one clear error."""
    content = bytearray(SOUND)
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    for _ in range(data.draw(st.integers(0, 3))):
        # The beginning of a field has more to say than the numbers in it.
        place = data.draw(st.integers(0, len(SOUND)) | st.integers(0, 400))
        if place < len(content):
            content[place] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    net = network()
    with contextlib.suppress(InputError):
        weights = read_caffemodel(path).weights(net)
        assert {name: value.shape for name, value in weights.items()} == shapes(net)
