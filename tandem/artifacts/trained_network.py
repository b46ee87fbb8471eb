"""A trained network with the mean image of its weights."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tandem.artifacts.checkpoint import Checkpoint, read_checkpoint, read_header
from tandem.data.mean_image import read_mean
from tandem.errors import InputError
from tandem.layers.network import (
    ALEXNET,
    GRAPH_NETWORK,
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
    mean: np.ndarray  # float32 (3, S, S), with the border


def load_network(
    weights: Path, mean: Path | None, network: str = ALEXNET, layers: Sequence[str] = ()
) -> LoadedNetwork:
    """Build the network of a checkpoint, and read its mean image.

    Parameters
    ----------
    mean : Path or None
        None: the mean image is that of the run's data set.
    network : str
        ``module:class`` of the network that the checkpoint must contain, which a graph does not
        need. Importing it imports PyTensor.
    layers : sequence of str
        ``module:class`` of each layer of the user's own in a graph. A loss is left out.

    Raises
    ------
    InputError
        A file is missing or damaged, or names code that the arguments do not.
    """
    description = read_header(weights).network
    if description.network == GRAPH_NETWORK:
        options = {key: value for key, value in description.options.items() if key != "loss"}
        description = replace(description, options=options)
    check_network(weights, description, network, layers)
    built = build_network(description)
    shapes = {name: variable.type.shape for name, variable in built.parameters.items()}
    checkpoint = read_checkpoint(weights, shapes)
    image = read_mean(_mean_path(weights, checkpoint) if mean is None else mean)
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
