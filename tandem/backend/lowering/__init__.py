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

__all__ = [
    "Lowering",
    "control_flow",
    "convolution",
    "elemwise",
    "host_rule",
    "linalg",
    "lower",
    "network",
    "reduction",
    "subtensor",
    "tensor",
]
