"""GoogLeNet as published by BVLC for Caffe, and with batch normalisation as in torchvision."""

import numpy as np
import pytensor.tensor as pt
from pytensor.tensor.variable import TensorVariable

from tandem.layers import (
    Builder,
    LayeredNetwork,
    average_pool,
    concatenate,
    global_average_pool,
    lecun_uniform,
    max_pool,
    relu,
    response_norm,
    truncated,
)
from tandem.models.options import Rate

# Filters of each module: 1x1; 3x3 and the 1x1 before it; 5x5 and the 1x1 before it; 1x1 after the
# pooling. Table 1 of the paper.
INCEPTIONS = {
    "3a": (64, 96, 128, 16, 32, 32),
    "3b": (128, 128, 192, 32, 96, 64),
    "4a": (192, 96, 208, 16, 48, 64),
    "4b": (160, 112, 224, 24, 64, 64),
    "4c": (128, 128, 256, 24, 64, 64),
    "4d": (112, 144, 288, 32, 64, 64),
    "4e": (256, 160, 320, 32, 128, 128),
    "5a": (256, 160, 320, 32, 128, 128),
    "5b": (384, 192, 384, 48, 128, 128),
}
POOLED = ("3b", "4e")  # modules before max pooling
HEADS = ("4a", "4d")  # modules before auxiliary heads
WEIGHT = 0.3  # of an auxiliary head's cost


class GoogLeNet(LayeredNetwork):
    """BVLC's GoogLeNet, with Caffe's names of layers, a dot for each slash.

    Convolutions of 7x7, 1x1 and 3x3 with pooling and local response normalisation, nine inception
    modules (`INCEPTIONS`) with ReLU after each convolution, the average of all pixels, and dropout.
    Pooling rounds up. Auxiliary heads after modules 4a and 4d are trained at 0.3 of their cost, and
    are absent in validation. Pictures are of 0 to 255 minus their mean, as in Caffe.

    Parameters
    ----------
    crop_size : int
        Side of the input, pixels; published for 224. With auxiliary heads at least 79.
    classes : int
    width : float
        Factor on numbers of filters and hidden units.
    dtype : str
    auxiliaries : bool
        Whether there are auxiliary heads.
    dropout : float
        Probability that a unit before the output is dropped; in auxiliary heads it is 0.7.

    References
    ----------
    Szegedy et al. 2015, "Going deeper with convolutions", CVPR, arXiv 1409.4842; BVLC,
    ``models/bvlc_googlenet/train_val.prototxt``.
    """

    head_dropout = 0.7

    def __init__(
        self,
        crop_size: int,
        classes: int,
        width: float,
        dtype: str,
        auxiliaries: bool = True,
        dropout: Rate = 0.4,
    ) -> None:
        self.auxiliaries, self.dropout = auxiliaries, dropout
        super().__init__(crop_size, classes, width, dtype)

    def build(self, net: Builder, x: TensorVariable) -> TensorVariable:
        x = self._convolve(net, "conv1.7x7_s2", x, 64, 7, 2)
        x = _norm(max_pool(x, 3, 2, ceil=True))
        x = self._convolve(net, "conv2.3x3_reduce", x, 64, 1)
        x = self._convolve(net, "conv2.3x3", x, 192, 3)
        x = max_pool(_norm(x), 3, 2, ceil=True)
        for module, filters in INCEPTIONS.items():
            x = self.inception(net, f"inception_{module}", x, filters)
            if module in POOLED:
                x = max_pool(x, 3, 2, ceil=True)
            if module in HEADS and self.auxiliaries and net.training is not None:
                self.head(net, f"loss{HEADS.index(module) + 1}", x)
        x = net.dropout(global_average_pool(x), self.dropout)
        return net.fully_connected("loss3.classifier", x, self.classes, initial=lecun_uniform)

    def inception(
        self, net: Builder, name: str, x: TensorVariable, filters: tuple[int, ...]
    ) -> TensorVariable:
        """Four ways side by side: 1x1, 3x3, 5x5, and max pooling."""
        ones, reduced3, threes, reduced5, fives, pooled = filters
        way3 = self._convolve(net, f"{name}.3x3_reduce", x, reduced3, 1)
        way5 = self._convolve(net, f"{name}.5x5_reduce", x, reduced5, 1)
        ways = [
            self._convolve(net, f"{name}.1x1", x, ones, 1),
            self._convolve(net, f"{name}.3x3", way3, threes, 3),
            self._convolve(net, f"{name}.5x5", way5, fives, 5),
            self._convolve(net, f"{name}.pool_proj", max_pool(x, 3, 1, pad=1), pooled, 1),
        ]
        return concatenate(ways)

    def head(self, net: Builder, name: str, x: TensorVariable) -> None:
        """An auxiliary head: average pooling, 1x1, and two fully connected layers."""
        x = self._convolve(net, f"{name}.conv", average_pool(x, 5, 3, ceil=True), 128, 1)
        x = net.fully_connected(f"{name}.fc", x, self.scaled(1024), bias=0.2, initial=lecun_uniform)
        x = net.dropout(relu(x), self.head_dropout)
        logits = net.fully_connected(f"{name}.classifier", x, self.classes, initial=lecun_uniform)
        net.auxiliary(logits, WEIGHT)

    def _convolve(
        self, net: Builder, name: str, x: TensorVariable, filters: int, size: int, stride: int = 1
    ) -> TensorVariable:
        filters = self.scaled(filters)
        return relu(
            net.convolution(name, x, filters, size, stride, bias=0.2, initial=lecun_uniform)
        )


class GoogLeNetBN(LayeredNetwork):
    """GoogLeNet with batch normalisation, with torchvision's names of parameters.

    Convolutions have no biases and are normalised. As in torchvision, the way of 5x5 has filters of
    3x3, the last max pooling is 2/2, and an auxiliary head begins with averages of 4x4 areas.

    Parameters
    ----------
    crop_size : int
        Side of the input, pixels; published for 224.
    classes : int
    width : float
        Factor on numbers of filters and hidden units.
    dtype : str
    auxiliaries : bool
        Whether there are auxiliary heads.
    dropout : float
        Probability that a unit before the output is dropped; in auxiliary heads it is 0.7.

    References
    ----------
    Szegedy et al. 2015, "Going deeper with convolutions"; Ioffe, Szegedy 2015, "Batch
    normalization", ICML, arXiv 1502.03167; torchvision, ``models/googlenet.py``.
    """

    head_dropout = 0.7
    input_std = (127.5, 127.5, 127.5)  # of torchvision's weights, which were Google's

    def __init__(
        self,
        crop_size: int,
        classes: int,
        width: float,
        dtype: str,
        auxiliaries: bool = True,
        dropout: Rate = 0.2,
    ) -> None:
        self.auxiliaries, self.dropout = auxiliaries, dropout
        super().__init__(crop_size, classes, width, dtype)

    def build(self, net: Builder, x: TensorVariable) -> TensorVariable:
        x = self._convolve(net, "conv1", x, 64, 7, 2)
        x = max_pool(x, 3, 2, ceil=True)
        x = self._convolve(net, "conv2", x, 64, 1)
        x = max_pool(self._convolve(net, "conv3", x, 192, 3), 3, 2, ceil=True)
        for module, filters in INCEPTIONS.items():
            x = self.inception(net, f"inception{module}", x, filters)
            if module in POOLED:
                x = max_pool(x, 3 if module == "3b" else 2, 2, ceil=True)
            if module in HEADS and self.auxiliaries and net.training is not None:
                self.head(net, f"aux{HEADS.index(module) + 1}", x)
        x = net.dropout(global_average_pool(x), self.dropout)
        return net.fully_connected("fc", x, self.classes, initial=truncated(0.01))

    def inception(
        self, net: Builder, name: str, x: TensorVariable, filters: tuple[int, ...]
    ) -> TensorVariable:
        """Four ways side by side: 1x1, 3x3, 3x3 again, and max pooling."""
        ones, reduced3, threes, reduced5, fives, pooled = filters
        way2 = self._convolve(net, f"{name}.branch2.0", x, reduced3, 1)
        way3 = self._convolve(net, f"{name}.branch3.0", x, reduced5, 1)
        ways = [
            self._convolve(net, f"{name}.branch1", x, ones, 1),
            self._convolve(net, f"{name}.branch2.1", way2, threes, 3),
            self._convolve(net, f"{name}.branch3.1", way3, fives, 3),
            self._convolve(net, f"{name}.branch4.1", max_pool(x, 3, 1, pad=1), pooled, 1),
        ]
        return concatenate(ways)

    def head(self, net: Builder, name: str, x: TensorVariable) -> None:
        """An auxiliary head: averages of 4x4 areas, 1x1, and two fully connected layers."""
        x = self._convolve(net, f"{name}.conv", area_averages(x, 4), 128, 1)
        x = net.fully_connected(f"{name}.fc1", x, self.scaled(1024), initial=truncated(0.01))
        x = net.dropout(relu(x), self.head_dropout)
        logits = net.fully_connected(f"{name}.fc2", x, self.classes, initial=truncated(0.01))
        net.auxiliary(logits, WEIGHT)

    def _convolve(
        self, net: Builder, name: str, x: TensorVariable, filters: int, size: int, stride: int = 1
    ) -> TensorVariable:
        std = self.input_std if name == "conv1" else None
        x = net.convolution(
            f"{name}.conv",
            x,
            self.scaled(filters),
            size,
            stride,
            initial=truncated(0.01),
            input_std=std,
        )
        return relu(net.batch_norm(f"{name}.bn", x, epsilon=1e-3))


def area_averages(x: TensorVariable, areas: int) -> TensorVariable:
    """Averages over `areas` x `areas` areas of an image of any size, which may overlap.

    Area i covers the rows from ``i rows / areas``, rounded down, to ``(i + 1) rows / areas``,
    rounded up: what PyTorch calls adaptive average pooling.

    Parameters
    ----------
    x : float (batch, channel, row, column)
        The numbers of rows and columns must be known.

    Returns
    -------
    float (batch, channel, areas, areas)
    """
    _, channels, *image = x.type.shape
    rows, columns = (_averaging(length, areas, x.type.dtype) for length in image)
    # With the channels last, as convolutions have them in memory, these reshapes are views.
    pixels = x.dimshuffle(0, 2, 3, 1).reshape((x.shape[0], image[0] * image[1], channels))
    averages = pt.constant(np.kron(rows, columns)) @ pixels
    return averages.reshape((x.shape[0], areas, areas, channels)).dimshuffle(0, 3, 1, 2)


def _averaging(length: int, areas: int, dtype: str) -> np.ndarray:
    """The matrix, (areas, length), that averages an axis over areas."""
    matrix = np.zeros((areas, length), dtype)
    for area in range(areas):
        first, last = area * length // areas, -(-(area + 1) * length // areas)
        matrix[area, first:last] = 1 / (last - first)
    return matrix


def _norm(x: TensorVariable) -> TensorVariable:
    """BVLC's response normalisation: Caffe divides its alpha of 1e-4 by the size of 5."""
    return response_norm(x, 5, 2e-5, 0.75, 1.0)
