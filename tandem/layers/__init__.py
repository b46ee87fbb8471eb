"""Building blocks of networks: parameters, layers, losses and metrics.

A name is imported when it is first used: programs that need no PyTensor use `network` alone.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tandem.layers.layers import (
        NORM_ALPHA,
        NORM_BETA,
        NORM_K,
        NORM_SIZE,
        convolution,
        dropout,
        flatten,
        fully_connected,
        max_pool,
        relu,
        response_norm,
    )
    from tandem.layers.losses import mean_over_valid, negative_log_likelihood
    from tandem.layers.metrics import label_rank
    from tandem.layers.network import Network
    from tandem.layers.parameter import DropoutKeys, Parameter, Parameters, bias, weight

__all__ = [
    "NORM_ALPHA",
    "NORM_BETA",
    "NORM_K",
    "NORM_SIZE",
    "DropoutKeys",
    "Network",
    "Parameter",
    "Parameters",
    "bias",
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
    "weight",
]

_MODULES = {
    **dict.fromkeys(("DropoutKeys", "Parameter", "Parameters", "bias", "weight"), "parameter"),
    **dict.fromkeys(("mean_over_valid", "negative_log_likelihood"), "losses"),
    "label_rank": "metrics",
    "Network": "network",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_MODULES.get(name, 'layers')}")
    return getattr(module, name)
