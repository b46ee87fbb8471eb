"""A trainer's functions: compiled when first called, and on a GPU recorded for each slot."""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import pytensor
from pytensor.compile.executor import Function
from pytensor.compile.mode import Mode
from pytensor.tensor.variable import TensorVariable

from tandem.backend import (
    Captured,
    DeviceSharedVariable,
    capture,
    check_capturable,
    device_mode,
    device_shared,
)
from tandem.backend.channel import Channel
from tandem.backend.plan import plan_function
from tandem.backend.schedule import Observe, Schedule
from tandem.config.schema import Config
from tandem.distributed import ExchangeSettings
from tandem.memory.parameters import CudaMemory, HostMemory
from tandem.memory.slot import Slot
from tandem.ops.work import most_nbytes
from tandem.training.graphs import GRADIENT, SHORT, FunctionGraph

log = logging.getLogger(__name__)


class DeviceFunctions:
    """Functions by name, called on a slot and on numbers.

    On the host a function takes a slot's arrays as its arguments. On a GPU it is recorded once for
    each slot, over the slot's memory, and replayed: that costs the host one call. By a `channel`
    functions that compute parts of one graph pass tensors to those of other trainers.
    """

    def __init__(
        self,
        graphs: Mapping[str, Callable[[], FunctionGraph]],
        config: Config,
        memory: HostMemory | CudaMemory,
        on_gradient_ready: Callable[[str], None] | None = None,
        channel: Channel | None = None,
    ) -> None:
        self._graphs, self._meets = graphs, channel is not None
        self._device, self._records = memory.device, memory.records
        self._make_modes = partial(_modes, (*graphs,), config, memory, on_gradient_ready, channel)
        self._modes = self._make_modes()
        self._numbers: dict[str, DeviceSharedVariable] = {}
        self._compiled: dict[str, tuple[Function, tuple[str, ...]]] = {}
        self._recorded: dict[tuple[str, Slot | None], Callable[[], Any]] = {}
        self._on_compiled: Callable[[Function], None] | None = None
        self.on_compile: Callable[[str], None] = lambda name: None
        """Called with the name of a function before it is compiled."""
        self.check: Callable[[int], None] = lambda nbytes: None
        """Called, on the host, with the bytes that the results of a new function take at most."""

    def __call__(self, name: str, slot: Slot | None, **numbers: np.ndarray) -> None:
        if not self._records:
            function, parts = self.compiled(name)
            function(*(getattr(slot, part) for part in parts), *numbers.values())
            return
        for key, value in numbers.items():
            self._number(key, value).set_value(value)
        if (name, slot) not in self._recorded:
            self._recorded[name, slot] = self.record(name, slot)
        self._recorded[name, slot]()

    def observe(
        self, observe: Observe, on_compiled: Callable[[Function], None] | None = None
    ) -> None:
        """Observe the calls of functions that are compiled from now on, see `device_mode`.

        `on_compiled` is called with each function, once all of its calls have been wrapped.
        """
        self._modes, self._on_compiled = self._make_modes(observe), on_compiled

    def compiled(self, name: str) -> tuple[Function, tuple[str, ...]]:
        """The function that takes parts of a slot and numbers as arguments, and these parts."""
        if name not in self._compiled:
            graph = self._graphs[name]()
            inputs = [*graph.minibatch.values(), *graph.numbers.values()]
            function = self._compile(name, graph, inputs, {})
            self.check(most_nbytes(function.maker.fgraph))
            self._compiled[name] = function, tuple(graph.minibatch)
        return self._compiled[name]

    def schedule(self, name: str) -> Schedule:
        """Return what a function would compute, in its order: it is neither made nor called."""
        graph = self._graphs[name]()
        inputs = [*graph.minibatch.values(), *graph.numbers.values()]
        return plan_function(inputs, graph.updates, self._modes[name], graph.parameters, name)

    def record(self, name: str, slot: Slot | None) -> Callable[[], Any]:
        """The function over one slot's memory, recorded. The slot holds a minibatch already.

        One that cannot be recorded, such as that of a network with an Op that runs on the host, is
        called as it is; so is one in which trainers meet.
        """
        graph = self._graphs[name]()
        givens = {
            variable: device_shared(
                None, name=f"slot/{part}", device=self._device, memory=getattr(slot, part)
            )
            for part, variable in graph.minibatch.items()
        } | {
            variable: self._number(key, np.zeros(variable.type.shape, variable.type.dtype))
            for key, variable in graph.numbers.items()
        }
        function = self._compile(name, graph, [], givens)
        if self._meets and graph.minibatch:
            return function
        try:
            check_capturable(function)
        except ValueError as reason:
            log.warning("steps take longer: %s", str(reason).splitlines()[0])
            return function
        # No two of them ever run at a time, so they share what memory they need in between.
        beside = next((f for f in self._recorded.values() if isinstance(f, Captured)), None)
        return capture([function], self._device, beside=beside)

    def _number(self, key: str, like: np.ndarray) -> DeviceSharedVariable:
        if key not in self._numbers:
            zeros = np.zeros_like(like)
            self._numbers[key] = device_shared(zeros, name=key, device=self._device)
        return self._numbers[key]

    def _compile(
        self, name: str, graph: FunctionGraph, inputs: list[TensorVariable], givens: dict[Any, Any]
    ) -> Function:
        self.on_compile(name)
        function = pytensor.function(
            inputs,
            [],
            updates=graph.updates,
            givens={**graph.parameters, **givens},
            mode=self._modes[name],
            name=name,
            trust_input=True,
            on_unused_input="ignore",  # an update needs no variable of the network
        )
        if self._on_compiled is not None:
            self._on_compiled(function)
        return function


def _modes(
    names: tuple[str, ...],
    config: Config,
    memory: HostMemory | CudaMemory,
    on_gradient_ready: Callable[[str], None] | None,
    channel: Channel | None,
    observe: Observe | None = None,
) -> dict[str, Mode]:
    """Make the mode of each function."""
    chosen = config.precision
    make_mode = partial(
        device_mode,
        memory.device,
        compile=config.compile is True,
        precision="float32" if chosen == "auto" else chosen,
        convolutions=config.convolutions,
        channel=channel,
        observe=observe,
    )
    modes = dict.fromkeys(names, make_mode())
    if on_gradient_ready is None:
        return modes
    ready = on_gradient_ready

    def report(variable: str) -> None:
        if variable.startswith(GRADIENT):
            ready(variable.removeprefix(GRADIENT))

    buckets = ExchangeSettings.of(dict(config)).exchange.buckets(memory.layout)
    parts = [[GRADIENT + name for name in bucket.names] for bucket in buckets]
    mode = make_mode(on_gradient_ready=report, buckets=parts)
    return modes | dict.fromkeys(("gradients", SHORT + "gradients"), mode)
