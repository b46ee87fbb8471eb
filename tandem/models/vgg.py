"""VGG with 11, 16 and 19 layers: convolutions of 3x3 alone, then three fully connected layers.

Each without batch normalisation, as in the paper, and with it after each convolution.
"""

from typing import ClassVar

from pytensor.tensor.variable import TensorVariable

from tandem.layers import Builder, LayeredNetwork, max_pool, normal, relu
from tandem.models.options import Rate
from tandem.models.pictures import IMAGENET_STD


class VGG11(LayeredNetwork):
    """Configuration A of the paper, with torchvision's names of layers.

    ======  ==============================================  ================
    stage   layers in VGG11, VGG16 and VGG19                then
    ======  ==============================================  ================
    1       1, 2, 2 convolutions of 64 3x3, each with ReLU  max pool 2/2
    2       1, 2, 2 of 128                                  max pool 2/2
    3       2, 3, 4 of 256                                  max pool 2/2
    4       2, 3, 4 of 512                                  max pool 2/2
    5       2, 3, 4 of 512                                  max pool 2/2
    6, 7    fully connected, 4096                           ReLU, dropout
    8       fully connected, classes
    ======  ==============================================  ================

    Parameters
    ----------
    crop_size : int
        Side of the input, pixels; published for 224, at least 32.
    classes : int
    width : float
        Factor on numbers of filters and hidden units.
    dtype : str
    dropout : float
        Probability that a hidden unit is dropped.

    References
    ----------
    Simonyan, Zisserman 2015, "Very deep convolutional networks for large-scale image recognition",
    ICLR, arXiv 1409.1556.
    """

    stages: ClassVar[tuple[int, ...]] = (1, 1, 2, 2, 2)  # convolutions before each pooling
    normalises: ClassVar[bool] = False

    def __init__(
        self, crop_size: int, classes: int, width: float, dtype: str, dropout: Rate = 0.5
    ) -> None:
        self.dropout = dropout
        super().__init__(crop_size, classes, width, dtype)

    def build(self, net: Builder, x: TensorVariable) -> TensorVariable:
        number = 0  # torchvision counts ReLU and pooling as well
        for convolutions, filters in zip(self.stages, (64, 128, 256, 512, 512), strict=True):
            for _ in range(convolutions):
                name, std = f"features.{number}", None if number else IMAGENET_STD
                x = net.convolution(name, x, self.scaled(filters), 3, bias=0.0, input_std=std)
                if self.normalises:
                    x, number = net.batch_norm(f"features.{number + 1}", x), number + 1
                x, number = relu(x), number + 2
            x, number = max_pool(x, 2, 2), number + 1
        for number in (0, 3):
            hidden = self.scaled(4096)
            x = net.fully_connected(f"classifier.{number}", x, hidden, initial=normal(0.01))
            x = net.dropout(relu(x), self.dropout)
        return net.fully_connected("classifier.6", x, self.classes, initial=normal(0.01))


class VGG16(VGG11):
    """Configuration D of the paper."""

    stages = (2, 2, 3, 3, 3)


class VGG19(VGG11):
    """Configuration E of the paper."""

    stages = (2, 2, 4, 4, 4)


class VGG11BN(VGG11):
    """VGG-11 with batch normalisation."""

    normalises = True


class VGG16BN(VGG16):
    """VGG-16 with batch normalisation."""

    normalises = True


class VGG19BN(VGG19):
    """VGG-19 with batch normalisation."""

    normalises = True
