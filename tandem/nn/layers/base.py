"""The base of layers, the symbols that calls of layers return, and what builds their graphs."""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, Union

from tandem.errors import InputError
from tandem.layers.parameter import Parameter
from tandem.nn.arguments import FLAG, NAME, argument, check_arguments, optional
from tandem.validation import shown

if TYPE_CHECKING:
    from pytensor.tensor.variable import TensorVariable

    from tandem.layers.training_pass import Training

Shape = tuple[int, ...]
"""Lengths of a row, without the batch: (unit,) or (row, column, channel)."""

MOST_ELEMENTS = 2**31  # of a row


@dataclass(frozen=True)
class BuildContext:
    """The context in which a layer's graph is built, beside its inputs.

    Attributes
    ----------
    name : str
        The layer's name in its graph.
    parameters : mapping of str to variable
        Of the whole network, by name.
    training : Training or None
        None for validation.
    number : int
        Of this call of a layer in its graph, from 0: random masks are drawn by it.
    """

    name: str
    parameters: "Mapping[str, TensorVariable]"
    training: "Training | None" = None
    number: int = 0

    def parameter(self, kind: str) -> "TensorVariable":
        """The layer's parameter, such as ``weight``, by the last word of its name."""
        return self.parameters[f"{self.name}.{kind}"]


@dataclass(frozen=True, eq=False)
class Layer(ABC):
    """Base of a layer: a frozen dataclass that is compared by identity.

    An own layer is a subclass in a module that can be imported, decorated with
    ``dataclass(frozen=True, eq=False)``, whose fields are numbers, strings, lists or None. A layer
    that is called on a symbol returns a symbol; called twice, it has its parameters in common.

    Parameters
    ----------
    name : str, optional
        Of the layer and of its parameters; by default its class in snake case, with a number from
        the second one of a graph on.
    """

    _: KW_ONLY
    name: str | None = argument(optional(NAME), None)

    def __post_init__(self) -> None:
        check_arguments(self, self.label)

    @classmethod
    def default_name(cls) -> str:
        """The class in snake case: ``max_pooling2d``."""
        words = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", cls.__name__)
        return re.sub(r"([a-z])([A-Z])", r"\1_\2", words).lower()

    @property
    def label(self) -> str:
        """The layer's name, or that of its class, for messages."""
        return self.name if isinstance(self.name, str) else self.default_name()

    @abstractmethod
    def shape(self, *inputs: Shape) -> Shape:
        """Shape of the output for those of the inputs; InputError if they do not fit."""

    def declare(self, name: str, *inputs: Shape) -> tuple[Parameter, ...]:
        """The parameters of the layer under a name, for inputs of these shapes."""
        return ()

    @abstractmethod
    def build(self, context: BuildContext, *inputs: "TensorVariable") -> "TensorVariable":
        """Build the graph of the output.

        Parameters
        ----------
        context : BuildContext
        *inputs : dtype (batch, channel, row, column), or (batch, ...)
            Of rows of three axes, or of others. All lengths but the batch's are known.

        Returns
        -------
        dtype (batch, channel, row, column), or (batch, ...)
        """

    def flops(self, *inputs: Shape) -> int:
        """Floating-point operations for one row, a product and its sum being two; 0 if few.

        Of a convolution, a product, a pooling or a normalisation they are those of its Op, see
        `tandem.ops.work`. An activation counts as one for each element.
        """
        return 0

    def output_shape(self, *inputs: Shape) -> Shape:
        """`shape`, checked: InputError if it is no shape, or if a row would be too large."""
        shape = self.shape(*inputs)
        is_shape = isinstance(shape, tuple) and all(
            isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in shape
        )
        if not is_shape or not 1 <= len(shape) <= 3:
            raise InputError(
                f"{self.label}: found an output of shape {shown(shape)}, expected one to three"
                " lengths of at least 1"
            )
        if math.prod(shape) > MOST_ELEMENTS:
            raise self.fault(f"an output of shape {shape}", f"at most {MOST_ELEMENTS} elements")
        return shape

    def __call__(self, *inputs: Any) -> "Symbol":
        if len(inputs) == 1 and isinstance(inputs[0], list | tuple):
            inputs = tuple(inputs[0])
        for symbol in inputs:
            if not isinstance(symbol, Symbol):
                raise self.fault(
                    f"a call on {type(symbol).__name__}",
                    "one on symbols: nn.Input(shape), or what layers return for it",
                )
        return Symbol(self.output_shape(*(symbol.shape for symbol in inputs)), self, inputs)

    def fault(self, found: str, expected: str) -> InputError:
        """The error about something that this layer cannot use."""
        return InputError(f"{self.label}: found {found}, expected {expected}")

    def single(self, inputs: tuple[Shape, ...]) -> Shape:
        """The only input's shape; InputError if there is another number of inputs."""
        if len(inputs) != 1:
            raise self.fault(f"{len(inputs)} inputs", "one: use Add or Concatenate before it")
        return inputs[0]

    def image(self, inputs: tuple[Shape, ...]) -> tuple[int, int, int]:
        """The only input's rows, columns and channels; InputError if it is no image."""
        shape = self.single(inputs)
        if len(shape) != 3:
            raise self.fault(f"an input of shape {shape}", "(row, column, channel)")
        rows, columns, channels = shape
        return rows, columns, channels


@dataclass(frozen=True, eq=False)
class ParameterLayer(Layer):
    """Base of a layer with parameters.

    Parameters
    ----------
    trainable : bool
        False: the parameters keep their values, and averages of a normalisation are used as they
        are.
    """

    _: KW_ONLY
    trainable: bool = argument(FLAG, True)


@dataclass(frozen=True, eq=False)
class ShapedLike(Layer):
    """Base of a layer whose output is shaped like its only input."""

    def shape(self, *inputs: Shape) -> Shape:
        return self.single(inputs)

    def flops(self, *inputs: Shape) -> int:
        return math.prod(inputs[0])


@dataclass(frozen=True, eq=False)
class Symbol:
    """A symbol that a layer returned for others: a place in a graph of layers.

    Attributes
    ----------
    shape : tuple of int
        Of a row, in Keras's order (row, column, channel).
    """

    shape: Shape
    layer: Layer
    inputs: tuple["Symbol", ...] = ()

    def __add__(self, other: Any) -> Union["Symbol", Any]:
        from tandem.nn.layers.merging import Add

        return Add()(self, other) if isinstance(other, Symbol) else NotImplemented

    def __repr__(self) -> str:
        return f"<Symbol of {self.layer.label}, shape {self.shape}>"
