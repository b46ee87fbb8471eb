"""Networks that declare their parameters by the layers of their graph."""

import math
from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
import pytensor.tensor as pt
from pytensor.tensor.variable import TensorVariable

import tandem.layers.layers as layers
from tandem.layers.initial import Initial, he_out, torch_linear
from tandem.layers.network import Network
from tandem.layers.parameter import Parameter, norm
from tandem.layers.training_pass import Training

__all__ = ["Builder", "LayeredNetwork"]


class Builder:
    """The layers that have parameters, by name, for one graph of a network.

    The first graph of a network declares its parameters, with shapes that follow from the inputs
    of its layers. `training` is None in validation.
    """

    def __init__(self, network: Network, training: Training | None, declares: bool = False) -> None:
        self.training = training
        self._network, self._declares, self._dropouts = network, declares, 0

    def convolution(
        self,
        name: str,
        x: TensorVariable,
        filters: int,
        size: int,
        stride: int = 1,
        pad: int | None = None,
        *,
        groups: int = 1,
        bias: float | None = None,
        initial: Initial = he_out,
        input_std: Sequence[float] | None = None,
    ) -> TensorVariable:
        """A convolution of square filters, at stride 1 of the same size by default.

        Parameters
        ----------
        x : dtype (batch, channel, row, column)
        filters, size, stride, groups : int
        pad : int or None
            Zeros on each side; None: half of `size`, rounded down.
        bias : float or None
            Initial value; None: no bias.
        initial : function
            Distribution of the initial weights.
        input_std : sequence of float or None
            What each channel of the input is divided by. The quotient is taken of the weights,
            which are fewer numbers.
        """
        shape = (filters, _known(name, x.type.shape[1]) // groups, size, size)
        fans = math.prod(shape[1:]), filters * size**2
        self._declare(name, shape, fans, bias, initial)
        w = self._network.parameters[f"{name}.weight"]
        if input_std is not None:
            factors = (1 / np.asarray(input_std)).astype(self._network.dtype)
            w = w * factors[:, np.newaxis, np.newaxis]
        b = None if bias is None else self._network.parameters[f"{name}.bias"]
        pad = size // 2 if pad is None else pad
        return self._shaped(name, layers.convolution(x, w, b, stride, pad, groups))

    def batch_norm(
        self,
        name: str,
        x: TensorVariable,
        scale: float = 1.0,
        epsilon: float = 1e-5,
        keep: float = 0.9,
    ) -> TensorVariable:
        """A batch normalisation of each channel, with an initial `scale`."""
        if self._declares:
            channels = _known(name, x.type.shape[1])
            self._network.parameters.add(*norm(name, channels, scale, keep))
        return layers.batch_norm(x, self._network.parameters, name, self.training, epsilon)

    def fully_connected(
        self,
        name: str,
        x: TensorVariable,
        units: int,
        *,
        bias: float = 0.0,
        initial: Initial = torch_linear,
    ) -> TensorVariable:
        """A fully connected layer of all elements of each row of the input."""
        inputs = math.prod(_known(name, length) for length in x.type.shape[1:])
        self._declare(name, (inputs, units), (inputs, units), bias, initial)
        if x.type.ndim != 2:
            x = layers.flatten(x, inputs)
        return self._shaped(name, layers.fully_connected(x, *self._network.parameters.of(name)))

    def dropout(self, x: TensorVariable, rate: float) -> TensorVariable:
        """Drop units in training and divide the others by ``1 - rate``."""
        self._dropouts += 1
        return layers.dropout(x, rate, self._dropouts - 1, self.training, inverted=True)

    def auxiliary(self, logits: TensorVariable, weight: float) -> None:
        """Train the output of an auxiliary head, at the weight of its cost."""
        if self.training is not None:
            self.training.auxiliary.append((logits, weight))

    def _declare(
        self,
        name: str,
        shape: tuple[int, ...],
        fans: tuple[int, int],
        bias: float | None,
        initial: Initial,
    ) -> None:
        """Declare weight and bias, if this is the first graph."""
        if not self._declares:
            return
        std, distribution = initial(*fans)
        units = shape[0] if len(shape) == 4 else shape[1]
        parameters = self._network.parameters
        parameters.add(Parameter(f"{name}.weight", shape, std=std, distribution=distribution))
        if bias is not None:
            parameters.add(Parameter(f"{name}.bias", (units,), "bias", bias))

    def _shaped(self, name: str, x: TensorVariable) -> TensorVariable:
        """Record a layer's shape when it is declared."""
        if self._declares:
            self._network.shapes[name] = x.type.shape[1:]
        return x


class LayeredNetwork(Network):
    """Base of a network that is stated once, as a graph whose layers declare their parameters.

    A subclass defines `build`. The constructor calls it once to declare the parameters, so one
    with options sets them before it calls this constructor.

    Parameters
    ----------
    crop_size : int
        Side of the input, in pixels.
    classes : int
    width : float
        Factor on numbers of filters and units, see `scaled`.
    dtype : "float32" or "float64"

    Raises
    ------
    ValueError
        A layer has no output left at this crop size, or an argument is out of its range.
    """

    def __init__(self, crop_size: int, classes: int, width: float, dtype: str) -> None:
        name = type(self).__name__
        if classes < 1:
            raise ValueError(f"{name}: classes must be at least 1, got {classes}")
        if not 0 < width < float("inf"):
            raise ValueError(f"{name}: width must be positive, got {width}")
        super().__init__(crop_size, classes, dtype)
        self.width = width
        training = Training(pt.lscalar("seed"), pt.lscalar("epoch"), pt.lvector("indices"))
        try:
            self.build(Builder(self, training, declares=True), self.images())
        except ValueError as error:
            raise ValueError(f"{name}: at crop_size {crop_size}: {error}") from error

    def scaled(self, units: int) -> int:
        """A number of filters or units times `width`, at least 1."""
        return max(1, round(units * self.width))

    def logits(self, images: TensorVariable, training: Training | None) -> TensorVariable:
        """Build the graph of the output before the softmax."""
        self.check_images(images)
        if None in images.type.shape[1:]:
            images = pt.specify_shape(images, (None, *self.shapes["input"]))
        return self.build(Builder(self, training), images)

    @abstractmethod
    def build(self, net: Builder, x: TensorVariable) -> TensorVariable:
        """Build the graph from images to logits by the layers of `net`.

        Parameters
        ----------
        net : Builder
        x : dtype (batch, RGB, crop_size, crop_size)

        Returns
        -------
        dtype (batch, class)
        """


def _known(name: str, length: int | None) -> int:
    if length is None:
        raise ValueError(f"{name}: the shape of its input must be known")
    return length
