"""A front with Keras 3's names: layers, graphs of them as data, and networks of the run.

Importing it imports neither PyTensor nor PyTorch.
"""

from tandem.nn import initializers, layers
from tandem.nn.layers import Input

__all__ = ["Input", "initializers", "layers"]
