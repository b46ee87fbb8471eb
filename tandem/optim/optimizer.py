"""The interface of an optimizer: declared states, and one symbolic step."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from tandem.registry import Choice, Registry, setting

if TYPE_CHECKING:
    from pytensor.tensor.variable import TensorVariable

    Numbers = Mapping[str, TensorVariable]
    Stepped = tuple[TensorVariable, tuple[TensorVariable, ...]]


@dataclass(frozen=True)
class Optimizer(Choice, ABC):
    """Base of an optimizer: a frozen dataclass of its settings, registered by name.

    Attributes
    ----------
    states : tuple of str
        Names of its states: each is one array for every trained parameter, of its shape and dtype,
        zero at first. Memory, exchange and checkpoints carry them under these names. A step maps
        zeros to zeros.
    is_linear : bool
        Whether averaging the results of steps equals a step with the averaged gradient.
    """

    states: ClassVar[tuple[str, ...]]
    is_linear: ClassVar[bool] = False

    weight_decay: float = setting(
        0.0005,
        "weight decay per step and unit of rate, see decay_kinds",
        "a number of at least 0",
        ge=0,
    )

    def numbers(self, updates: int) -> dict[str, float]:
        """Numbers that depend on how many updates were made, such as bias corrections.

        They are computed on the host and passed to each step; always under the same names. An
        optimizer with none need not know whether the last minibatch was skipped.
        """
        return {}

    @abstractmethod
    def step(
        self,
        weight: "TensorVariable",
        states: "Sequence[TensorVariable]",
        gradient: "TensorVariable",
        rate: "TensorVariable",
        decay: float,
        numbers: "Numbers",
    ) -> "Stepped":
        """Build the graph of one step of one parameter.

        Parameters
        ----------
        weight, gradient : float, of one shape
        states : sequence of float
            One for each name in `states`, of that shape.
        rate : float scalar of the same dtype
            The parameter's own, as is `decay`.
        numbers : mapping of str to float scalar of the same dtype
            Those of the method `numbers`.

        Returns
        -------
        weight, states
            The new values, in order.
        """


OPTIMIZERS: Registry[Optimizer] = Registry("optimizer")
