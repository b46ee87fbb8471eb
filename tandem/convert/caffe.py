"""Conversion of Caffe's AlexNet and CaffeNet: weights of a ``.caffemodel``, and mean image.

Differences, and how they are converted:

* Pictures are BGR: the channels of conv1's filters are reversed.
* bvlc_alexnet normalises before pooling, CaffeNet after: an option of our network.
* Normalisation is ``x / (k + alpha / n * sum)^beta`` with k 1, ours ``x / (2 + 1e-4 * sum)^beta``.
  They are equal if the input is scaled by s and the output by t: with ``s^2 = 2 alpha / (1e-4 n
  k)`` our bracket is ``2 / k`` times Caffe's, which ``t = (2 / k)^beta / s`` compensates. ReLU and
  max pooling preserve a factor, so s goes into the filters and biases before, t into the filters
  after.
* Dropout multiplies kept values by 2 in training, ours all values by 1/2 in validation: the weights
  after a dropout are doubled.
* Fully connected weights are (out, in), ours (in, out).

Both correlate with filters. Sources: Jia et al. 2014, "Caffe: convolutional architecture for fast
feature embedding"; caffe.proto for the field numbers.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tandem.convert.wire import Message
from tandem.data.safe_io import read_bytes
from tandem.errors import InputError, explained
from tandem.layers import NORM_ALPHA, NORM_BETA, NORM_K, NORM_SIZE

_MOST_BYTES = 1 << 30  # AlexNet needs a quarter
_MOST_MEAN_BYTES = 1 << 26
_MOST_AXES = 8

# Field numbers of caffe.proto. bvlc_alexnet has layers of the older type V1LayerParameter.
_V1_LAYERS, _V0_LAYER, _LAYERS = 2, 1, 100
_V1_KINDS = {4: "Convolution", 14: "InnerProduct", 15: "LRN", 17: "Pooling"}
_DATA, _SHAPE, _OLD_SHAPE = 5, 7, (1, 2, 3, 4)

CONVOLUTION, DENSE, NORM, POOL = "Convolution", "InnerProduct", "LRN", "Pooling"
_LAST = [CONVOLUTION] * 3 + [POOL] + [DENSE] * 3
_POOL_LAST = [CONVOLUTION, NORM, POOL] * 2 + _LAST
_NORM_LAST = [CONVOLUTION, POOL, NORM] * 2 + _LAST


@dataclass(frozen=True)
class Layer:
    """A layer with weights, a normalisation, or a pooling layer."""

    name: str
    kind: str  # Convolution, InnerProduct, LRN or Pooling
    blobs: tuple[np.ndarray, ...]  # weights and biases, float32
    options: Message  # the parameters of its kind


@dataclass(frozen=True)
class CaffeNetwork:
    """The layers of AlexNet or CaffeNet in a caffemodel."""

    path: Path
    layers: tuple[Layer, ...]
    norm_before_pool: bool  # true for AlexNet, false for CaffeNet

    @property
    def classes(self) -> int:
        return len(self.layers[-1].blobs[1])

    def weights(self, network: Any) -> dict[str, np.ndarray]:
        """Convert to the weights of a network of ours with the same order and classes.

        Raises InputError if a layer's shape or setting differs from the network's.
        """
        with naming(self.path):
            return _converted(self.layers, network)


def read_layers(path: Path) -> tuple[Layer, ...]:
    """Read the layers of a caffemodel; raises InputError if it is missing or damaged."""
    with naming(path):
        return tuple(_layers(Message(read_bytes(path, _MOST_BYTES))))


def alexnet(path: Path, layers: tuple[Layer, ...]) -> CaffeNetwork:
    """AlexNet or CaffeNet of the layers of a caffemodel; raises InputError for other layers."""
    with naming(path):
        kinds = [layer.kind for layer in layers]
        if kinds not in (_POOL_LAST, _NORM_LAST):
            raise ValueError(
                f"found the layers {', '.join(kinds) or 'none'}, which are not those of AlexNet"
            )
        for layer in layers:
            if layer.kind in (CONVOLUTION, DENSE) and len(layer.blobs) != 2:
                raise ValueError(f"{layer.name}: found {len(layer.blobs)} blobs, expected 2")
        return CaffeNetwork(path, layers, kinds == _POOL_LAST)


def read_mean_proto(path: Path) -> np.ndarray:
    """Read Caffe's mean image, ``imagenet_mean.binaryproto``, as float32 (RGB, row, column).

    Raises InputError if the file is missing, damaged, or not a mean image.
    """
    with naming(path):
        mean = _blob(Message(read_bytes(path, _MOST_MEAN_BYTES)))
        if mean.ndim != 3 or mean.shape[0] != 3 or mean.shape[1] != mean.shape[2]:
            raise ValueError(f"found the shape {mean.shape}, expected (3, S, S)")
        return np.ascontiguousarray(mean[::-1])


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn errors about a file into an `InputError` that names it."""
    try:
        with explained(path, "cannot be read"):
            yield
    except ValueError as error:
        raise InputError(
            f"{path}: cannot be converted; expected a whole file of Caffe: {error}"
        ) from error


def _layers(net: Message) -> list[Layer]:
    found = []
    for layer in net.messages(_V1_LAYERS):
        if layer.chunks(_V0_LAYER):
            raise ValueError(
                "found layers in the format from before May 2014; Caffe's upgrade_net_proto_binary "
                "converts them"
            )
        if kind := _V1_KINDS.get(layer.integer(5, 0)):
            options = {CONVOLUTION: 10, DENSE: 17, NORM: 18, POOL: 19}[kind]
            found.append(_layer(layer, layer.text(4), kind, 6, options))
    for layer in net.messages(_LAYERS):
        if (kind := layer.text(2)) in _V1_KINDS.values():
            options = {CONVOLUTION: 106, DENSE: 117, NORM: 118, POOL: 121}[kind]
            found.append(_layer(layer, layer.text(1), kind, 7, options))
    return found


def _layer(layer: Message, name: str, kind: str, blobs: int, options: int) -> Layer:
    arrays = tuple(_blob(blob) for blob in layer.messages(blobs))
    return Layer(name, kind, arrays, layer.message(options))


def _blob(blob: Message) -> np.ndarray:
    """The array of a BlobProto, without leading axes of length 1."""
    old = [blob.integer(field, 1) for field in _OLD_SHAPE]
    shape = blob.message(_SHAPE).integers(1) if blob.chunks(_SHAPE) else old
    chunks = blob.chunks(_DATA)
    data = chunks[0] if len(chunks) == 1 else memoryview(b"".join(chunks))
    if not 1 <= len(shape) <= _MOST_AXES or 4 * math.prod(shape) != len(data):
        raise ValueError(f"found {len(data)} bytes of numbers for the shape {tuple(shape)}")
    while len(shape) > 1 and shape[0] == 1:
        shape = shape[1:]
    return np.frombuffer(data, "<f4").reshape(shape)


def _converted(layers: Sequence[Layer], network: Any) -> dict[str, np.ndarray]:
    ours = (*network.convolutions, *network.fully_connected)
    learned = [layer for layer in layers if layer.kind in (CONVOLUTION, DENSE)]
    _check_options(layers, network.convolutions)
    weights: dict[str, np.ndarray] = {}
    pending = 1.0  # factor on the input of the next layer
    for theirs, layer, norm in zip(learned, ours, _norms(layers), strict=True):
        own, after = (1.0, 1.0) if norm is None else _scales(norm)
        weight, bias = theirs.blobs
        if theirs.kind == DENSE:
            weight = weight.T
        for kind, value, factor in (("weight", weight, own * pending), ("bias", bias, own)):
            name = f"{layer.name}.{kind}"
            expected = network.parameters[name].type.shape
            if value.shape != expected:
                raise ValueError(f"{theirs.name}: {name} is {value.shape}, expected {expected}")
            weights[name] = np.ascontiguousarray((value * np.float64(factor)).astype(np.float32))
        dropout = getattr(layer, "dropout", None)
        pending = after if dropout is None else 1 / (1 - dropout)
    first = f"{ours[0].name}.weight"
    return weights | {first: np.ascontiguousarray(weights[first][:, ::-1])}  # from BGR


def _norms(layers: Sequence[Layer]) -> list[Layer | None]:
    """The normalisation after each layer with weights, or None."""
    found: list[Layer | None] = []
    for layer in layers:
        if layer.kind in (CONVOLUTION, DENSE):
            found.append(None)
        elif layer.kind == NORM:
            found[-1] = layer
    return found


def _scales(norm: Layer) -> tuple[float, float]:
    """Factors on input and output that turn our normalisation into Caffe's."""
    options = norm.options
    alpha, beta, k = options.real(2, 1.0), options.real(3, 0.75), options.real(5, 1.0)
    if beta != NORM_BETA or not (0 < alpha < math.inf and 0 < k < math.inf):
        raise ValueError(f"{norm.name}: found beta {beta}, alpha {alpha}, k {k}")
    ratio = NORM_K / k
    before = math.sqrt(ratio * alpha / NORM_SIZE / NORM_ALPHA)
    return before, ratio**NORM_BETA / before


def _check_options(layers: Sequence[Layer], ours: Sequence[Any]) -> None:
    """Check the options that shapes do not show."""
    convolutions = iter(ours)
    for layer in layers:
        if layer.kind == CONVOLUTION:
            own = next(convolutions)
            check_option(layer, "pad", 3, 0, own.pad)
            check_option(layer, "group", 5, 1, own.groups)
            check_option(layer, "stride", 6, 1, own.stride)
        elif layer.kind == POOL:
            check_option(layer, "pool", 1, 0, 0)  # the maximum
            check_option(layer, "kernel_size", 2, 0, 3)
            check_option(layer, "stride", 3, 1, 2)
            check_option(layer, "pad", 4, 0, 0)
        elif layer.kind == NORM:
            check_option(layer, "local_size", 1, 5, NORM_SIZE)
            check_option(layer, "norm_region", 4, 0, 0)  # across channels


def check_option(layer: Layer, option: str, field: int, default: int, expected: int) -> None:
    """Raise ValueError unless an option of a layer has the value expected."""
    found = layer.options.integers(field) or [default]
    if set(found) != {expected}:
        raise ValueError(f"{layer.name}: {option} is {found}, expected {expected}")
