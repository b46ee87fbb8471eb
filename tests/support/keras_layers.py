"""Keras's layers and operations, with shapes of rows to try them on, and random weights."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.support.keras_models import keras

IMAGE, TALL, SEQUENCE, ROW = (7, 8, 4), (9, 6, 3), (6, 4), (5,)

Layers = Callable[[Any], list[Any]]

LAYERS: dict[str, tuple[tuple[int, ...], Layers]] = {
    "rows": (
        ROW,
        lambda m: [
            m.Dense(3, "tanh", kernel_regularizer="l2"),
            m.Dense(4, m.ELU(0.3), use_bias=False),
            m.BatchNormalization(momentum=0.9, epsilon=0.1),
            m.BatchNormalization(scale=False),
            m.LayerNormalization(),
            m.GroupNormalization(5),
            m.Rescaling(1 / 3, -0.5),
            m.Rescaling([1.0, 2.0, 3.0, 4.0, 5.0]),
            m.Normalization(mean=[1.0, 2.0, 3.0, 4.0, 5.0], variance=[4.0] * 5),
            m.Normalization(mean=1.0, variance=2.0, axis=None, invert=True),
            m.ReLU(),
            m.ReLU(1.2, 0.1, 0.4),
            m.ReLU(threshold=0.5),
            m.LeakyReLU(),
            m.ELU(0.7),
            m.PReLU(),
            m.Softmax(),
            m.Dropout(0.5),
            m.GaussianNoise(0.5),
            m.GaussianDropout(0.5),
            m.Flatten(),
            m.Reshape((5, 1)),
            m.RepeatVector(3),
            m.Identity(),
            m.EinsumDense("ab,bc->ac", output_shape=3, bias_axes="c"),
            m.UnitNormalization(),
            m.RMSNormalization(),
            m.Activation(keras.activations.gelu),
        ],
    ),
    "images": (
        IMAGE,
        lambda m: [
            m.Conv2D(6, 3, activation="relu"),
            m.Conv2D(6, (3, 5), padding="same"),
            m.Conv2D(2, (2, 4), padding="same", dilation_rate=2),
            m.Conv2D(2, 3, 2, "same", use_bias=False),
            m.Conv2D(6, 3, groups=2, activation="softmax"),
            m.DepthwiseConv2D(3, depth_multiplier=2),
            m.DepthwiseConv2D((2, 3), 2, "same", use_bias=False, activation="elu"),
            m.SeparableConv2D(5, 3, 2, "same", depth_multiplier=2),
            m.Conv2DTranspose(3, 3, 2, "same", activation="tanh"),
            m.Conv2DTranspose(3, 2, 3),
            m.Conv2DTranspose(2, (4, 3), (1, 2)),
            m.Conv2DTranspose(2, 4, 2, "same", use_bias=False),
            m.Conv2DTranspose(2, (3, 2), 2, "same", output_padding=(1, 0)),
            m.Conv2DTranspose(2, (2, 3), 3, output_padding=(0, 2)),
            m.MaxPooling2D(3, 2),
            m.MaxPooling2D((2, 4), 1, "same"),
            m.AveragePooling2D((2, 3), (1, 2)),
            m.AveragePooling2D(3, 1, "same"),
            m.GlobalAveragePooling2D(),
            m.GlobalAveragePooling2D(keepdims=True),
            m.GlobalMaxPooling2D(),
            m.ZeroPadding2D(((1, 2), (0, 3))),
            m.Cropping2D(((1, 2), (0, 3))),
            m.UpSampling2D((2, 3)),
            m.UpSampling2D(2, interpolation="bilinear"),
            m.Permute((3, 1, 2)),
            m.Reshape((-1, 2)),
            m.Flatten(),
        ],
    ),
    "more of images": (
        TALL,
        lambda m: [
            m.Conv2D(2, (1, 2), 3, "same"),
            m.Conv2D(2, (3, 2), (2, 3)),
            m.MaxPooling2D((2, 2), (1, 3), "same"),
            m.MaxPooling2D((10, 7), padding="same"),
            m.BatchNormalization(),
            m.BatchNormalization(axis=1, center=False),
            m.LayerNormalization(axis=[2, 3]),
            m.LayerNormalization(scale=False),
            m.GroupNormalization(3, axis=-1),
            m.GroupNormalization(3, axis=1, center=False),
            m.PReLU(shared_axes=[1, 2]),
            m.Softmax(axis=2),
            m.Dense(4),
            m.SpatialDropout2D(0.3),
            m.Dropout(0.3, noise_shape=(None, 1, 1, 1)),
            m.TimeDistributed(m.Conv1D(2, 3)),
            m.Resizing(4, 5, interpolation="nearest"),
        ],
    ),
    "channels first": (
        (4, 7, 8),
        lambda m: [
            m.Conv2D(6, 3, data_format="channels_first"),
            m.MaxPooling2D(2, data_format="channels_first"),
            m.GlobalAveragePooling2D("channels_first"),
            m.Flatten("channels_first"),
            m.ZeroPadding2D(1, data_format="channels_first"),
        ],
    ),
    "sequences": (
        SEQUENCE,
        lambda m: [
            m.Conv1D(3, 2, 2, "same"),
            m.Conv1D(3, 3, padding="causal", dilation_rate=2),
            m.Conv1D(4, 2, groups=2),
            m.DepthwiseConv1D(3, depth_multiplier=2),
            m.SeparableConv1D(3, 3),
            m.Conv1DTranspose(3, 3, 2, "same", output_padding=0),
            m.MaxPooling1D(2),
            m.AveragePooling1D(3, 2),
            m.GlobalAveragePooling1D(),
            m.GlobalMaxPooling1D(keepdims=True),
            m.ZeroPadding1D((1, 2)),
            m.Cropping1D((1, 2)),
            m.UpSampling1D(2),
            m.BatchNormalization(),
            m.LayerNormalization(epsilon=0.1),
            m.Dense(3, "relu"),
            m.EinsumDense("abc,cd->adb", output_shape=(3, 6), bias_axes="d"),
            m.EinsumDense("abc,cde->abde", output_shape=(6, 2, 3), bias_axes="d"),
            m.SpatialDropout1D(0.4),
            m.Dropout(0.4),
            m.TimeDistributed(m.Dense(2)),
            m.TimeDistributed(keras.Sequential([m.Dense(2), m.Dropout(0.5), m.Dense(3)])),
            m.Masking(1.5),
            m.Normalization(1, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]),
            m.Normalization((1, 2), [0.0, 1.0, 2.0, 3.0], [4.0] * 4, invert=True),
        ],
    ),
    "recurrent": (
        SEQUENCE,
        lambda m: [
            m.SimpleRNN(3, use_bias=False),
            m.LSTM(3, dropout=0.3, recurrent_dropout=0.2),
            m.LSTM(3, return_sequences=True, go_backwards=True, activation="relu"),
            m.GRU(3),
            m.GRU(3, use_bias=False, return_sequences=True),
            m.LSTM(3, use_bias=False),
            m.GRU(3, reset_after=False, return_sequences=True),
            m.RNN([m.LSTMCell(2), m.GRUCell(3)]),
            m.Bidirectional(m.LSTM(2)),
            m.Bidirectional(m.GRU(2, return_sequences=True), merge_mode="ave"),
        ],
    ),
}


def randomize(model: Any) -> None:
    """Draw all weights, so that none is 0 or 1; variances are positive."""
    rng = np.random.default_rng(3)
    for variable in model.weights:
        if "float" in variable.dtype:
            low = 0.5 if "variance" in variable.path else -0.7
            variable.assign(rng.uniform(low, 0.9, variable.shape))


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
    found += [one(y) for one in (ops.arcsinh, ops.exp2, ops.round, ops.cbrt, ops.tril)]
    found += [ops.arctanh(ops.tanh(y) * 0.5), ops.arccosh(positive + 1), ops.hypot(y, positive)]
    found += [ops.logaddexp(x, y), ops.logical_xor(y > 0, x > 0), ops.triu(y, 1)]
    found += [ops.norm(y, axis=-1), ops.hstack([x, y])]
    found += [ops.norm(y, 1, axis=2, keepdims=True), ops.norm(y, "fro", axis=(1, 2))]
    found += [ops.average(y, 1), ops.average(y, 3, weights=np.arange(4.0)), ops.roll(y, 2, axis=1)]
    found += [ops.full_like(y, 0.5) * y, ops.average(y, -1, weights=positive)]
    found += [ops.stop_gradient(y) * y, ops.logical_and(y > 0, x > 0), ops.ones_like(y)]
    return found


def activated(x: Any, m: Any, without: tuple[str, ...] = ()) -> list[Any]:
    """All activations by their names, of rows and of the outputs of convolutions."""
    names = sorted({*keras.src.activations.ALL_OBJECTS_DICT} - {"threshold", "glu", *without})
    image = m.Conv2D(4, 1)(x)
    found = [m.Activation(name)(image) for name in names]
    functions = [keras.ops.soft_shrink, keras.ops.hard_shrink, keras.ops.celu, keras.ops.glu]
    found += [function(image) for function in functions]
    return [*found, keras.ops.threshold(image, 0.3, -1.0)]


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
