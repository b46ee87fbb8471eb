"""Layers with Keras 3's names, arguments, defaults and numerics.

Shapes are those of rows without the batch, in Keras's order (row, column, channel); symbolic
minibatches of images are (batch, channel, row, column).
"""

from tandem.nn.layers.activations import ELU, Activation, LeakyReLU, ReLU, Softmax
from tandem.nn.layers.base import BuildContext, Layer, Shape, Symbol
from tandem.nn.layers.convolution import Conv2D, DepthwiseConv2D, ZeroPadding2D
from tandem.nn.layers.core import Dense, Dropout, Flatten, Input, InputLayer, Rescaling
from tandem.nn.layers.merging import Add, Concatenate, Concatenated, Residual
from tandem.nn.layers.normalization import BatchNormalization, LocalResponseNormalization
from tandem.nn.layers.pooling import AveragePooling2D, GlobalAveragePooling2D, MaxPooling2D

__all__ = [
    "ELU",
    "Activation",
    "Add",
    "AveragePooling2D",
    "BatchNormalization",
    "BuildContext",
    "Concatenate",
    "Concatenated",
    "Conv2D",
    "Dense",
    "DepthwiseConv2D",
    "Dropout",
    "Flatten",
    "GlobalAveragePooling2D",
    "Input",
    "InputLayer",
    "Layer",
    "LeakyReLU",
    "LocalResponseNormalization",
    "MaxPooling2D",
    "ReLU",
    "Rescaling",
    "Residual",
    "Shape",
    "Softmax",
    "Symbol",
    "ZeroPadding2D",
]

LAYERS: dict[str, type[Layer]] = {
    kind.__name__: kind
    for kind in (
        ELU,
        Activation,
        Add,
        AveragePooling2D,
        BatchNormalization,
        Concatenate,
        Conv2D,
        Dense,
        DepthwiseConv2D,
        Dropout,
        Flatten,
        GlobalAveragePooling2D,
        InputLayer,
        LeakyReLU,
        LocalResponseNormalization,
        MaxPooling2D,
        ReLU,
        Rescaling,
        Softmax,
        ZeroPadding2D,
    )
}
"""The layers that a graph may name without their module: nothing else is made from a file."""
