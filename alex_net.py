"""AlexNet as a graph: layers, cost and errors. It knows nothing of devices, processes or files.

net = AlexNet()
net.initialize(seed=1)
images = pt.tensor("images", dtype="float32", shape=(128, 3, 227, 227))
cost = net.cost(net.logits(images, Training(seed, epoch, indices)), labels, valid)
gradients = pytensor.grad(cost, list(net.parameters.values()))
"""

import math
from dataclasses import dataclass, replace

from pytensor.tensor.variable import TensorVariable

from tandem import layers
from tandem.layers import Network, Training

POOL_SIZE, POOL_STRIDE = 3, 2
SMALLEST_CROP = 67  # pixels; pool5 then has one row and one column


@dataclass(frozen=True)
class Convolution:
    """A convolutional layer: filters, ReLU, then max pooling and LRN where they are set."""

    name: str
    filters: int
    size: int
    inputs: int  # that a unit of the paper's network adds up
    stride: int = 1
    pad: int = 0
    groups: int = 1
    pool: str | None = None  # the pooling layer's name
    normalize: bool = False
    std: float = 0.01
    bias: float = 0.0


@dataclass(frozen=True)
class FullyConnected:
    """A fully connected layer, then ReLU and dropout unless it is the last."""

    name: str
    units: int
    inputs: int  # of the paper's network
    dropout: float | None = None  # probability that a unit is dropped; None: no ReLU either
    std: float = 0.01
    bias: float = 0.0


CONVOLUTIONS = (
    Convolution("conv1", 96, 11, 363, stride=4, pool="pool1", normalize=True),
    Convolution("conv2", 256, 5, 1200, pad=2, groups=2, pool="pool2", normalize=True, bias=0.1),
    Convolution("conv3", 384, 3, 2304, pad=1),
    Convolution("conv4", 384, 3, 1728, pad=1, groups=2, bias=0.1),
    Convolution("conv5", 256, 3, 1728, pad=1, groups=2, pool="pool5"),
)
HIDDEN = (
    FullyConnected("fc6", 4096, 9216, dropout=0.5, std=0.005, bias=0.1),
    FullyConnected("fc7", 4096, 4096, dropout=0.5, std=0.005, bias=0.1),
)


class AlexNet(Network):
    """The network of Krizhevsky, Sutskever and Hinton, with its groups.

    ======  =================  ===================  ==========================  =================
    layer   filters or units   stride, pad, groups  then                        init
    ======  =================  ===================  ==========================  =================
    conv1   96 of 11x11        4, 0, 1              ReLU, max pool 3/2, LRN     N(0, 0.01), 0
    conv2   256 of 5x5         1, 2, 2              ReLU, max pool 3/2, LRN     N(0, 0.01), 0.1
    conv3   384 of 3x3         1, 1, 1              ReLU                        N(0, 0.01), 0
    conv4   384 of 3x3         1, 1, 2              ReLU                        N(0, 0.01), 0.1
    conv5   256 of 3x3         1, 1, 2              ReLU, max pool 3/2          N(0, 0.01), 0
    fc6     4096                                    ReLU, dropout 0.5           N(0, 0.005), 0.1
    fc7     4096                                    ReLU, dropout 0.5           N(0, 0.005), 0.1
    fc8     classes                                                             N(0, 0.01), 0
    ======  =================  ===================  ==========================  =================

    At 227 pixels and 1000 classes these are 60,965,224 parameters.

    In a network with fewer inputs to a unit, by `width` or by `crop_size`, the standard deviation
    of its weights is larger by the root of the ratio, so that its outputs vary as much as in the
    network of the table. With the table's own numbers the signal of a small network dies out on its
    way, and training does not begin.

    Parameters
    ----------
    crop_size : int
        Side of the input, in pixels, at least 67; published for 227.
    width : float
        Factor on the numbers of filters and hidden units. Filters are rounded to an even number, at
        least 2, so that two groups divide them.
    dtype : {"float32", "float64"}
    norm_before_pool : bool
        Whether LRN comes before the max pooling of its layer, as in Caffe's bvlc_alexnet, and not
        after it, as in the table.

    Attributes
    ----------
    parameters : Parameters
        ``conv1.weight``, ``conv1.bias``, ... ``fc8.bias``, in this order; all zeros until
        `initialize` or a checkpoint sets them. Filters are (filter, channel of its group, row,
        column), other weights (in, out).
    shapes : dict of str to tuple of int
        Shape of each layer's output for one picture, in order: ``input``, ``conv1``, ``pool1``,
        ... ``fc8``.

    Raises
    ------
    ValueError
        A layer has no output left at this crop size, or an argument is out of its range.

    References
    ----------
    Krizhevsky, Sutskever, Hinton 2012, "ImageNet classification with deep convolutional neural
    networks", NIPS 25.
    """

    def __init__(
        self,
        crop_size: int = 227,
        classes: int = 1000,
        width: float = 1.0,
        dtype: str = "float32",
        norm_before_pool: bool = False,
    ) -> None:
        _check_arguments(classes, width, dtype)
        super().__init__(crop_size, classes, dtype)
        self.width, self.norm_before_pool = width, norm_before_pool
        self.convolutions = tuple(
            replace(layer, filters=max(2, 2 * round(layer.filters * width / 2)))
            for layer in CONVOLUTIONS
        )
        hidden = (replace(layer, units=max(1, round(layer.units * width))) for layer in HIDDEN)
        self.fully_connected = (*hidden, FullyConnected("fc8", classes, HIDDEN[-1].units))
        self._declare_convolutions()
        self._declare_fully_connected()

    def _declare_convolutions(self) -> None:
        x = self.images()
        for layer in self.convolutions:
            channels = x.type.shape[1] // layer.groups
            self._declare(layer, (layer.filters, channels, layer.size, layer.size), layer.filters)
            for name, build in ((layer.name, self._convolve), (layer.pool, self._pool)):
                try:
                    x = build(layer, x)
                except ValueError as error:
                    raise ValueError(
                        f"AlexNet: at crop_size {self.crop_size}, {name} has no output left; the "
                        f"smallest that works is {SMALLEST_CROP}"
                    ) from error
                if name is not None:
                    self.shapes[name] = x.type.shape[1:]

    def _declare_fully_connected(self) -> None:
        inputs = math.prod(self.shapes["pool5"])
        for layer in self.fully_connected:
            self._declare(layer, (inputs, layer.units), layer.units)
            self.shapes[layer.name] = (layer.units,)
            inputs = layer.units

    def _declare(
        self, layer: Convolution | FullyConnected, shape: tuple[int, ...], units: int
    ) -> None:
        """Declare weight and bias, with the paper's variance of a unit's sum of inputs."""
        inputs = math.prod(shape[1:]) if len(shape) == 4 else shape[0]
        std = layer.std * math.sqrt(layer.inputs / inputs)
        self.parameters.add(
            layers.weight(layer.name, shape, std), layers.bias(layer.name, units, layer.bias)
        )

    def logits(self, images: TensorVariable, training: Training | None) -> TensorVariable:
        self.check_images(images)
        x = images
        for layer in self.convolutions:
            x = self._pool(layer, self._convolve(layer, x))
        x = layers.flatten(x, math.prod(self.shapes["pool5"]))
        for number, dense in enumerate(self.fully_connected):
            x = layers.fully_connected(x, *self.parameters.of(dense.name))
            if dense.dropout is not None:
                x = layers.dropout(layers.relu(x), dense.dropout, number, training)
        return x

    def _convolve(self, layer: Convolution, x: TensorVariable) -> TensorVariable:
        weight, bias = self.parameters.of(layer.name)
        return layers.relu(
            layers.convolution(x, weight, bias, layer.stride, layer.pad, layer.groups)
        )

    def _pool(self, layer: Convolution, x: TensorVariable) -> TensorVariable:
        """Max pooling and normalisation, in the network's order."""
        if layer.normalize and self.norm_before_pool:
            x = layers.response_norm(x)
        if layer.pool is not None:
            x = layers.max_pool(x, POOL_SIZE, POOL_STRIDE)
        if layer.normalize and not self.norm_before_pool:
            x = layers.response_norm(x)
        return x


def _check_arguments(classes: int, width: float, dtype: str) -> None:
    if classes < 1:
        raise ValueError(f"AlexNet: classes must be at least 1, got {classes}")
    if not 0 < width < float("inf"):
        raise ValueError(f"AlexNet: width must be positive, got {width}")
    if dtype not in ("float32", "float64"):
        raise TypeError(f"AlexNet: dtype must be float32 or float64, got {dtype!r}")
