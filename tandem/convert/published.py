"""Weights published for networks of `tandem.models`, and what belongs to them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tandem.data.class_names import imagenet_names
from tandem.data.manifest import Resize
from tandem.errors import InputError
from tandem.layers.network import Network, NetworkDescription, build_network

CROP_SIZE = 224  # pixels, of all of them
STORED_SIZE = 256  # pixels, of the pictures that are cropped

TORCHVISION_MEAN = (123.675, 116.28, 103.53)  # 0.485, 0.456 and 0.406 of 255
GOOGLE_MEAN = (127.5, 127.5, 127.5)


@dataclass(frozen=True)
class Published:
    """A network of ours whose weights others publish."""

    network: str  # module:class
    mean: tuple[float, float, float] | None  # RGB, subtracted from all pixels; None: unknown
    resize: Resize = "shorter_side"
    options: Mapping[str, Any] = field(default_factory=dict)

    def describe(self, classes: int, crop_size: int | None, width: float) -> NetworkDescription:
        names = tuple(imagenet_names())
        return NetworkDescription(
            CROP_SIZE if crop_size is None else crop_size,
            classes,
            width,
            names if classes == len(names) else None,
            network=self.network,
            options=self.options,
            resize=self.resize,
        )

    def mean_image(self, crop_size: int | None) -> np.ndarray | None:
        """The mean colour as a mean image of which there are crops, float32 (RGB, row, column)."""
        if self.mean is None:
            return None
        colour = np.array(self.mean, np.float32)[:, np.newaxis, np.newaxis]
        side = max(STORED_SIZE, crop_size or 0)
        return np.ascontiguousarray(np.broadcast_to(colour, (3, side, side)))


@dataclass(frozen=True)
class Converted:
    """Weights in our layout, and the network that they are of."""

    weights: dict[str, np.ndarray]
    description: NetworkDescription
    mean: np.ndarray | None  # float32 (RGB, row, column)
    untrained: tuple[str, ...] = ()  # of the weights, the running averages


def output_of(network: Network) -> str:
    """The name of the bias of the last layer."""
    return [*network.parameters.declared][-1]


def fitted(
    published: Published, shapes: Mapping[str, tuple[int, ...]], crop_size: int | None, width: float
) -> tuple[Network, NetworkDescription]:
    """Build a published network with as many classes as arrays of these names have."""
    description = published.describe(1000, crop_size, width)
    network = build_network(description)
    length = (shapes.get(output_of(network)) or (1000,))[-1]
    if length != 1000:
        description = published.describe(length, crop_size, width)
        network = build_network(description)
    return network, description


def laid_out(
    where: str, values: Mapping[str, Any], network: Network
) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """Arrays of a network in our layout, and the names of those that are not trained.

    `values` are arrays, or slices of files that have a shape, whose fully connected weights are
    (out, in). Raises InputError if one is missing, superfluous, or of another shape.
    """
    declared = network.parameters.declared
    for names, fault in (
        ([name for name in declared if name not in values], "has no"),
        ([name for name in values if name not in declared], "has, and the network has not,"),
    ):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise InputError(
                f"{where}: {fault} {names[0]}{more}; expected those of {type(network).__name__}"
            )
    weights = {}
    for name, parameter in declared.items():
        shape = tuple(values[name].shape)
        expected = parameter.shape[::-1] if len(parameter.shape) == 2 else parameter.shape
        if shape != expected:
            raise InputError(f"{where}: {name}: found the shape {shape}, expected {expected}")
        value = np.asarray(values[name][...], np.float32)
        weights[name] = np.ascontiguousarray(value.T if value.ndim == 2 else value)
    return weights, tuple(name for name, p in declared.items() if not p.trainable)


def without_heads(published: Published) -> Published:
    """The same network without auxiliary heads."""
    return replace(published, options={**published.options, "auxiliaries": False})
