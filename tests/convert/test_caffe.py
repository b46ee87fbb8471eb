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
from tandem.convert.caffe import read_caffemodel, read_mean_proto
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


def drop(name: str) -> Callable[[Any], None]:
    def change(net: Any) -> None:
        for place, layer in enumerate(net.layers):
            if layer.name == name:
                del net.layers[place]
                return

    return change


def layer_of(net: Any, name: str) -> Any:
    return next(layer for layer in net.layers if layer.name == name)


def spoil_blob(net: Any) -> None:
    layer_of(net, "fc7").blobs[0].data.pop()


def turn_blob(net: Any) -> None:
    blob = layer_of(net, "fc6").blobs[0]
    blob.height, blob.width = blob.width, blob.height


def drop_bias(net: Any) -> None:
    del layer_of(net, "conv3").blobs[1]


def make_old(net: Any) -> None:
    net.layers[1].layer = "conv"


def set_option(layer: str, kind: str, option: str, value: Any) -> Callable[[Any], None]:
    def change(net: Any) -> None:
        options = getattr(layer_of(net, layer), kind)
        if isinstance(value, list):
            del getattr(options, option)[:]
            getattr(options, option).extend(value)
        else:
            setattr(options, option, value)

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (drop("norm2"), "found the layers Convolution, LRN, Pooling, .* not those of AlexNet"),
        (drop("fc7"), "not those of AlexNet"),
        (spoil_blob, "found 168096 bytes of numbers for the shape"),
        (turn_blob, r"fc6: fc6.weight is \(205, 12\), expected \(12, 205\)"),
        (drop_bias, "conv3: found 1 blobs, expected 2"),
        (make_old, "before May 2014"),
        (set_option("conv1", "Convolution", "stride", [2]), r"conv1: stride is \[2\], expected 4"),
        (set_option("conv3", "Convolution", "pad", []), r"conv3: pad is \[0\], expected 1"),
        (set_option("conv4", "Convolution", "group", 1), r"conv4: group is \[1\], expected 2"),
        (set_option("pool1", "Pooling", "pool", 1), r"pool1: pool is \[1\], expected 0"),
        (set_option("pool5", "Pooling", "stride", 3), r"pool5: stride is \[3\], expected 2"),
        (set_option("norm1", "LRN", "local_size", 3), r"norm1: local_size is \[3\], expected 5"),
        (set_option("norm1", "LRN", "norm_region", 1), r"norm1: norm_region is \[1\]"),
        (set_option("norm2", "LRN", "beta", 0.5), "norm2: found beta 0.5"),
        (set_option("norm2", "LRN", "alpha", 0.0), "norm2: found beta 0.75, alpha 0.0"),
        (set_option("norm2", "LRN", "k", float("nan")), "k nan"),
    ],
)
def test_other_networks_are_refused(path: Path, change: Callable[[Any], None], reason: str) -> None:
    net = caffemodel(BLOBS)
    change(net)
    with pytest.raises(InputError, match=reason) as caught:
        convert(path, net, network())
    assert str(path) in str(caught.value)


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
