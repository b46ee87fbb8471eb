"""Sharded and replicated tensors in a graph, with the conversions between them inferred.

A tensor is replicated, sharded along an axis, a partial sum, or at a single rank, as in neon's
multi-GPU back end (Nervana 2015), PyTorch's DTensor and JAX. `partition` turns a graph of whole
tensors into that of one rank. What needs PyTensor is imported when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from tandem.placement.placements import (
    Partial,
    Placement,
    Replicate,
    Shard,
    Single,
    local_index,
    local_shape,
)

if TYPE_CHECKING:
    from tandem.placement.annotations import place
    from tandem.placement.explanation import explain
    from tandem.placement.partitioned import Conversion, Partitioned, partition
    from tandem.placement.rules import OpStrategy, Part, rule
    from tandem.placement.simulation import simulate

__all__ = [
    "Conversion",
    "OpStrategy",
    "Part",
    "Partial",
    "Partitioned",
    "Placement",
    "Replicate",
    "Shard",
    "Single",
    "explain",
    "local_index",
    "local_shape",
    "partition",
    "place",
    "rule",
    "simulate",
]

_MODULES = ("partitioned", "annotations", "rules", "explanation", "simulation")


def __getattr__(name: str) -> Any:
    if name in __all__:
        for module in _MODULES:
            found = getattr(importlib.import_module(f"{__name__}.{module}"), name, None)
            if found is not None:
                return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
