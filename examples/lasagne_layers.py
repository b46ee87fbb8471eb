"""Lasagne's layers, as far as Synkhronos's demos use them, of the Ops of this library.

Names, arguments and defaults are Lasagne's (Dieleman et al. 2015, doi 10.5281/zenodo.27878).
Different are: weights are drawn from the generator of the `InputLayer`; masks of dropout are a
function of the number of a training step, the row and the layer, so that workers drop what one
process would; normalisation covers groups of `rows` consecutive rows; and what training updates
beside the parameters is in `get_state_updates`, where Lasagne has default updates.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.tensor.special import softmax as softmax_of
from pytensor.tensor.variable import TensorVariable

import tandem.parallel as synk
from tandem import ops
from tandem.layers import average_pool, convolution, max_pool, relu

Updates = list[tuple[Any, Any]]
Init = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]
rectify = relu


def softmax(x: TensorVariable) -> TensorVariable:
    """Probabilities of the classes, (batch, class)."""
    return softmax_of(x, axis=1)


def glorot_uniform(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Draw weights (in, out) or filters (out, in, row, column) by `GlorotUniform`."""
    receptive = math.prod(shape[2:])
    limit = math.sqrt(6 / ((shape[0] + shape[1]) * receptive))
    return rng.uniform(-limit, limit, shape)


class Layer(ABC):
    """A layer with its parameters, all float32; `output_shape` begins with None for the batch."""

    output_shape: tuple[Any, ...]

    def __init__(self, *incomings: "Layer") -> None:
        self.incomings = incomings
        self.source: InputLayer = incomings[0].source if incomings else self  # type: ignore
        self.params: list[Any] = []  # that are trained
        self.averages: list[Any] = []  # that training updates beside them
        self.output_shape = incomings[0].output_shape if incomings else ()

    def add(self, name: str, value: np.ndarray) -> Any:
        """Make a shared variable, which every worker has."""
        return pytensor.shared(value.astype(np.float32), name=name, shape=value.shape)

    @abstractmethod
    def output(self, inputs: list[TensorVariable], deterministic: bool) -> TensorVariable:
        """Compute the output from those of `incomings`."""


class InputLayer(Layer):
    """The input, with the generator of all weights and the number of the training step."""

    def __init__(self, shape: tuple[Any, ...], input_var: Any = None, seed: int = 1) -> None:
        super().__init__()
        self.input_var, self.output_shape = input_var, shape
        self.rng = np.random.default_rng(seed)
        self.step = pytensor.shared(np.int64(0), name="step")
        self.dropouts = 0

    def output(self, inputs: list[TensorVariable], deterministic: bool) -> TensorVariable:
        return self.input_var if not inputs else inputs[0]


class DenseLayer(Layer):
    """``nonlinearity(x W + b)``; images are flattened as (channel, row, column)."""

    def __init__(
        self, incoming: Layer, num_units: int, W: Init = glorot_uniform, nonlinearity: Any = rectify
    ) -> None:
        super().__init__(incoming)
        units = math.prod(incoming.output_shape[1:])
        self.W = self.add("W", W(self.source.rng, (units, num_units)))
        self.b = self.add("b", np.zeros(num_units))
        self.params, self.nonlinearity = [self.W, self.b], nonlinearity
        self.output_shape = None, num_units

    def output(self, inputs: list[TensorVariable], deterministic: bool) -> TensorVariable:
        (x,) = inputs
        y = x.reshape((x.shape[0], self.W.type.shape[0])).dot(self.W) + self.b
        return y if self.nonlinearity is None else self.nonlinearity(y)


class Conv2DLayer(Layer):
    """A convolution that correlates, as with ``flip_filters=False``; `b` None is without bias."""

    def __init__(
        self,
        incoming: Layer,
        num_filters: int,
        filter_size: int,
        stride: int = 1,
        pad: int = 0,
        W: Init = glorot_uniform,
        b: float | None = 0.0,
        nonlinearity: Any = rectify,
    ) -> None:
        super().__init__(incoming)
        _, channels, rows, columns = incoming.output_shape
        shape = num_filters, channels, filter_size, filter_size
        self.W = self.add("W", W(self.source.rng, shape))
        self.b = None if b is None else self.add("b", np.full(num_filters, b))
        self.params = [self.W] if self.b is None else [self.W, self.b]
        self.stride, self.pad, self.nonlinearity = stride, pad, nonlinearity
        sides = ((side + 2 * pad - filter_size) // stride + 1 for side in (rows, columns))
        self.output_shape = None, num_filters, *sides

    def output(self, inputs: list[TensorVariable], deterministic: bool) -> TensorVariable:
        y = convolution(inputs[0], self.W, stride=self.stride, pad=self.pad)
        if self.b is not None:
            y = y + self.b[:, None, None]
        return y if self.nonlinearity is None else self.nonlinearity(y)


class Pool2DLayer(Layer):
    """Pooling; without `ignore_border` the last windows may reach over the border."""

    def __init__(
        self,
        incoming: Layer,
        pool_size: int,
        stride: int | None = None,
        ignore_border: bool = True,
        mode: str = "max",
    ) -> None:
        super().__init__(incoming)
        self.size, self.stride = pool_size, stride or pool_size
        self.ceil, self.pool = not ignore_border, {"max": max_pool, "average_exc_pad": average_pool}
        self.mode = mode
        _, channels, *sides = incoming.output_shape
        whole = math.ceil if self.ceil else math.floor  # of windows
        sides = [whole((side - pool_size) / self.stride) + 1 for side in sides]
        if self.ceil and self.stride >= pool_size:  # no window begins beyond the image
            sides = [-(-side // self.stride) for side in incoming.output_shape[2:]]
        self.output_shape = None, channels, *sides

    def output(self, inputs: list[TensorVariable], deterministic: bool) -> TensorVariable:
        return self.pool[self.mode](inputs[0], self.size, self.stride, ceil=self.ceil)


class DropoutLayer(Layer):
    """Units are 0 with probability `p`, and else divided by ``1 - p``."""

    def __init__(self, incoming: Layer, p: float = 0.5) -> None:
        super().__init__(incoming)
        self.p, self.number = p, self.source.dropouts
        self.source.dropouts += 1

    def output(self, inputs: list[TensorVariable], deterministic: bool) -> TensorVariable:
        if deterministic or not self.p:
            return inputs[0]
        step, rows, factor = self.source.step, synk.row_index(), 1 / (1 - self.p)
        return ops.dropout(inputs[0], 1, step, rows, rate=self.p, layer=self.number, factor=factor)


class BatchNormLayer(Layer):
    """Batch normalisation of groups of `rows`: the averages hold a variance, not `inv_std`."""

    def __init__(
        self, incoming: Layer, rows: int = 32, alpha: float = 0.1, epsilon: float = 1e-4
    ) -> None:
        super().__init__(incoming)
        channels = incoming.output_shape[1]
        self.beta, self.mean = (self.add(name, np.zeros(channels)) for name in ("beta", "mean"))
        self.gamma, self.var = (self.add(name, np.ones(channels)) for name in ("gamma", "var"))
        self.params, self.averages = [self.beta, self.gamma], [self.mean, self.var]
        self.rows, self.alpha, self.epsilon = rows, alpha, epsilon
        self.statistics: list[TensorVariable] = []

    def output(self, inputs: list[TensorVariable], deterministic: bool) -> TensorVariable:
        x, scale, shift = inputs[0], self.gamma, self.beta
        if deterministic:
            return ops.batch_norm_inference(x, scale, shift, self.mean, self.var, self.epsilon)
        y, *self.statistics = ops.batch_norm(x, scale, shift, self.rows, epsilon=self.epsilon)
        return y


class NonlinearityLayer(Layer):
    """A function of each unit."""

    def __init__(self, incoming: Layer, nonlinearity: Any = rectify) -> None:
        super().__init__(incoming)
        self.nonlinearity = nonlinearity

    def output(self, inputs: list[TensorVariable], deterministic: bool) -> TensorVariable:
        return self.nonlinearity(*inputs)


class ElemwiseSumLayer(Layer):
    """The sum of several layers."""

    def __init__(self, incomings: Iterable[Layer]) -> None:
        super().__init__(*incomings)

    def output(self, inputs: list[TensorVariable], deterministic: bool) -> TensorVariable:
        first, *others = inputs
        return sum(others, first)


def get_all_layers(layer: Layer) -> list[Layer]:
    """Return all layers below and the layer itself, each after those that it is computed from."""
    found: dict[Layer, None] = {}

    def visit(one: Layer) -> None:
        if one not in found:
            for incoming in one.incomings:
                visit(incoming)
            found[one] = None

    visit(layer)
    return list(found)


def get_output(layer: Layer, inputs: Any = None, deterministic: bool = False) -> TensorVariable:
    """Return the output for `inputs`, or for the variable of the input layer."""
    values: dict[Layer, Any] = {}
    for one in get_all_layers(layer):
        below = [values[i] for i in one.incomings]
        if isinstance(one, InputLayer) and inputs is not None:
            below = [inputs]
        values[one] = one.output(below, deterministic)
    return values[layer]


def get_all_params(layer: Layer) -> list[Any]:
    """Return the parameters that are trained."""
    return [p for one in get_all_layers(layer) for p in one.params]


def get_all_averages(layer: Layer) -> list[Any]:
    """Return the running averages of normalisations."""
    return [p for one in get_all_layers(layer) for p in one.averages]


def get_state_updates(layer: Layer) -> Updates:
    """Return the updates of the step's number, and of averages from the last training output."""
    updates: Updates = [(layer.source.step, layer.source.step + 1)]
    for one in get_all_layers(layer):
        if isinstance(one, BatchNormLayer):
            keep, new = np.float32(1 - one.alpha), np.float32(one.alpha)
            pairs = zip(one.averages, one.statistics, strict=True)
            updates += [(old, keep * old + new * found) for old, found in pairs]
    return updates


def categorical_crossentropy(predictions: Any, targets: Any) -> TensorVariable:
    """Return the cost of each row, in nats, from probabilities (batch, class) and classes."""
    return -pt.log(predictions)[pt.arange(targets.shape[0]), targets]
