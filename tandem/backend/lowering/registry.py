"""The registry of lowerings: for each Op, the PyTorch call that computes it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, singledispatch
from typing import Any

import numpy as np
import torch
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.op import Op
from pytensor.scalar.basic import ScalarType
from pytensor.tensor.type import DenseTensorType, TensorType

from tandem.backend.channel import Channel

_NAMES = """
bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128
"""
TORCH_DTYPES: Mapping[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES.split()}
Storage = list[list[Any]]  # one cell for each variable
Thunk = Callable[[], list[Any]]  # computes outputs of what is in the cells
# PyTorch computes nothing in these. What is moved or added has the bits of signed integers.
AS_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
SIGNED_ONLY = "PyTorch computes with signed 64-bit integers only"


@dataclass(frozen=True)
class Lowering:
    """The computation of one node of a graph, and all that the code generator asks about it.

    Inputs, outputs and operands are named by their positions. `call` never writes into an input.
    """

    call: Callable[..., Any]  # from tensors, in order, to a tensor, or a tuple of several
    host: frozenset[int] = frozenset()  # inputs taken as Python numbers, or tuples of them
    omit: frozenset[int] = frozenset()  # inputs that `call` already contains as constants
    # For each output, inputs whose memory it may share, beside those in the Op's view_map.
    views: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    repeats: bool = False  # a view may map several elements to one address
    numbers: bool = False  # outputs are Python numbers or tuples of them, not tensors
    counts: bool = False  # the shape depends on values, as with a mask: unknown to torch.compile
    opaque: bool = False  # torch.compile cannot read the call
    # Makes `call` of the mode's channel to other ranks, or refuses it.
    over: Callable[[Channel | None], Callable[..., Any]] | None = None
    # Graphs of which `call` takes the programs, before the inputs. Each takes the graph's inputs
    # and returns a tuple of its outputs, in memory of their own.
    graphs: tuple[FunctionGraph, ...] = ()
    named: bool = False  # errors are those of a node of `graphs`
    # Makes the thunk of a graph of this node alone, without tensors, from the storages of the
    # inputs, the outputs of the node that are the graph's, and the thunk for all other arrays.
    thunk_of_arrays: Callable[[Storage, Sequence[int], Thunk], Thunk] | None = None
    # Variants of `call` that overwrite and return an input, after the last other use of it.
    reuse: Mapping[int, Callable[..., Any]] = field(default_factory=dict)
    # Conversions of inputs to another layout or precision. Nodes that name the same function for
    # a variable share the result.
    prepare: Mapping[int, Callable[[torch.Tensor], torch.Tensor]] = field(default_factory=dict)
    # A variant of `call` that takes, before the inputs, a tensor for each output to write to.
    into: Callable[..., Any] | None = None
    in_place: bool = False  # that tensor may be an input: the work is element by element
    certain: bool = False  # cannot fail once all shapes are static; updates are then written early
    # Outputs are new numbers, not moved, copied or joined ones, which torch.compile may leave out.
    computes: bool = False
    permutes: tuple[int, ...] | None = None  # the order of axes, if the node only transposes
    factors: tuple[int, ...] = ()  # inputs that are factors of a product, or pass as such
    images: bool = False  # they are images and filters, whose channels may lie last
    winograd: Callable[..., Any] | None = None  # a variant of `call`, if it may be faster


computed = partial(Lowering, computes=True, certain=True)
"""A `Lowering` of an Op that computes new numbers, in a way that cannot fail."""


def on_a_copy(write: Callable[..., Any]) -> Callable[..., Any]:
    """Return a call that leaves its first input as it is, of one that writes over it."""
    return lambda x, *rest: write(x.clone(memory_format=torch.contiguous_format), *rest)


@singledispatch
def lower(op: Op, node: Apply, device: torch.device, compiled: bool) -> Lowering:
    """Return the PyTorch call that computes `node`.

    A lowering for another Op is added with ``@lower.register(ThatOp)``. With `compiled`,
    ``torch.compile`` will read the call, and fuses elementwise calls by itself.

    Raises
    ------
    NotImplementedError
        No lowering is registered for the Op, or the registered one does not cover this case.
    """
    raise unsupported(node, "there is no PyTorch lowering for this Op")


def unsupported(node: Apply, reason: str) -> NotImplementedError:
    """Name the node that cannot be lowered, the reason, and where a lowering would go."""
    types = ", ".join(str(variable.type) for variable in node.inputs)
    return NotImplementedError(
        f"{type(node.op).__module__}.{type(node.op).__name__}: {reason}. "
        f"The node is {node} with inputs of type {types}. Register a lowering with "
        "@tandem.backend.lowering.lower.register in a module of tandem/backend/lowering."
    )


def torch_dtype(variable: Variable) -> torch.dtype:
    """Return the PyTorch dtype of a tensor or scalar variable."""
    name = variable.type.dtype
    if name not in TORCH_DTYPES:
        raise NotImplementedError(
            f"dtype {name} of {variable} is not supported on a PyTorch device; "
            f"supported are {', '.join(TORCH_DTYPES)}"
        )
    return TORCH_DTYPES[name]


def constant_number(variable: Variable) -> bool | int | float | None:
    """Return the value of a constant with a single element; None for anything else."""
    if not isinstance(variable, Constant) or not isinstance(variable.type, TensorType | ScalarType):
        return None
    data = np.asarray(variable.data)
    return data.item() if data.size == 1 else None


def constant_integers(variable: Variable) -> tuple[int, ...] | None:
    """Return the values of a constant integer vector; None for anything else."""
    if not isinstance(variable, Constant) or not isinstance(variable.type, TensorType):
        return None
    return tuple(int(value) for value in np.atleast_1d(variable.data))


def is_host_type(variable: Variable) -> bool:
    """Return whether values of the variable are Python numbers wherever they are computed."""
    return isinstance(variable.type, ScalarType)


def is_tensor(variable: Variable) -> bool:
    """Return whether values of the variable are tensors, which those of a sparse type are not."""
    return isinstance(variable.type, DenseTensorType)


def static_shape(variable: Variable) -> tuple[int, ...] | None:
    """Return the shape of a variable if every dimension is known while linking."""
    shape = variable.type.shape
    return None if None in shape else tuple(shape)
