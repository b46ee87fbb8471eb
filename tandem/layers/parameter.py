"""Declarations of a network's parameters: shapes, kinds, and initial values."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from tandem.errors import InputError

if TYPE_CHECKING:
    from pytensor.tensor.sharedvar import TensorSharedVariable

__all__ = ["Kind", "Parameter", "Parameters", "bias", "norm", "weight"]

Kind = Literal["weight", "bias", "scale", "shift", "average"]
Distribution = Literal["normal", "uniform", "truncated"]

_WIDEST = 2.0  # standard deviations, of a truncated normal distribution


@dataclass(frozen=True)
class Parameter:
    """One array of a network: name, shape, kind, and initial distribution.

    Attributes
    ----------
    name : str
        ``layer.weight``, ``layer.bias``, or another word after the layer's name.
    shape : tuple of int
        (filter, channel of its group, row, column), (in, out), or (out,).
    kind : str
        weight; bias; scale or shift of a normalisation; or average, a running average, which no
        optimizer steps. Learning rates and weight decay are by kind.
    mean, std : float
        Of the distribution of the initial values; all equal `mean` where `std` is 0.
    distribution : str
        normal; uniform; or truncated, a normal distribution of `std` from which values beyond two
        of `std` are drawn again.
    keep : float
        Of an average: the fraction of the old value that a step keeps. The rest comes from the
        statistic that the network reports in `Training.statistics`.

    Raises
    ------
    InputError
        A value means nothing, or contradicts another.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind = "weight"
    mean: float = 0.0
    std: float = 0.0
    distribution: Distribution = "normal"
    keep: float = 0.0

    def __post_init__(self) -> None:
        fault = None
        if "/" in self.name:
            fault = "a parameter's name must not contain a slash"
        for field, words in (("kind", get_args(Kind)), ("distribution", get_args(Distribution))):
            if (value := getattr(self, field)) not in words:
                fault = f"{field} is {value}; it must be {', '.join(words[:-1])} or {words[-1]}"
        for field in ("mean", "std"):
            if not math.isfinite(value := getattr(self, field)):
                fault = f"{field} is {value}; it must be finite"
        if self.std < 0:
            fault = f"std is {self.std}; it must not be negative"
        if not 0 <= self.keep <= 1:
            fault = f"keep is {self.keep}; it must be a fraction from 0 to 1"
        if self.keep and self.trainable:
            fault = f"keep is {self.keep}, but only an average keeps a part"
        if fault:
            raise InputError(f"network: {self.name}: {fault}")

    @property
    def trainable(self) -> bool:
        """Return whether an optimizer steps it."""
        return self.kind != "average"

    def shared(self, dtype: str) -> "TensorSharedVariable":
        """A shared variable of this name and static shape, all zeros.

        The operating system maps zeros when they are first touched, so a network whose values come
        from elsewhere, or that is only inspected, takes no memory.
        """
        import pytensor

        zeros = np.zeros(self.shape, dtype)
        return pytensor.shared(zeros, name=self.name, shape=self.shape, borrow=True)

    def initial_value(self, seed: int, position: int, dtype: str) -> np.ndarray:
        """Draw the initial value: a function of `seed` and of the position in the network alone.

        Drawn in float32 whatever the dtype, so that networks in float32 and float64 start from
        the same numbers.
        """
        if self.std == 0:
            return np.full(self.shape, self.mean, dtype)
        key = np.array([seed % 2**64, position], np.uint64)
        generator = np.random.Generator(np.random.Philox(key=key))
        values = _draw(self.distribution, generator, self.shape)
        values *= np.float32(self.std)
        values += np.float32(self.mean)
        return values.astype(dtype, copy=False)


def _draw(
    distribution: Distribution, generator: np.random.Generator, shape: tuple[int, ...]
) -> np.ndarray:
    """Draw float32 numbers of mean 0 and deviation 1, for truncated that of the whole normal."""
    if distribution == "uniform":
        values = generator.random(shape, np.float32)
        values -= np.float32(0.5)
        values *= np.float32(math.sqrt(12))
        return values
    values = generator.standard_normal(shape, np.float32)
    while distribution == "truncated" and (outside := np.abs(values) > _WIDEST).any():
        values[outside] = generator.standard_normal(int(outside.sum()), np.float32)
    return values


def weight(
    layer: str, shape: tuple[int, ...], std: float, distribution: Distribution = "normal"
) -> Parameter:
    """The weight of a layer: initial values of mean 0."""
    return Parameter(f"{layer}.weight", shape, std=std, distribution=distribution)


def bias(layer: str, units: int, mean: float = 0.0) -> Parameter:
    """The bias of a layer: constant at first."""
    return Parameter(f"{layer}.bias", (units,), "bias", mean)


def norm(
    layer: str, channels: int, scale: float = 1.0, keep: float = 0.9
) -> tuple[Parameter, Parameter, Parameter, Parameter]:
    """Scale, shift and running averages of a batch normalisation, under torchvision's names.

    Initial values are `scale`, 0, mean 0 and variance 1. A step keeps `keep` of the averages, which
    is 1 minus what PyTorch calls momentum.
    """
    shape = (channels,)
    return (
        Parameter(f"{layer}.weight", shape, "scale", scale),
        Parameter(f"{layer}.bias", shape, "shift"),
        Parameter(f"{layer}.running_mean", shape, "average", keep=keep),
        Parameter(f"{layer}.running_var", shape, "average", 1.0, keep=keep),
    )


class Parameters(Mapping[str, "TensorSharedVariable"]):
    """The shared variables of a network by name, in the order of their declaration.

    The order fixes their initial values too. `declared` holds the declarations by name.
    """

    def __init__(self, dtype: str, declared: Iterable[Parameter] = ()) -> None:
        self._dtype = dtype
        self._variables: dict[str, TensorSharedVariable] = {}
        self.declared: dict[str, Parameter] = {}
        self.add(*declared)

    def __getitem__(self, name: str) -> "TensorSharedVariable":
        return self._variables[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._variables)

    def __len__(self) -> int:
        return len(self._variables)

    def add(self, *declared: Parameter) -> None:
        """Declare more parameters, behind the earlier ones; InputError if a name is taken."""
        for parameter in declared:
            if parameter.name in self.declared:
                raise InputError(f"network: {parameter.name} is declared twice")
            self.declared[parameter.name] = parameter
            self._variables[parameter.name] = parameter.shared(self._dtype)

    def of(self, layer: str) -> "tuple[TensorSharedVariable, TensorSharedVariable]":
        """Weight and bias of a layer."""
        return self[f"{layer}.weight"], self[f"{layer}.bias"]

    def initial_values(self, seed: int) -> Iterator[tuple[str, np.ndarray]]:
        """Each parameter's name and initial value, drawn one at a time."""
        for position, parameter in enumerate(self.declared.values()):
            yield parameter.name, parameter.initial_value(seed, position, self._dtype)

    def initialize(self, seed: int) -> None:
        """Set every variable to its initial value."""
        for name, value in self.initial_values(seed):
            self[name].set_value(value, borrow=True)


def layer_of(parameter: str) -> str:
    """The layer of a parameter: ``conv1`` for ``conv1.weight``."""
    return parameter.rpartition(".")[0]
