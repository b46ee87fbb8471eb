"""The network of a run or of a checkpoint, made from its description."""

import importlib
from typing import Any

from tandem.errors import InputError
from tandem.run.checkpoint import NetworkDescription

ALEXNET = "alex_net:AlexNet"


def build_network(network: str, description: NetworkDescription, dtype: str = "float32") -> Any:
    """Import the class of a network and make one.

    Parameters
    ----------
    network : str
        "module:class"; the module imports PyTensor.
    description : NetworkDescription
        What it is to be.
    dtype : "float32" or "float64"
        Of its parameters.

    Returns
    -------
    AlexNet, or another object with its ``parameters``, ``kinds``, ``logits`` and ``cost``

    Raises
    ------
    InputError
        No network is of this description.
    """
    module, _, name = network.partition(":")
    # A network that knows only one order need not have the argument.
    options = {"norm_before_pool": True} if description.norm_before_pool else {}
    try:
        return getattr(importlib.import_module(module), name)(
            crop_size=description.crop_size,
            classes=description.classes,
            width=description.width,
            dtype=dtype,
            **options,
        )
    except (ValueError, MemoryError, OverflowError) as error:
        raise InputError(f"crop_size, width: {error or 'there is no memory for that'}") from error
