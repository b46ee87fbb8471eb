"""AlexNet as the original and as Caffe compute it, in NumPy and loops, on their own weights.

Nothing of the library is used here.
"""

from collections.abc import Mapping

import numpy as np

Arrays = Mapping[str, np.ndarray]


def theano_logits(files: Arrays, images: np.ndarray) -> np.ndarray:
    """The original's output (picture, class) before its softmax, with dropout off.

    `files` are by their names without the epoch, as ``W0_1``; `images` are (RGB, row, column,
    picture), the original's axes, minus the mean image.
    """
    x = images
    for layer, (stride, pad, groups, pool, norm) in enumerate(LAYERS):
        parts = []
        for part, mark in zip(np.split(x, groups), [""] if groups == 1 else "01", strict=True):
            w, b = (files[f"{letter}{mark}_{layer}"] for letter in "Wb")
            parts.append(true_convolution(part, w, b, stride, pad))
        x = np.maximum(np.concatenate(parts), 0)
        x = pooled(x) if pool else x
        x = normalized(x, alpha=1e-4, k=2.0) if norm else x
    x = x.transpose(3, 0, 1, 2).reshape(x.shape[3], -1)
    for layer in (5, 6):
        x = 0.5 * np.maximum(x @ files[f"W_{layer}"] + files[f"b_{layer}"], 0)
    return x @ files["W_7"] + files["b_7"]


def caffe_logits(
    blobs: Mapping[str, tuple[np.ndarray, np.ndarray]],
    images: np.ndarray,
    norm_before_pool: bool,
    alpha: float = 1e-4,
    k: float = 1.0,
) -> np.ndarray:
    """Caffe's fc8 in its test phase, (picture, class), for bvlc_alexnet or CaffeNet.

    `blobs` are weight and bias by the layer's name; `images` are (picture, BGR, row, column) minus
    the mean image.
    """
    x = images.transpose(1, 2, 3, 0)
    for number, (stride, pad, groups, pool, norm) in enumerate(LAYERS, 1):
        weight, bias = blobs[f"conv{number}"]
        parts = []
        for part, w, b in zip(*(np.split(a, groups) for a in (x, weight, bias)), strict=True):
            # Theano's convolution with flipped filters is a correlation.
            flipped = w.transpose(1, 2, 3, 0)[:, ::-1, ::-1]
            parts.append(true_convolution(part, flipped, b, stride, pad))
        x = np.maximum(np.concatenate(parts), 0)
        for step in ("norm", "pool") if norm_before_pool else ("pool", "norm"):
            if step == "norm" and norm:
                x = normalized(x, alpha / 5, k)
            if step == "pool" and pool:
                x = pooled(x)
    x = x.transpose(3, 0, 1, 2).reshape(x.shape[3], -1)
    for name in ("fc6", "fc7", "fc8"):
        weight, bias = blobs[name]
        x = x @ weight.T + bias
        x = x if name == "fc8" else np.maximum(x, 0)
    return x


# Stride, pad, groups, whether pooled, whether normalised.
LAYERS = (
    (4, 0, 1, True, True),
    (1, 2, 2, True, True),
    (1, 1, 1, False, False),
    (1, 1, 2, False, False),
    (1, 1, 2, True, False),
)


def true_convolution(
    x: np.ndarray, w: np.ndarray, b: np.ndarray, stride: int, pad: int
) -> np.ndarray:
    """What Theano computes: a convolution, which flips the filters.

    ``y[o, p, q] = b[o] + sum over c, i, j of x[c, p s + K - 1 - i, q s + K - 1 - j] w[c, i, j,
    o]``. What stands first in a filter meets what comes last in its window. x is (channel, row,
    column, picture) and w (channel, row, column, filter).
    """
    side, last = w.shape[1], w.shape[1] - 1
    x = np.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    count = (x.shape[1] - side) // stride + 1
    y = np.zeros((w.shape[3], count, count, x.shape[3])) + b[:, None, None, None]
    for p in range(count):
        for q in range(count):
            for i in range(side):
                for j in range(side):
                    pixel = x[:, p * stride + last - i, q * stride + last - j]
                    y[:, p, q] += w[:, i, j].T @ pixel
    return y


def pooled(x: np.ndarray) -> np.ndarray:
    """The maximum of each window of 3 x 3, two pixels apart; (channel, row, column, picture)."""
    count = (x.shape[1] - 3) // 2 + 1
    y = np.empty((x.shape[0], count, count, x.shape[3]))
    for p in range(count):
        for q in range(count):
            y[:, p, q] = x[:, 2 * p : 2 * p + 3, 2 * q : 2 * q + 3].max(axis=(1, 2))
    return y


def normalized(x: np.ndarray, alpha: float, k: float) -> np.ndarray:
    """Divide by (k + alpha times the squares of five channels) ** .75; channels first."""
    y = np.empty_like(x)
    for channel in range(len(x)):
        around = x[max(0, channel - 2) : channel + 3]
        y[channel] = x[channel] / (k + alpha * (around**2).sum(axis=0)) ** 0.75
    return y
