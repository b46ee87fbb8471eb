"""The network on its device: parameters in flat buffers, and the functions compiled over them.

Importing this module imports PyTensor and PyTorch: only a trainer process does.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.compile.executor import Function
from pytensor.tensor.variable import TensorVariable

from tandem.artifacts.metrics import MetricSums
from tandem.backend import Captured, DeviceSharedVariable, capture, device_mode, device_shared
from tandem.config.schema import Config
from tandem.data.augment import Mode
from tandem.layers import DropoutKeys, Network
from tandem.memory.flat import Vectors
from tandem.memory.slot import Slot
from tandem.ops import crop_mirror
from tandem.optim import Optimizer
from tandem.optim.parameter_groups import learned_rates, running_averages
from tandem.training.graphs import (
    FunctionGraph,
    Tensors,
    added,
    are_finite,
    count_minibatch,
    minibatch_inputs,
)

_Variables = dict[str, DeviceSharedVariable]
_Placed = tuple[_Variables, dict[str, _Variables], _Variables]
"""Weights, each state of the optimizer, and gradients."""
_GRADIENT = "gradient/"


class CompiledNetwork:
    """A network whose parameters, optimizer states and gradients lie in flat vectors.

    Frozen parameters lie beside them, so that no exchange touches them. An array that is not
    trained has its statistic, computed with the gradients, in the vector of gradients.

    On the host a function takes a slot's arrays as its arguments. On a GPU it is recorded once for
    each slot, over the slot's memory, and replayed: that costs the host one call.

    Parameters
    ----------
    network : Network
        The graph.
    config : Config
        Rates, precision, seed, and all other settings that the functions depend on.
    optimizer : Optimizer
        Its step updates the parameters.
    mean : float32 (3, S, S)
        The mean image.
    vectors : Vectors
        The memory of parameters, states and gradients, which other trainers may share.
    device : str
        "cpu" or "cuda:0" and so on.
    compile : bool
        Whether the functions go through ``torch.compile``.
    device_crops : bool
        Whether a slot holds whole pictures, cropped here, or crops.
    records : bool
        Whether slots are in the device's own memory, so that functions are recorded over it.
    updated : Vectors, optional
        The parts of these vectors that an update steps, flattened; by default all of them.
    on_gradient_ready : callable, optional
        Called with a parameter's name when its gradient is ready, during the backward pass, see
        `device_mode`. Gradients are then not recorded.
    """

    def __init__(
        self,
        network: Network,
        config: Config,
        optimizer: Optimizer,
        mean: np.ndarray,
        vectors: Vectors,
        device: str = "cpu",
        compile: bool = False,
        device_crops: bool = True,
        records: bool = False,
        updated: Vectors | None = None,
        on_gradient_ready: Callable[[str], None] | None = None,
    ) -> None:
        self._network, self._config, self._device = network, config, device
        self._optimizer = optimizer
        self._records, self._on_gradient_ready = records, on_gradient_ready
        products = "float32" if config.precision == "float64" else config.precision
        make_mode = partial(device_mode, device, compile=compile, precision=products)
        self._mode = make_mode()
        self._reporting_mode = (
            self._mode
            if on_gradient_ready is None
            else make_mode(on_gradient_ready=self._report_gradient)
        )
        self._crop = (config.crop_size, not device_crops)
        self._side = mean.shape[1] if device_crops else config.crop_size
        declared = network.parameters.declared
        self._rates = learned_rates(
            declared, config.freeze, config.lr_multipliers, optimizer.weight_decay
        )
        self._averages = running_averages(declared, config.freeze)
        placed = self._place_vectors(vectors)
        self.weights, self.states, self.gradients = placed
        self.weights |= self._frozen()
        self._updated = placed if updated is None else self._place_vectors(updated, "part of ")
        self._mean = device_shared(mean.astype(config.dtype), name="mean", device=device)
        self._sums = {mode: self._zeros(mode) for mode in ("train", "validation")}
        self._last = self._zeros("last")
        self._scores: DeviceSharedVariable | None = None
        self._finite = self._number("int64", "finite")
        self._values = {
            "epoch": self._number("int64", "epoch"),
            "learning_rate": self._number(config.dtype, "learning_rate"),
        }
        self._functions: dict[str, tuple[Function, tuple[str, ...]]] = {}
        self._recorded: dict[tuple[str, Slot | None], Callable[[], Any]] = {}

    def _report_gradient(self, variable: str) -> None:
        if self._on_gradient_ready is not None and variable.startswith(_GRADIENT):
            self._on_gradient_ready(variable.removeprefix(_GRADIENT))

    def _place(self, arrays: Mapping[str, Any], prefix: str) -> dict[str, DeviceSharedVariable]:
        return {
            name: device_shared(None, name=prefix + name, device=self._device, memory=array)
            for name, array in arrays.items()
        }

    def _place_vectors(self, vectors: Vectors, prefix: str = "") -> _Placed:
        return (
            self._place(vectors.weights, prefix),
            {
                state: self._place(vectors.states[state], f"{prefix}{state}/")
                for state in self._optimizer.states
            },
            self._place(vectors.gradients, prefix + _GRADIENT),
        )

    def _frozen(self) -> dict[str, DeviceSharedVariable]:
        return {
            name: device_shared(
                np.zeros(variable.type.shape, self._config.dtype), name=name, device=self._device
            )
            for name, variable in self._network.parameters.items()
            if name not in self.weights
        }

    def _number(self, dtype: str, name: str) -> DeviceSharedVariable:
        return device_shared(np.zeros((), dtype), name=name, device=self._device)

    def _zeros(self, prefix: str) -> dict[str, DeviceSharedVariable]:
        return {
            name: self._number("float64" if name == "loss" else "int64", f"{prefix} {name}")
            for name in ("loss", "top1_errors", "top5_errors", "images")
        }

    def load(
        self,
        weights: Mapping[str, np.ndarray],
        states: Mapping[str, Mapping[str, np.ndarray]] = MappingProxyType({}),
    ) -> None:
        """Set weights and optimizer states, in their logical layouts, in place.

        Names left out keep their values. A frozen parameter has no state: one that is given is
        ignored.
        """
        groups = [(self.weights, weights)]
        groups += [(placed, states.get(name, {})) for name, placed in self.states.items()]
        for variables, values in groups:
            for name in variables.keys() & values.keys():
                variables[name].set_value(values[name].astype(self._config.dtype, copy=False))

    def state(self) -> tuple[dict[str, np.ndarray], dict[str, dict[str, np.ndarray]]]:
        """All weights, and each state of the optimizer, by name, in the network's order.

        Returns
        -------
        weights : dict of str to ndarray
            In their logical layouts. On the host they are the memory itself.
        states : dict of str to dict of str to ndarray
            Likewise, of every trainable parameter; zero where it is frozen.
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

    def compute_gradients(self, slot: Slot, epoch: int) -> None:
        """Write the gradients of the mean cost over the slot's valid pictures to their vector.

        Loss and errors are of the same forward pass, with dropout, before the update, which counts
        them.
        """
        self._call("gradients", slot, epoch=np.array(epoch, np.int64))

    def is_finite(self) -> bool:
        """Whether the loss and all gradients that were computed last are finite."""
        return bool(self._finite.get_value())

    def update(self, learning_rate: float) -> None:
        """Step weights and optimizer states, in place, from the gradients in their vector.

        The loss and errors of the gradients' forward pass are added to the sums of training.
        """
        self._call("update", None, learning_rate=np.asarray(learning_rate, self._config.dtype))

    def validate(self, slot: Slot) -> None:
        """Add up loss and errors of the slot's valid pictures, without dropout."""
        self._call("validation", slot)

    def read_scores(self) -> np.ndarray:
        """The network's outputs of the last minibatch that was validated, (row, class)."""
        if self._scores is None:
            raise RuntimeError("nothing has been validated yet")
        return self._scores.get_value()

    def take_sums(self, mode: Mode) -> MetricSums:
        """Give the sums of training or of validation since the last call, and start from zero."""
        sums = self.read_sums(mode)
        self.put_sums(mode, MetricSums())
        return sums

    def read_sums(self, mode: Mode) -> MetricSums:
        """Give the sums without starting anew."""
        return MetricSums(**{name: v.get_value().item() for name, v in self._sums[mode].items()})

    def put_sums(self, mode: Mode, sums: MetricSums) -> None:
        """Go on from `sums`."""
        for name, variable in self._sums[mode].items():
            variable.set_value(np.asarray(getattr(sums, name), variable.dtype))

    def _call(self, name: str, slot: Slot | None, **values: np.ndarray) -> None:
        if not self._records:
            function, parts = self._function(name)
            function(*(getattr(slot, part) for part in parts), *values.values())
            return
        for key, value in values.items():
            self._values[key].set_value(value)
        if (name, slot) not in self._recorded:
            self._recorded[name, slot] = self._record(name, slot)
        self._recorded[name, slot]()

    def _graph(self, name: str) -> FunctionGraph:
        return {
            "gradients": self._gradient_graph,
            "update": self._update_graph,
            "validation": self._validation_graph,
        }[name]()

    def _function(self, name: str) -> tuple[Function, tuple[str, ...]]:
        """The function that takes parts of a slot and numbers as arguments, and these parts."""
        if name not in self._functions:
            graph = self._graph(name)
            inputs = [*graph.minibatch.values(), *graph.values.values()]
            parts = tuple(graph.minibatch)
            self._functions[name] = self._compile(name, graph, inputs, {}), parts
        return self._functions[name]

    def _record(self, name: str, slot: Slot | None) -> Callable[[], Any]:
        """The function over one slot's memory, recorded. The slot holds a minibatch already."""
        graph = self._graph(name)
        arrays = {part: getattr(slot, part) for part in graph.minibatch}
        places = self._place(arrays, "slot/") | self._values
        givens = {
            variable: places[key] for key, variable in (graph.minibatch | graph.values).items()
        }
        function = self._compile(name, graph, [], givens)
        if name == "gradients" and self._on_gradient_ready is not None:
            return function
        # No two of them ever run at a time, so they share what memory they need in between.
        beside = next((f for f in self._recorded.values() if isinstance(f, Captured)), None)
        return capture([function], self._device, beside=beside)

    def _compile(
        self, name: str, graph: FunctionGraph, inputs: list[TensorVariable], givens: dict[Any, Any]
    ) -> Function:
        # The update runs no network, and a frozen parameter would be an input that it does not use.
        names = self.weights if graph.minibatch else ()
        placed = {self._network.parameters[name]: self.weights[name] for name in names}
        return pytensor.function(
            inputs,
            [],
            updates=graph.updates,
            givens={**placed, **givens},
            mode=self._reporting_mode if name == "gradients" else self._mode,
            name=name,
            trust_input=True,
            on_unused_input="ignore",  # an update needs no variable of the network
        )

    def _images(self, minibatch: Tensors) -> TensorVariable:
        size, cropped = self._crop
        return crop_mirror(
            minibatch["pictures"],
            self._mean,
            minibatch["origins"],
            minibatch["mirrored"],
            crop_size=size,
            cropped=cropped,
            dtype=self._config.dtype,
        )

    def _gradient_graph(self) -> FunctionGraph:
        network, minibatch = self._network, minibatch_inputs(self._config.batch_size, self._side)
        minibatch["indices"] = pt.tensor(
            "indices", dtype="int64", shape=minibatch["labels"].type.shape
        )
        epoch = pt.tensor("epoch", dtype="int64", shape=())
        seed = pt.constant(np.int64(self._config.seed))
        keys = DropoutKeys(seed, epoch, minibatch["indices"])
        logits = network.logits(self._images(minibatch), keys)
        cost = network.cost(logits, minibatch["labels"], minibatch["valid"])
        learned = [network.parameters[name] for name in self._rates]
        gradients = cast(list[TensorVariable], pt.grad(cost, learned))
        updates = [(self.gradients[n], g) for n, g in zip(self._rates, gradients, strict=True)]
        statistics = [keys.statistics[n] for n in self._averages]
        updates += [(self.gradients[n], v) for n, v in zip(self._averages, statistics, strict=True)]
        counts = count_minibatch(cost, logits, minibatch, self._config.print_train_error)
        updates += [(self._last[name], value) for name, value in counts.items()]
        updates.append((self._finite, are_finite([cost, *gradients, *statistics]).astype("int64")))
        return FunctionGraph(minibatch, {"epoch": epoch}, updates)

    def _update_graph(self) -> FunctionGraph:
        rate = pt.tensor("learning_rate", dtype=self._config.dtype, shape=())
        updates = added(self._sums["train"], self._last)
        weights, states, gradients = self._updated
        for name, own in self._rates.items():
            if name not in gradients:  # another trainer updates it
                continue
            before = [placed[name] for placed in states.values()]
            weight, after = self._optimizer.step(
                weights[name],
                before,
                gradients[name],
                rate if own.factor == 1 else rate * np.asarray(own.factor, rate.dtype),
                own.decay,
            )
            updates += [(weights[name], weight), *zip(before, after, strict=True)]
        for name, keep in self._averages.items():
            if name in gradients:
                kept, rest = (np.asarray(x, rate.dtype) for x in (keep, 1 - keep))
                updates.append((weights[name], kept * weights[name] + rest * gradients[name]))
        return FunctionGraph({}, {"learning_rate": rate}, updates)

    def _validation_graph(self) -> FunctionGraph:
        minibatch = minibatch_inputs(self._config.batch_size, self._side)
        logits = self._network.logits(self._images(minibatch), None)
        cost = self._network.cost(logits, minibatch["labels"], minibatch["valid"])
        counts = count_minibatch(cost, logits, minibatch, errors=True)
        if self._scores is None:
            shape = (self._config.batch_size, self._network.classes)
            value = np.zeros(shape, self._config.dtype)
            self._scores = device_shared(value, name="scores", device=self._device)
        updates = [*added(self._sums["validation"], counts), (self._scores, logits)]
        return FunctionGraph(minibatch, {}, updates)
