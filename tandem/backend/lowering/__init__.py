"""Lowerings: the PyTorch call of each Op, one module for each kind of Op."""

from pytensor.scalar.basic import ScalarOp

from tandem.backend.lowering import (
    batch_norm,
    blockwise,
    collective,
    control_flow,
    convolution,
    decompositions,
    elemwise,
    linalg,
    matrix_functions,
    network,
    pool_norm,
    pooling,
    recurrent,
    reduction,
    selection,
    signal,
    subtensor,
    tensor,
    updates,
)
from tandem.backend.lowering.host import host_rule
from tandem.backend.lowering.registry import Lowering, lower
from tandem.backend.lowering.scalars import covered_scalar_ops


def covered_ops() -> frozenset[type]:
    """Return the classes of Ops, scalar ones included, that have a kernel for some case.

    Rules for numbers on the host count: no kernel is needed there.
    """
    found = frozenset(lower.registry) | frozenset(host_rule.registry) | covered_scalar_ops()
    return found - {object, ScalarOp}


__all__ = [
    "Lowering",
    "batch_norm",
    "blockwise",
    "collective",
    "control_flow",
    "convolution",
    "covered_ops",
    "decompositions",
    "elemwise",
    "host_rule",
    "linalg",
    "lower",
    "matrix_functions",
    "network",
    "pool_norm",
    "pooling",
    "recurrent",
    "reduction",
    "selection",
    "signal",
    "subtensor",
    "tensor",
    "updates",
]
