"""The functions that turn one layer or operation of Keras into a PyTensor graph, by class."""

import functools
import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from tandem.errors import InputError
from tandem.validation import suggestion

MODULES = (
    "activations",
    "attention",
    "convolution",
    "core",
    "merging",
    "normalization",
    "operations",
    "pooling",
    "published",
    "recurrent",
)

_AUGMENTATIONS = {"RandomFlip": "rand_mirror=True", "RandomCrop": "rand_crop=True"}

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Lowering:
    """A lowering function.

    `keeps_mask` says that the first output has the mask of the first input, as with Keras's layers
    that support masking.
    """

    function: Callable[..., Any]
    keeps_mask: bool = False


_LOWERINGS: dict[str, Lowering] = {}


def lowers(*kinds: str | type, keeps_mask: bool = False) -> Callable[[Function], Function]:
    """Decorator: a function lowers layers of these classes.

    The function takes a `Call`, which has configuration and parameters, then the inputs that the
    layer was called with, PyTensor variables, and returns the output or a list of them.

    ::

        @tandem.keras.lowers(Scaled)
        def scaled(layer, x):
            return x * layer.parameter("gain", x.type.shape[1:])

    Parameters
    ----------
    *kinds : type or str
        A class of your own, whose name it is known by; or the name of one of Keras.
    keeps_mask : bool
        Whether a mask of the input is also that of the output.
    """

    def register(function: Function) -> Function:
        for kind in kinds:
            key = kind if isinstance(kind, str) else f"own:{kind.__name__}"
            if key in _LOWERINGS and not key.startswith("own:"):
                raise ValueError(f"{key} is lowered twice")
            _LOWERINGS[key] = Lowering(function, keeps_mask)
        return function

    return register


def find_lowering(kind: str, layer: str) -> Lowering:
    """Find the lowering of a class; InputError, with the way out, if there is none."""
    _load()
    if found := _LOWERINGS.get(kind):
        return found
    name = kind.removeprefix("own:")
    if kind.startswith("own:"):
        raise InputError(
            f"{layer}: found {name}, a layer of your own, expected one with a lowering: decorate a "
            f"function with @tandem.keras.lowers({name}), see docs/keras.md"
        )
    if name in _AUGMENTATIONS:
        raise InputError(f"{layer}: found {name}, expected {_AUGMENTATIONS[name]} of distribute")
    hint = suggestion(name, (k for k in _LOWERINGS if not k.startswith("own:")))
    raise InputError(
        f"{layer}: found {name}, for which there is no lowering{hint}; give one by "
        f'@tandem.keras.lowers("{kind}"), see docs/keras.md'
    )


def own_lowerings(model: Any) -> dict[str, Lowering]:
    """The lowerings that are not of this package, by class, of what a model, as JSON, has."""
    ours, used = "tandem.keras.", _class_names(model)
    return {
        kind: found
        for kind, found in _LOWERINGS.items()
        if kind.replace(":", ".").rpartition(".")[2] in used
        and not found.function.__module__.startswith(ours)
    }


def _class_names(values: Any) -> set[str]:
    """Every class in the JSON of a model, those of wrapped layers included."""
    inner = values.values() if isinstance(values, dict) else values
    if isinstance(values, str) or not isinstance(inner, Iterable):
        return set()
    own = {values["class_name"]} if isinstance(values, dict) and "class_name" in values else set()
    return own.union(*map(_class_names, inner))


def add_own_lowerings(lowerings: dict[str, Lowering]) -> None:
    """Add what `own_lowerings` returned in another process."""
    _LOWERINGS.update(lowerings)


@functools.cache
def _load() -> None:
    """Import the modules of all lowerings, and with them PyTensor."""
    for module in MODULES:
        importlib.import_module(f"tandem.keras.lowering.{module}")
