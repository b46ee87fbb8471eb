"""Optimizers, with Keras's names, arguments and equations."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from tandem.errors import InputError
from tandem.nn.arguments import FLAG, argument, check_arguments, number, optional

__all__ = ["SGD", "Adam", "AdamW", "Nadam", "Optimizer", "RMSprop", "find_optimizer"]

# In Keras all parameters have one rate, and weight decay is of all.
_POSITIVE = number("a finite number above 0", lambda v: v > 0)
_NOT_NEGATIVE = number("a finite number from 0", lambda v: v >= 0)
_FRACTION = number("a number from 0 and below 1", lambda v: 0 <= v < 1)

_GROUPS: dict[str, Any] = {"bias_rate": 1.0, "decay_kinds": ["weight", "bias", "scale", "shift"]}


@dataclass(frozen=True)
class Optimizer(ABC):
    """Base of an optimizer: its arguments, as the settings of a run.

    Raises InputError for an argument that cannot be used.
    """

    def __post_init__(self) -> None:
        check_arguments(self, type(self).__name__)

    def settings(self) -> dict[str, Any]:
        """The keys of the configuration that it stands for."""
        return {**_GROUPS, **self._own()}

    @abstractmethod
    def _own(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class SGD(Optimizer):
    """Stochastic gradient descent, with momentum or Nesterov's form of it.

    Parameters
    ----------
    learning_rate : float
    momentum : float
        Fraction of the velocity that is kept.
    nesterov : bool
    weight_decay : float, optional
        Per step and unit of rate, only without momentum: Keras's is no part of the velocity. With
        momentum, the argument ``weight_decay`` of `fit` is the classical one, which is.
    """

    learning_rate: float = argument(_POSITIVE, 0.01)
    momentum: float = argument(_FRACTION, 0.0)
    nesterov: bool = argument(FLAG, False)
    weight_decay: float | None = argument(optional(_NOT_NEGATIVE), None)

    def _own(self) -> dict[str, Any]:
        if self.weight_decay and self.momentum:
            raise InputError(
                f"SGD: found weight_decay {self.weight_decay:g} with momentum {self.momentum:g}, "
                "expected one of them: for the classical decay, which is part of the velocity, "
                "give weight_decay to fit; for one beside the step take AdamW"
            )
        momentum = {"momentum": self.momentum} if self.momentum else {}
        return {
            "optimizer": "sgd",
            "learning_rate": self.learning_rate,
            "use_momentum": self.momentum > 0,
            **momentum,
            "use_nesterov_momentum": self.nesterov and self.momentum > 0,
            "weight_decay": self.weight_decay or 0.0,
        }


@dataclass(frozen=True)
class RMSprop(Optimizer):
    """RMSProp, with Keras's epsilon inside the root."""

    learning_rate: float = argument(_POSITIVE, 0.001)
    rho: float = argument(_FRACTION, 0.9)
    epsilon: float = argument(_NOT_NEGATIVE, 1e-7)

    def _own(self) -> dict[str, Any]:
        return {
            "optimizer": "rmsprop",
            "learning_rate": self.learning_rate,
            "rmsprop_decay": self.rho,
            "rmsprop_epsilon": self.epsilon,
            "rmsprop_epsilon_inside": True,
            "weight_decay": 0.0,
        }


@dataclass(frozen=True)
class _Moments(Optimizer):
    """Base of optimizers with two moments."""

    learning_rate: float = argument(_POSITIVE, 0.001)
    beta_1: float = argument(_FRACTION, 0.9)
    beta_2: float = argument(_FRACTION, 0.999)
    epsilon: float = argument(_NOT_NEGATIVE, 1e-7)

    def _own(self) -> dict[str, Any]:
        return {
            "learning_rate": self.learning_rate,
            "adam_beta1": self.beta_1,
            "adam_beta2": self.beta_2,
            "adam_epsilon": self.epsilon,
            "weight_decay": 0.0,
        }


@dataclass(frozen=True)
class Adam(_Moments):
    """Adam, with Keras's epsilon: that of section 2 of the paper, "epsilon hat".

    With `weight_decay` it is AdamW, as in Keras.
    """

    weight_decay: float | None = argument(optional(_NOT_NEGATIVE), None)
    default_decay: ClassVar[float] = 0.0

    def _own(self) -> dict[str, Any]:
        decay = self.default_decay if self.weight_decay is None else self.weight_decay
        return {
            **super()._own(),
            "optimizer": "adamw" if decay else "adam",
            "adam_epsilon_hat": True,
            "weight_decay": decay,
        }


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with weight decay beside the step (Loshchilov and Hutter 2019), by default 0.004."""

    default_decay = 0.004


@dataclass(frozen=True)
class Nadam(_Moments):
    """Adam with Nesterov's momentum (Dozat 2016)."""

    def _own(self) -> dict[str, Any]:
        return {**super()._own(), "optimizer": "nadam", "nadam_decay": 1.0}


_NAMES: dict[str, type[Optimizer]] = {
    kind.__name__.lower(): kind for kind in (SGD, RMSprop, Adam, AdamW, Nadam)
}


def find_optimizer(optimizer: str | Optimizer) -> Optimizer:
    """An optimizer by its name, with its defaults, or as it is."""
    if isinstance(optimizer, Optimizer):
        return optimizer
    from tandem.validation import shown, suggestion

    if not isinstance(optimizer, str) or optimizer.lower() not in _NAMES:
        hint = suggestion(str(optimizer), _NAMES) or "."
        raise InputError(
            f"optimizer: found {shown(optimizer)}{hint} Expected an optimizer of "
            f"tandem.nn.optimizers or one of {', '.join(_NAMES)}"
        )
    return _NAMES[optimizer.lower()]()
