"""Keras's layers, with shapes of rows to try them on, and random weights for them."""

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
            m.Dense(4, use_bias=False),
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
            m.Conv1DTranspose(3, 3, 2, "same"),
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
            m.SpatialDropout1D(0.4),
            m.Dropout(0.4),
            m.TimeDistributed(m.Dense(2)),
            m.TimeDistributed(keras.Sequential([m.Dense(2), m.Dropout(0.5), m.Dense(3)])),
            m.Masking(1.5),
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
