"""The base class of the Ops that all ranks of a run compute together, and their tokens."""

# A make_node names its inputs, in place of the *inputs of PyTensor's Op.
# mypy: disable-error-code=override

import math
from abc import abstractmethod
from collections.abc import Sequence
from functools import reduce
from typing import Any, Literal, get_args

import numpy as np
import pytensor.tensor as pt
from pytensor.gradient import DisconnectedType, disconnected_type
from pytensor.graph.basic import Apply
from pytensor.tensor.variable import TensorVariable

from tandem.ops.base import TensorOp, Values, positive_int
from tandem.split import edges, part_of, part_shape

Shape = tuple[int, ...]
Reduction = Literal["sum", "max", "min"]

TOKEN_DTYPE = "float32"

_ELEMENTWISE = {"sum": pt.add, "max": pt.maximum, "min": pt.minimum}


def first_token() -> TensorVariable:
    """Return the token that the first communicating Op of a graph takes: float32 (), 0."""
    return pt.constant(np.zeros((), TOKEN_DTYPE))


def placeholder(ndim: int, dtype: str) -> TensorVariable:
    """Return what stands for a tensor at a rank that has none: `ndim` axes of length 0."""
    return pt.constant(np.zeros((0,) * ndim, dtype))


class Collective(TensorOp):
    """Base of the Ops that all ranks of a run compute together: ``y, token = Op(...)(x, token)``.

    A rank that has no `x`, or no result, has a `placeholder` in its place. A token is float32 ().
    It carries no value, only the order. A gradient's Ops have the numbers ``~number``; the
    cotangent of a token is the token of the Ops of the gradient, which run in the reverse order.

    Parameters
    ----------
    number : int
        Which of the run's conversions this is, the same at all ranks.
    ranks, rank : int
        Number of ranks, and which of them has this graph.
    shape : tuple of int
        Of the whole tensor, of which a rank may have a part.
    """

    number: int
    ranks: int
    rank: int
    shape: Shape

    __props__: tuple[str, ...] = ("number", "ranks", "rank", "shape")

    def __init__(self, number: int, ranks: int, rank: int, shape: Sequence[int]) -> None:
        owner = type(self).__name__
        if isinstance(number, bool) or not hasattr(number, "__index__"):
            raise TypeError(f"{owner}: number must be an int, got {number!r}")
        self.number = int(number)
        self.ranks = positive_int(owner, "ranks", ranks)
        self.rank = self._a_rank("rank", rank)
        self.shape = tuple(positive_int(owner, "length of an axis", n, least=0) for n in shape)

    # What each rank has and gets

    @abstractmethod
    def given(self, rank: int) -> Shape | None:
        """Return the shape of a rank's `x`; None where it has none."""

    @abstractmethod
    def result(self, rank: int) -> Shape | None:
        """Return the shape of a rank's result; None where it has none."""

    @abstractmethod
    def received_elements(self) -> int:
        """Return how many elements come to this rank from others."""

    @abstractmethod
    def combine(self, parts: Sequence[TensorVariable]) -> list[TensorVariable]:
        """Return the results of all ranks, of the inputs of all: the meaning of the Op."""

    @property
    def input_shape(self) -> Shape:
        """The shape of this rank's `x`, or of its placeholder."""
        return self._or_placeholder(self.given(self.rank))

    def received(self, dtype: str) -> int:
        """Return how many bytes of a tensor of a dtype come to this rank from others."""
        return self.received_elements() * np.dtype(dtype).itemsize

    def make_node(self, x: Any, token: Any) -> Apply:
        x, token = pt.as_tensor_variable(x), pt.as_tensor_variable(token)
        shape = self.input_shape
        known = x.type.shape
        if len(known) != len(shape) or any(
            length not in (None, expected) for length, expected in zip(known, shape, strict=True)
        ):
            raise ValueError(
                f"{self}: x at rank {self.rank} of {self.ranks} must have the shape {shape}, got "
                f"{x.type}"
            )
        if token.type.ndim or token.type.dtype != TOKEN_DTYPE:
            raise TypeError(f"{self}: a token must be {TOKEN_DTYPE} (), got {token.type}")
        self._check_dtype(x.type.dtype)
        y = pt.tensor(dtype=x.type.dtype, shape=self._or_placeholder(self.result(self.rank)))
        return Apply(self, [x, token], [y, pt.tensor(dtype=TOKEN_DTYPE, shape=())])

    def perform(self, node: Apply, inputs: Values, output_storage: list[list[Any]]) -> None:
        raise RuntimeError(
            f"{self.describe()} needs the other ranks: use a device_mode that has a channel to them"
        )

    def infer_shape(self, fgraph: Any, node: Apply, shapes: list[tuple]) -> list[tuple]:
        shape = self._or_placeholder(self.result(self.rank))
        return [tuple(pt.constant(length, dtype="int64") for length in shape), ()]

    def do_constant_folding(self, fgraph: Any, node: Apply) -> bool:
        # The others must be met even if this rank's x never changes.
        return False

    def connection_pattern(self, node: Apply) -> list[list[bool]]:
        # A token has no value, but the Ops of the gradient are put in order by its cotangent: so
        # whatever leads to this Op is connected to the next.
        is_float = node.inputs[0].type.dtype.startswith("float")
        return [[is_float, is_float], [is_float, True]]

    def pullback(self, inputs: Values, outputs: Values, cotangents: Values) -> list[Any]:
        x, (g, token) = inputs[0], cotangents
        if isinstance(token.type, DisconnectedType):
            token = outputs[1]
        if not x.type.dtype.startswith("float"):
            return [disconnected_type(), token]
        if isinstance(g.type, DisconnectedType):
            return [pt.zeros_like(x), token]
        return list(self.backward(g, token))

    @abstractmethod
    def backward(self, g: TensorVariable, token: TensorVariable) -> Sequence[TensorVariable]:
        """Return the cotangent of `x` and the next token, given that of `y` and a token."""

    def describe(self) -> str:
        """Name the conversion for a message."""
        return f"{type(self).__name__} {self.number} of a tensor of shape {self.shape}"

    # For the classes below

    @property
    def _where(self) -> tuple[int, int, int, Shape]:
        """The first arguments of the Op that belongs to this one in the gradient."""
        return ~self.number, self.ranks, self.rank, self.shape

    @property
    def _size(self) -> int:
        return math.prod(self.shape)

    def _or_placeholder(self, shape: Shape | None) -> Shape:
        return (0,) * len(self.shape) if shape is None else shape

    def _a_rank(self, name: str, value: Any) -> int:
        owner = type(self).__name__
        value = positive_int(owner, name, value, least=0)
        if value >= self.ranks:
            raise ValueError(f"{owner}: {name} must be below ranks, {self.ranks}, got {value}")
        return value

    def _an_axis(self, name: str, value: Any) -> int:
        owner = type(self).__name__
        value = positive_int(owner, name, value, least=0)
        if value >= len(self.shape):
            raise ValueError(f"{owner}: {name} must be an axis of {self.shape}, got {value}")
        return value

    def _a_reduction(self, value: str) -> Reduction:
        if value not in get_args(Reduction):
            allowed = ", ".join(get_args(Reduction))
            raise ValueError(f"{type(self).__name__}: op must be one of {allowed}, got {value!r}")
        return value  # type: ignore[return-value]

    def _check_dtype(self, dtype: str) -> None:
        if dtype == "bool" and getattr(self, "op", "") == "sum":
            raise TypeError(f"{self}: a sum needs numbers, got bool")

    def _shard(self, axis: int, rank: int) -> Shape:
        return part_shape(self.shape, axis, self.ranks, rank)

    def _split(self, whole: TensorVariable, axis: int) -> list[TensorVariable]:
        return [whole[part_of(self.shape, axis, self.ranks, rank)] for rank in range(self.ranks)]

    def _at(self, root: int, value: TensorVariable) -> list[TensorVariable]:
        """A value at one rank, placeholders at the others."""
        empty = placeholder(len(self.shape), value.type.dtype)
        return [value if rank == root else empty for rank in range(self.ranks)]

    def _reduced(self, parts: Sequence[TensorVariable], op: Reduction) -> TensorVariable:
        return reduce(_ELEMENTWISE[op], parts)

    def _linear(self, op: Reduction) -> None:
        if op != "sum":
            raise NotImplementedError(f"{type(self).__name__} by {op} has no gradient")

    @property
    def _own_part(self) -> int:
        """Return how many elements of the flattened tensor this rank adds."""
        ends = edges(self._size, self.ranks)
        return ends[self.rank + 1] - ends[self.rank]
