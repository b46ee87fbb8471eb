"""Lowerings: the PyTorch call of each Op, one module for each kind of Op."""

from tandem.backend.lowering import (
    control_flow,
    convolution,
    elemwise,
    linalg,
    network,
    reduction,
    subtensor,
    tensor,
)
from tandem.backend.lowering.host import host_rule
from tandem.backend.lowering.registry import Lowering, lower
from tandem.backend.lowering.scalars import covered_scalar_ops


def covered_ops() -> frozenset[type]:
    """Return the classes of Ops, scalar ones included, that have a kernel for some case."""
    return frozenset(lower.registry) - {object} | covered_scalar_ops()


__all__ = [
    "Lowering",
    "control_flow",
    "convolution",
    "covered_ops",
    "elemwise",
    "host_rule",
    "linalg",
    "lower",
    "network",
    "reduction",
    "subtensor",
    "tensor",
]
