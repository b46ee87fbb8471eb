"""Layers of their own that models of `keras.applications` have."""

from typing import Any

from pytensor.tensor.variable import TensorVariable

from tandem.keras.lowering.call import Call, by_element, number
from tandem.keras.lowering.core import drop, lengths
from tandem.keras.lowering.registry import lowers


@lowers("CustomScaleLayer")
def scaled_sum(layer: Call, inputs: Any) -> TensorVariable:
    """Szegedy et al. 2017, section 3.3: a residual that is scaled down."""
    scale = layer.number("scale")
    return by_element(lambda x, y: x + y * number(scale, y), *inputs)


@lowers("LayerScale")
def layer_scale(layer: Call, x: TensorVariable) -> TensorVariable:
    """Touvron et al. 2021: a factor for each channel."""
    layer.number("init_values")
    return x * layer.parameter("variable", (layer.integer("projection_dim"),))


@lowers("StochasticDepth")
def stochastic_depth(layer: Call, x: TensorVariable) -> TensorVariable:
    """Huang et al. 2016: rows lose a path in training."""
    rate = layer.number("drop_path_rate", 0, 0.999999)
    return drop(layer, x, rate, (1,) * len(lengths(x)))
