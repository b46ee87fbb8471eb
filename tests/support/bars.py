"""Small pictures of bars, and a model that learns their direction."""

import numpy as np

from tandem import nn


def bars(count: int, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Grey pictures, uint8 (n, 8, 8), of a noisy bar, and its direction: 0 across, 1 down."""
    rng = np.random.default_rng(seed)
    pictures = rng.integers(0, 120, (count, 8, 8), np.uint8)
    labels = rng.integers(0, 2, count)
    for picture, label, place in zip(pictures, labels, rng.integers(0, 8, count), strict=True):
        (picture if label == 0 else picture.T)[place] = 250
    return pictures, labels


def small_model(norm: bool = False, **options: int) -> nn.Sequential:
    """A convolution, dropout and a dense layer, with batch normalisation if asked for."""
    middle = [nn.layers.BatchNormalization()] if norm else []
    return nn.Sequential(
        [
            nn.layers.Input((8, 8, 1)),
            nn.layers.Rescaling(1 / 255),
            nn.layers.Conv2D(4, 3, activation="relu"),
            *middle,
            nn.layers.MaxPooling2D(2),
            nn.layers.Flatten(),
            nn.layers.Dropout(0.1),
            nn.layers.Dense(2, activation="softmax"),
        ],
        **options,
    )
