"""LeNet: how another network than AlexNet is written for the same programs.

python train.py --network examples.le_net:LeNet --crop_size 28 --data_folder data/small
"""

from collections.abc import Iterator

from pytensor.tensor.variable import TensorVariable

from tandem import layers
from tandem.layers import Network, Parameter, Training

FILTER, POOL = 5, 2  # pixels; the filters' stride is 1, the windows' their size
CONTRAST = 64.0  # about what pictures of 0 to 255 minus their mean vary by


class LeNet(Network):
    """Two convolutions with ReLU and max pooling, then two fully connected layers.

    Sizes are those of the LeNet in Caffe's examples: 20 and 50 filters, 500 units.

    Parameters
    ----------
    crop_size : int
        Side of the input, pixels.
    classes : int
        Number of classes.
    width : float
        Factor on the numbers of filters and hidden units.
    dtype : str
        float32 or float64.

    Raises
    ------
    ValueError
        The input is too small for two convolutions and poolings.

    References
    ----------
    LeCun, Bottou, Bengio, Haffner 1998, "Gradient-based learning applied to document recognition",
    Proceedings of the IEEE 86 (11).
    """

    def __init__(self, crop_size: int, classes: int, width: float, dtype: str) -> None:
        super().__init__(crop_size, classes, dtype)
        filters1, filters2, units = (max(1, round(n * width)) for n in (20, 50, 500))
        side = _pooled(_pooled(crop_size))
        if side < 1:
            raise ValueError(f"LeNet: at crop_size {crop_size} nothing is left; it needs 16")
        self.features = filters2 * side**2
        self.parameters.add(
            *_layer("conv1", (filters1, 3, FILTER, FILTER), 3 * FILTER**2, CONTRAST),
            *_layer("conv2", (filters2, filters1, FILTER, FILTER), filters1 * FILTER**2),
            *_layer("fc3", (self.features, units), self.features),
            *_layer("fc4", (units, classes), units),
        )

    def logits(self, images: TensorVariable, training: Training | None) -> TensorVariable:
        # There is no dropout, so its keys are not used.
        x = images
        for name in ("conv1", "conv2"):
            x = layers.relu(layers.convolution(x, *self.parameters.of(name)))
            x = layers.max_pool(x, POOL, POOL)
        x = layers.flatten(x, self.features)
        x = layers.relu(layers.fully_connected(x, *self.parameters.of("fc3")))
        return layers.fully_connected(x, *self.parameters.of("fc4"))


def _layer(
    name: str, shape: tuple[int, ...], inputs: int, contrast: float = 1.0
) -> Iterator[Parameter]:
    """Weight and bias. Where inputs vary by `contrast`, outputs vary by about a half."""
    units = shape[0] if len(shape) == 4 else shape[-1]
    yield layers.weight(name, shape, 0.5 / contrast / inputs**0.5)
    yield layers.bias(name, units)


def _pooled(side: int) -> int:
    """Rows that a convolution and its pooling leave of so many."""
    return (side - FILTER + 1) // POOL
