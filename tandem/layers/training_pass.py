"""The arguments of a layer in training, and its reports."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytensor.tensor.variable import TensorVariable

__all__ = ["Training"]


@dataclass(frozen=True)
class Training:
    """The inputs of a forward pass that are particular to training, and its further outputs.

    Dropout masks are a function of `seed`, `epoch` and `indices`. Statistics cover each run of
    `rows` consecutive rows, so that trainers which divide a global minibatch at multiples of it
    compute what one would; with `rows` None they cover the whole minibatch, that of all trainers
    where they share one graph. The network fills the last two.
    """

    seed: "TensorVariable"  # int64 scalar
    epoch: "TensorVariable"  # int64 scalar, from 0
    indices: "TensorVariable"  # int64 (batch,), of the pictures in the dataset
    valid: "TensorVariable | None" = None  # int64 scalar: rows that count; None: all
    rows: int | None = 32  # of a group that is normalised together; None: all
    frozen: Collection[str] = ()  # layers that are not trained, with all below them
    # Of each array that is not trained, its value for this minibatch:
    statistics: "dict[str, TensorVariable]" = field(default_factory=dict)
    # Outputs of auxiliary heads, (batch, class), each with the weight of its cost:
    auxiliary: "list[tuple[TensorVariable, float]]" = field(default_factory=list)

    def is_frozen(self, layer: str) -> bool:
        """Return whether a layer is not trained."""
        return is_below(layer, self.frozen)


def is_below(name: str, layers: Collection[str]) -> bool:
    """Test if a layer or parameter is one of `layers`, or below one: conv1 is below layer1."""
    return any(name == layer or name.startswith(f"{layer}.") for layer in layers)
