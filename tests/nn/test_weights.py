"""The arrays of a model: Keras's layout, names that change, and refusals."""

from typing import Any

import numpy as np
import pytest

from tandem import nn
from tandem.errors import InputError
from tests.support.bars import small_model


def filled(value: complex) -> list[np.ndarray]:
    return [np.full(w.shape, value) for w in small_model().get_weights()]


def test_weights_are_copies() -> None:
    model = small_model()
    before = {name: w.copy() for name, w in model.weights.items()}
    for w in model.get_weights():
        w += 1
    for name, w in model.weights.items():
        np.testing.assert_array_equal(w, before[name])


def test_weights_have_keras_layouts_and_come_back() -> None:
    x = nn.Input((9, 9, 2))
    y = nn.layers.DepthwiseConv2D(3, depth_multiplier=2)(x)
    model = nn.Model(x, nn.layers.Dense(5)(nn.layers.Flatten()(nn.layers.Conv2D(7, (3, 2))(y))))
    found = model.get_weights()
    assert [w.shape for w in found] == [
        (3, 3, 2, 2), (4,), (3, 2, 4, 7), (7,), (5 * 6 * 7, 5), (5,)
    ]  # fmt: skip
    new = [np.random.default_rng(n).normal(size=w.shape) for n, w in enumerate(found)]
    model.set_weights(new)
    for one, other in zip(model.get_weights(), new, strict=True):
        np.testing.assert_array_equal(one, other.astype(np.float32))
    # Keras's multiplier runs fastest.
    kernel = new[0].astype(np.float32)
    np.testing.assert_array_equal(
        model.weights["depthwise_conv2d.weight"][1, 0], kernel[:, :, 0, 1]
    )


def test_a_layer_that_is_added_leaves_the_others_their_weights() -> None:
    """Under their names, which may change."""
    model = nn.Sequential([nn.layers.Dense(4), nn.layers.Dense(4)])
    model.build((None, 4))
    model.set_weights([np.full(w.shape, n) for n, w in enumerate(model.get_weights())])
    model.add(nn.layers.Dense(4, name="dense_1"))
    assert [*model.weights][2:] == [
        "dense_2.weight", "dense_2.bias", "dense_1.weight", "dense_1.bias"
    ]  # fmt: skip
    assert [w.mean() for w in model.get_weights()[:4]] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({}, "weights: found nothing for conv2d.weight, expected (4, 1, 3, 3)"),
        ({"conv2d.weight": np.ones(4)}, "weights: found shape (4,) for conv2d.weight"),
        ("model.safetensors", "weights: found str, expected arrays by name"),
    ],
)
def test_arrays_by_name_that_do_not_fit_are_refused(weights: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        small_model().load_weights(weights)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([], "found 0 arrays, expected 4"),
        ([np.ones(2)] * 4, "found shape (2,) for conv2d.weight"),
        (filled(1j), "conv2d.weight: found complex128, expected real numbers"),
        (filled(1e300), "conv2d.weight: found 1e+300, expected numbers that float32 can hold"),
        (
            [np.ma.masked_equal(w, w.flat[0]) for w in filled(0.0)],
            "found a masked array with 36 of 36 numbers masked",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused(weights: list[Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        small_model().set_weights(weights)
    assert message in str(caught.value)
