"""Keras's variables as our arrays by name, and back."""

from typing import Any

import numpy as np
import pytest

from tandem.errors import InputError
from tandem.keras.weights import read_weights, write_weights
from tests.support.keras_models import keras


def model() -> Any:
    m = keras.layers
    x = keras.Input((8, 8, 3))
    y = m.Conv2D(4, 3, name="conv")(x)
    y = m.SeparableConv2D(5, 3, depth_multiplier=2, name="separable")(y)
    y = m.Conv2DTranspose(2, 3, name="back")(y)
    y = keras.Sequential([m.BatchNormalization(name="norm")], name="inside")(y)
    y = m.Reshape((6, 12))(y)
    y = m.Bidirectional(m.LSTM(2, return_sequences=True, name="lstm"), name="both")(y)
    y = m.Conv1D(3, 2, name="steps")(y)
    y = m.MultiHeadAttention(2, 3, name="attention")(y, y)
    return keras.Model(x, m.TimeDistributed(m.Dense(2, name="dense"), name="each")(y))


SHAPES = {
    "conv.weight": (4, 3, 3, 3),
    "separable.depthwise_kernel": (8, 1, 3, 3),
    "separable.pointwise_kernel": (5, 8, 1, 1),
    "back.weight": (5, 2, 3, 3),
    "inside.norm.weight": (2,),
    "inside.norm.running_var": (2,),
    "both.forward_lstm.weight": (12, 8),
    "both.backward_lstm.recurrent_kernel": (2, 8),
    "steps.weight": (3, 4, 2, 1),
    "attention.query.weight": (3, 2, 3),
    "attention.attention_output.bias": (3,),
    "each.dense.weight": (3, 2),
}


def test_arrays_have_our_names_and_layout_and_return() -> None:
    keras.utils.set_random_seed(3)
    first, second = model(), model()
    weights = read_weights(first)
    assert {name: weights[name].shape for name in SHAPES} == SHAPES
    assert all(value.dtype == np.float32 for value in weights.values())
    write_weights(second, weights)
    for one, other in zip(first.get_weights(), second.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    kernel = first.get_layer("conv").kernel.numpy()
    assert weights["conv.weight"][3, 2, 1, 0] == kernel[1, 0, 2, 3]
    kernel = first.get_layer("separable").depthwise_kernel.numpy()
    assert weights["separable.depthwise_kernel"][5, 0, 1, 2] == kernel[1, 2, 2, 1]


def test_what_is_read_is_a_copy() -> None:
    small = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="dense")])
    for found in (read_weights(small)["dense.weight"], small.get_weights()[0]):
        before = found.copy()
        found += 1
        np.testing.assert_array_equal(small.get_weights()[0], before)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("dense.weight", None, "found nothing for dense.weight, expected an array"),
        ("dense.bias", np.ones(3), r"found shape \(3,\) for dense.bias, .*dense/bias, \(2,\)"),
        ("dense.bias", np.ma.masked_equal([1, 2], 2), "masked array"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_and_change_nothing(
    name: str, value: Any, message: str
) -> None:
    small = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="dense")])
    before = small.get_weights()
    weights: dict[str, Any] = {"dense.weight": np.ones((3, 2)), "dense.bias": np.ones(2)}
    weights[name] = value
    if value is None:
        del weights[name]
    with pytest.raises(InputError, match=message):
        write_weights(small, weights)
    for one, other in zip(before, small.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_layer_in_two_models_inside_is_refused() -> None:
    dense = keras.layers.Dense(3, name="dense")
    x, parts = keras.Input((3,)), []
    for name in ("a", "b"):
        parts.append(keras.Sequential([keras.Input((3,)), dense], name=name))
    with pytest.raises(InputError, match=r"one layer as a\.dense\.weight and b\.dense\.weight"):
        read_weights(keras.Model(x, parts[1](parts[0](x))))
