"""The interface of an optimizer: declared states, and one symbolic step."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from tandem.registry import Choice, Registry

if TYPE_CHECKING:
    from pytensor.tensor.variable import TensorVariable


class Optimizer(Choice, ABC):
    """Base of an optimizer: a frozen dataclass of its settings, registered by name.

    Attributes
    ----------
    states : tuple of str
        Names of its states: each is one array for every trained parameter, of its shape and dtype,
        zero at first. Memory, exchange and checkpoints carry them under these names.
    weight_decay : float
        Per step and unit of rate, of parameters that decay.
    """

    states: ClassVar[tuple[str, ...]]
    weight_decay: float

    @abstractmethod
    def step(
        self,
        weight: "TensorVariable",
        states: "Sequence[TensorVariable]",
        gradient: "TensorVariable",
        rate: "TensorVariable",
        decay: float,
    ) -> "tuple[TensorVariable, tuple[TensorVariable, ...]]":
        """Build the graph of one step of one parameter.

        Parameters
        ----------
        weight, gradient : float, of one shape
        states : sequence of float
            One for each name in `states`, of that shape.
        rate : float scalar of the same dtype
            The parameter's own, as is `decay`.

        Returns
        -------
        weight, states
            The new values, in order.
        """


OPTIMIZERS: Registry[Optimizer] = Registry("optimizer")
