"""Layers with shapes to try them on, and their graphs over random parameters."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt

from tandem.nn.layers import BuildContext, Layer, Shape
from tandem.nn.network import symbolic_shape

IMAGE, TALL, ROW = (7, 8, 4), (9, 6, 3), (5,)

CASES: dict[str, tuple[Callable[[Any], Any], list[Shape]]] = {
    "dense": (lambda m: m.Dense(3, "tanh"), [ROW]),
    "dense without bias": (lambda m: m.Dense(4, use_bias=False), [ROW]),
    "conv": (lambda m: m.Conv2D(6, 3, activation="relu"), [IMAGE]),
    "conv same": (lambda m: m.Conv2D(6, (3, 5), padding="same"), [IMAGE]),
    "conv same even": (lambda m: m.Conv2D(2, (2, 4), padding="same"), [IMAGE]),
    "conv same strides": (lambda m: m.Conv2D(2, 3, 2, "same", use_bias=False), [IMAGE]),
    "conv same long strides": (lambda m: m.Conv2D(2, (1, 2), 3, "same"), [TALL]),
    "conv valid strides": (lambda m: m.Conv2D(2, (3, 2), (2, 3)), [TALL]),
    "conv dilated": (lambda m: m.Conv2D(2, (3, 2), dilation_rate=(2, 3)), [IMAGE]),
    "conv same dilated": (lambda m: m.Conv2D(2, 2, padding="same", dilation_rate=3), [IMAGE]),
    "conv groups": (lambda m: m.Conv2D(6, 3, groups=2, activation="softmax"), [IMAGE]),
    "depthwise": (lambda m: m.DepthwiseConv2D(3, depth_multiplier=2), [IMAGE]),
    "depthwise same": (
        lambda m: m.DepthwiseConv2D((2, 3), 2, "same", use_bias=False, activation="elu"),
        [TALL],
    ),
    "max pool": (lambda m: m.MaxPooling2D(), [IMAGE]),
    "max pool overlapping": (lambda m: m.MaxPooling2D(3, 2), [IMAGE]),
    "max pool same": (lambda m: m.MaxPooling2D(3, 2, "same"), [IMAGE]),
    "max pool same even": (lambda m: m.MaxPooling2D((2, 4), 1, "same"), [IMAGE]),
    "max pool same mixed": (lambda m: m.MaxPooling2D((2, 2), (1, 3), "same"), [TALL]),
    "max pool same larger": (lambda m: m.MaxPooling2D((4, 5), padding="same"), [(3, 2, 3)]),
    "max pool same single": (lambda m: m.MaxPooling2D(2, padding="same"), [(1, 1, 3)]),
    "average pool same larger": (lambda m: m.AveragePooling2D((3, 4), padding="same"), [(2, 1, 3)]),
    "average pool": (lambda m: m.AveragePooling2D((2, 3), (1, 2)), [IMAGE]),
    "average pool same": (lambda m: m.AveragePooling2D(3, 2, "same"), [IMAGE]),
    "average pool same even": (lambda m: m.AveragePooling2D((4, 2), 1, "same"), [IMAGE]),
    "average pool same mixed": (lambda m: m.AveragePooling2D((2, 2), (3, 1), "same"), [TALL]),
    "global average": (lambda m: m.GlobalAveragePooling2D(), [IMAGE]),
    "global average keepdims": (lambda m: m.GlobalAveragePooling2D(keepdims=True), [IMAGE]),
    "batch norm": (lambda m: m.BatchNormalization(), [IMAGE]),
    "batch norm of units": (lambda m: m.BatchNormalization(momentum=0.9, epsilon=0.1), [ROW]),
    "batch norm without shift": (lambda m: m.BatchNormalization(center=False), [IMAGE]),
    "batch norm without scale": (lambda m: m.BatchNormalization(scale=False), [ROW]),
    "activation": (lambda m: m.Activation("leaky_relu"), [ROW]),
    "softplus": (lambda m: m.Activation("softplus"), [ROW]),
    "log sigmoid": (lambda m: m.Activation("log_sigmoid"), [ROW]),
    "relu6": (lambda m: m.Activation("relu6"), [ROW]),
    "sigmoid": (lambda m: m.Activation("sigmoid"), [ROW]),
    "linear": (lambda m: m.Activation("linear"), [ROW]),
    "softmax of channels": (lambda m: m.Activation("softmax"), [IMAGE]),
    "relu": (lambda m: m.ReLU(), [IMAGE]),
    "relu with slope": (lambda m: m.ReLU(negative_slope=0.2), [ROW]),
    "relu with all": (lambda m: m.ReLU(1.2, 0.1, 0.4), [ROW]),
    "relu with threshold": (lambda m: m.ReLU(threshold=0.5), [ROW]),
    "leaky relu": (lambda m: m.LeakyReLU(), [ROW]),
    "elu": (lambda m: m.ELU(0.7), [ROW]),
    "softmax": (lambda m: m.Softmax(), [ROW]),
    "softmax of columns": (lambda m: m.Softmax(axis=2), [IMAGE]),
    "dropout": (lambda m: m.Dropout(0.5), [ROW]),
    "flatten": (lambda m: m.Flatten(), [IMAGE]),
    "flatten rows": (lambda m: m.Flatten(), [(3, 4)]),
    "padding": (lambda m: m.ZeroPadding2D(((1, 2), (0, 3))), [IMAGE]),
    "rescaling": (lambda m: m.Rescaling(1 / 3, -0.5), [IMAGE]),
    "add": (lambda m: m.Add(), [IMAGE, IMAGE, IMAGE]),
    "concatenate": (lambda m: m.Concatenate(), [IMAGE, (7, 8, 2)]),
    "concatenate rows": (lambda m: m.Concatenate(axis=1), [IMAGE, (3, 8, 4)]),
    "concatenate units": (lambda m: m.Concatenate(), [ROW, (2,)]),
}
"""Layers of our module of layers or of Keras's, and shapes of their inputs, by name."""


def random_values(shape: Shape, seed: int, dtype: str = "float64") -> np.ndarray:
    """Numbers of both signs, without the ones near 0 where gradients of maxima jump."""
    return np.random.default_rng(seed).uniform(-2, 2, shape).astype(dtype)


def parameters_of(layer: Layer, shapes: list[Shape], dtype: str = "float64") -> dict[str, Any]:
    """A shared variable of random values for each parameter; variances are positive."""
    values = {
        p.name: random_values(p.shape, 7 + number, dtype)
        for number, p in enumerate(layer.declare("it", *shapes))
    }
    return {
        name: pytensor.shared(
            abs(value) + np.asarray(0.5, dtype) if name.endswith("running_var") else value,
            name=name,
            shape=value.shape,
        )
        for name, value in values.items()
    }


def graph_of(
    layer: Layer, shapes: list[Shape], dtype: str = "float64", training: Any = None
) -> tuple[list[Any], dict[str, Any], Any]:
    """Inputs, parameters and output of a layer's graph."""
    inputs = [pt.tensor(dtype=dtype, shape=(None, *symbolic_shape(shape))) for shape in shapes]
    parameters = parameters_of(layer, shapes, dtype)
    return inputs, parameters, layer.build(BuildContext("it", parameters, training), *inputs)


def channels_first(rows: np.ndarray) -> np.ndarray:
    """A minibatch in Keras's order as our graphs have it."""
    return rows.transpose(0, 3, 1, 2) if rows.ndim == 4 else rows


def channels_last(rows: np.ndarray) -> np.ndarray:
    """A minibatch of our graphs in Keras's order."""
    return rows.transpose(0, 2, 3, 1) if rows.ndim == 4 else rows
