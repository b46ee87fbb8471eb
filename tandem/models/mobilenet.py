"""MobileNet, version 2: depthwise convolutions between convolutions of 1x1."""

from pytensor.tensor.variable import TensorVariable

from tandem.layers import (
    Builder,
    LayeredNetwork,
    global_average_pool,
    normal,
    relu6,
)
from tandem.models.options import Rate
from tandem.models.pictures import IMAGENET_STD

# Expansion, filters, blocks, and the stride of the first of them. Table 2 of the paper.
STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
DIVISOR = 8  # of all numbers of filters


class MobileNetV2(LayeredNetwork):
    """MobileNet V2, with torchvision's names of parameters.

    A block expands its input by a convolution of 1x1, filters each channel by one of 3x3, and
    projects by one of 1x1 without ReLU; where shapes agree, its input is added.

    Parameters
    ----------
    crop_size : int
        Side of the input, pixels; published for 224.
    classes : int
    width : float
        Factor on numbers of filters, which are rounded to multiples of 8; that of the last
        convolution, 1280, only grows.
    dtype : str
    dropout : float
        Before the output.

    References
    ----------
    Sandler et al. 2018, "MobileNetV2: inverted residuals and linear bottlenecks", CVPR, arXiv
    1801.04381
    """

    def __init__(
        self, crop_size: int, classes: int, width: float, dtype: str, dropout: Rate = 0.2
    ) -> None:
        self.dropout = dropout
        super().__init__(crop_size, classes, width, dtype)

    def scaled(self, units: int) -> int:
        """A number of filters times `width`: a multiple of 8, and not below 90 % of that."""
        wanted = units * self.width
        filters = max(DIVISOR, int(wanted + DIVISOR / 2) // DIVISOR * DIVISOR)
        return filters + DIVISOR if filters < 0.9 * wanted else filters

    def build(self, net: Builder, x: TensorVariable) -> TensorVariable:
        x = net.convolution("features.0.0", x, self.scaled(32), 3, 2, input_std=IMAGENET_STD)
        x = relu6(net.batch_norm("features.0.1", x))
        number = 1
        for expansion, filters, blocks, first in STAGES:
            for block in range(blocks):
                stride = 1 if block else first
                name = f"features.{number}.conv"
                x = _block(net, name, x, self.scaled(filters), expansion, stride)
                number += 1
        last = 1280 if self.width <= 1 else self.scaled(1280)
        x = net.convolution(f"features.{number}.0", x, last, 1)
        x = relu6(net.batch_norm(f"features.{number}.1", x))
        x = net.dropout(global_average_pool(x), self.dropout)
        return net.fully_connected("classifier.1", x, self.classes, initial=normal(0.01))


def _block(
    net: Builder, name: str, x: TensorVariable, filters: int, expansion: int, stride: int
) -> TensorVariable:
    """An inverted residual."""
    channels, y, number = x.type.shape[1], x, 0
    if expansion != 1:
        y = net.convolution(f"{name}.0.0", y, channels * expansion, 1)
        y, number = relu6(net.batch_norm(f"{name}.0.1", y)), 1
    hidden = channels * expansion
    y = net.convolution(f"{name}.{number}.0", y, hidden, 3, stride, groups=hidden)
    y = relu6(net.batch_norm(f"{name}.{number}.1", y))
    y = net.convolution(f"{name}.{number + 1}", y, filters, 1)
    y = net.batch_norm(f"{name}.{number + 2}", y)
    return x + y if stride == 1 and channels == filters else y
