"""A trainer's parameters, gradients, sums and kept data as variables of graphs."""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np

from tandem.artifacts.metrics import Sums
from tandem.backend import DeviceSharedVariable, device_shared
from tandem.config.schema import Config
from tandem.layers import Network
from tandem.layers.choices import Metric
from tandem.memory.flat import Vectors
from tandem.memory.parameters import CudaMemory, HostMemory
from tandem.optim.averaged import AVERAGE
from tandem.training.division import Division
from tandem.training.graphs import GRADIENT, counts_errors

Variables = dict[str, DeviceSharedVariable]
SumName = Literal["train", "validation", "last"]
_UNKNOWN = -(1 << 52)  # a count, to which others are added


class Placed(NamedTuple):
    """Views of a trainer's flat vectors by name: what an update reads and writes."""

    weights: Variables
    states: dict[str, Variables]  # by state of the optimizer
    gradients: Variables


class NetworkVariables:
    """The variables of a trainer's functions.

    Where trainers divide parameters, those that this one has a part of have the shape of its part,
    and those that it has nothing of are missing.

    Attributes
    ----------
    own : Placed
        The trainer's weights, frozen ones included, optimizer states and gradients.
    updated : Placed
        What it updates, which is a part where trainers share their parameters.
    mean : variable or None
        The mean image; None where slots hold rows of arrays.
    kept : dict
        Pictures that a device keeps, by split.
    sums, last : dict
        Counts of training, of validation, and of the last minibatch, which are `last` too.
    finite, token : variable
        Whether the last loss and gradients were finite; the end of a step's conversions.
    scores, probabilities : variable or None
        Outputs of the last minibatch, and sums of those of crops, (row, class); made when used.
    """

    def __init__(
        self,
        network: Network,
        config: Config,
        mean: np.ndarray | None,
        memory: HostMemory | CudaMemory,
        metrics: Sequence[Metric],
        division: Division | None,
    ) -> None:
        self._network, self._config, self._metrics = network, config, metrics
        self._device, self._targets = memory.device, memory.slot_layout.targets
        self.division = division
        own = _place_vectors(memory.vectors, memory.device)
        if memory.shards is not None:
            _extend(own, _place_vectors(memory.shards, memory.device))
        own.weights.update(self._frozen(own.weights))
        self.own = self.updated = own
        if memory.updated is not None:
            self.updated = _place_vectors(memory.updated, memory.device, "part of ")
        self.mean = None if mean is None else self.shared(mean.astype(config.dtype), "mean")
        self.kept = _place(memory.pictures, memory.device, "pictures/")
        self.sums = {name: self._zero_sums(name) for name in ("train", "validation", "last")}
        self.last = self.sums["last"]
        self.finite = self.shared(np.zeros((), np.int64), "finite")
        self.token = self.shared(np.zeros((), np.float32), "token")
        self.scores: DeviceSharedVariable | None = None
        self.probabilities: DeviceSharedVariable | None = None

    def shared(self, value: np.ndarray, name: str) -> DeviceSharedVariable:
        """Make a variable on the trainer's device."""
        return device_shared(value, name=name, device=self._device)

    def parameters(self) -> dict[Any, DeviceSharedVariable]:
        """The trainer's variable of each parameter of the network."""
        return {self._network.parameters[name]: v for name, v in self.own.weights.items()}

    def _frozen(self, others: Variables) -> Variables:
        """Make the parameters that lie in no vector, so that no exchange touches them."""
        shapes = {
            name: self._own_shape(name, parameter.shape)
            for name, parameter in self._network.parameters.declared.items()
            if name not in others
        }
        return {
            name: self.shared(np.zeros(shape, self._config.dtype), name)
            for name, shape in shapes.items()
            if shape is not None
        }

    def _own_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        return shape if self.division is None else self.division.shape(name, shape)

    def _zero_sums(self, prefix: str) -> Variables:
        zero = np.zeros((), np.int64)
        zeros = {"loss": np.zeros(()), "images": zero}
        if counts_errors(self._network, self._targets):
            zeros |= {"top1_errors": zero, "top5_errors": zero}
        for metric in self._metrics:
            shape = (self._network.classes,) if metric.by_class else ()
            zeros |= {name: np.zeros(shape) for name in metric.sums}
        return {name: self.shared(value, f"{prefix} {name}") for name, value in zeros.items()}

    def load(
        self,
        weights: Mapping[str, np.ndarray],
        states: Mapping[str, Mapping[str, np.ndarray]] = MappingProxyType({}),
    ) -> None:
        """Set weights and optimizer states from whole arrays in their logical layouts, in place.

        Names left out keep their values; a state of a frozen parameter is ignored.
        """
        groups = [(self.own.weights, weights)]
        groups += [(placed, states.get(name, {})) for name, placed in self.own.states.items()]
        for variables, values in groups:
            for name in variables.keys() & values.keys():
                value = values[name]
                if self.division is not None:
                    value = value[self.division.index(name, value.shape)]
                variables[name].set_value(value.astype(self._config.dtype, copy=False))

    def state(self) -> tuple[dict[str, np.ndarray], dict[str, dict[str, np.ndarray]]]:
        """The trainer's weights, and each state of the optimizer, by name, in the network's order.

        They have their logical layouts; on the host they are the memory itself. A state has every
        trainable parameter: where that is frozen it is zero, and its average is itself.
        """
        weights = {
            name: self.own.weights[name].get_value(borrow=True)
            for name in self._network.parameters.declared
            if name in self.own.weights
        }
        declared = self._network.parameters.declared
        states = {
            state: {
                name: placed[name].get_value(borrow=True)
                if name in placed
                else (own if state == AVERAGE else np.zeros_like(own))
                for name, own in weights.items()
                if declared[name].trainable
            }
            for state, placed in self.own.states.items()
        }
        return weights, states

    def read_sums(self, name: SumName) -> Sums:
        """The sums of training or of validation since they were last taken, or the last counts."""
        found = {key: v.get_value().tolist() for key, v in self.sums[name].items()}
        images, loss = found.pop("images"), found.pop("loss")
        values = {n: tuple(v) if isinstance(v, list) else v for n, v in found.items()}
        for key, value in values.items():
            uncounted = name != "validation" and images and not self._config.print_train_error
            if uncounted or (isinstance(value, int) and value < 0):
                values[key] = math.nan
        return Sums(images, loss, values)

    def put_sums(self, name: SumName, sums: Sums) -> None:
        """Continue from `sums`; what they lack of pictures that were counted is not known."""
        given: dict[str, Any] = {"images": sums.images, "loss": sums.loss, **sums.values}
        for key, variable in self.sums[name].items():
            shape, dtype = variable.type.shape, variable.dtype
            value = np.asarray(given.get(key, np.nan if sums.images else 0))
            if value.shape != shape:
                value = np.full(shape, np.nan if sums.images else 0)
            if dtype == "int64" and not np.isfinite(value):
                value = np.asarray(_UNKNOWN)
            variable.set_value(value.astype(dtype))


def _place(arrays: Mapping[str, Any], device: str, prefix: str) -> Variables:
    return {
        name: device_shared(None, name=prefix + name, device=device, memory=array)
        for name, array in arrays.items()
    }


def _place_vectors(vectors: Vectors, device: str, prefix: str = "") -> Placed:
    return Placed(
        _place(vectors.weights, device, prefix),
        {
            state: _place(arrays, device, f"{prefix}{state}/")
            for state, arrays in vectors.states.items()
        },
        _place(vectors.gradients, device, prefix + GRADIENT),
    )


def _extend(placed: Placed, more: Placed) -> None:
    """Add the variables of other vectors."""
    placed.weights.update(more.weights)
    placed.gradients.update(more.gradients)
    for state, variables in more.states.items():
        placed.states[state].update(variables)
