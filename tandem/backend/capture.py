"""Recording the work of functions on a GPU, to replay it without the host."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from pytensor.compile.executor import Function

from tandem.backend.runtime import as_device
from tandem.backend.segments import SegmentedRun
from tandem.backend.shared import DeviceSharedVariable


@dataclass(frozen=True, eq=False)
class Captured:
    """Functions as one recording; calling it runs it.

    On a GPU it is replayed on the stream that PyTorch uses at the time of the call, and two replays
    must not overlap. Functions that report variables early are several graphs, between which they
    report.
    """

    functions: tuple[Function, ...]  # kept alive: a recording reads their constants in place
    # CUDA graphs in their order, each with what reports behind it; none on a CPU.
    graphs: tuple[tuple[torch.cuda.CUDAGraph, Callable[[], None]], ...] = ()

    def __call__(self) -> None:
        """Run the functions in their order."""
        for graph, report in self.graphs:
            graph.replay()
            report()
        if not self.graphs:
            for function in self.functions:
                function()


@dataclass(frozen=True)
class _Part:
    """Work of functions up to a report."""

    calls: list[Callable[[], Any]] = field(default_factory=list)
    report: Callable[[], None] = lambda: None

    def run(self) -> None:
        """Do the work, without the report."""
        with torch.no_grad():
            for call in self.calls:
                call()


def capture(
    functions: Sequence[Function],
    device: str | torch.device = "cpu",
    warmups: int = 3,
    beside: Captured | None = None,
) -> Captured:
    """Record the kernels of functions, in their order, as one CUDA graph.

    A replay costs the host one call. It reads and writes the memory that the functions use: what
    changes from one replay to the next, a learning rate or a minibatch, is a `device_shared`
    variable, whose address is fixed. On a CPU the functions are called instead. A function in
    segments, of a mode with `on_gradient_ready`, ends a graph with each.

    The functions are first run a few times, without reports, since PyTorch and its compiler choose
    kernels and set up memory on the first run. All variables then get their former values back.

    Parameters
    ----------
    functions : sequence of Function
        Of a `device_mode` of the device, with neither inputs nor outputs, over variables made by
        `device_shared` on it.
    warmups : int
        Number of calls before the recording, at least 1.
    beside : Captured, optional
        A recording that never overlaps with this one, such as the step on the other slot. The two
        share their memory for intermediate values.

    Raises
    ------
    InputError
        The device does not exist.
    ValueError
        A function can't be recorded; the message gives the reason.
    """
    target = as_device(device)
    if warmups < 1:
        raise ValueError(f"warmups must be at least 1, not {warmups}")
    for function in functions:
        check_capturable(function)
    saved = [(tensor, tensor.clone()) for tensor in _written(functions)]
    for _ in range(warmups):
        for part in _divide(functions):
            part.run()
    for tensor, value in saved:
        tensor.copy_(value)
    if target.type == "cpu":
        return Captured(tuple(functions))
    pool = beside.graphs[0][0].pool() if beside is not None and beside.graphs else None
    graphs = []
    for part in _divide(functions):
        graph = _record(part, target, pool)
        # What one leaves for the next keeps its place in the memory that they share, and what no
        # later one needs is used again: they are always replayed in this order.
        pool = graph.pool()
        graphs.append((graph, part.report))
    return Captured(tuple(functions), tuple(graphs))


def check_capturable(function: Function) -> None:
    """Refuse, with ValueError, a function whose kernels depend on the host from call to call."""
    name = function.name or "the function"
    maker = function.maker
    given = [i.variable for i in maker.inputs if not i.shared]
    elsewhere = [v for v in function.get_shared() if not isinstance(v, DeviceSharedVariable)]
    if given or maker.outputs:
        raise ValueError(
            f"{name} can't be recorded: it has inputs {given} and {len(maker.outputs)} outputs; "
            "its arguments and results must be in device shared variables"
        )
    if elsewhere:
        raise ValueError(f"{name} can't be recorded: {elsewhere} are not on the device")
    program = cast(Any, function.vm).program
    if program.breaks:
        raise ValueError(
            f"{name} can't be recorded: it computes on the host, or reads values from the device "
            "to decide what to compute\n"
            f"{program.source}"
        )


def _written(functions: Sequence[Function]) -> list[torch.Tensor]:
    """The tensors of all variables that functions update, each once; they may overlap."""
    found: dict[int, torch.Tensor] = {}
    for function in functions:
        for argument in function.maker.inputs:
            if argument.update is not None:
                container: Any = argument.value
                found[id(container.storage[0])] = container.storage[0]
    return list(found.values())


def _divide(functions: Sequence[Function]) -> list[_Part]:
    """Divide one run of functions into parts, each up to a report; to be run in their order."""
    parts = [_Part()]
    for function in functions:
        work = cast(Any, function.vm)
        if not isinstance(work.jit_fn, SegmentedRun):
            parts[-1].calls.append(function)
            continue
        steps = work.steps()
        for segment in work.jit_fn.segments:
            report = partial(work.jit_fn.report_all, segment)
            parts[-1] = _Part([*parts[-1].calls, partial(next, steps)], report)
            parts.append(_Part())
    return [part for part in parts if part.calls]


def _record(part: _Part, device: torch.device, pool: Any) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    fault: BaseException | None = None
    try:
        with (
            torch.cuda.device(device),
            # Other threads may use the GPU meanwhile.
            torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"),
        ):
            try:
                part.run()
            except BaseException as error:
                fault = error
                raise
    except Exception:
        # PyTorch ends a failed recording with an error of its own.
        if fault is not None:
            raise fault from None
        raise
    return graph
