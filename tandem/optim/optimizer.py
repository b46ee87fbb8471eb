"""The interface of an optimizer: declared states, and one symbolic step."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from tandem.registry import Choice, Registry, setting

Numbers = Mapping[str, Any]
Stepped = tuple[Any, tuple[Any, ...]]  # new weight and states


@dataclass(frozen=True)
class Optimizer(Choice, ABC):
    """Base of an optimizer: a frozen dataclass of its settings, registered by name.

    Made by itself, outside the settings of a run, its numbers may be scalar variables too.

    Attributes
    ----------
    states : tuple of str
        Names of its states, which may follow from its settings: each is one array for every trained
        parameter, of its shape and dtype, zero at first. Memory, exchange and checkpoints carry
        them under these names. A step maps zeros to zeros.
    is_linear : bool
        Whether averaging the results of steps equals a step with the averaged gradient.
    """

    is_linear: ClassVar[bool] = False

    weight_decay: float = setting(
        0.0005,
        "weight decay per step and unit of rate, see decay_kinds",
        "a number of at least 0",
        ge=0,
    )

    @property
    @abstractmethod
    def states(self) -> tuple[str, ...]: ...

    def numbers(self, updates: Any) -> dict[str, Any]:
        """Numbers that depend on how many updates were made, such as bias corrections.

        A trainer computes them on the host and passes them to each step, always under the same
        names; of a float64 scalar variable of updates they are such variables. An optimizer with
        none need not know whether the last minibatch was skipped.
        """
        return {}

    @abstractmethod
    def step(
        self, weight: Any, states: Any, gradient: Any, rate: Any, decay: float, numbers: Numbers
    ) -> Stepped:
        """Build the graph of one step of one parameter.

        Parameters
        ----------
        weight, gradient : float, of one shape
        states : sequence of float
            One for each name in `states`, of that shape.
        rate : float scalar of the same dtype
            The parameter's own, as is `decay`.
        numbers : mapping of str to float scalar of the same dtype or a number
            Those of the method `numbers`.

        Returns
        -------
        weight, states
            The new values, in order.
        """


def in_dtype(number: Any, dtype: str) -> Any:
    """Return a number, or a scalar variable, in a dtype."""
    return number.astype(dtype) if hasattr(number, "owner") else np.dtype(dtype).type(number)


def decayed(gradient: Any, weight: Any, decay: float) -> Any:
    """Return the gradient with that of the weight decay: ``g + wd w``."""
    return gradient + in_dtype(decay, weight.dtype) * weight if decay else gradient


OPTIMIZERS: Registry[Optimizer] = Registry("optimizer")
