"""Building blocks of networks: parameters, layers, losses and metrics.

A name is imported when it is first used: programs that need no PyTensor use `network` alone.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tandem.layers.activations import *  # noqa: F403
    from tandem.layers.builder import *  # noqa: F403
    from tandem.layers.initial import *  # noqa: F403
    from tandem.layers.layers import *  # noqa: F403
    from tandem.layers.losses import *  # noqa: F403
    from tandem.layers.metrics import *  # noqa: F403
    from tandem.layers.network import *  # noqa: F403
    from tandem.layers.parameter import *  # noqa: F403
    from tandem.layers.training_pass import *  # noqa: F403

_MODULES = (
    "network",
    "parameter",
    "training_pass",
    "initial",
    "layers",
    "activations",
    "losses",
    "metrics",
    "builder",
)


def __getattr__(name: str) -> Any:
    if name == "__all__":
        modules = (importlib.import_module(f"{__name__}.{module}") for module in _MODULES)
        return [exported for module in modules for exported in module.__all__]
    for module in () if name.startswith("_") else _MODULES:
        found = importlib.import_module(f"{__name__}.{module}")
        if name in found.__all__:
            return getattr(found, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__getattr__("__all__")]
