"""Keras's layers as PyTensor graphs: one registered function for each class.

Importing it imports neither PyTensor nor Keras.
"""

from tandem.keras.lowering.registry import (
    add_own_lowerings,
    find_lowering,
    lowers,
    own_lowerings,
)

__all__ = ["add_own_lowerings", "find_lowering", "lowers", "own_lowerings"]
