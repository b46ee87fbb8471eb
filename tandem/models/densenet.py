"""Densely connected networks: 121 to 201 layers for ImageNet, and 100 for CIFAR."""

from typing import ClassVar

from pytensor.tensor.variable import TensorVariable

from tandem.layers import (
    Builder,
    LayeredNetwork,
    average_pool,
    concatenate,
    global_average_pool,
    he_in,
    max_pool,
    relu,
)
from tandem.models.options import Rate
from tandem.models.pictures import IMAGENET_STD


class DenseNet121(LayeredNetwork):
    """DenseNet-BC of 121 layers, with torchvision's names of parameters.

    A layer of a dense block is a convolution of 1x1 and one of 3x3, each after normalisation and
    ReLU; its `growth` channels are appended to its input. Between blocks a convolution of 1x1
    halves the channels and average pooling the side.

    Parameters
    ----------
    crop_size : int
        Side of the input, pixels; published for 224.
    classes : int
    width : float
        Factor on the growth, and on the filters of the first layer.
    dtype : str
    dropout : float
        Probability that a unit after a layer's last convolution is dropped.

    References
    ----------
    Huang, Liu, van der Maaten, Weinberger 2017, "Densely connected convolutional networks", CVPR,
    arXiv 1608.06993
    """

    blocks: ClassVar[tuple[int, ...]] = (6, 12, 24, 16)  # layers of each dense block
    growth: ClassVar[int] = 32

    def __init__(
        self, crop_size: int, classes: int, width: float, dtype: str, dropout: Rate = 0.0
    ) -> None:
        self.dropout = dropout
        super().__init__(crop_size, classes, width, dtype)

    def build(self, net: Builder, x: TensorVariable) -> TensorVariable:
        x = self.first(net, x)
        for number, count in enumerate(self.blocks, 1):
            for layer in range(1, count + 1):
                y = self.layer(net, f"features.denseblock{number}.denselayer{layer}", x)
                x = concatenate([x, y])
            if number < len(self.blocks):
                x = _transition(net, f"features.transition{number}", x)
        x = relu(net.batch_norm(f"features.norm{len(self.blocks) + 1}", x))
        return net.fully_connected("classifier", global_average_pool(x), self.classes)

    def first(self, net: Builder, x: TensorVariable) -> TensorVariable:
        """The layers before the first dense block."""
        filters = self.scaled(2 * self.growth)
        x = net.convolution(
            "features.conv0", x, filters, 7, 2, initial=he_in, input_std=IMAGENET_STD
        )
        return max_pool(relu(net.batch_norm("features.norm0", x)), 3, 2, pad=1)

    def layer(self, net: Builder, name: str, x: TensorVariable) -> TensorVariable:
        """The new channels of one layer of a dense block."""
        growth = self.scaled(self.growth)
        x = relu(net.batch_norm(f"{name}.norm1", x))
        x = net.convolution(f"{name}.conv1", x, 4 * growth, 1, initial=he_in)
        x = relu(net.batch_norm(f"{name}.norm2", x))
        x = net.convolution(f"{name}.conv2", x, growth, 3, initial=he_in)
        return net.dropout(x, self.dropout) if self.dropout else x


class DenseNet161(DenseNet121):
    """DenseNet-BC of 161 layers and growth 48."""

    blocks = (6, 12, 36, 24)
    growth = 48


class DenseNet169(DenseNet121):
    """DenseNet-BC of 169 layers."""

    blocks = (6, 12, 32, 32)


class DenseNet201(DenseNet121):
    """DenseNet-BC of 201 layers."""

    blocks = (6, 12, 48, 32)


class DenseNet100(DenseNet121):
    """DenseNet-BC of 100 layers and growth 12, published for 32 pixels, those of CIFAR."""

    blocks = (16, 16, 16)
    growth = 12

    def first(self, net: Builder, x: TensorVariable) -> TensorVariable:
        """A convolution of 3x3."""
        filters = self.scaled(2 * self.growth)
        return net.convolution("features.conv0", x, filters, 3, initial=he_in)


def _transition(net: Builder, name: str, x: TensorVariable) -> TensorVariable:
    channels = x.type.shape[1] // 2
    x = relu(net.batch_norm(f"{name}.norm", x))
    x = net.convolution(f"{name}.conv", x, channels, 1, initial=he_in)
    return average_pool(x, 2, 2)
