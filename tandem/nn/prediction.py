"""Prediction and evaluation in the process of the caller; imports PyTensor and PyTorch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.tensor.variable import TensorVariable

from tandem.artifacts.metrics import Sums
from tandem.backend import device_mode, device_shared, set_threads
from tandem.config.hardware import available_cores, resolve_devices
from tandem.layers.checks import choose_loss
from tandem.layers.choices import LOSSES, CrossEntropy, Metric, evaluate_metrics
from tandem.layers.network import Network, build_network
from tandem.nn.arrays import Rows
from tandem.training.graphs import count_minibatch, targets_of

if TYPE_CHECKING:
    from tandem.nn.model import Model


class CompiledModel:
    """A network with weights on a device, for inputs as `tandem.nn.arrays.checked_inputs` returns.

    Parameters
    ----------
    make_network : function
        Makes the network, in float32 and with its loss, of a crop size; of None for arrays.
    weights : mapping of str to float32 array
    metrics : sequence of Metric
    device : str
        "cpu", "cuda:0" and so on.
    """

    def __init__(
        self,
        make_network: Callable[[int | None], Network],
        weights: Mapping[str, np.ndarray],
        metrics: Sequence[Metric],
        device: str,
    ) -> None:
        self._make_network, self._metrics, self._device = make_network, metrics, device
        self._weights = {
            name: device_shared(value, name=name, device=device) for name, value in weights.items()
        }
        self._functions: dict[Any, Any] = {}

    def load(self, weights: Mapping[str, np.ndarray]) -> None:
        """Set the weights, by name."""
        for name, variable in self._weights.items():
            variable.set_value(weights[name])

    def predict(self, x: np.ndarray, batch_size: int, from_logits: bool) -> np.ndarray:
        """The network's predictions, float32 (n, units); with `from_logits` before the softmax."""
        key = "predict", x.dtype, x.shape[1:], from_logits
        if key not in self._functions:
            network, stored, images = self._inputs(x)
            logits = network.logits(images, None)
            found = logits if from_logits else network.predictions(logits)
            self._functions[key] = self._compile(network, [stored], found)
        function = self._functions[key]
        return np.concatenate([function(part) for part in _batches(x, batch_size)])

    def evaluate(self, rows: Rows, batch_size: int) -> dict[str, float]:
        """The mean loss of rows, as ``loss``, and the metrics by their names."""
        key = "evaluate", rows.x.dtype, rows.x.shape[1:], rows.y.dtype
        if key not in self._functions:
            self._functions[key] = self._evaluation(rows)
        names, function = self._functions[key]
        total = Sums()
        for x, y in zip(_batches(rows.x, batch_size), _batches(rows.y, batch_size), strict=True):
            found = dict(zip(names, (value.tolist() for value in function(x, y)), strict=True))
            images, loss = found.pop("images"), found.pop("loss")
            sums = {name: tuple(v) if isinstance(v, list) else v for name, v in found.items()}
            total += Sums(images, loss, sums)
        measured = evaluate_metrics(self._metrics, total.images, total.values)
        return {"loss": total.loss / total.images, **measured}

    def _evaluation(self, rows: Rows) -> tuple[list[str], Any]:
        network, stored, images = self._inputs(rows.x)
        lengths = (None, *rows.y.shape[1:])
        targets = pt.tensor("labels", dtype=rows.y.dtype.name, shape=lengths)
        minibatch = {"labels": targets, "valid": targets.shape[0]}
        logits = network.logits(images, None)
        cost = network.cost(logits, targets_of(minibatch, network.dtype), targets.shape[0])
        counts = count_minibatch(cost, logits, minibatch, network, self._metrics)
        function = self._compile(network, [stored, targets], list(counts.values()))
        return list(counts), function

    def _inputs(self, x: np.ndarray) -> tuple[Network, TensorVariable, TensorVariable]:
        """A network, stored rows as a symbolic variable, and the network's input of these.

        Grey pictures have three equal colours, as in files; rows of three axes become (batch,
        channel, row, column).
        """
        stored = pt.tensor("x", dtype=x.dtype.name, shape=(None, *x.shape[1:]))
        if x.dtype != np.uint8:
            images = stored.dimshuffle(0, 3, 1, 2) if x.ndim == 4 else stored
            return self._make_network(None), stored, images
        network = self._make_network(x.shape[1])
        images = stored.astype(network.dtype)
        if x.ndim == 4:
            return network, stored, images.dimshuffle(0, 3, 1, 2)
        return network, stored, pt.stack([images] * 3, axis=1)

    def _compile(self, network: Network, inputs: list[TensorVariable], outputs: Any) -> Any:
        return pytensor.function(
            inputs,
            outputs,
            givens=[(network.parameters[name], value) for name, value in self._weights.items()],
            mode=device_mode(self._device),
            on_unused_input="ignore",
            name="model",
        )


def _batches(rows: np.ndarray, size: int) -> Iterator[np.ndarray]:
    for begin in range(0, len(rows), size):
        yield rows[begin : begin + size]


def compiled_model(model: "Model") -> CompiledModel:
    """Compile a model for the first GPU that can be used, or the CPU."""
    set_threads(len(available_cores()))
    compilation = model.compilation
    loss = CrossEntropy() if compilation is None else LOSSES.chosen(compilation.loss.settings())
    metrics = () if compilation is None else tuple(compilation.measured.values())

    def make_network(crop_size: int | None) -> Network:
        network = build_network(model.description(crop_size))
        if compilation is None or not compilation.function:
            choose_loss(network, loss)
        return network

    return CompiledModel(make_network, model.weights, metrics, resolve_devices("auto", False)[0])
