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
from tandem.cost.fitting import TimedLine, TimedSteps
from tandem.cost.loading import write_noise
from tandem.cost.probes import PROBES, Probe
from tandem.distributed import ExchangeSettings, local_groups, open_host_memory
from tandem.memory import HostSlots, SlotLayout
from tandem.memory.flat import FlatLayout
from tandem.ops.work import work_of
from tandem.optim import SGD
from tandem.training.compiled_network import CompiledNetwork

_CLASSES = 1000
_RATE = 1e-6


class TimedNetwork:
    """A trainer's step of a network: gradients and update, on a minibatch of noise."""

    def __init__(self, probe: Probe) -> None:
        self._lines: dict[Apply, float] = defaultdict(float)  # seconds in this step
        self._steps: list[tuple[float, dict[Apply, float]]] = []  # seconds of it and of its lines
        batch, side = probe.batch_size, probe.crop_size
        network = probe.network(side, _CLASSES, probe.width, "float32")
        config = Config(
            batch_size=batch,
            crop_size=side,
            exchange="average",
            compile=False,
            use_data_layer=False,
        )
        shapes = {name: v.type.shape for name, v in network.parameters.items()}
        layout = FlatLayout.of(shapes, config.dtype, states=SGD().states)
        slots = HostSlots.create(SlotLayout.of_pictures(batch, side), rank=0)
        # As in a run: where memory begins matters to matrix products.
        (alone,) = local_groups(1)
        memory = open_host_memory(ExchangeSettings.of(dict(config)), slots, alone, layout)
        mean = np.full((3, side, side), 117, np.float32)
        self._model = CompiledNetwork(network, config, SGD(), mean, memory)
        self._model.functions.observe(self._observe)
        self._model.load(dict(network.initial_values(seed=1)))
        self._slot = slots.arrays[0]
        write_noise(self._slot, _CLASSES)

    def step(self, counts: bool = True) -> None:
        """Make a step, whose seconds count or do not."""
        self._lines.clear()
        begun = time.perf_counter()
        self._model.compute_gradients(self._slot, epoch=0)
        self._model.is_finite()
        self._model.update(_RATE)
        if counts:
            self._steps.append((time.perf_counter() - begun, dict(self._lines)))

    def take(self) -> TimedSteps:
        """Return what counted, and forget it.

        Lines are means over the faster half of the steps, in which little else was computing: their
        sum is then not above that of these steps, as it could be with medians.
        """
        steps = sorted(self._steps, key=lambda step: step[0])
        self._steps = []
        faster = steps[: (len(steps) + 1) // 2]
        lines = [
            TimedLine(work_of(node), statistics.mean(lines[node] for _, lines in faster))
            for node in faster[0][1]
        ]
        seconds = [seconds for seconds, _ in steps]
        return TimedSteps(lines, statistics.mean(seconds[: len(faster)]), max(seconds))

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
