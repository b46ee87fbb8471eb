"""The registry of lowerings: for each Op, the PyTorch call that computes it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial, singledispatch
from typing import Any

import numpy as np
import torch
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.op import Op
from pytensor.scalar.basic import ScalarType
from pytensor.tensor.type import TensorType

_NAMES = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64"
TORCH_DTYPES: Mapping[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES.split()}


@dataclass(frozen=True)
class Lowering:
    """How one node of a graph is computed, and all that the code generator asks about it.

    Parameters
    ----------
    call : callable
        Takes the node's inputs, except those in `omit`, as tensors on the device, and returns the
        output (or a tuple of them, where the node has several) as tensors. It never writes into an
        input.
    host : frozenset of int
        Positions of inputs that `call` takes as Python numbers (a 0-d input) or tuples of them (a
        vector): sizes, indices, axes. Numbers that come from shapes never leave the host.
    omit : frozenset of int
        Positions of inputs that `call` does not take, because it already contains their constants.
    views : mapping from int to tuple of int
        For each output that may share memory with inputs, the positions of these inputs, in
        addition to the Op's own ``view_map``.
    repeats : bool
        Whether an output that is a view may map several elements to one address.
    numbers : bool
        Whether the outputs are Python numbers or tuples of them, and not tensors.
    counts : bool
        Whether `call` counts elements by their values, as a mask does: ``torch.compile`` cannot
        know the shape of what follows.
    reuse : mapping from int to callable
        Variants of `call` that may overwrite and return the input at that position. They are used
        after the last other use of that input's value.
    prepare : mapping from int to callable
        Conversions of inputs that `call` takes in another layout or precision. Nodes that name the
        same function for a variable share the result.
    into : callable or None
        A variant of `call` that takes, before the inputs, a tensor of each output's shape and dtype
        to write the result to, and returns that tensor (or a tuple of them).
    in_place : bool
        Whether a tensor that `into` writes to may be one of the inputs: each element of the result
        depends only on the elements at its own position.
    certain : bool
        Whether `call` cannot fail once all shapes are static: no value is out of range. Updates in
        place are written as soon as only such nodes follow.
    computes : bool
        Whether the outputs are new numbers. Otherwise numbers are moved, copied or joined, which
        ``torch.compile`` may leave out (an axis of length 1 is flipped, say).
    permutes : tuple of int or None
        The order of axes, if all that the node does is to transpose its input.
    factors : int
        How many inputs, from the first, are factors of a product whose precision may be chosen.
    images : bool
        Whether these factors are images and filters, (batch or filter, channel, row, column), whose
        channels may lie last.
    """

    call: Callable[..., Any]
    host: frozenset[int] = frozenset()
    omit: frozenset[int] = frozenset()
    views: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    repeats: bool = False
    numbers: bool = False
    counts: bool = False
    reuse: Mapping[int, Callable[..., Any]] = field(default_factory=dict)
    prepare: Mapping[int, Callable[[torch.Tensor], torch.Tensor]] = field(default_factory=dict)
    into: Callable[..., Any] | None = None
    in_place: bool = False
    certain: bool = False
    computes: bool = False
    permutes: tuple[int, ...] | None = None
    factors: int = 0
    images: bool = False


computed = partial(Lowering, computes=True, certain=True)
"""A `Lowering` of an Op that computes new numbers, in a way that cannot fail."""


@singledispatch
def lower(op: Op, node: Apply, device: torch.device, compiled: bool) -> Lowering:
    """Return the PyTorch call that computes `node`.

    A lowering for another Op is added with ``@lower.register(ThatOp)``.

    Parameters
    ----------
    op : Op
        The Op of `node`; the lowering is chosen by its class.
    node : Apply
        The node to compute.
    device : torch.device
        Where the tensors are.
    compiled : bool
        Whether ``torch.compile`` will read the call: then it fuses elementwise calls by itself.

    Returns
    -------
    Lowering

    Raises
    ------
    NotImplementedError
        If no lowering is registered for the Op, or the registered one does not cover this case.
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
    """Whether values of the variable are Python numbers wherever they are computed."""
    return isinstance(variable.type, ScalarType)


def static_shape(variable: Variable) -> tuple[int, ...] | None:
    """Return the shape of a variable if every dimension is known while linking."""
    shape = variable.type.shape
    return None if None in shape else tuple(shape)
