"""Each layer, activation and operation against Keras on PyTorch, with the same weights."""

from typing import Any

import numpy as np
import pytest

from tests.support.keras_layers import IMAGE, LAYERS, SEQUENCE, randomize
from tests.support.keras_models import keras, network_of, ours, random_rows, ravelled, theirs

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


def chained(x: Any, *layers: Any) -> Any:
    """The output of layers one after another."""
    for layer in layers:
        x = layer(x)
    return x


def merged(x: Any, m: Any) -> list[Any]:
    """Joins of images, of which two are outputs of convolutions."""
    a, b = m.Conv2D(4, 3, padding="same")(x), m.PReLU()(x)
    both, row = [a, b], m.GlobalAveragePooling2D()(b)
    kinds = (m.Add, m.Subtract, m.Multiply, m.Average, m.Maximum, m.Minimum)
    joins = [kind()(both) for kind in kinds]
    joins += [m.Add()([a, b, a]), m.Add()([a, m.Reshape((1, 1, 4))(row)]), m.Multiply()([b, row])]
    joins += [m.Concatenate()(both), m.Concatenate(1)(both), m.Concatenate(axis=2)([b, b])]
    c, d = m.Reshape((7, 32))(a), m.Reshape((8, 28))(b)
    joins += [m.Dot((1, 2))([c, m.Permute((2, 1))(c)]), m.Dot(1)([row, row])]
    return [*joins, m.Dot(1, normalize=True)([m.Reshape((8, 28))(a), d])]


def operated(x: Any, m: Any) -> list[Any]:
    """Results of `keras.ops` of an image."""
    ops, y = keras.ops, m.Conv2D(4, 3, padding="same")(x)
    flat = ops.reshape(y, (-1, 7, 32))
    positive = ops.square(y) + 0.1
    ones = [ops.abs, ops.exp, ops.sin, ops.cos, ops.tanh, ops.erf, ops.negative, ops.sigmoid]
    ones += [ops.floor, ops.sign, ops.expm1, ops.relu, ops.silu, ops.leaky_relu, ops.gelu, ops.copy]
    found = [one(y) for one in ones]
    found += [one(positive) for one in (ops.log, ops.sqrt, ops.rsqrt, ops.log1p, ops.reciprocal)]
    found += [y + 1, 2 - y, y * x, x / positive, 1 / positive, positive**1.5, -y, y - np.ones(4)]
    found += [
        ops.maximum(y, 0.3),
        ops.minimum(y, x),
        ops.mod(positive, 0.7),
        ops.stop_gradient(positive) // 0.5,
    ]
    found += [ops.sum(y, axis=(1, 2)), ops.mean(y, axis=-1, keepdims=True), ops.max(y, axis=2)]
    found += [ops.min(y, axis=[1, 2]), ops.var(y, axis=1), ops.std(y, axis=(1, 2))]
    found += [ops.logsumexp(y, axis=-1), ops.prod(y, axis=-1), ops.cumsum(y, axis=1)]
    found += [ops.argmax(y, axis=-1), ops.any(y > 1.5, axis=1), ops.normalize(y, axis=-1)]
    found += [ops.matmul(flat, ops.transpose(flat, (0, 2, 1))), flat @ np.eye(32, 3)]
    found += [ops.einsum("abc,adc->abd", flat, flat), ops.softmax(y, axis=-1), y[:, 1:, ::2, 0]]
    found += [ops.concatenate([y, x], axis=-1), ops.stack([y, x], axis=1), y[..., -1], y[:, None]]
    found += [*ops.split(y, 2, axis=-1), *ops.split(y, [2, 3], axis=1), *ops.unstack(flat, axis=1)]
    found += [ops.tile(y, (1, 2, 1, 1)), ops.repeat(y, 2, axis=1), ops.flip(y, axis=2)]
    found += [
        ops.swapaxes(y, 1, -1),
        ops.moveaxis(y, 1, 3),
        ops.expand_dims(y, 1),
        ops.clip(y, 0, 1),
    ]
    found += [ops.squeeze(ops.expand_dims(y, 1), 1), ops.pad(y, ((0, 0), (1, 0), (0, 2), (0, 0)))]
    found += [ops.where(y > 0, y, x), ops.where(y < 0, 0.0, y), ops.cast(y > 0, "float32")]
    found += [ops.one_hot(ops.argmax(y, axis=-1), 4), ops.take(y, [0, 2], axis=1)]
    found += [ops.stop_gradient(y) * y, ops.logical_and(y > 0, x > 0), ops.ones_like(y)]
    return found


def activated(x: Any, m: Any) -> list[Any]:
    """All activations by their names, of rows and of the outputs of convolutions."""
    names = sorted(keras.src.activations.ALL_OBJECTS_DICT)
    image = m.Conv2D(4, 1)(x)
    found = [m.Activation(name)(image) for name in names if name not in ("threshold", "glu")]
    functions = [keras.ops.soft_shrink, keras.ops.hard_shrink, keras.ops.celu, keras.ops.glu]
    found += [function(image) for function in functions]
    return [*found, keras.ops.threshold(image, 0.3, -1.0)]


@pytest.mark.parametrize("make", [merged, activated, pytest.param(operated, marks=SLOW)])
def test_joins_operations_and_activations_are_those_of_keras(make: Any) -> None:
    x = keras.Input(IMAGE)
    outputs = make(x, keras.layers)
    assert_same(keras.Model(x, outputs), [f"{n} {y.name}" for n, y in enumerate(outputs)])


def attended(x: Any, m: Any) -> list[Any]:
    y = m.Dense(3)(x)
    several = m.MultiHeadAttention(2, 3, value_dim=2)
    scored = m.MultiHeadAttention(2, 3, dropout=0.3, use_bias=False, output_shape=5)
    attention = m.Attention(use_scale=True)
    return [
        several(x, x),
        several(x, x, use_causal_mask=True),
        m.MultiHeadAttention(1, 2)(y, x, y),
        *scored(x, y, return_attention_scores=True, use_causal_mask=True),
        attention([y, y]),
        m.Attention(score_mode="concat")([y, y], use_causal_mask=True),
        m.AdditiveAttention(use_scale=False)([y, y, y]),
    ]


def of_tokens(x: Any, m: Any) -> list[Any]:
    """Layers of embedded tokens, of which 0 is masked."""
    masked = m.Embedding(4, 3, mask_zero=True)
    y, z = masked(x), m.Embedding(4, 3)(x)
    query = m.MultiHeadAttention(2, 3)(masked(x), masked(x))  # Keras takes their masks away
    return [
        z,
        m.GlobalAveragePooling1D()(y),
        m.GlobalAveragePooling1D()(m.Dropout(0.3)(m.Dense(2)(m.LayerNormalization()(y)))),
        m.GlobalAveragePooling1D()(m.Concatenate()([y, z])),
        m.GlobalAveragePooling1D()(m.Concatenate(axis=1)([y, z])),
        m.GlobalAveragePooling1D()(m.Add()([y, y])),
        m.GlobalAveragePooling1D()(query),
        m.MultiHeadAttention(2, 3, dropout=0.1)(z, masked(x)),
        m.Attention()([y, y]),
    ]


def recurrent_of_tokens(x: Any, m: Any) -> list[Any]:
    y = m.Embedding(4, 3, mask_zero=True)(x)
    encoded, h, c = m.LSTM(3, return_state=True)(y)
    decoded = m.LSTM(3, return_sequences=True)(y, initial_state=[h, c])
    both = m.Bidirectional(m.GRU(2, return_sequences=True, return_state=True))(y)
    return [encoded, decoded, *both, m.SimpleRNN(2, go_backwards=True)(decoded)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "dtype", "make"),
    [
        (SEQUENCE, "float32", attended),
        ((6,), "int32", of_tokens),
        ((6,), "int32", recurrent_of_tokens),
    ],
)
def test_attention_and_masks_are_those_of_keras(shape: Any, dtype: str, make: Any) -> None:
    x = keras.Input(shape, dtype=dtype)
    outputs = make(x, keras.layers)
    assert_same(keras.Model(x, outputs), [f"{n} {y.name}" for n, y in enumerate(outputs)])


def pooled_by_loops(x: np.ndarray, size: int, stride: int) -> np.ndarray:
    """Means of windows, of the pixels that are there."""
    places = [-(-n // stride) for n in x.shape[1:3]]
    pads = [
        max((m - 1) * stride + size - n, 0) // 2 for m, n in zip(places, x.shape[1:3], strict=True)
    ]
    found = np.zeros((len(x), *places, x.shape[3]))
    for i, j in np.ndindex(*places):
        a, b = i * stride - pads[0], j * stride - pads[1]
        window = x[:, max(a, 0) : a + size, max(b, 0) : b + size]
        found[:, i, j] = window.mean(axis=(1, 2))
    return found


def test_average_pools_leave_padding_out() -> None:
    """As in Keras's other backends; on PyTorch it counts the last pixels of some windows twice."""
    x = keras.Input((7, 6, 2))
    cases = [(size, stride) for size in (2, 3, 4, 5) for stride in (1, 2, 3)]
    model = keras.Model(x, [keras.layers.AveragePooling2D(*case, "same")(x) for case in cases])
    rows = random_rows(model)
    found, _ = ours(network_of(model), rows)
    expected = ravelled([pooled_by_loops(rows[0], *case) for case in cases])
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
