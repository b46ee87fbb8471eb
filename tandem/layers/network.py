"""The network of a run or of a checkpoint, made from its description."""

import difflib
import importlib
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

import numpy as np
from pydantic import Field

from tandem.errors import InputError

ALEXNET = "alex_net:AlexNet"

_PARTS = [
    "parameters",
    "kinds",
    "initial_values",
    "logits",
    "cost",
    "crop_size",
    "classes",
    "dtype",
    "shapes",
]


@dataclass(frozen=True)
class NetworkDescription:
    """What determines a network beside its parameters, and what its outputs mean.

    Attributes
    ----------
    crop_size : int
        Pixels on each side of the input.
    classes : int
        Number of outputs.
    width : float
        Factor on all filter and unit counts.
    wnids : tuple of str or None
        The classes by name, in the order of the outputs; None if unknown.
    norm_before_pool : bool
        Whether normalisation comes before max pooling, and not after it.
    network : str
        "module:class". A file must not choose the code that runs: the user names the network, see
        `check_network`.
    """

    crop_size: Annotated[int, Field(ge=1)]
    classes: Annotated[int, Field(ge=1)]
    width: float
    wnids: tuple[str, ...] | None = None
    norm_before_pool: bool = False
    network: str = ALEXNET

    @property
    def summary(self) -> str:
        """The description in a few words, for messages."""
        kind = "" if self.network == ALEXNET else f"{self.network}, "
        return f"{kind}{self.classes} classes, crop_size {self.crop_size}, width {self.width:g}"


class Network(Protocol):
    """What a run asks of a network. It is made with the keyword arguments of `build_network`.

    A network knows nothing of devices, processes or files: it declares what is learned, and builds
    graphs over it with `tandem.layers`, `tandem.ops` or plain PyTensor.

    Attributes
    ----------
    parameters : mapping of str to TensorSharedVariable
        By name, ``layer.weight`` or ``layer.bias``, in order, of known shapes.
    kinds : mapping of str to "weight" or "bias"
        What each parameter is, for rates and decay, in the same order.
    crop_size : int
        Pixels on each side of the input.
    classes : int
        Number of outputs.
    dtype : "float32" or "float64"
        Of parameters and images.
    shapes : mapping of str to tuple of int
        Shape for one picture of ``input``; of other layers where that is of use.
    """

    parameters: Mapping[str, Any]
    kinds: Mapping[str, Any]
    crop_size: int
    classes: int
    dtype: str
    shapes: Mapping[str, tuple[int, ...]]

    def initial_values(self, seed: int) -> Iterator[tuple[str, np.ndarray]]:
        """Each parameter's name and first value: a function of `seed` alone."""
        ...

    def logits(self, images: Any, dropout: Any) -> Any:
        """The output before the softmax.

        Parameters
        ----------
        images : dtype (batch, RGB, crop_size, crop_size), symbolic
            Minus the mean image.
        dropout : DropoutKeys or None
            What the masks of a training step depend on; None for validation.

        Returns
        -------
        dtype (batch, class), symbolic
        """
        ...

    def cost(self, logits: Any, labels: Any, valid: Any) -> Any:
        """The mean loss of the first `valid` rows, symbolic; 0 where there are none.

        Only a mean over rows makes the number of trainers change nothing.
        """
        ...


def build_network(description: NetworkDescription, dtype: str = "float32") -> Any:
    """Import the class of a network and make one.

    Parameters
    ----------
    description : NetworkDescription
        What it is to be. Its class is called with the keyword arguments `crop_size`, `classes`,
        `width` and `dtype`, and with `norm_before_pool` where that is true.
    dtype : "float32" or "float64"
        Of its parameters.

    Returns
    -------
    Network

    Raises
    ------
    InputError
        There is no such class, it is no network, or none is of this description.
    """
    kind = find_network(description.network)
    # A network that knows only one order need not have the argument.
    options = {"norm_before_pool": True} if description.norm_before_pool else {}
    arguments = {
        "crop_size": description.crop_size,
        "classes": description.classes,
        "width": description.width,
        "dtype": dtype,
        **options,
    }
    try:
        inspect.signature(kind).bind(**arguments)
    except TypeError as error:
        raise InputError(
            f"network: {description.network} cannot be made with the arguments "
            f"{', '.join(arguments)}: {error}"
        ) from error
    try:
        network = kind(**arguments)
    except (ValueError, MemoryError, OverflowError) as error:
        raise InputError(f"crop_size, width: {error or 'there is no memory for that'}") from error
    if missing := [part for part in _PARTS if not hasattr(network, part)]:
        raise InputError(
            f"network: {description.network} is no network: it has no {', '.join(missing)}"
        )
    return network


def check_network(path: str | Path, description: NetworkDescription, network: str) -> None:
    """Refuse a checkpoint of another network than the user names.

    Parameters
    ----------
    path : Path
        The checkpoint, for the message.
    description : NetworkDescription
        Its description of itself.
    network : str
        "module:class" that the user names.

    Raises
    ------
    InputError
        Names both.
    """
    if description.network != network:
        raise InputError(
            f"{path}: this checkpoint says that it is of the network {description.network}, not "
            f"{network}; a file does not decide what code is run, so say --network "
            f"{description.network} if you mean it"
        )


def find_network(network: str) -> type:
    """Import the class of a network.

    Parameters
    ----------
    network : str
        "module:class"; the module is looked for where Python looks for modules, the folder of the
        program first.

    Raises
    ------
    InputError
        There is no such module or class.
    """
    module_name, _, name = network.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # The module may be there, and another that it imports may not.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise InputError(
            f"network: there is no module {error.name!r} for {network}: it is looked for in the "
            "folder of the program and in those of PYTHONPATH"
        ) from error
    kind = getattr(module, name, None)
    if not isinstance(kind, type):
        classes = [n for n, value in vars(module).items() if isinstance(value, type)]
        nearest = difflib.get_close_matches(name, classes, 1)
        hint = f"; did you mean {module_name}:{nearest[0]}?" if nearest else ""
        raise InputError(f"network: the module {module_name} has no class {name!r}{hint}")
    return kind
