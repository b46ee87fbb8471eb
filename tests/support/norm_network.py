"""A small network with batch normalisation of both kinds, and auxiliary heads if asked for."""

from typing import Any

import numpy as np
import pytensor.tensor as pt

from tandem import layers
from tandem.layers import Network, Training
from tandem.layers.parameter import norm

FILTERS, UNITS, CROP = 4, 8, 12
EPSILON = 1e-5


class NormNetwork(Network):
    """Convolution, fully connected layer and outputs, with batch normalisation between them.

    With `auxiliary`, a head of its own on the convolution has that weight in what is trained.
    """

    def __init__(
        self, crop_size: int, classes: int, width: float, dtype: str, auxiliary: float = 0.0
    ) -> None:
        super().__init__(crop_size, classes, dtype)
        self._auxiliary, self._units = auxiliary, FILTERS * ((crop_size - 3) // 2 + 1) ** 2
        self.parameters.add(
            layers.weight("conv1", (FILTERS, 3, 3, 3), std=0.01),
            *norm("conv1.norm", FILTERS),
            layers.weight("fc1", (self._units, UNITS), std=0.1),
            *norm("fc1.norm", UNITS, keep=0.75),
            layers.weight("fc2", (UNITS, classes), std=0.3),
            layers.bias("fc2", classes),
        )
        if auxiliary:
            self.parameters.add(
                layers.weight("head", (self._units, classes), std=0.1), layers.bias("head", classes)
            )

    def logits(self, images: Any, training: Training | None) -> Any:
        none = pt.zeros(FILTERS, dtype=self.dtype)
        x = layers.convolution(images, self.parameters["conv1.weight"], none, stride=2)
        x = layers.relu(batch_norm(x, self.parameters, "conv1.norm", training))
        x = layers.flatten(x, self._units)
        if self._auxiliary and training is not None:
            outputs = layers.fully_connected(x, *self.parameters.of("head"))
            training.auxiliary.append((outputs, self._auxiliary))
        x = pt.dot(x, self.parameters["fc1.weight"])
        x = layers.relu(batch_norm(x, self.parameters, "fc1.norm", training))
        return layers.fully_connected(x, *self.parameters.of("fc2"))


def batch_norm(x: Any, parameters: Any, layer: str, training: Training | None) -> Any:
    """Batch normalisation of groups of valid rows, in plain PyTensor."""
    scale, shift, mean, variance = (
        parameters[f"{layer}.{part}"] for part in ("weight", "bias", "running_mean", "running_var")
    )

    def channels(values: Any) -> Any:
        return values.reshape((-1, values.shape[-1], *(1,) * (x.ndim - 2)))

    if training is None or training.is_frozen(layer):
        normal = (x - channels(mean)) / pt.sqrt(channels(variance) + EPSILON)
        return normal * channels(scale) + channels(shift)
    rows, axes = training.rows, (1, *range(3, x.ndim + 1))
    groups = x.reshape((-1, rows, *x.type.shape[1:]))
    valid = x.shape[0] if training.valid is None else training.valid
    counts = pt.lt(pt.arange(x.shape[0]), valid).astype(x.dtype).reshape((-1, rows))
    mask = counts.reshape((-1, rows, *(1,) * (x.ndim - 1)))
    each = counts.sum(axis=1)
    elements = (each * np.prod(x.type.shape[2:], dtype=x.dtype)).reshape((-1, 1))
    means = (groups * mask).sum(axis=axes) / pt.maximum(elements, 1)
    spread = lambda values: values.reshape((-1, 1, values.shape[1], *(1,) * (x.ndim - 2)))  # noqa: E731
    centred = groups - spread(means)
    biased = (centred**2 * mask).sum(axis=axes) / pt.maximum(elements, 1)
    unbiased = biased * elements / pt.maximum(elements - 1, 1)
    parts = (each / pt.maximum(each.sum(), 1)).reshape((-1, 1))
    training.statistics[f"{layer}.running_mean"] = (means * parts).sum(axis=0)
    training.statistics[f"{layer}.running_var"] = (unbiased * parts).sum(axis=0)
    normal = (centred / pt.sqrt(spread(biased) + EPSILON)).reshape(x.shape)
    return normal * channels(scale) + channels(shift)
