"""Residual networks: 18 to 152 layers for ImageNet, and 6n + 2 for CIFAR."""

from typing import ClassVar, Literal, get_args

import pytensor.tensor as pt
from pytensor.tensor.variable import TensorVariable

from tandem.layers import (
    Builder,
    LayeredNetwork,
    global_average_pool,
    max_pool,
    relu,
)
from tandem.models.pictures import IMAGENET_STD

Shortcut = Literal["identity", "projection"]


class ResNet50(LayeredNetwork):
    """ResNet-50 in its version 1.5, with torchvision's names of parameters.

    A convolution of 7x7 with stride 2, max pooling, and four stages of 3, 4, 6 and 3 bottlenecks:
    convolutions of 1x1, 3x3 and 1x1, each with batch normalisation, beside a shortcut. The first of
    a stage after the first has stride 2, in version 1.5 in its 3x3; its shortcut is a projection.

    Parameters
    ----------
    crop_size : int
        Side of the input, pixels; published for 224.
    classes : int
    width : float
        Factor on numbers of filters.
    dtype : str
    zero_init : bool
        Whether the last normalisation of each block begins with scale 0, so that a block begins as
        the identity (Goyal et al. 2017, arXiv 1706.02677, section 5.1).

    References
    ----------
    He, Zhang, Ren, Sun 2016, "Deep residual learning for image recognition", CVPR, arXiv 1512.03385
    """

    blocks: ClassVar[tuple[int, ...]] = (3, 4, 6, 3)  # of each stage
    expansion: ClassVar[int] = 4  # outputs of a block, as a multiple of its filters

    def __init__(
        self, crop_size: int, classes: int, width: float, dtype: str, zero_init: bool = False
    ) -> None:
        self.last_scale = 0.0 if zero_init else 1.0
        super().__init__(crop_size, classes, width, dtype)

    def build(self, net: Builder, x: TensorVariable) -> TensorVariable:
        x = net.convolution("conv1", x, self.scaled(64), 7, 2, input_std=IMAGENET_STD)
        x = max_pool(relu(net.batch_norm("bn1", x)), 3, 2, pad=1)
        for stage, blocks in enumerate(self.blocks):
            for block in range(blocks):
                stride = 2 if stage and not block else 1
                x = self.block(net, f"layer{stage + 1}.{block}", x, 64 * 2**stage, stride)
        return net.fully_connected("fc", global_average_pool(x), self.classes)

    def block(
        self, net: Builder, name: str, x: TensorVariable, filters: int, stride: int
    ) -> TensorVariable:
        """A bottleneck: 1x1, 3x3 and 1x1 beside the shortcut."""
        filters = self.scaled(filters)
        y = net.convolution(f"{name}.conv1", x, filters, 1)
        y = relu(net.batch_norm(f"{name}.bn1", y))
        y = net.convolution(f"{name}.conv2", y, filters, 3, stride)
        y = relu(net.batch_norm(f"{name}.bn2", y))
        y = net.convolution(f"{name}.conv3", y, filters * self.expansion, 1)
        y = net.batch_norm(f"{name}.bn3", y, self.last_scale)
        return relu(y + _projected(net, name, x, y, stride))


class ResNet101(ResNet50):
    """ResNet-101: stages of 3, 4, 23 and 3 bottlenecks."""

    blocks = (3, 4, 23, 3)


class ResNet152(ResNet50):
    """ResNet-152: stages of 3, 8, 36 and 3 bottlenecks."""

    blocks = (3, 8, 36, 3)


class ResNet18(ResNet50):
    """ResNet-18: four stages of two blocks of two convolutions of 3x3."""

    blocks = (2, 2, 2, 2)
    expansion = 1

    def block(
        self, net: Builder, name: str, x: TensorVariable, filters: int, stride: int
    ) -> TensorVariable:
        """Two convolutions of 3x3 beside the shortcut."""
        y = _two_convolutions(net, name, x, self.scaled(filters), stride, self.last_scale)
        return relu(y + _projected(net, name, x, y, stride))


class ResNet34(ResNet18):
    """ResNet-34: stages of 3, 4, 6 and 3 blocks of two convolutions of 3x3."""

    blocks = (3, 4, 6, 3)


class ResNet20(LayeredNetwork):
    """The paper's network of 20 layers for CIFAR; 32, 44, 56, 110 and 1202 layers are subclasses.

    A convolution of 3x3, three stages of n blocks of two convolutions of 3x3, of 16, 32 and 64
    filters, with stride 2 between stages, and the average of all pixels: 6n + 2 layers.

    Parameters
    ----------
    crop_size : int
        Side of the input, pixels; published for 32.
    classes : int
    width : float
        Factor on numbers of filters.
    dtype : str
    shortcut : {"identity", "projection"}
        Where the shape changes: the paper's option A, every second pixel and channels of zeros, or
        its option B, a convolution of 1x1.
    zero_init : bool
        Whether the last normalisation of each block begins with scale 0.

    References
    ----------
    He, Zhang, Ren, Sun 2016, "Deep residual learning for image recognition", section 4.2
    """

    blocks: ClassVar[int] = 3  # of each stage, n

    def __init__(
        self,
        crop_size: int,
        classes: int,
        width: float,
        dtype: str,
        shortcut: Shortcut = "identity",
        zero_init: bool = False,
    ) -> None:
        if shortcut not in get_args(Shortcut):
            raise ValueError(f"shortcut is {shortcut!r}, expected identity or projection")
        self.shortcut, self.last_scale = shortcut, 0.0 if zero_init else 1.0
        super().__init__(crop_size, classes, width, dtype)

    def build(self, net: Builder, x: TensorVariable) -> TensorVariable:
        x = net.convolution("conv1", x, self.scaled(16), 3)
        x = relu(net.batch_norm("bn1", x))
        for stage in range(3):
            for block in range(self.blocks):
                stride = 2 if stage and not block else 1
                x = self.block(net, f"layer{stage + 1}.{block}", x, 16 * 2**stage, stride)
        return net.fully_connected("fc", global_average_pool(x), self.classes)

    def block(
        self, net: Builder, name: str, x: TensorVariable, filters: int, stride: int
    ) -> TensorVariable:
        """Two convolutions of 3x3 beside the shortcut."""
        y = _two_convolutions(net, name, x, self.scaled(filters), stride, self.last_scale)
        if self.shortcut == "projection":
            return relu(y + _projected(net, name, x, y, stride))
        return relu(_with_identity(y, x, stride))


class ResNet32(ResNet20):
    """The network of 32 layers for CIFAR."""

    blocks = 5


class ResNet44(ResNet20):
    """The network of 44 layers for CIFAR."""

    blocks = 7


class ResNet56(ResNet20):
    """The network of 56 layers for CIFAR."""

    blocks = 9


class ResNet110(ResNet20):
    """The network of 110 layers for CIFAR."""

    blocks = 18


class ResNet1202(ResNet20):
    """The network of 1202 layers for CIFAR."""

    blocks = 200


def _two_convolutions(
    net: Builder, block: str, x: TensorVariable, filters: int, stride: int, last_scale: float
) -> TensorVariable:
    """The residual of a basic block."""
    x = net.convolution(f"{block}.conv1", x, filters, 3, stride)
    x = relu(net.batch_norm(f"{block}.bn1", x))
    x = net.convolution(f"{block}.conv2", x, filters, 3)
    return net.batch_norm(f"{block}.bn2", x, last_scale)


def _projected(
    net: Builder, block: str, x: TensorVariable, y: TensorVariable, stride: int
) -> TensorVariable:
    """A block's input in the shape of its output `y`: by a convolution where they differ."""
    filters = y.type.shape[1]
    if stride == 1 and x.type.shape[1] == filters:
        return x
    x = net.convolution(f"{block}.downsample.0", x, filters, 1, stride)
    return net.batch_norm(f"{block}.downsample.1", x)


def _with_identity(y: TensorVariable, x: TensorVariable, stride: int) -> TensorVariable:
    """Add a block's input to `y`: every `stride`-th pixel, to the channels in the middle."""
    channels, filters = x.type.shape[1], y.type.shape[1]
    if stride == 1 and channels == filters:
        return y + x
    first = (filters - channels) // 2
    return pt.inc_subtensor(y[:, first : first + channels], x[:, :, ::stride, ::stride])
