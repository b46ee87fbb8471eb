"""The network of a run or of a checkpoint, made from its description."""

import dataclasses
import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_type_hints

import numpy as np
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError

from tandem.data.manifest import Border, Resize
from tandem.errors import InputError
from tandem.layers.choices import CrossEntropy, Loss
from tandem.layers.parameter import Parameters, layer_of
from tandem.layers.training_pass import Training
from tandem.nested import difference, plain
from tandem.registry import find_class
from tandem.validation import listed, shown, suggestion

if TYPE_CHECKING:
    from pytensor.tensor.variable import TensorVariable

    from tandem.placement import Placement

__all__ = ["Network", "NetworkDescription", "build_network"]

COLOURS = 3
_ALIAS = "norm_before_pool"
_ARGUMENTS = ("crop_size", "classes", "width", "dtype")
ALEXNET = "alex_net:AlexNet"
KERAS_NETWORK = "tandem.keras.network:KerasNetwork"
"""The network that is a model of Keras: its graph is data in its options, and no code."""
FullyConnected = Literal["replicated", "sharded", "single"]
"""Places where trainers have the weights of fully connected layers."""


@dataclass(frozen=True)
class NetworkDescription:
    """The description of a network beside its parameters, and of its inputs and outputs.

    `norm_before_pool` is an option of AlexNet that has a key of its own in configurations and
    checkpoints: `options` may be given with it, and never holds it. Raises InputError if an option
    cannot be used.
    """

    # Pixels on each side of the input; None: the input is no pictures, and has the network's shape
    crop_size: Annotated[int, Field(ge=1)] | None
    classes: Annotated[int, Field(ge=1)]
    width: float  # factor on all filter and unit counts
    wnids: tuple[str, ...] | None = None  # the classes, in the order of the outputs, if known
    norm_before_pool: bool = False
    network: str = ALEXNET  # "module:class", which the user has to name too, see `check_network`
    # Other arguments of the class, of values as JSON has them, which may be nested
    options: Annotated[Mapping[str, Any], AfterValidator(plain)] = field(default_factory=dict)
    resize: Resize = "squash"  # how the training pictures were made squares
    pad: Border = 0  # pixels of the mean colour on each side of a training picture

    def __post_init__(self) -> None:
        options = dict(self.options)
        alias = options.pop(_ALIAS, self.norm_before_pool)
        if not isinstance(alias, bool):
            raise InputError(f"{_ALIAS} is {alias}; it must be true or false")
        object.__setattr__(self, "norm_before_pool", alias)
        object.__setattr__(self, "options", options)

    @property
    def all_options(self) -> dict[str, Any]:
        """Options as keyword arguments; a network needs no `norm_before_pool` to be without it."""
        return {_ALIAS: True, **self.options} if self.norm_before_pool else dict(self.options)

    def header(self) -> dict[str, Any]:
        """The description as JSON in a checkpoint, without options, resize and pad at defaults."""
        values = dataclasses.asdict(self)
        if not self.options:
            del values["options"]
        if self.resize == "squash":
            del values["resize"]
        if not self.pad:
            del values["pad"]
        return values

    def differences(
        self, other: "NetworkDescription", sizes: bool = True
    ) -> Iterator[tuple[str, Any, Any]]:
        """Name, own value and other value of each option that differs, and of each size.

        Of nested options it is the place of the first difference, such as
        ``graph.layers.conv2d.filters``, and what stands there.
        """
        names = ("classes", "crop_size", "width") if sizes else ()
        pairs = [(name, getattr(self, name), getattr(other, name)) for name in names]
        for name in sorted({*self.all_options, *other.all_options}):
            default = False if name == _ALIAS else "at its default"
            pairs.append((name, *(d.all_options.get(name, default) for d in (self, other))))
        return (difference(*pair) for pair in pairs if pair[1] != pair[2])

    @property
    def summary(self) -> str:
        """The description in a few words, for messages."""
        kind = "" if self.network == ALEXNET else f"{self.network}, "
        size = "" if self.crop_size is None else f", crop_size {self.crop_size}"
        return f"{kind}{self.classes} classes{size}, width {self.width:g}"


class Network(ABC):
    """Base of a network: declares its parameters, and builds graphs over them.

    A network knows nothing of devices, processes or files: it uses `tandem.layers`, `tandem.ops` or
    plain PyTensor. It is made with the keyword arguments of `build_network`.

    Parameters
    ----------
    crop_size : int or None
        Pixels on each side of the input; None: it is no pictures, and the network sets its shape.
    classes : int
    dtype : "float32" or "float64"
        Of parameters and images.

    Attributes
    ----------
    parameters : Parameters
        In order; all zeros until `initialize` or a checkpoint sets them.
    shapes : dict of str to tuple of int
        Shape for one picture of ``input``, and of the outputs of layers.
    loss : Loss
        Of each row, for `cost`.
    """

    loss: Loss = CrossEntropy()
    # Whether rows of arrays reach it as they are stored; else those of three axes as images are,
    # with the channel first
    takes_stored_rows: ClassVar[bool] = False
    undivided: Sequence[str] = ()  # layers of whose graph trainers cannot compute parts
    frozen: tuple[str, ...] = ()  # layers and parameters that are not trained, beside the setting's

    def __init__(self, crop_size: int | None, classes: int, dtype: str) -> None:
        self.crop_size: Any = crop_size  # of pictures an int, on which their programs rely
        self.classes, self.dtype = classes, dtype
        self.parameters = Parameters(dtype)
        self.shapes: dict[str, tuple[int, ...]] = {}
        if crop_size is not None:
            self.shapes["input"] = (COLOURS, crop_size, crop_size)

    def initial_values(self, seed: int) -> Iterator[tuple[str, np.ndarray]]:
        """Each parameter's name and initial value, in order: a function of `seed` alone."""
        return self.parameters.initial_values(seed)

    def initialize(self, seed: int) -> None:
        """Set all parameters to their `initial_values`."""
        self.parameters.initialize(seed)

    def images(self) -> "TensorVariable":
        """A symbolic minibatch of any number of pictures, by which shapes can be inferred."""
        import pytensor.tensor as pt

        return pt.tensor("images", dtype=self.dtype, shape=(None, *self.shapes["input"]))

    def check_images(self, images: "TensorVariable") -> None:
        """Raise TypeError or ValueError unless images have the network's dtype and shape."""
        expected, name = (None, *self.shapes["input"]), type(self).__name__
        if images.type.ndim != len(expected) or images.type.dtype != self.dtype:
            raise TypeError(
                f"{name}: images must be a {len(expected)}-dimensional tensor of {self.dtype}, got"
                f" {images.type}"
            )
        for length, wanted in zip(images.type.shape, expected, strict=True):
            if None not in (length, wanted) and length != wanted:
                lengths = ", ".join(map(str, expected[1:]))
                raise ValueError(
                    f"{name}: images must have the shape (batch, {lengths}), got"
                    f" {images.type.shape}"
                )

    @abstractmethod
    def logits(self, images: "TensorVariable", training: Training | None) -> "TensorVariable":
        """Build the graph of the output before the softmax.

        Parameters
        ----------
        images : dtype (batch, RGB, crop_size, crop_size)
            Minus the mean image. Lengths may be unknown when the graph is built.
        training : Training or None
            Inputs that are particular to training, and where statistics and auxiliary outputs go.
            None for validation.

        Returns
        -------
        dtype (batch, class)

        Raises
        ------
        TypeError, ValueError
            The images have another dtype, number of axes, or shape.
        """

    def placements(self, kind: FullyConnected) -> "dict[str, Placement]":
        """Return where trainers have parameters; each has a copy of those that are left out.

        By default, ``sharded`` divides the units of fully connected layers among the trainers: the
        columns of weights of two axes, and biases beside them. ``single`` leaves these arrays to
        trainer 0. A network may place others, or fewer.

        Returns
        -------
        dict of str to `Replicate`, `Shard` or `Single`
            By the parameter's name; see `tandem.placement`.
        """
        from tandem.placement import Shard, Single

        found: dict[str, Placement] = {}
        declared = self.parameters.declared
        for name, parameter in declared.items() if kind != "replicated" else ():
            if parameter.kind != "weight" or len(parameter.shape) != 2:
                continue
            found[name] = Shard(1) if kind == "sharded" else Single()
            beside = declared.get(f"{layer_of(name)}.bias")
            if beside is not None and beside.shape == parameter.shape[1:]:
                found[beside.name] = Shard(0) if kind == "sharded" else Single()
        return found

    def predictions(self, logits: "TensorVariable") -> "TensorVariable":
        """Predict, in the shape of the outputs: by default their softmax."""
        import pytensor.tensor as pt

        return pt.special.softmax(logits, axis=1)

    def probabilities(self, logits: "TensorVariable") -> "TensorVariable":
        """Predict probabilities, which reports show and crops average: by default `predictions`."""
        return self.predictions(logits)

    @property
    def takes_total(self) -> bool:
        """Return whether `cost` has a fourth argument, `total`: the rows of the whole step.

        Then a sum over these rows can be a cost, as their number times the mean of a trainer's.
        """
        return False

    @property
    def has_own_cost(self) -> bool:
        """Return whether `cost` is another than the mean of `loss`."""
        return type(self).cost is not Network.cost

    def measured(self, logits: "TensorVariable") -> "TensorVariable":
        """The outputs as metrics see them: by default those before the softmax."""
        return logits

    def measures(self, logits: "TensorVariable", labels: "TensorVariable") -> "dict[str, Any]":
        """Build values of each row, (batch,), of which metrics ``network.NAME`` are means.

        A pair of values times weights and of weights is a weighted mean. The arguments are those of
        `cost`, which was called before. By default there are none.
        """
        return {}

    def cost(
        self, logits: "TensorVariable", labels: "TensorVariable", valid: "TensorVariable"
    ) -> "TensorVariable":
        """Mean loss of the first `valid` rows, in nats for the cross-entropy; 0 if there are none.

        The setting `loss` chooses another one. Whatever replaces it must be a mean over rows:
        otherwise the number of trainers changes the result.

        Parameters
        ----------
        logits : dtype (batch, class)
        labels : int64 (batch,)
        valid : int64 scalar

        Returns
        -------
        dtype scalar
        """
        from tandem.layers.losses import mean_over_valid

        return mean_over_valid(self.loss(logits, labels), valid)


def build_network(description: NetworkDescription, dtype: str = "float32") -> Network:
    """Import the class of a network and make one.

    The class is called with the keyword arguments `crop_size`, `classes`, `width` and `dtype`
    (float32 or float64), and with the options.

    Raises
    ------
    InputError
        There is no such class, it is no network, or none is of this description.
    """
    kind = find_class("network", description.network)
    if not issubclass(kind, Network):
        raise InputError(
            f"network: {description.network} is no network: it has to be a subclass of "
            "tandem.layers.Network"
        )
    _check_options(description, kind)
    arguments: dict[str, Any] = {
        "crop_size": description.crop_size,
        "classes": description.classes,
        "width": description.width,
        "dtype": dtype,
        **description.all_options,
    }
    try:
        inspect.signature(kind).bind(**arguments)
    except TypeError as error:
        raise InputError(
            f"network: {description.network} cannot be made with the arguments "
            f"{', '.join(arguments)}: {error}"
        ) from error
    try:
        return kind(**arguments)
    except (TypeError, KeyError) as error:
        if description.crop_size is not None:
            raise
        raise InputError(
            f"network: {description.network} cannot be made for rows of arrays, which have no"
            " crop_size: it is for pictures"
        ) from error
    except (ValueError, MemoryError, OverflowError) as error:
        settings = "crop_size, width" + ", network_options" * bool(description.all_options)
        raise InputError(f"{settings}: {error or 'there is no memory for that'}") from error


def _check_options(description: NetworkDescription, kind: type[Network]) -> None:
    """Refuse options that the class of a network does not take, and values of another type."""
    parameters = inspect.signature(kind).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return
    known = [name for name in parameters if name not in _ARGUMENTS]
    for option in description.all_options:
        if option in _ARGUMENTS:
            raise InputError(f"network_options: {option} is not an option: it is set by itself")
        if option not in known:
            raise InputError(
                f"network_options: {description.network} has no option {option!r}"
                f"{suggestion(option, known) or '.'} It has {', '.join(known) or 'none'}"
            )
    _check_types(description, kind)


def _check_types(description: NetworkDescription, kind: type[Network]) -> None:
    """Refuse values of options that are not of the types that a class's constructor annotates."""
    try:
        types = get_type_hints(kind.__init__, include_extras=True)
    except NameError:  # of what is imported for type checkers alone
        return
    for option, value in description.all_options.items():
        try:
            TypeAdapter(types.get(option, Any)).validate_json(json.dumps(value), strict=True)
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise InputError(
                f"network_options: {option} of {description.network} is {shown(value)}: "
                f"{reason[0].lower()}{reason[1:]}"
            ) from error
        except PydanticSchemaGenerationError:
            continue


def own_code(options: Mapping[str, Any]) -> list[str]:
    """The functions of the user's own that options of a Keras model name."""
    layers = options.get("layers")
    names = layers if isinstance(layers, list | tuple) else [layers]
    return [name for name in names if name and isinstance(name, str)]


def check_network(
    path: str | Path,
    description: NetworkDescription,
    network: str,
    own: Collection[str] = (),
    advice: str = "",
) -> None:
    """Refuse a checkpoint of code that the user does not name, with an InputError.

    A graph is data, so a checkpoint of a Keras model needs no other `network` than the default;
    but `own` has to list what it has of `own_code`. `advice` says how, if not by ``--layers``.
    """
    if description.network == KERAS_NETWORK and network in (ALEXNET, description.network):
        names = own_code(description.options)
        if unnamed := [name for name in names if name not in own]:
            raise InputError(
                f"{path}: found {listed(unnamed)} in the graph of this checkpoint, expected only "
                f"what you name ({listed([*own])}); a file does not decide what code is run, so "
                f"{advice or f'say --layers {chr(32).join(names)}'} if you mean it"
            )
    elif description.network != network:
        raise InputError(
            f"{path}: this checkpoint says that it is of the network {description.network}, not "
            f"{network}; a file does not decide what code is run, so say --network "
            f"{description.network} if you mean it"
        )
