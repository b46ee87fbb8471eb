"""Conversion of state dicts with torchvision's names, in safetensors files.

Names are ours too. Differences, and how they are converted:

* Fully connected weights are (out, in), ours (in, out).
* ``num_batches_tracked`` counts what nothing needs.
* Pictures are of 0 to 1, minus a mean colour, divided by a deviation: our networks divide pictures
  of 0 to 255 by 255 times that, and the mean colour becomes a mean image. As both are subtracted
  before a border of zeros is added, outputs are the same at the borders too.
* DenseNet's published files have a dot more in the names of layers, ``norm.1``.

Source: torchvision's ``models`` and the transforms of its weights.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from tandem.artifacts.unsupported import describe_unsupported
from tandem.convert.published import (
    GOOGLE_MEAN,
    TORCHVISION_MEAN,
    Converted,
    Published,
    fitted,
    laid_out,
    without_heads,
)
from tandem.errors import InputError
from tandem.layers.network import ALEXNET
from tandem.validation import nearest

_GOOGLENET = Published("tandem.models.googlenet:GoogLeNetBN", GOOGLE_MEAN)
KNOWN = (
    *(Published(f"tandem.models.resnet:ResNet{n}", TORCHVISION_MEAN) for n in (18, 34, 50)),
    *(Published(f"tandem.models.vgg:VGG{n}", TORCHVISION_MEAN) for n in (11, 16, 19)),
    without_heads(_GOOGLENET),
    _GOOGLENET,
    Published("tandem.models.densenet:DenseNet121", TORCHVISION_MEAN),
    Published("tandem.models.mobilenet:MobileNetV2", TORCHVISION_MEAN),
)

_OLD_DENSENET = re.compile(r"(denselayer\d+\.(?:norm|conv))\.([12]\.)")
_FLOATS = ("F16", "F32", "F64")


class _Slice:
    """An array of a safetensors file, read when it is indexed."""

    def __init__(self, part: Any) -> None:
        self._part, self.shape = part, tuple(part.get_shape())

    def __getitem__(self, index: Any) -> np.ndarray:
        return self._part[index]


def read_state_dict(
    path: Path, network: str | None, crop_size: int | None, width: float
) -> Converted:
    """Read a state dict in a safetensors file.

    `network` is a ``module:class``; None: the network that has its names. Raises InputError if the
    file is damaged, or of another network.
    """
    with _opened(path) as tensors:
        published = _find(path, tensors, network, crop_size, width)
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        built, description = fitted(published, shapes, crop_size, width)
        weights, untrained = laid_out(str(path), tensors, built)
        return Converted(
            weights, description, published.mean_image(description.crop_size), untrained
        )


@contextmanager
def _opened(path: Path) -> Iterator[dict[str, _Slice]]:
    """The arrays of a file by our names."""
    try:
        with safe_open(path, framework="numpy") as file:
            found: dict[str, _Slice] = {}
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                if name.endswith(".num_batches_tracked"):
                    continue
                if part.get_dtype() not in _FLOATS:
                    raise InputError(
                        f"{path}: {name}: found numbers of {part.get_dtype()}, expected "
                        f"{', '.join(_FLOATS[:-1])} or {_FLOATS[-1]}"
                    )
                found[_OLD_DENSENET.sub(r"\1\2", name)] = _Slice(part)
            yield found
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"{path}: cannot be read; expected a whole safetensors file ({error})"
        ) from error


def _find(
    path: Path,
    tensors: Mapping[str, _Slice],
    network: str | None,
    crop_size: int | None,
    width: float,
) -> Published:
    """The network that the arrays are of."""
    candidates = [known for known in KNOWN if network in (None, known.network)]
    for known in candidates:
        # At the usual size, which each has; names are those of any.
        if {*fitted(known, {}, None, width)[0].parameters} == {*tensors}:
            return known
    if network is not None and network != ALEXNET:
        return candidates[-1] if candidates else Published(network, None)
    if unsupported := describe_unsupported(path):
        raise InputError(f"{path}: {unsupported}")
    names = [known.network for known in KNOWN]
    hint = nearest(f"tandem.models.{path.stem}:{path.stem}", names)
    raise InputError(
        f"{path}: found {len(tensors)} arrays whose names are those of no network known here; "
        f"--network {hint or 'MODULE:CLASS'} says what differs from that one"
    )
