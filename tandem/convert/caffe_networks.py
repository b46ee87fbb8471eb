"""Conversion of Caffe's GoogLeNet and VGG, from their ``.caffemodel``.

Differences, and how they are converted:

* Pictures are BGR: the channels of the first filters are reversed.
* VGG's first filters see pictures of 0 to 255, ours divide them by a deviation: the filters are
  multiplied by it.
* GoogLeNet's layers are named with a slash, ours with a dot; VGG's by stage and number, ours by
  their place, as in torchvision.
* Fully connected weights are (out, in), ours (in, out).

Dropout divides by what it keeps in training, as ours does. Sources: ``models/bvlc_googlenet`` of
Caffe, with a mean colour of its own; the model files of Simonyan and Zisserman.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from tandem.convert.caffe import CONVOLUTION, DENSE, NORM, Layer, check_option, naming
from tandem.convert.published import Converted, Published, fitted, laid_out, without_heads
from tandem.layers.network import Network
from tandem.models.pictures import IMAGENET_STD

_GOOGLENET = Published("tandem.models.googlenet:GoogLeNet", (123.0, 117.0, 104.0), "squash")
_VGG_MEAN = (123.68, 116.779, 103.939)
_VGG = {count: Published(f"tandem.models.vgg:VGG{count}", _VGG_MEAN) for count in (11, 16, 19)}


def convert_network(
    path: Path, layers: Sequence[Layer], crop_size: int | None, width: float
) -> Converted | None:
    """Convert a GoogLeNet or VGG; None if the layers are of another network.

    Raises InputError if the network is incomplete, or a setting differs from ours.
    """
    learned = [layer for layer in layers if layer.kind in (CONVOLUTION, DENSE)]
    names = [layer.name for layer in learned]
    if "inception_3a/1x1" in names:
        published = _GOOGLENET if "loss1/conv" in names else without_heads(_GOOGLENET)
        ours = {name: name.replace("/", ".") for name in names}
    elif "conv1_1" in names and len(learned) in _VGG:
        published, ours = _VGG[len(learned)], {}
    else:
        return None
    with naming(path):
        for layer in learned:
            if len(layer.blobs) != 2:
                raise ValueError(f"{layer.name}: found {len(layer.blobs)} blobs, expected 2")
    classes = {"loss3.classifier.bias": learned[-1].blobs[1].shape}
    classes["classifier.6.bias"] = classes["loss3.classifier.bias"]
    network, description = fitted(published, classes, crop_size, width)
    ours = ours or dict(zip(names, _layers_of(network), strict=True))
    with naming(path):
        _check(layers)
    values = _values(learned, ours)
    first = f"{ours[names[0]]}.weight"
    values[first] = values[first][:, ::-1]
    if published in _VGG.values():
        std = np.array(IMAGENET_STD, np.float32)[:, np.newaxis, np.newaxis]
        values[first] = values[first] * std
    weights, untrained = laid_out(str(path), values, network)
    return Converted(weights, description, published.mean_image(description.crop_size), untrained)


def _layers_of(network: Network) -> list[str]:
    return [*dict.fromkeys(name.rpartition(".")[0] for name in network.parameters)]


def _values(learned: Sequence[Layer], ours: Mapping[str, str]) -> dict[str, np.ndarray]:
    """Weights and biases by our names, with all axes that ours have."""
    values = {}
    for layer in learned:
        weight, bias = layer.blobs
        axes = 4 if layer.kind == CONVOLUTION else 2
        values[f"{ours[layer.name]}.weight"] = weight.reshape(
            (1,) * (axes - weight.ndim) + weight.shape
        )
        values[f"{ours[layer.name]}.bias"] = bias.reshape(-1)
    return values


def _check(layers: Sequence[Layer]) -> None:
    """Check the options that shapes do not show."""
    first = True
    for layer in layers:
        if layer.kind == CONVOLUTION:
            size = layer.blobs[0].shape[-1] if layer.blobs[0].ndim > 1 else 1
            check_option(layer, "pad", 3, 0, size // 2)
            check_option(layer, "group", 5, 1, 1)
            check_option(layer, "stride", 6, 1, 2 if first and size == 7 else 1)
            first = False
        elif layer.kind == NORM:
            check_option(layer, "local_size", 1, 5, 5)
            check_option(layer, "norm_region", 4, 0, 0)
            found = [layer.options.real(field, 1.0) for field in (2, 3, 5)]
            if not np.allclose(found, [1e-4, 0.75, 1.0], rtol=1e-6):
                raise ValueError(
                    f"{layer.name}: alpha, beta and k are {found}, expected 0.0001, 0.75, 1"
                )
