"""The network on its device: parameters in flat buffers, and functions compiled over them.

Importing this module imports PyTensor and PyTorch: only a trainer process does.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import pytensor.tensor as pt
from pytensor.tensor.variable import TensorVariable

from tandem.artifacts.metrics import Sums
from tandem.backend import DeviceSharedVariable, device_shared
from tandem.config.schema import Config
from tandem.data.augment import Mode
from tandem.layers import Network, Training, mean_over_valid
from tandem.layers.checks import check_graph, choose_loss
from tandem.layers.choices import LOSSES, metrics_of
from tandem.memory.flat import Vectors
from tandem.memory.parameters import CudaMemory, HostMemory
from tandem.memory.slot import Slot
from tandem.optim import Optimizer
from tandem.training.functions import DeviceFunctions
from tandem.training.graphs import (
    GRADIENT,
    SHORT,
    BackwardPass,
    FunctionGraph,
    Tensors,
    added,
    are_finite,
    array_inputs,
    count_minibatch,
    counts_errors,
    minibatch_inputs,
    targets_of,
)

CROPS = 10

_Variables = dict[str, DeviceSharedVariable]
_Placed = tuple[_Variables, dict[str, _Variables], Mapping[str, TensorVariable]]
"""Weights, each state of the optimizer, and gradients."""


class CompiledNetwork:
    """A network whose parameters, optimizer states and gradients lie in flat vectors.

    Frozen parameters lie beside them, so that no exchange touches them. An array that is not
    trained has its statistic, computed with the gradients, in the vector of gradients. A network
    with such arrays has two functions of gradients: for minibatches of which every row is valid,
    and for short ones, compiled when the first of them comes.

    Parameters
    ----------
    config : Config
        With ``auto`` resolved; ``compile: auto`` is taken as false, ``precision: auto`` as float32.
    mean : float32 (3, S, S) or None
        The mean image, of the size of a whole picture; None: slots hold rows of arrays.
    on_gradient_ready : callable, optional
        Called with a parameter's name when the gradients of its bucket are ready, during the
        backward pass, see `device_mode`.
    """

    def __init__(
        self,
        network: Network,
        config: Config,
        optimizer: Optimizer,
        mean: np.ndarray | None,
        memory: HostMemory | CudaMemory,
        on_gradient_ready: Callable[[str], None] | None = None,
    ) -> None:
        self._network, self._config, self._optimizer = network, config, optimizer
        choose_loss(network, LOSSES.chosen(dict(config)))
        self._metrics = metrics_of(config.metrics)
        self._device = memory.device
        declared = network.parameters.declared
        self._rates = config.parameter_groups.learned(declared, optimizer.weight_decay)
        self._averages = config.parameter_groups.averages(declared)
        placed = _place_vectors(memory.vectors, memory.device)
        self.weights, self.states, self.gradients = placed
        self.weights |= self._frozen()
        self._updated = placed
        if memory.updated is not None:
            self._updated = _place_vectors(memory.updated, memory.device, "part of ")
        self._mean = None if mean is None else self._shared(mean.astype(config.dtype), "mean")
        self._layout = memory.slot_layout
        self._kept = _place(memory.pictures, memory.device, "pictures/")
        self._sums = {mode: self._zero_sums(mode) for mode in ("train", "validation")}
        self._last = self._zero_sums("last")
        self._scores: DeviceSharedVariable | None = None
        self._probabilities: DeviceSharedVariable | None = None
        self._finite = self._shared(np.zeros((), np.int64), "finite")
        self.functions = DeviceFunctions(
            {
                "gradients": self._gradient_graph,
                SHORT + "gradients": partial(self._gradient_graph, short=True),
                "update": self._update_graph,
                "step": self._step_graph,
                SHORT + "step": partial(self._step_graph, short=True),
                "validation": self._validation_graph,
                "crop": self._crop_graph,
            },
            {network.parameters[name]: variable for name, variable in self.weights.items()},
            config,
            memory,
            on_gradient_ready,
        )

    def _shared(self, value: np.ndarray, name: str) -> DeviceSharedVariable:
        return device_shared(value, name=name, device=self._device)

    def _frozen(self) -> _Variables:
        return {
            name: self._shared(np.zeros(variable.type.shape, self._config.dtype), name)
            for name, variable in self._network.parameters.items()
            if name not in self.weights
        }

    def _zero_sums(self, prefix: str) -> _Variables:
        zero = np.zeros((), np.int64)
        zeros = {"loss": np.zeros(()), "images": zero}
        if counts_errors(self._network, self._layout.targets):
            zeros |= {"top1_errors": zero, "top5_errors": zero}
        for metric in self._metrics:
            shape = (self._network.classes,) if metric.by_class else ()
            zeros |= {name: np.zeros(shape) for name in metric.sums}
        return {name: self._shared(value, f"{prefix} {name}") for name, value in zeros.items()}

    def load(
        self,
        weights: Mapping[str, np.ndarray],
        states: Mapping[str, Mapping[str, np.ndarray]] = MappingProxyType({}),
    ) -> None:
        """Set weights and optimizer states, in their logical layouts, in place.

        Names left out keep their values; a state of a frozen parameter is ignored.
        """
        groups = [(self.weights, weights)]
        groups += [(placed, states.get(name, {})) for name, placed in self.states.items()]
        for variables, values in groups:
            for name in variables.keys() & values.keys():
                variables[name].set_value(values[name].astype(self._config.dtype, copy=False))

    def state(self) -> tuple[dict[str, np.ndarray], dict[str, dict[str, np.ndarray]]]:
        """All weights, and each state of the optimizer, by name, in the network's order.

        They have their logical layouts; on the host they are the memory itself. A state has every
        trainable parameter, zero where that is frozen.
        """
        declared = self._network.parameters.declared
        weights = {name: self.weights[name].get_value(borrow=True) for name in declared}
        states = {
            state: {
                name: placed[name].get_value(borrow=True)
                if name in placed
                else np.zeros_like(weights[name])
                for name, parameter in declared.items()
                if parameter.trainable
            }
            for state, placed in self.states.items()
        }
        return weights, states

    def compute_gradients(self, slot: Slot, epoch: int, rows: int | None = None) -> None:
        """Write the gradients of the mean cost over the slot's valid pictures to their vector.

        Loss and errors are of the same forward pass, with dropout; the update counts them. `rows`
        is the number of valid pictures, None where all are.
        """
        name = self._of_rows("gradients", rows)
        self.functions(name, slot, epoch=np.array(epoch, np.int64))

    def is_finite(self) -> bool:
        """Whether the loss and all gradients that were computed last are finite."""
        return bool(self._finite.get_value())

    def update(self, learning_rate: float, updates: int = 0) -> None:
        """Step weights and optimizer states, in place, from the gradients in their vector.

        `updates` is how many were made before. The loss and errors of the gradients' forward pass
        are added to the sums of training.
        """
        self.functions("update", None, **self._update_numbers(learning_rate, updates))

    def step(
        self,
        slot: Slot,
        epoch: int,
        learning_rate: float,
        rows: int | None = None,
        updates: int = 0,
    ) -> Callable[[], bool]:
        """Compute gradients and update in one function, without waiting.

        Where the loss or a gradient is not finite nothing is updated, and nothing counted. The
        result waits for the step and returns whether all were finite. For a trainer alone. `rows`
        is that of `compute_gradients`.
        """
        numbers = self._update_numbers(learning_rate, updates)
        name = self._of_rows("step", rows)
        self.functions(name, slot, epoch=np.array(epoch, np.int64), **numbers)
        finite = self._finite.read_later()
        return lambda: bool(finite())

    def validate(self, slot: Slot) -> None:
        """Add up loss and errors of the slot's valid pictures, without dropout."""
        self.functions("validation", slot)

    def validate_crop(self, slot: Slot, last: bool) -> None:
        """Add the class probabilities of one of the `CROPS` crops of a minibatch to the others'.

        After the `last` one, loss and errors of the averages are added to the sums: the loss of a
        picture is the negative logarithm of its class's averaged probability, whatever `loss` is.
        """
        self.functions("crop", slot, last=np.array(last, np.int64))

    def read_scores(self) -> np.ndarray:
        """The network's outputs of the last minibatch that was validated, (row, class)."""
        if self._scores is None:
            raise RuntimeError("nothing has been validated yet")
        return self._scores.get_value()

    def read_sums(self, mode: Mode) -> Sums:
        """The sums of training or of validation since they were last taken."""
        found = {name: v.get_value().tolist() for name, v in self._sums[mode].items()}
        images, loss = found.pop("images"), found.pop("loss")
        values = {n: tuple(v) if isinstance(v, list) else v for n, v in found.items()}
        return Sums(images, loss, values)

    def take_sums(self, mode: Mode) -> Sums:
        """Return the sums, and start from zero."""
        sums = self.read_sums(mode)
        self.put_sums(mode, Sums())
        return sums

    def put_sums(self, mode: Mode, sums: Sums) -> None:
        """Continue from `sums`; what they lack of pictures that were counted is not known."""
        given: dict[str, Any] = {"images": sums.images, "loss": sums.loss, **sums.values}
        for name, variable in self._sums[mode].items():
            shape, dtype = variable.type.shape, variable.dtype
            value = np.asarray(given.get(name, np.nan if sums.images else 0))
            if value.shape != shape or (dtype == "int64" and not np.isfinite(value)):
                value = np.full(shape, np.nan if sums.images and dtype == "float64" else 0)
            variable.set_value(value.astype(dtype))

    def _of_rows(self, name: str, rows: int | None) -> str:
        """The function for so many valid rows: only averages tell a short minibatch by it."""
        is_short = rows is not None and rows < self._config.batch_size
        return SHORT + name if is_short and self._averages else name

    def _inputs(self, mode: Mode, coloured: bool = False) -> tuple[Tensors, TensorVariable]:
        """The arrays of a slot as symbolic variables, and the network's input."""
        if self._mean is None:
            return array_inputs(self._config, self._layout, self._kept.get(mode))
        return minibatch_inputs(self._config, self._mean, self._kept.get(mode), coloured)

    def _backward(self, short: bool) -> BackwardPass:
        """Build the forward and the backward pass, of a minibatch that is short or is not.

        What is trained is the cost with those of auxiliary heads; what is counted, without.
        """
        network, config = self._network, self._config
        minibatch, images = self._inputs("train", coloured=config.rand_colour > 0)
        epoch = pt.tensor("epoch", dtype="int64", shape=())
        seed = pt.constant(np.int64(config.seed))
        labels, valid = targets_of(minibatch, config.dtype), minibatch["valid"]
        training = Training(
            seed,
            epoch,
            minibatch["indices"],
            valid if short else None,
            config.group_rows,
            config.freeze,
        )
        logits = network.logits(images, training)
        cost = total = network.cost(logits, labels, valid)
        for outputs, weight in training.auxiliary:
            part = network.cost(outputs, labels, valid)
            total = total + np.asarray(weight, part.dtype) * part
        check_graph(network, images, total, training)
        learned = [network.parameters[name] for name in self._rates]
        gradients = cast(list[TensorVariable], pt.grad(total, learned))
        found = dict(zip(self._rates, gradients, strict=True))
        found |= {name: training.statistics[name] for name in self._averages}
        measured = self._metrics if config.print_train_error else None
        counts = count_minibatch(cost, logits, minibatch, network, measured)
        return BackwardPass(minibatch, epoch, found, counts, are_finite([total, *found.values()]))

    def _gradient_graph(self, short: bool = False) -> FunctionGraph:
        found = self._backward(short)
        updates = [(self.gradients[name], value) for name, value in found.gradients.items()]
        updates += [(self._last[name], value) for name, value in found.counts.items()]
        updates.append((self._finite, found.finite.astype("int64")))
        return FunctionGraph(found.minibatch, {"epoch": found.epoch}, updates)

    def _update_graph(self) -> FunctionGraph:
        numbers = self._number_inputs()
        updates = self._updates(self._updated, self._last, numbers)
        return FunctionGraph({}, numbers, updates)

    def _step_graph(self, short: bool = False) -> FunctionGraph:
        found, numbers = self._backward(short), self._number_inputs()
        placed = self.weights, self.states, found.gradients
        updates = self._updates(placed, found.counts, numbers)
        kept = [(v, pt.switch(found.finite, new, v)) for v, new in updates]
        kept.append((self._finite, found.finite.astype("int64")))
        return FunctionGraph(found.minibatch, {"epoch": found.epoch, **numbers}, kept)

    def _update_numbers(self, learning_rate: float, updates: int) -> dict[str, np.ndarray]:
        """The rate and the optimizer's numbers, as an update takes them."""
        numbers = {"learning_rate": learning_rate, **self._optimizer.numbers(updates)}
        return {key: np.asarray(value, self._config.dtype) for key, value in numbers.items()}

    def _number_inputs(self) -> Tensors:
        kind = self._config.dtype
        return {
            key: pt.tensor(key, dtype=kind, shape=())
            for key in self._update_numbers(0.0, updates=0)
        }

    def _updates(
        self, placed: _Placed, counts: Mapping[str, TensorVariable], numbers: Tensors
    ) -> list[tuple[DeviceSharedVariable, TensorVariable]]:
        """Pairs of a variable and its value after a step."""
        updates, rate = added(self._sums["train"], counts), numbers["learning_rate"]
        weights, states, gradients = placed
        for name, own in self._rates.items():
            if name not in gradients:  # another trainer updates it
                continue
            before = [state[name] for state in states.values()]
            weight, after = self._optimizer.step(
                weights[name],
                before,
                gradients[name],
                rate if own.factor == 1 else rate * np.asarray(own.factor, rate.dtype),
                own.decay,
                numbers,
            )
            updates += [(weights[name], weight), *zip(before, after, strict=True)]
        for name, keep in self._averages.items():
            if name in gradients:
                kept, rest = (np.asarray(x, rate.dtype) for x in (keep, 1 - keep))
                updates.append((weights[name], kept * weights[name] + rest * gradients[name]))
        return updates

    def _forward(self) -> tuple[Tensors, TensorVariable, TensorVariable]:
        """The arrays of a slot, and the network's outputs and their cost in validation."""
        minibatch, images = self._inputs("validation")
        logits = self._network.logits(images, None)
        targets = targets_of(minibatch, self._config.dtype)
        cost = self._network.cost(logits, targets, minibatch["valid"])
        check_graph(self._network, images, cost)
        return minibatch, logits, cost

    def _validation_graph(self) -> FunctionGraph:
        minibatch, logits, cost = self._forward()
        counts = count_minibatch(cost, logits, minibatch, self._network, self._metrics)
        if self._scores is None:
            shape = (self._config.batch_size, self._network.classes)
            value = np.zeros(shape, self._config.dtype)
            self._scores = self._shared(value, "scores")
        updates = [*added(self._sums["validation"], counts), (self._scores, logits)]
        return FunctionGraph(minibatch, {}, updates)

    def _crop_graph(self) -> FunctionGraph:
        minibatch, logits, _ = self._forward()
        if self._probabilities is None:
            zeros = np.zeros((self._config.batch_size, self._network.classes))
            self._probabilities = self._shared(zeros, "probabilities")
        last = pt.tensor("last", dtype="int64", shape=())
        # In float64, in which the logarithm of an improbable class is finite.
        sums = self._probabilities + pt.special.softmax(logits.astype("float64"), axis=1)
        rows = pt.arange(self._config.batch_size)
        losses = -pt.log(sums[rows, minibatch["labels"]] / CROPS)
        cost = mean_over_valid(losses, minibatch["valid"])
        counts = count_minibatch(cost, sums, minibatch, self._network, self._metrics)
        counted = {name: pt.switch(last, n, pt.zeros_like(n)) for name, n in counts.items()}
        updates = added(self._sums["validation"], counted)
        updates.append((self._probabilities, pt.switch(last, pt.zeros_like(sums), sums)))
        return FunctionGraph(minibatch, {"last": last}, updates)


def _place(arrays: Mapping[str, Any], device: str, prefix: str) -> _Variables:
    return {
        name: device_shared(None, name=prefix + name, device=device, memory=array)
        for name, array in arrays.items()
    }


def _place_vectors(vectors: Vectors, device: str, prefix: str = "") -> _Placed:
    return (
        _place(vectors.weights, device, prefix),
        {
            state: _place(arrays, device, f"{prefix}{state}/")
            for state, arrays in vectors.states.items()
        },
        _place(vectors.gradients, device, prefix + GRADIENT),
    )
