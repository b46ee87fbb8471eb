"""A network of one layer over rows of any shape, and what a run of it computes, in NumPy."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytensor.tensor as pt

from tandem import layers
from tandem.layers import Network, Training

NETWORK = f"{__name__}:RowsNetwork"
LARGEST = f"{__name__}:largest_difference"


class RowsNetwork(Network):
    """A fully connected layer over rows whose shape, channel first, is the option `rows`."""

    def __init__(
        self,
        crop_size: int | None,
        classes: int,
        width: float,
        dtype: str,
        rows: Sequence[int] = (3, 4, 4),
    ) -> None:
        super().__init__(crop_size, classes, dtype)
        self.shapes["input"] = tuple(rows)
        self._inputs = math.prod(rows)
        self.parameters.add(
            layers.weight("fc1", (self._inputs, classes), std=0.1), layers.bias("fc1", classes)
        )

    def logits(self, images: Any, training: Training | None) -> Any:
        self.check_images(images)
        rows = images.reshape((images.shape[0], self._inputs))
        return layers.fully_connected(rows, *self.parameters.of("fc1"))


def largest_difference(targets: Any, predictions: Any) -> Any:
    """A metric of a user's own."""
    return pt.max(abs(targets - predictions), axis=1)


def softmax(outputs: np.ndarray) -> np.ndarray:
    """Probabilities of the classes, (row, class)."""
    powers = np.exp(outputs - outputs.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def inputs_of(x: np.ndarray) -> np.ndarray:
    """Rows as the network's layer gets them, float64 (n, inputs)."""
    moved = x.transpose(0, 3, 1, 2) if x.ndim == 4 else x
    return np.ascontiguousarray(moved).reshape(len(x), -1).astype(float)


def trained(
    weights: dict[str, np.ndarray], x: np.ndarray, targets: np.ndarray, loss: str, **run: Any
) -> dict[str, np.ndarray]:
    """The weights after plain gradient descent over the rows in their order.

    `targets` are rows, (n, classes); `loss` is cross_entropy or mse; `run` has the rate, the number
    of rows of a step, and of epochs.
    """
    w, b = weights["fc1.weight"].astype(float), weights["fc1.bias"].astype(float)
    rows, targets = inputs_of(x), targets.reshape(len(x), -1).astype(float)
    for _ in range(run["epochs"]):
        for start in range(0, len(rows), run["batch"]):
            part, wanted = rows[start : start + run["batch"]], targets[start : start + run["batch"]]
            outputs = part @ w + b
            if loss == "mse":
                slope = 2 * (outputs - wanted) / wanted.shape[1]
            else:
                slope = softmax(outputs) * wanted.sum(axis=1, keepdims=True) - wanted
            slope /= len(part)
            w, b = w - run["rate"] * part.T @ slope, b - run["rate"] * slope.sum(axis=0)
    return {"fc1.weight": w, "fc1.bias": b}
