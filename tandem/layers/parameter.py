"""Declarations of a network's parameters: shapes, initial values, and tags for the optimizer."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tandem.errors import InputError

if TYPE_CHECKING:
    from pytensor.tensor.sharedvar import TensorSharedVariable
    from pytensor.tensor.variable import TensorVariable

__all__ = ["DropoutKeys", "Parameter", "Parameters", "bias", "weight"]


@dataclass(frozen=True)
class Parameter:
    """One array of a network: name, shape, initial distribution, and tags.

    Attributes
    ----------
    name : str
        ``layer.weight``, ``layer.bias``, or another word after the layer's name.
    shape : tuple of int
        (filter, channel of its group, row, column), (in, out), or (out,).
    mean, std : float
        Of the normal distribution of the initial values; all equal `mean` where `std` is 0.
    trainable : bool
        Whether an optimizer steps it. Other arrays are running averages, see `keep`.
    decay : bool
        Whether weight decay applies to it.
    rate : float
        Its learning rate, as a multiple of the run's.
    keep : float
        Of an array that is not trained: the fraction of the old value that a step keeps. The rest
        comes from the statistic that the network reports in `DropoutKeys.statistics`.

    Raises
    ------
    InputError
        A tag means nothing, or contradicts another.
    """

    name: str
    shape: tuple[int, ...]
    mean: float = 0.0
    std: float = 0.0
    trainable: bool = True
    decay: bool = True
    rate: float = 1.0
    keep: float = 0.0

    def __post_init__(self) -> None:
        fault = None
        if "/" in self.name:
            fault = "a parameter's name must not contain a slash"
        for tag in ("trainable", "decay"):
            if not isinstance(value := getattr(self, tag), bool):
                fault = f"{tag} is {value}; it must be true or false"
        for tag in ("mean", "std", "rate"):
            value = getattr(self, tag)
            if not math.isfinite(value):
                fault = f"{tag} is {value}; it must be finite"
            elif value < 0 and tag != "mean":
                fault = f"{tag} is {value}; it must not be negative"
        if not 0 <= self.keep <= 1:
            fault = f"keep is {self.keep}; it must be a fraction from 0 to 1"
        if self.keep and self.trainable:
            fault = f"keep is {self.keep}, but only an array that is not trained keeps a part"
        if fault:
            raise InputError(f"network: {self.name}: {fault}")

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
        normal = generator.standard_normal(self.shape, np.float32)
        normal *= np.float32(self.std)
        normal += np.float32(self.mean)
        return normal.astype(dtype, copy=False)


def weight(layer: str, shape: tuple[int, ...], std: float) -> Parameter:
    """The weight of a layer: initial values of mean 0, the run's rate, with decay."""
    return Parameter(f"{layer}.weight", shape, std=std)


def bias(layer: str, units: int, mean: float = 0.0) -> Parameter:
    """The bias of a layer: constant at first, twice the run's rate, no decay.

    Krizhevsky et al. 2012, section 5, and the original's program.
    """
    return Parameter(f"{layer}.bias", (units,), mean, decay=False, rate=2.0)


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


@dataclass(frozen=True)
class DropoutKeys:
    """The symbolic inputs that are particular to training.

    Dropout masks are a function of the first three. The network fills `statistics`: for each array
    that is not trained, its value for this minibatch.
    """

    seed: "TensorVariable"  # int64 scalar
    epoch: "TensorVariable"  # int64 scalar, from 0
    indices: "TensorVariable"  # int64 (batch,), of the pictures in the dataset
    statistics: "dict[str, TensorVariable]" = field(default_factory=dict)


def layer_of(parameter: str) -> str:
    """The layer of a parameter: ``conv1`` for ``conv1.weight``."""
    return parameter.rpartition(".")[0]
