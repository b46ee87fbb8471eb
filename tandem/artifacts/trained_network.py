"""Saved weights with all that it takes to use them: the network and the mean image."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tandem.artifacts.checkpoint import Checkpoint, read_checkpoint, read_header
from tandem.data.mean_image import read_mean
from tandem.errors import InputError
from tandem.layers.network import ALEXNET, NetworkDescription, build_network, check_network


@dataclass(frozen=True)
class LoadedNetwork:
    """A network that can be used.

    Attributes
    ----------
    network : Network
        In float32; its parameters have the values of the checkpoint.
    description : NetworkDescription
        What it is.
    mean : float32 (3, S, S)
        The mean image that belongs to the weights.
    """

    network: Any
    description: NetworkDescription
    mean: np.ndarray


def load_network(weights: Path, mean: Path | None, network: str = ALEXNET) -> LoadedNetwork:
    """Build the network of a checkpoint, and find its mean image.

    Parameters
    ----------
    weights : Path
        The checkpoint.
    mean : Path or None
        The mean image, .npy; None is the one of the run's data set.
    network : str
        "module:class" that the checkpoint is to be of; it imports PyTensor.

    Raises
    ------
    InputError
        A file is missing or damaged or of another network, or no mean image is known.
    """
    description = read_header(weights).network
    check_network(weights, description, network)
    built = build_network(description)
    shapes = {name: variable.type.shape for name, variable in built.parameters.items()}
    checkpoint = read_checkpoint(weights, shapes)
    image = read_mean(_mean_path(weights, checkpoint) if mean is None else mean)
    if image.shape[-1] < description.crop_size:
        raise InputError(
            f"the mean image is {image.shape[-1]} pixels wide and high, the network of {weights} "
            f"sees {description.crop_size}"
        )
    for name, variable in built.parameters.items():
        variable.set_value(checkpoint.weights[name].astype(np.float32, copy=False), borrow=True)
    return LoadedNetwork(built, description, image)


def _mean_path(weights: Path, checkpoint: Checkpoint) -> Path:
    """Where the run of a checkpoint had its mean image."""
    folder, file = (checkpoint.config.get(key) for key in ("data_folder", "mean_file"))
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
