"""Each layer, activation and operation against Keras on PyTorch, with the same weights."""

from typing import Any

import numpy as np
import pytensor
import pytest

from tandem.errors import InputError
from tests.support.keras_layers import (
    IMAGE,
    LAYERS,
    SEQUENCE,
    activated,
    attended,
    merged,
    of_tokens,
    operated,
    randomize,
    recurrent_of_tokens,
)
from tests.support.keras_models import DEVICE, keras, network_of, ours, random_rows, theirs

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")


def assert_same(model: Any, names: list[str], training: bool = False, most: int = 4) -> None:
    """Compare outputs to 1e-5 and gradients to 1e-4, and the numbers of parameters."""
    randomize(model)
    rows = random_rows(model, most=most)
    network = network_of(model)
    numbers = sum(int(np.prod(p.shape)) for p in network.parameters.declared.values())
    assert numbers == model.count_params()
    shapes = network.output_shapes
    assert shapes == [tuple(output.shape[1:]) for output in model.outputs]
    sizes = [int(np.prod(shape)) for shape in shapes]
    slope = np.random.default_rng(7).uniform(-1, 1, sum(sizes))
    (y, slopes), (expected, exact) = (
        ours(network, rows, None, slope),
        theirs(model, rows, training, slope),
    )
    ends = np.cumsum(sizes)
    for name, last, size in zip(names, ends, sizes, strict=True):
        part = slice(last - size, last)
        scale = max(1, abs(expected[:, part]).max())
        np.testing.assert_allclose(
            y[:, part], expected[:, part], rtol=1e-5, atol=1e-5 * scale, err_msg=name
        )
    frozen = {n for n in slopes if any(n == f or n.startswith(f"{f}.") for f in network.frozen)}
    assert {*slopes} - frozen == {*exact}
    for name, found in exact.items():
        scale = max(1, abs(found).max())
        np.testing.assert_allclose(slopes[name], found, rtol=1e-4, atol=1e-4 * scale, err_msg=name)


def test_numbers_that_tie_share_the_gradient_of_an_extreme() -> None:
    layers, ops = keras.layers, keras.ops
    x = keras.Input((6, 4))
    y = layers.Dense(3)(x)
    found = [layers.GlobalMaxPooling1D()(y), ops.max(y, axis=1), ops.amin(y, axis=(1, 2))]
    model = keras.Model(x, keras.layers.Concatenate()([*found[:2], ops.expand_dims(found[2], 1)]))
    randomize(model)
    rows = np.random.default_rng(0).normal(size=(5, 6, 4)).astype(np.float32)
    rows[:, 2:] = rows[:, 1:2]  # five equal steps
    slope = np.arange(1, 8)
    (y, slopes), (expected, exact) = (
        ours(network_of(model), [rows], None, slope),
        theirs(model, [rows], slope=slope),
    )
    np.testing.assert_allclose(y, expected, rtol=1e-5)
    for name, values in exact.items():
        np.testing.assert_allclose(slopes[name], values, rtol=1e-4, err_msg=name)


def test_activity_regularizers_of_attention_are_of_its_projections() -> None:
    m, x = keras.layers, keras.Input((6, 4))
    given: dict[str, Any] = {"activity_regularizer": "l2"}
    model = keras.Model(x, m.MultiHeadAttention(2, 3, value_dim=2, **given)(x, x))
    randomize(model)
    (rows,) = random_rows(model)
    model(rows)
    network = network_of(model)
    images = network.images()
    costs = network._run(images, None)[1].activities
    found = pytensor.function([images], sum(cost.mean() for cost in costs), mode=DEVICE)(rows)
    assert found == pytest.approx(sum(loss.item() for loss in model.losses), rel=1e-5)
    model = keras.Model(x, m.MultiHeadAttention(1, 2, **given)(x, x, return_attention_scores=True))
    with pytest.raises(InputError, match="found activity_regularizer with return_attention_scor"):
        network_of(model)


SLOW = pytest.mark.slow  # cases that take seconds to compile


@pytest.mark.parametrize(
    "case",
    [pytest.param(n, marks=SLOW) if n in ("recurrent", "more of images") else n for n in LAYERS],
)
def test_values_and_gradients_of_layers_are_those_of_keras(case: str) -> None:
    """The parameter of a PReLU before each layer has the layer's gradient."""
    shape, make = LAYERS[case]
    x = keras.Input(shape)
    layers = make(keras.layers)
    outputs = [layer(keras.layers.PReLU()(x)) for layer in layers]
    assert_same(keras.Model(x, outputs), [f"{n} {layer.name}" for n, layer in enumerate(layers)])


@pytest.mark.parametrize(
    ("shape", "dtype", "make"),
    [
        (IMAGE, "float32", merged),
        (IMAGE, "float32", activated),
        pytest.param(IMAGE, "float32", operated, marks=SLOW),
        pytest.param(SEQUENCE, "float32", attended, marks=SLOW),
        pytest.param((6,), "int32", of_tokens, marks=SLOW),
        pytest.param((6,), "int32", recurrent_of_tokens, marks=SLOW),
    ],
)
def test_graphs_of_several_inputs_are_those_of_keras(shape: Any, dtype: str, make: Any) -> None:
    x = keras.Input(shape, dtype=dtype)
    outputs = make(x, keras.layers)
    assert_same(keras.Model(x, outputs), [f"{n} {y.name}" for n, y in enumerate(outputs)])


@pytest.mark.filterwarnings("ignore:Layer .* was passed an input with a mask")
def test_masks_that_are_given_are_those_of_keras() -> None:
    m, x = keras.layers, keras.Input((6,), dtype="int32")
    y, masked = m.Embedding(4, 6)(x), m.Embedding(4, 6, mask_zero=True)(x)
    mask = keras.ops.not_equal(x, 1)
    outputs = []
    for kind in (m.Attention, lambda: m.AdditiveAttention(use_scale=False)):
        for masks in ([mask, mask], [None, mask], [None, None]):
            outputs.append(kind()([masked, y], mask=masks))
    for axis, shape in ((-1, (1, 6)), (1, (6, 1))):
        outputs.append(m.Softmax(axis)(y, mask=keras.ops.reshape(mask, (-1, *shape))))
    inside = keras.Input((6, 6))
    mean = keras.Model(inside, m.GlobalAveragePooling1D()(inside))
    outputs += [mean(m.Dense(6)(y), mask=mask), mean(masked)]
    assert_same(keras.Model(x, outputs), [f"{n} {o.name}" for n, o in enumerate(outputs)])


@pytest.mark.filterwarnings("ignore:Layer .* was passed an input with a mask")
def test_outputs_have_masks_where_those_of_keras_have() -> None:
    m, x = keras.layers, keras.Input((6,), dtype="int32")
    masked = m.Embedding(4, 3, mask_zero=True)(x)
    given = m.Normalization(mean=1.0, variance=2.0, axis=None)
    layers = [m.Rescaling(0.5), given, m.UnitNormalization(), m.RMSNormalization()]
    outputs = [layer(masked) for layer in layers]
    outputs += [m.Add()([masked, masked]), m.Add()([masked, m.Embedding(4, 3)(x)])]
    assert masked_outputs(keras.Model(x, outputs)) == [True, True, True, False, True, False]


def masked_outputs(model: Any) -> list[bool]:
    """Whether each output has a mask, which is so in Keras too."""
    network = network_of(model)
    logits = network.logits(network.images(), None)
    found = [mask is not None for mask in network._masks[logits]]
    exact = model(np.array([[1, 2, 0, 0, 1, 0]]))
    assert found == [getattr(y, "_keras_mask", None) is not None for y in exact]
    return found


def test_attention_takes_the_masks_of_its_inputs_away() -> None:
    """So what is computed later has none, in the order in which Keras computes."""
    m, x = keras.layers, keras.Input((6,), dtype="int32")
    y, z, query = (m.Embedding(4, 4, mask_zero=True)(x) for _ in range(3))
    block = m.Add()([y, m.MultiHeadAttention(2, 3)(y, y)])
    outputs = [m.Add()([block, m.MultiHeadAttention(2, 3)(block, block)])]
    outputs += [m.MultiHeadAttention(1, 2)(z, z) for _ in range(2)]
    outputs += [m.MultiHeadAttention(1, 2)(query, m.Embedding(4, 4)(x)), m.Dense(2)(query)]
    model = keras.Model(x, outputs)
    assert masked_outputs(model) == [False, False, True, True, True]
    randomize(model)
    rows = random_rows(model)
    found, expected = ours(network_of(model), rows)[0], theirs(model, rows)[0]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    # Gradients of steps that see none differ: PyTorch's are not those by differences.


def test_inputs_of_a_model_inside_are_found_by_name() -> None:
    m = keras.layers
    a, b = keras.Input((3,), name="a"), keras.Input((3,), name="b")
    outputs = []
    for inputs in ([b, a], {"b": b, "a": a}):
        inner = keras.Model(inputs, m.Concatenate()([m.Dense(2)(a), m.Dense(1)(b)]))
        outputs += [inner({"a": a, "b": b}), inner({"a": b, "b": a})]
    assert_same(keras.Model([a, b], outputs), ["names", "swapped", "mapping", "both"])


def test_what_a_triangle_drops_may_be_infinite_and_a_norm_zero() -> None:
    ops, x = keras.ops, keras.Input((3, 3))
    whole = ops.full_like(x, 1.9, dtype="int32")
    never = ops.cast(ops.greater(x[:, :, :2], 1e9), "float32")
    zero = ops.norm(never * keras.layers.Dense(2)(x), axis=-1)
    outputs = [ops.tril(ops.log(ops.tril(ops.exp(x)))), zero, x + ops.cast(whole, "float32")]
    assert_same(keras.Model(x, outputs), ["triangle", "norm", "whole"])


def test_short_rows_are_normalised_as_keras_does() -> None:
    ops, x = keras.ops, keras.Input((3, 4))
    short = x * 1e-8
    outputs = [keras.layers.UnitNormalization()(short), ops.normalize(short, axis=1)]
    outputs += [ops.normalize(short, epsilon=1e-9), ops.normalize(short, epsilon=1e-6)]
    outputs.append(keras.layers.Dot(2, normalize=True)([short, x]))
    assert_same(keras.Model(x, outputs), ["layer", "default", "less", "more", "dot"])


def test_average_pools_with_uneven_padding_are_those_of_keras_on_pytorch() -> None:
    """Which counts edge pixels again; windows may be larger than the image."""
    for side in (7, 2):
        x = keras.Input((side, 6, 2))
        cases = [(size, stride) for size in (2, 3, 4, 5) for stride in (1, 2, 3)]
        pooled = [keras.layers.AveragePooling2D(*case, "same")(x) for case in cases]
        assert_same(keras.Model(x, pooled), [str(case) for case in cases])
