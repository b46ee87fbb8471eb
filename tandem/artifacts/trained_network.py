"""A trained network with the mean image of its weights."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tandem.artifacts.checkpoint import read_checkpoint, read_header
from tandem.artifacts.run_folder import chosen_checkpoint
from tandem.data.manifest import read_manifest
from tandem.data.mean_image import read_mean
from tandem.errors import InputError
from tandem.layers.network import (
    ALEXNET,
    KERAS_NETWORK,
    Network,
    NetworkDescription,
    build_network,
    check_network,
)


@dataclass(frozen=True)
class LoadedNetwork:
    """A network with weights, and the mean image that belongs to them."""

    network: Network  # in float32
    description: NetworkDescription
    mean: np.ndarray | None  # float32 (3, S, S), with the border; None: the input is no pictures


def load_network(
    weights: Path, mean: Path | None, network: str = ALEXNET, layers: Sequence[str] = ()
) -> LoadedNetwork:
    """Build the network of a checkpoint, and read its mean image.

    Parameters
    ----------
    mean : Path or None
        None: the mean image is that of the run's data set, zeros if it subtracted none, or of a
        model that was converted from Keras's file.
    network : str
        ``module:class`` of the network that the checkpoint must contain, which a graph does not
        need. Importing it imports PyTensor.
    layers : sequence of str
        ``module:function`` of the lowering of each layer of the user's own in a graph.

    Raises
    ------
    InputError
        A file is missing or damaged, or names code that the arguments do not.
    """
    weights = chosen_checkpoint(weights)
    description = read_header(weights).network
    check_network(weights, description, network, layers)
    built = build_network(description)
    shapes = {name: variable.type.shape for name, variable in built.parameters.items()}
    checkpoint = read_checkpoint(weights, shapes)
    image = _mean_image(weights, mean, description, checkpoint.config)
    for name, variable in built.parameters.items():
        variable.set_value(checkpoint.weights[name].astype(np.float32, copy=False), borrow=True)
    return LoadedNetwork(built, description, image)


def _mean_image(
    weights: Path, path: Path | None, description: NetworkDescription, config: Mapping[str, Any]
) -> np.ndarray | None:
    """The mean image of a network, float32 (3, S, S); None for one whose input is no pictures."""
    if description.crop_size is None:
        return None
    is_converted = description.network == KERAS_NETWORK and not config
    if path is None and (is_converted or config.get("mean_file", "") is None):
        side = _stored_size(description, config)
        return np.zeros((3, side, side), np.float32)
    image = read_mean(_mean_path(weights, config) if path is None else path)
    if image.shape[-1] < description.crop_size:
        raise InputError(
            f"the mean image is {image.shape[-1]} pixels wide and high, the network of {weights} "
            f"sees {description.crop_size}"
        )
    if image.shape[-1] <= 2 * description.pad:
        raise InputError(
            f"the mean image is {image.shape[-1]} pixels wide and high, the pictures of {weights} "
            f"have a border of {description.pad} on each side"
        )
    return image


def _stored_size(description: NetworkDescription, config: Mapping[str, Any]) -> int:
    """Rows and columns of the pictures that a network was trained on, with the border.

    Without their manifest, which has the same classes, these are crops with a border around them.
    """
    crop_size = description.crop_size or 0
    if isinstance(folder := config.get("data_folder"), str):
        with contextlib.suppress(InputError):
            found = read_manifest(Path(folder))
            if found.wnids == description.wnids and found.image_size >= crop_size:
                return found.image_size
    return crop_size + 2 * description.pad


def _mean_path(weights: Path, config: Mapping[str, Any]) -> Path:
    """Return where the run of a checkpoint had its mean image."""
    folder, file = (config.get(key) for key in ("data_folder", "mean_file"))
    if not isinstance(folder, str) or not isinstance(file, str):
        raise InputError(
            f"{weights} does not say which mean image belongs to it, as it was converted: say "
            "--mean FILE, and see pretrained/README.md for where it comes from"
        )
    path = Path(folder) / file
    if not path.exists():
        raise InputError(
            f"{path}: the mean image that {weights} was trained with is not there; "
            "say --mean FILE where it is now"
        )
    return path
