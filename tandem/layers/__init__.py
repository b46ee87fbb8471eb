"""Graph builders over `tandem.ops`: the layers of a network, its cost and its errors.

Each takes symbolic variables and returns one. Axes are (batch, channel, row, column) between
convolutions and (batch, unit) between fully connected layers. Nothing here knows of devices.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tandem.layers.layers import (
        NORM_ALPHA,
        NORM_BETA,
        NORM_K,
        NORM_SIZE,
        DropoutKeys,
        Kind,
        Parameter,
        Parameters,
        convolution,
        dropout,
        flatten,
        fully_connected,
        label_rank,
        max_pool,
        mean_over_valid,
        negative_log_likelihood,
        relu,
        response_norm,
    )

__all__ = [
    "NORM_ALPHA",
    "NORM_BETA",
    "NORM_K",
    "NORM_SIZE",
    "DropoutKeys",
    "Kind",
    "Parameter",
    "Parameters",
    "convolution",
    "dropout",
    "flatten",
    "fully_connected",
    "label_rank",
    "max_pool",
    "mean_over_valid",
    "negative_log_likelihood",
    "relu",
    "response_norm",
]


def __getattr__(name: str) -> Any:
    """Import a builder when it is first used: `network` serves programs that need no PyTensor."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tandem.layers import layers

    return getattr(layers, name)
