"""The graphs of a trainer's functions, over its variables."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.tensor.variable import TensorVariable

from tandem.backend import DeviceSharedVariable, device_mode
from tandem.config.schema import Config
from tandem.data.augment import Mode
from tandem.layers import Network, mean_over_valid
from tandem.layers.checks import check_graph
from tandem.layers.choices import Metric
from tandem.memory.slot import SlotLayout
from tandem.optim import Optimizer
from tandem.placement.placements import Partial, Placement, Shard
from tandem.training.divided_graphs import GlobalMinibatch, own_part, partition_training
from tandem.training.graphs import (
    TOTAL,
    BackwardPass,
    FunctionGraph,
    Minibatch,
    Tensors,
    added,
    are_finite,
    array_inputs,
    cost_of,
    minibatch_inputs,
    targets_of,
)
from tandem.training.variables import NetworkVariables, Placed
from tandem.training.whole_graphs import count, counts_of, gradient, whole_pass

CROPS = 10

_Updates = list[tuple[DeviceSharedVariable, TensorVariable]]


class NetworkGraphs:
    """Builds the graphs of a trainer's functions.

    Where trainers divide one graph, it is built of the global minibatch, and then each takes its
    part of it; the update is of what each has in any case.
    """

    def __init__(
        self,
        network: Network,
        config: Config,
        optimizer: Optimizer,
        variables: NetworkVariables,
        layout: SlotLayout,
        metrics: Sequence[Metric],
    ) -> None:
        self._network, self._config, self._optimizer = network, config, optimizer
        self._variables, self._layout, self._metrics = variables, layout, metrics
        declared = network.parameters.declared
        self._rates = config.parameter_groups.learned(declared, optimizer.weight_decay)
        self.averages = config.parameter_groups.averages(declared)

    def gradients(self, short: bool = False) -> FunctionGraph:
        """Gradients of the mean cost, and what the minibatch counts."""
        found, own = self._backward(short), self._variables
        updates = [(own.own.gradients[name], value) for name, value in found.gradients.items()]
        updates += [(own.last[name], value) for name, value in found.counts.items()]
        updates.append((own.finite, found.finite.astype("int64")))
        return self._function(found.minibatch, updates + found.updates, {"epoch": found.epoch})

    def update(self) -> FunctionGraph:
        """A step of the optimizer from the gradients in their vector."""
        numbers = self._number_inputs()
        placed = self._variables.updated
        updates = self._updates(placed, self._variables.last, numbers, placed.gradients)
        return FunctionGraph({}, numbers, updates)

    def step(self, short: bool = False) -> FunctionGraph:
        """Gradients and update of a trainer alone, of which nothing is kept if not all finite."""
        found, numbers = self._backward(short), self._number_inputs()
        placed = self._variables.own
        updates = self._updates(placed, found.counts, numbers, found.gradients)
        kept: _Updates = [(v, pt.switch(found.finite, new, v)) for v, new in updates]
        kept.append((self._variables.finite, found.finite.astype("int64")))
        return self._function(found.minibatch, kept, {"epoch": found.epoch, **numbers})

    def validation(self) -> FunctionGraph:
        """Loss, errors and outputs of a minibatch, without dropout."""
        minibatch, logits, cost = self._forward()
        counts = self._counts(cost, logits, minibatch)
        own = self._variables
        if own.scores is None:
            own.scores = own.shared(self._zero_outputs(self._config.dtype), "scores")
        wanted: dict[str, Placement] = dict.fromkeys(counts, Partial())
        found, updates = self._own({**counts, "": logits}, {**wanted, "": Shard(0)}, minibatch, {})
        scores = found.pop("")
        updates += [*added(own.sums["validation"], self._counted(found, minibatch))]
        return self._function(minibatch, [*updates, (own.scores, scores)])

    def crop(self) -> FunctionGraph:
        """Sums of the probabilities of the crops of a minibatch, and counts of their average."""
        minibatch, logits, _ = self._forward()
        own = self._variables
        if own.probabilities is None:
            own.probabilities = own.shared(self._zero_outputs("float64"), "probabilities")
        crop = pt.tensor("crop", dtype="int64", shape=())
        before = self._rows_of_all(own.probabilities)
        # In float64, in which the logarithm of an improbable class is finite.
        likely = self._network.probabilities(logits.astype("float64"))
        sums = pt.switch(pt.eq(crop, 0), likely, before + likely)
        labels, valid = minibatch.tensors["labels"], minibatch.tensors["valid"]
        losses = -pt.log(sums[pt.arange(labels.type.shape[0]), labels] / np.float64(CROPS))
        cost = mean_over_valid(losses, valid)
        counts = self._counts(cost, sums, minibatch)
        wanted: dict[str, Placement] = dict.fromkeys(counts, Partial())
        found, updates = self._own(
            {**counts, "": sums}, {**wanted, "": Shard(0)}, minibatch, {before: own.probabilities}
        )
        total = found.pop("")
        counted = {
            name: pt.switch(pt.eq(crop, CROPS - 1), n, pt.zeros_like(n))
            for name, n in self._counted(found, minibatch).items()
        }
        updates += added(own.sums["validation"], counted)
        updates.append((own.probabilities, total))
        return self._function(minibatch, updates, {"crop": crop})

    @cached_property
    def predict(self) -> Callable[[np.ndarray], Any]:
        """The function from outputs, float64 (row, class), to what the network predicts."""
        logits = pt.matrix("logits", dtype="float64")
        # TF32 is a setting of the process, and so the run's here too.
        precision: Any = "tf32" if self._config.precision == "tf32" else "float32"
        mode = device_mode("cpu", precision=precision)
        return pytensor.function([logits], self._network.probabilities(logits), mode=mode)

    def update_numbers(self, learning_rate: float, updates: int) -> dict[str, np.ndarray]:
        """The rate and the optimizer's numbers, as an update takes them."""
        numbers = {"learning_rate": learning_rate, **self._optimizer.numbers(updates)}
        return {key: np.asarray(value, self._config.dtype) for key, value in numbers.items()}

    def _number_inputs(self) -> Tensors:
        kind = self._config.dtype
        return {
            key: pt.tensor(key, dtype=kind, shape=()) for key in self.update_numbers(0.0, updates=0)
        }

    def _function(
        self, minibatch: Minibatch, updates: Sequence[Any], numbers: Tensors | None = None
    ) -> FunctionGraph:
        # A divided graph has the trainer's variables already.
        parameters = {} if self._variables.division else self._variables.parameters()
        together = {**(numbers or {}), **minibatch.numbers}
        return FunctionGraph(minibatch.slot, together, list(updates), parameters)

    def _minibatch(self, mode: Mode, coloured: bool = False) -> Minibatch:
        """The arrays of a slot as symbolic variables, and the network's input."""
        mean, kept = self._variables.mean, self._variables.kept.get(mode)
        if mean is None:
            as_stored = self._network.takes_stored_rows
            slot, images = array_inputs(self._config, self._layout, kept, as_stored)
        else:
            slot, images = minibatch_inputs(self._config, mean, kept, coloured)
        if (division := self._variables.division) is None:
            total = {TOTAL: pt.tensor(TOTAL, dtype="int64", shape=())}
            return Minibatch(slot, images, slot, total if self._network.takes_total else {})
        return GlobalMinibatch.of(slot, images, division.ranks, mode)

    def _backward(self, short: bool) -> BackwardPass:
        """This trainer's part of the forward and the backward pass, and whether it is finite."""
        minibatch = self._minibatch("train", coloured=self._config.rand_colour > 0)
        whole = whole_pass(self._network, self._config, minibatch, self._metrics, short)
        division = self._variables.division
        wanted = whole.wanted({} if division is None else division.placements)
        found, updates = self._own(whole.outputs, wanted, minibatch, {})
        own = {n: found[gradient(n)] for n in whole.gradients if gradient(n) in found}
        counted = {name: found[count(name)] for name in whole.counts}
        return BackwardPass(
            minibatch,
            whole.epoch,
            own,
            self._counted(counted, minibatch),
            are_finite([found["total"], *own.values()]),
            updates,
        )

    def _own(
        self,
        outputs: Tensors,
        wanted: Mapping[str, Placement],
        minibatch: Minibatch,
        others: Mapping[TensorVariable, TensorVariable],
    ) -> tuple[Tensors, _Updates]:
        """This trainer's part of a graph, and the update by which it makes every conversion.

        `others` are further global variables, with this trainer's rows of them.
        """
        division = self._variables.division
        if division is None:
            return outputs, []
        assert isinstance(minibatch, GlobalMinibatch)
        rows = {**minibatch.sources, **others}
        parted = partition_training(
            outputs,
            wanted,
            {self._network.parameters[n]: p for n, p in division.placements.items()},
            [*rows],
            division.ranks,
            division.rank,
        )
        found, token = own_part(outputs, parted, {**self._variables.parameters(), **rows})
        return found, [] if token is None else [(self._variables.token, token)]

    def _counts(
        self, cost: TensorVariable, outputs: TensorVariable, minibatch: Minibatch
    ) -> Tensors:
        return counts_of(self._network, minibatch, cost, outputs, self._metrics)

    def _counted(self, counts: Tensors, minibatch: Minibatch) -> Tensors:
        """Counts with the number of pictures: each trainer counts its own."""
        return {**counts, "images": minibatch.slot["valid"]}

    def _rows_of_all(self, own: DeviceSharedVariable) -> TensorVariable:
        """A variable of rows, or in a divided graph one for those of all trainers."""
        if self._variables.division is None:
            return own
        rows, *shape = own.type.shape
        whole = (rows * self._variables.division.ranks, *shape)
        return pt.tensor(f"all {own.name}", dtype=own.type.dtype, shape=whole)

    def _zero_outputs(self, dtype: str) -> np.ndarray:
        return np.zeros((self._config.pass_rows, self._network.classes), dtype)

    def _updates(
        self,
        placed: Placed,
        counts: Mapping[str, TensorVariable],
        numbers: Tensors,
        gradients: Mapping[str, TensorVariable],
    ) -> _Updates:
        """Pairs of a variable and its value after a step."""
        updates, rate = added(self._variables.sums["train"], counts), numbers["learning_rate"]
        weights, states = placed.weights, placed.states
        clipped = self._clipped({n: gradients[n] for n in self._rates if n in gradients})
        for name, slope in clipped.items():  # but for those that another trainer updates
            own, value, decay = self._rates[name], weights[name], self._rates[name].decay
            own_rate = rate if own.factor == 1 else rate * np.asarray(own.factor, rate.dtype)
            if decay and self._config.decoupled_decay:
                value, decay = value - own_rate * np.asarray(decay, rate.dtype) * value, 0.0
            before = [state[name] for state in states.values()]
            weight, after = self._optimizer.step(value, before, slope, own_rate, decay, numbers)
            updates += [(weights[name], weight), *zip(before, after, strict=True)]
        for name, keep in self.averages.items():
            if name in gradients:
                kept, rest = (np.asarray(x, rate.dtype) for x in (keep, 1 - keep))
                updates.append((weights[name], kept * weights[name] + rest * gradients[name]))
        return updates

    def _clipped(self, gradients: Tensors) -> Tensors:
        """Gradients of which norms or elements are limited, as the configuration says."""
        config = self._config
        if (limit := config.clip_value) is not None:
            bound = np.asarray(limit, config.dtype)
            return {name: pt.clip(g, -bound, bound) for name, g in gradients.items()}
        squares = {name: pt.sqr(g).sum(dtype=config.dtype) for name, g in gradients.items()}
        if (limit := config.clip_global_norm) is not None:
            squares = dict.fromkeys(gradients, pt.stack([*squares.values()]).sum())
        elif (limit := config.clip_norm) is None:
            return gradients
        most = np.asarray(limit, config.dtype)
        factors = {name: most / pt.maximum(pt.sqrt(s), most) for name, s in squares.items()}
        return {name: g * factors[name] for name, g in gradients.items()}

    def _forward(self) -> tuple[Minibatch, TensorVariable, TensorVariable]:
        """The minibatch, and the network's outputs and their cost in validation."""
        minibatch = self._minibatch("validation")
        logits = self._network.logits(minibatch.images, None)
        targets = targets_of(minibatch.tensors, self._config.dtype)
        cost = cost_of(self._network, minibatch, logits, targets)
        check_graph(self._network, minibatch.images, cost)
        return minibatch, logits, cost
