"""AlexNet as a graph: layers, cost and errors. It knows nothing of devices, processes or files.

net = AlexNet()
net.initialize(seed=1)
images = pt.tensor("images", dtype="float32", shape=(128, 3, 227, 227))
cost = net.cost(net.logits(images, DropoutKeys(seed, epoch, indices)), labels, valid)
gradients = pytensor.grad(cost, list(net.parameters.values()))
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from pytensor.tensor.sharedvar import TensorSharedVariable
from pytensor.tensor.variable import TensorVariable

from tandem import layers
from tandem.layers import DropoutKeys, Kind, Parameter, Parameters

COLOURS = 3
PAPER_CROP = 227
POOL_SIZE, POOL_STRIDE = 3, 2

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Convolution:
    """A convolutional layer: filters, ReLU, then max pooling and LRN where they are set.

    Which of the two comes first is the network's to say.
    """

    name: str
    filters: int
    size: int
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
    dropout: float | None = None  # probability that a unit is dropped; None: no ReLU either
    std: float = 0.01
    bias: float = 0.0


CONVOLUTIONS = (
    Convolution("conv1", 96, 11, stride=4, pool="pool1", normalize=True),
    Convolution("conv2", 256, 5, pad=2, groups=2, pool="pool2", normalize=True, bias=0.1),
    Convolution("conv3", 384, 3, pad=1),
    Convolution("conv4", 384, 3, pad=1, groups=2, bias=0.1),
    Convolution("conv5", 256, 3, pad=1, groups=2, pool="pool5"),
)
HIDDEN = (
    FullyConnected("fc6", 4096, dropout=0.5, std=0.005, bias=0.1),
    FullyConnected("fc7", 4096, dropout=0.5, std=0.005, bias=0.1),
)


class AlexNet:
    """The network of Krizhevsky, Sutskever and Hinton, with its groups.

    ======  =================  ===================  ==========================  ================
    layer   filters or units   stride, pad, groups  then                        init
    ======  =================  ===================  ==========================  ================
    conv1   96 of 11x11        4, 0, 1              ReLU, max pool 3/2, LRN     N(0, .01), 0
    conv2   256 of 5x5         1, 2, 2              ReLU, max pool 3/2, LRN     N(0, .01), .1
    conv3   384 of 3x3         1, 1, 1              ReLU                        N(0, .01), 0
    conv4   384 of 3x3         1, 1, 2              ReLU                        N(0, .01), .1
    conv5   256 of 3x3         1, 1, 2              ReLU, max pool 3/2          N(0, .01), 0
    fc6     4096                                    ReLU, dropout .5            N(0, .005), .1
    fc7     4096                                    ReLU, dropout .5            N(0, .005), .1
    fc8     classes                                                             N(0, .01), 0
    ======  =================  ===================  ==========================  ================

    At 227 pixels and 1000 classes these are 60,965,224 parameters.

    In a network with fewer inputs to a unit, by `width` or by `crop_size`, the standard deviation
    of its weights is larger by the root of the ratio, so that its outputs vary as much as in the
    network of the table. With the table's own numbers the signal of a small network dies out on its
    way, and training does not begin.

    Parameters
    ----------
    crop_size : int
        Side of the input, in pixels, at least 67.
    classes : int
        Number of classes.
    width : float
        Factor on the numbers of filters and hidden units. Filters are rounded to an even number, at
        least 2, so that two groups divide them.
    dtype : str
        float32 or float64.
    norm_before_pool : bool
        Whether LRN comes before the max pooling of its layer, as in Caffe's bvlc_alexnet, and not
        after it, as in the table.

    Attributes
    ----------
    parameters : dict of str to TensorSharedVariable
        ``conv1.weight``, ``conv1.bias``, ... ``fc8.bias``, in this order; all zeros until
        `initialize` or a checkpoint sets them. Filters are (filter, channel of its group, row,
        column), other weights (in, out).
    kinds : dict of str to "weight" or "bias"
        What each parameter is, for rates and decay.
    shapes : dict of str to tuple of int
        Shape of each layer's output for one picture, in order: ``input``, ``conv1``, ``pool1``,
        ... ``fc8``.
    crop_size, classes, width, dtype, norm_before_pool
        As given.

    Raises
    ------
    ValueError
        A layer has no output left at this crop size, or an argument is out of its range.
    TypeError
        `dtype` is neither float32 nor float64.

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
        self.norm_before_pool = norm_before_pool
        self.crop_size, self.classes, self.width, self.dtype = crop_size, classes, width, dtype
        self.convolutions = tuple(_widened_filters(layer, width) for layer in CONVOLUTIONS)
        hidden = (_widened_units(layer, width) for layer in HIDDEN)
        self.fully_connected = (*hidden, FullyConnected("fc8", classes))
        self.shapes = _output_shapes(crop_size, self.convolutions, self.fully_connected)
        declared = _parameters(self.convolutions, self.fully_connected, self._features)
        self._parameters = Parameters(_with_the_papers_variance(declared, classes), dtype)

    @property
    def parameters(self) -> dict[str, TensorSharedVariable]:
        return self._parameters.variables

    @property
    def kinds(self) -> dict[str, Kind]:
        return self._parameters.kinds

    @property
    def _features(self) -> int:
        """Number of values that the last pooling layer hands to fc6."""
        return int(np.prod(self.shapes["pool5"]))

    def initial_values(self, seed: int) -> Iterator[tuple[str, np.ndarray]]:
        """Each parameter's name and initial value, in order, drawn one at a time.

        A value is a function of `seed` and the parameter's place alone.
        """
        return self._parameters.initial_values(seed)

    def initialize(self, seed: int) -> None:
        """Set all parameters to their `initial_values`."""
        self._parameters.initialize(seed)

    def logits(self, images: TensorVariable, dropout: DropoutKeys | None) -> TensorVariable:
        """The network's output before the softmax.

        Parameters
        ----------
        images : dtype (batch, RGB, crop_size, crop_size)
            Minus the mean image. Lengths may be unknown when the graph is built.
        dropout : DropoutKeys or None
            What the dropout masks of a training step depend on; None for validation.

        Returns
        -------
        dtype (batch, class)

        Raises
        ------
        TypeError, ValueError
            The images have another dtype, number of axes, or shape.
        """
        self._check_images(images)
        x = images
        for layer in self.convolutions:
            x = self._convolve(layer, x)
        x = layers.flatten(x, self._features)
        for number, dense in enumerate(self.fully_connected):
            x = layers.fully_connected(x, *self._parameters.of(dense.name))
            if dense.dropout is not None:
                x = layers.dropout(layers.relu(x), dense.dropout, number, dropout)
        return x

    def cost(
        self, logits: TensorVariable, labels: TensorVariable, valid: TensorVariable
    ) -> TensorVariable:
        """Mean cross-entropy of the first `valid` rows, in nats; 0 where there are none.

        Parameters
        ----------
        logits : dtype (batch, class)
        labels : int64 (batch,)
        valid : int64 scalar

        Returns
        -------
        dtype scalar
        """
        return layers.mean_over_valid(layers.negative_log_likelihood(logits, labels), valid)

    def _convolve(self, layer: Convolution, x: TensorVariable) -> TensorVariable:
        weight, bias = self._parameters.of(layer.name)
        x = layers.convolution(x, weight, bias, layer.stride, layer.pad, layer.groups)
        x = layers.relu(x)
        if layer.normalize and self.norm_before_pool:
            x = layers.response_norm(x)
        if layer.pool is not None:
            x = layers.max_pool(x, POOL_SIZE, POOL_STRIDE)
        if layer.normalize and not self.norm_before_pool:
            x = layers.response_norm(x)
        return x

    def _check_images(self, images: TensorVariable) -> None:
        expected = (None, *self.shapes["input"])
        if images.type.ndim != len(expected) or images.type.dtype != self.dtype:
            raise TypeError(
                f"AlexNet: images must be a 4-dimensional tensor of {self.dtype}, got {images.type}"
            )
        for length, wanted in zip(images.type.shape, expected, strict=True):
            if None not in (length, wanted) and length != wanted:
                raise ValueError(
                    f"AlexNet: images must have the shape (batch, {COLOURS}, {self.crop_size},"
                    f" {self.crop_size}), got {images.type.shape}"
                )


def _check_arguments(classes: int, width: float, dtype: str) -> None:
    if classes < 1:
        raise ValueError(f"AlexNet: classes must be at least 1, got {classes}")
    if not 0 < width < float("inf"):
        raise ValueError(f"AlexNet: width must be positive, got {width}")
    if dtype not in ("float32", "float64"):
        raise TypeError(f"AlexNet: dtype must be float32 or float64, got {dtype!r}")


def _widened_filters(layer: Convolution, width: float) -> Convolution:
    return replace(layer, filters=max(2, 2 * round(layer.filters * width / 2)))


def _widened_units(layer: FullyConnected, width: float) -> FullyConnected:
    return replace(layer, units=max(1, round(layer.units * width)))


def _output_shapes(
    crop_size: int, convolutions: Sequence[Convolution], dense: Sequence[FullyConnected]
) -> dict[str, Shape]:
    """Each layer's output for one picture, in order; ValueError if one has none."""
    sides = _sides(crop_size, convolutions)
    vanished = next((name for name, side in sides.items() if side < 1), None)
    if vanished is not None:
        raise ValueError(
            f"AlexNet: at crop_size {crop_size}, {vanished} has no output left; the smallest that"
            f" works is {_smallest_crop(convolutions)}"
        )
    shapes: dict[str, Shape] = {"input": (COLOURS, crop_size, crop_size)}
    for layer in convolutions:
        for name in filter(None, (layer.name, layer.pool)):
            shapes[name] = (layer.filters, sides[name], sides[name])
    return shapes | {layer.name: (layer.units,) for layer in dense}


def _sides(crop_size: int, convolutions: Sequence[Convolution]) -> dict[str, int]:
    """Rows, and columns, of each convolution's and pooling's output; less than 1 where none fit."""
    sides: dict[str, int] = {}
    side = crop_size
    for layer in convolutions:
        side = sides[layer.name] = (side + 2 * layer.pad - layer.size) // layer.stride + 1
        if layer.pool is not None:
            side = sides[layer.pool] = (side - POOL_SIZE) // POOL_STRIDE + 1
    return sides


def _smallest_crop(convolutions: Sequence[Convolution]) -> int:
    crop_size = 1
    while min(_sides(crop_size, convolutions).values()) < 1:
        crop_size += 1
    return crop_size


def _with_the_papers_variance(declared: Iterator[Parameter], classes: int) -> Iterator[Parameter]:
    """Scale the initial weights to as many inputs as each unit has, against the paper's network."""
    dense = (*HIDDEN, FullyConnected("fc8", classes))
    features = int(np.prod(_output_shapes(PAPER_CROP, CONVOLUTIONS, dense)["pool5"]))
    for ours, paper in zip(declared, _parameters(CONVOLUTIONS, dense, features), strict=True):
        yield replace(ours, std=ours.std * math.sqrt(_inputs(paper) / _inputs(ours)))


def _inputs(parameter: Parameter) -> int:
    """Number of inputs that a unit of this layer adds up."""
    if parameter.kind == "bias":
        return 1
    return int(np.prod(parameter.shape[1:])) if len(parameter.shape) == 4 else parameter.shape[0]


def _parameters(
    convolutions: Sequence[Convolution], dense: Sequence[FullyConnected], features: int
) -> Iterator[Parameter]:
    """Weight and bias of each layer, in order; `features` values enter the first of `dense`."""
    channels = COLOURS
    for layer in convolutions:
        filters = (layer.filters, channels // layer.groups, layer.size, layer.size)
        yield Parameter(f"{layer.name}.weight", filters, "weight", std=layer.std)
        yield Parameter(f"{layer.name}.bias", (layer.filters,), "bias", mean=layer.bias)
        channels = layer.filters
    for unit in dense:
        yield Parameter(f"{unit.name}.weight", (features, unit.units), "weight", std=unit.std)
        yield Parameter(f"{unit.name}.bias", (unit.units,), "bias", mean=unit.bias)
        features = unit.units
