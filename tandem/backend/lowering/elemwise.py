"""Elementwise Ops and the reordering of dimensions."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from pytensor.graph.basic import Apply
from pytensor.scalar.basic import Composite, IntDiv, Mod, Pow, Second
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.type import discrete_dtypes

from tandem.backend.lowering.registry import Lowering, computed, lower, static_shape
from tandem.backend.lowering.scalars import ScalarCall, scalar_call


@lower.register(Elemwise)
def lower_elemwise(op: Elemwise, node: Apply, device: torch.device, compiled: bool) -> Lowering:
    prepared = scalar_call(op.scalar_op, node)
    call = prepared.call
    views = {out: prepared.returns for out in range(len(node.outputs)) if prepared.returns}
    # These may stretch the operand that they return to the shape of another.
    repeats = bool(views) and isinstance(op.scalar_op, Second | Composite)
    divides = isinstance(op.scalar_op, IntDiv | Mod | Pow | Composite)
    fails = divides and node.outputs[0].type.dtype in discrete_dtypes
    checks = _broadcast_checks(node, prepared.omit)
    if checks:
        call = _checked(checks, call)
    lowering = computed(
        call,
        omit=prepared.omit,
        views=views,
        repeats=repeats,
        certain=not (fails or prepared.opaque),
        opaque=prepared.opaque,
    )
    if checks:
        return lowering
    into = None if prepared.into is None else _out_first(prepared.into)
    return replace(lowering, reuse=_reuse(node, prepared), into=into, in_place=True)


def _out_first(into: Callable[..., Any]) -> Callable[..., Any]:
    return lambda out, *operands: into(*operands, out=out)


def _reuse(node: Apply, prepared: ScalarCall) -> dict[int, Callable[..., Any]]:
    """Find the operands that the result may overwrite: those of its own shape and dtype."""
    shape = static_shape(node.outputs[0])
    if prepared.into is None or shape is None:
        return {}
    kept = [place for place in range(len(node.inputs)) if place not in prepared.omit]
    return {
        place: _into_operand(prepared.into, argument)
        for argument, place in enumerate(kept)
        if node.inputs[place].type.dtype == node.outputs[0].type.dtype
        and static_shape(node.inputs[place]) == shape
    }


def _into_operand(into: Callable[..., Any], argument: int) -> Callable[..., Any]:
    def call(*operands: torch.Tensor) -> torch.Tensor:
        return into(*operands, out=operands[argument])

    return call


def _broadcast_checks(node: Apply, omit: frozenset[int]) -> list[list[tuple[int, int]]]:
    """List, per dimension, the (argument, dimension) pairs that must agree but may not.

    Only a dimension whose length is 1 *by type* is repeated in PyTensor; PyTorch repeats any.
    """
    kept = [variable for place, variable in enumerate(node.inputs) if place not in omit]
    checks = []
    for dimension in range(node.outputs[0].type.ndim):
        lengths = [variable.type.shape[dimension] for variable in kept]
        places = [(argument, dimension) for argument, length in enumerate(lengths) if length != 1]
        if None in lengths and len(places) > 1:
            checks.append(places)
    return checks


def _checked(checks: list[list[tuple[int, int]]], call: Callable[..., Any]) -> Callable[..., Any]:
    def check_and_call(*operands: torch.Tensor) -> Any:
        for places in checks:
            lengths = {operands[argument].shape[dimension] for argument, dimension in places}
            if len(lengths) > 1 and 1 in lengths:
                raise ValueError(
                    "Runtime broadcasting not allowed. At least one input has a distinct "
                    "dimension length of 1, but was not marked as broadcastable. If broadcasting "
                    "was intended, use `specify_broadcastable` on the relevant input."
                )
        return call(*operands)

    return check_and_call


@lower.register(DimShuffle)
def lower_dimshuffle(op: DimShuffle, node: Apply, device: torch.device, compiled: bool) -> Lowering:
    drop = op.drop
    kept = [axis for axis in range(op.input_ndim) if axis not in drop]
    order = [kept.index(axis) for axis in op.shuffle]
    reordered = order != sorted(order)
    added = op.augment

    def dimshuffle(x: torch.Tensor) -> torch.Tensor:
        if drop:
            x = x.squeeze(drop)
            if x.ndim != len(order):
                raise ValueError(f"cannot drop axes {drop}: not all of them have length 1")
        if reordered:
            x = x.permute(order)
        for axis in added:
            x = x.unsqueeze(axis)
        return x

    permutes = None if drop or added else tuple(op.shuffle)
    return Lowering(dimshuffle, views={0: (0,)}, certain=True, permutes=permutes)
