"""Steps of small networks, each line of which is timed.

Importing this module imports PyTensor and PyTorch.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
from pytensor.graph.basic import Apply

from tandem.config.schema import Config
from tandem.cost.fitting import TimedLine
from tandem.cost.probes import PROBES, Probe
from tandem.memory import HostSlots, Slot, SlotLayout
from tandem.memory.flat import FlatLayout
from tandem.memory.parameters import HostMemory
from tandem.ops.work import work_of
from tandem.optim import SGD
from tandem.training.compiled_network import CompiledNetwork

_CLASSES = 1000
_RATE = 1e-6


class TimedNetwork:
    """A trainer's step of a network: gradients and update, on a minibatch of noise."""

    def __init__(self, probe: Probe) -> None:
        self._lines: dict[Apply, float] = defaultdict(float)  # seconds of this step
        self._counted: dict[Apply, list[float]] = defaultdict(list)
        self._steps: list[float] = []
        batch, side = probe.batch_size, probe.crop_size
        network = probe.network(side, _CLASSES, probe.width, "float32")
        config = Config(batch_size=batch, crop_size=side, compile=False, use_data_layer=False)
        shapes = {name: v.type.shape for name, v in network.parameters.items()}
        layout = FlatLayout.of(shapes, config.dtype, states=SGD.states)
        slots = HostSlots.create(SlotLayout.of_pictures(batch, side), rank=0)
        parameters, gradients = (
            np.zeros(n, np.uint8) for n in (layout.parameters_nbytes, layout.nbytes)
        )
        memory = HostMemory(slots, layout, [parameters], [gradients])
        mean = np.full((3, side, side), 117, np.float32)
        self._model = CompiledNetwork(network, config, SGD(), mean, memory)
        self._model.functions.observe(self._observe)
        self._model.load(dict(network.initial_values(seed=1)))
        self._slot = slots.arrays[0]
        _fill(self._slot)

    def step(self, counts: bool = True) -> None:
        """Make a step, whose seconds count or do not."""
        self._lines.clear()
        begun = time.perf_counter()
        self._model.compute_gradients(self._slot, epoch=0)
        self._model.is_finite()
        self._model.update(_RATE)
        if counts:
            self._steps.append(time.perf_counter() - begun)
            for node, seconds in self._lines.items():
                self._counted[node].append(seconds)

    def take_lines(self) -> list[TimedLine]:
        """Return the lines with the medians of their seconds, and forget those."""
        found = [TimedLine(work_of(n), statistics.median(s)) for n, s in self._counted.items()]
        self._counted.clear()
        return found

    def take_steps(self) -> list[float]:
        """Return the seconds of the steps that counted, and forget them."""
        found, self._steps = self._steps, []
        return found

    def _observe(self, node: Apply, call: Callable[..., Any]) -> Callable[..., Any]:
        lines, clock = self._lines, time.perf_counter

        def timed(*operands: Any) -> Any:
            begun = clock()
            result = call(*operands)
            lines[node] += clock() - begun
            return result

        return timed


def compiled_probes() -> list[TimedNetwork]:
    """Compile the networks, and make a step of each."""
    found = [TimedNetwork(probe) for probe in PROBES]
    for network in found:
        network.step(counts=False)
    return found


def _fill(slot: Slot) -> None:
    """Write noise: on zeros a few kernels are faster than on pictures."""
    rng = np.random.default_rng(1)
    slot.pictures[...] = rng.integers(0, 256, slot.pictures.shape, np.uint8)
    slot.labels[...] = rng.integers(0, _CLASSES, slot.labels.shape)
    slot.indices[...] = np.arange(len(slot.indices))
    slot.valid[...] = len(slot.labels)
