"""Distributions of initial weights, with Keras 3's names and numerics.

Each is a frozen dataclass; a layer takes one, or its name in either spelling: ``HeNormal()``,
``"HeNormal"`` or ``"he_normal"``. What is drawn follows from the run's seed.
"""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from tandem.errors import InputError
from tandem.layers.parameter import Distribution
from tandem.nn.arguments import Argument, argument, check_arguments, known_name, number
from tandem.validation import shown

__all__ = [
    "Constant",
    "GlorotNormal",
    "GlorotUniform",
    "HeNormal",
    "HeUniform",
    "Initializer",
    "LecunNormal",
    "LecunUniform",
    "Ones",
    "RandomNormal",
    "RandomUniform",
    "TruncatedNormal",
    "Zeros",
]

_TRUNCATED_STD = 0.87962566103423978
"""Standard deviation of a normal distribution of 1 that is truncated at -2 and 2."""

NOT_NEGATIVE = number("a number of at least 0", lambda value: value >= 0)


@dataclass(frozen=True)
class Drawn:
    """The fields of a `tandem.layers.Parameter` that determine its initial values."""

    mean: float = 0.0
    std: float = 0.0
    distribution: Distribution = "normal"


@dataclass(frozen=True)
class Initializer(ABC):
    """Base of an initializer."""

    def __post_init__(self) -> None:
        check_arguments(self, type(self).__name__)

    @abstractmethod
    def draw(self, fan_in: int, fan_out: int) -> Drawn:
        """The distribution for an array whose units have these fans."""


@dataclass(frozen=True)
class Zeros(Initializer):
    """Zeros."""

    def draw(self, fan_in: int, fan_out: int) -> Drawn:
        return Drawn()


@dataclass(frozen=True)
class Ones(Initializer):
    """Ones."""

    def draw(self, fan_in: int, fan_out: int) -> Drawn:
        return Drawn(1.0)


@dataclass(frozen=True)
class Constant(Initializer):
    """One value."""

    value: float = argument(number(), 0.0)

    def draw(self, fan_in: int, fan_out: int) -> Drawn:
        return Drawn(self.value)


@dataclass(frozen=True)
class RandomNormal(Initializer):
    """Normal, of a mean and standard deviation whatever the layer's sizes."""

    mean: float = argument(number(), 0.0)
    stddev: float = argument(NOT_NEGATIVE, 0.05)

    def draw(self, fan_in: int, fan_out: int) -> Drawn:
        return Drawn(self.mean, self.stddev)


@dataclass(frozen=True)
class TruncatedNormal(Initializer):
    """Normal, drawn again beyond two of `stddev`, which is that of the whole distribution."""

    mean: float = argument(number(), 0.0)
    stddev: float = argument(NOT_NEGATIVE, 0.05)

    def draw(self, fan_in: int, fan_out: int) -> Drawn:
        return Drawn(self.mean, self.stddev, "truncated")


@dataclass(frozen=True)
class RandomUniform(Initializer):
    """Uniform between two values."""

    minval: float = argument(number(), -0.05)
    maxval: float = argument(number(), 0.05)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.minval > self.maxval:
            raise InputError(
                f"RandomUniform: found minval {self.minval:g} and maxval {self.maxval:g}, expected"
                " minval to be no larger"
            )

    def draw(self, fan_in: int, fan_out: int) -> Drawn:
        width = self.maxval - self.minval
        return Drawn((self.minval + self.maxval) / 2, width / math.sqrt(12), "uniform")


@dataclass(frozen=True)
class _Scaled(Initializer):
    """Variance `scale` divided by the fan-in, or by the mean of fan-in and fan-out."""

    scale: ClassVar[float]
    fan: ClassVar[Literal["in", "average"]]
    distribution: ClassVar[Distribution]

    def draw(self, fan_in: int, fan_out: int) -> Drawn:
        fan = fan_in if self.fan == "in" else (fan_in + fan_out) / 2
        std = math.sqrt(self.scale / max(1, fan))
        if self.distribution == "truncated":  # the variance is that after truncation
            std /= _TRUNCATED_STD
        return Drawn(0.0, std, self.distribution)


@dataclass(frozen=True)
class GlorotUniform(_Scaled):
    """Uniform, variance ``2 / (fan-in + fan-out)`` (Glorot and Bengio 2010)."""

    scale, fan, distribution = 1.0, "average", "uniform"


@dataclass(frozen=True)
class GlorotNormal(_Scaled):
    """Truncated normal, variance ``2 / (fan-in + fan-out)`` (Glorot and Bengio 2010)."""

    scale, fan, distribution = 1.0, "average", "truncated"


@dataclass(frozen=True)
class HeUniform(_Scaled):
    """Uniform, variance ``2 / fan-in`` (He et al. 2015)."""

    scale, fan, distribution = 2.0, "in", "uniform"


@dataclass(frozen=True)
class HeNormal(_Scaled):
    """Truncated normal, variance ``2 / fan-in`` (He et al. 2015)."""

    scale, fan, distribution = 2.0, "in", "truncated"


@dataclass(frozen=True)
class LecunUniform(_Scaled):
    """Uniform, variance ``1 / fan-in`` (LeCun et al. 1998)."""

    scale, fan, distribution = 1.0, "in", "uniform"


@dataclass(frozen=True)
class LecunNormal(_Scaled):
    """Truncated normal, variance ``1 / fan-in`` (LeCun et al. 1998)."""

    scale, fan, distribution = 1.0, "in", "truncated"


_CLASSES: tuple[type[Initializer], ...] = (
    Constant,
    GlorotNormal,
    GlorotUniform,
    HeNormal,
    HeUniform,
    LecunNormal,
    LecunUniform,
    Ones,
    RandomNormal,
    RandomUniform,
    TruncatedNormal,
    Zeros,
)
_NAMES: Mapping[str, type[Initializer]] = {
    **{re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__).lower(): kind for kind in _CLASSES},
    **{kind.__name__: kind for kind in _CLASSES},
}
_find = known_name([*_NAMES])


def find_initializer(value: Any) -> Initializer:
    """The initializer of a name, of its JSON, or itself; InputError if there is none such."""
    if isinstance(value, Initializer):
        return value
    if not isinstance(value, Mapping):
        return _NAMES[_find(value)]()
    kind = _NAMES[_find(value.get("class"))]
    try:
        return kind(**{key: item for key, item in value.items() if key != "class"})
    except TypeError as error:
        raise InputError(
            f"found {shown(dict(value))}, expected the arguments of {kind.__name__}"
        ) from error


INITIALIZER = Argument("an initializer or its name", find_initializer)
