"""Ops without a kernel: their own `perform`, in NumPy on the host."""

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.op import Op, _NoPythonOp
from pytensor.link.c.op import _NoPythonCOp, _NoPythonExternalCOp

from tandem.backend.lowering.registry import Lowering, is_host_type, is_tensor
from tandem.backend.shared import tensor_over

WITHOUT_PERFORM: tuple[type[Op], ...] = (_NoPythonOp, _NoPythonCOp, _NoPythonExternalCOp)

Convert = Callable[[Any], Any]


def by_perform(node: Apply, device: torch.device, refusal: NotImplementedError) -> Lowering:
    """Compute a node by its Op's `perform`: on a CPU without a copy of its operands.

    On another device the operands are copied to the host and the results back, with a warning.

    Raises
    ------
    NotImplementedError
        The Op has no `perform`. This is `refusal`, which explains why it has no kernel.
    """
    op: Any = node.op
    if isinstance(op, WITHOUT_PERFORM):
        raise refusal
    if device.type != "cpu":
        warnings.warn(
            f"{op} has no kernel: its operands are copied from {device} and its results back, in "
            f"every call ({refusal})",
            stacklevel=2,
        )
    op.prepare_node(node, storage_map=None, compute_map=None, impl="py")
    to_host = [_to_host(variable) for variable in node.inputs]
    from_host = [_from_host(variable, device) for variable in node.outputs]
    written = {index for indices in op.destroy_map.values() for index in indices}

    def perform(*operands: Any) -> Any:
        values = [convert(value) for convert, value in zip(to_host, operands, strict=True)]
        for index in written:
            values[index] = copy.deepcopy(values[index])
        cells: list[list[Any]] = [[None] for _ in from_host]
        op.perform(node, values, cells)
        results = _separate([cell[0] for cell in cells], values)
        ready = [convert(value) for convert, value in zip(from_host, results, strict=True)]
        return ready[0] if len(ready) == 1 else tuple(ready)

    numbers = frozenset(index for index, v in enumerate(node.inputs) if is_host_type(v))
    return Lowering(perform, host=numbers, opaque=True)


def _to_host(variable: Variable) -> Convert:
    """Make the conversion from a program's value to what `perform` takes."""
    if is_host_type(variable):
        return np.dtype(variable.type.dtype).type
    if not is_tensor(variable):
        return lambda value: value
    if variable.type.dtype.startswith("complex"):
        return lambda tensor: tensor.resolve_conj().cpu().numpy()
    return lambda tensor: tensor.cpu().numpy()


def _from_host(variable: Variable, device: torch.device) -> Convert:
    if is_host_type(variable):
        kind = np.dtype(variable.type.dtype).type
        return lambda value: kind(value).item()
    if not is_tensor(variable):
        return lambda value: value
    dtype = np.dtype(variable.type.dtype)

    def convert(value: Any) -> torch.Tensor:
        array = np.asarray(value)
        kinds = array.dtype.kind + dtype.kind
        # Some Ops declare real numbers or integers and compute others: those stay as they are.
        if kinds == "iu" or np.can_cast(array.dtype, dtype, "same_kind"):
            array = array.astype(dtype, copy=False)
        return tensor_over(array).to(device)

    return convert


def _separate(results: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
    """Copy each array that is not its own: the program may write over a result.

    An Op need not declare that a result is an operand, or that two results are one array.
    """
    taken = [value for value in operands if isinstance(value, np.ndarray)]
    separate: list[Any] = []
    for value in results:
        if isinstance(value, np.ndarray):
            if not value.flags.writeable or any(np.may_share_memory(value, x) for x in taken):
                value = value.copy()
            taken.append(value)
        separate.append(value)
    return separate
