"""Sharded and replicated tensors in a graph, with the conversions between them inferred.

A tensor is replicated, sharded along an axis, a partial sum, or at a single rank, as in neon's
multi-GPU back end (Nervana 2015), PyTorch's DTensor and JAX. `partition` turns a graph of whole
tensors into that of one rank.
"""

from tandem.placement.explain import explain
from tandem.placement.partition import Conversion, Partitioned, partition
from tandem.placement.place import place
from tandem.placement.placements import (
    Partial,
    Placement,
    Replicate,
    Shard,
    Single,
    local_index,
    local_shape,
)
from tandem.placement.rules import Choice, Part, rule
from tandem.placement.simulate import simulate

__all__ = [
    "Choice",
    "Conversion",
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
