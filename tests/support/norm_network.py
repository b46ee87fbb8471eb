"""A small network with batch normalisation of both kinds, and auxiliary heads if asked for."""

from typing import Any

import pytensor.tensor as pt

from tandem import layers
from tandem.layers import Network, Training

NETWORK = f"{__name__}:NormNetwork"
FILTERS, UNITS, CROP = 4, 8, 12


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
            *layers.norm("conv1.norm", FILTERS),
            layers.weight("fc1", (self._units, UNITS), std=0.1),
            *layers.norm("fc1.norm", UNITS, keep=0.75),
            layers.weight("fc2", (UNITS, classes), std=0.3),
            layers.bias("fc2", classes),
        )
        if auxiliary:
            self.parameters.add(
                layers.weight("head", (self._units, classes), std=0.1), layers.bias("head", classes)
            )

    def logits(self, images: Any, training: Training | None) -> Any:
        x = layers.convolution(images, self.parameters["conv1.weight"], stride=2)
        x = layers.relu(layers.batch_norm(x, self.parameters, "conv1.norm", training))
        x = layers.flatten(x, self._units)
        if self._auxiliary and training is not None:
            outputs = layers.fully_connected(x, *self.parameters.of("head"))
            training.auxiliary.append((outputs, self._auxiliary))
        x = pt.dot(x, self.parameters["fc1.weight"])
        x = layers.relu(layers.batch_norm(x, self.parameters, "fc1.norm", training))
        return layers.fully_connected(x, *self.parameters.of("fc2"))


class Plain(Network):
    """A fully connected layer without any normalisation."""

    def __init__(self, crop_size: int, classes: int, width: float, dtype: str) -> None:
        super().__init__(crop_size, classes, dtype)
        self.parameters.add(
            layers.weight("fc1", (3 * crop_size**2, classes), std=0.001),
            layers.bias("fc1", classes),
        )

    def logits(self, images: Any, training: Training | None) -> Any:
        x = layers.flatten(images, 3 * self.crop_size**2)
        return layers.fully_connected(x, *self.parameters.of("fc1"))
