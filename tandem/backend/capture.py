"""Recording the work of functions on a GPU, to replay it without the host."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from pytensor.compile.executor import Function

from tandem.backend.runtime import as_device
from tandem.backend.shared import DeviceSharedVariable


@dataclass(frozen=True, eq=False)
class Captured:
    """Functions as one recording; calling it runs it.

    On a GPU it is replayed on the stream that PyTorch uses at the time of the call, and two replays
    must not overlap.
    """

    functions: tuple[Function, ...]  # kept alive: a recording reads their constants in place
    graph: Any  # a torch.cuda.CUDAGraph; None on a CPU

    def __call__(self) -> None:
        """Run the functions in their order."""
        if self.graph is None:
            _call_all(self.functions)
        else:
            self.graph.replay()


def capture(
    functions: Sequence[Function],
    device: str | torch.device = "cpu",
    warmups: int = 3,
    beside: Captured | None = None,
) -> Captured:
    """Record the kernels of functions, in their order, as one CUDA graph.

    A replay costs the host one call. It reads and writes the memory that the functions use: what
    changes from one replay to the next, a learning rate or a minibatch, is a `device_shared`
    variable, whose address is fixed. On a CPU the functions are called instead.

    The functions are first called a few times, since PyTorch and its compiler choose kernels and
    set up memory on the first run. All variables then get their former values back.

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
        _call_all(functions)
    for tensor, value in saved:
        tensor.copy_(value)
    graph = None if target.type == "cpu" else _record(functions, target, beside)
    return Captured(tuple(functions), graph)


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
    if program.calls_back:
        raise ValueError(f"{name} can't be recorded: it calls on_gradient_ready when it runs")
    if program.breaks:
        raise ValueError(
            f"{name} can't be recorded: it computes on the host, or reads values from the device "
            "to decide what to compute\n"
            f"{program.source}"
        )


def _written(functions: Sequence[Function]) -> list[torch.Tensor]:
    """The memory of every variable that a function updates, each once."""
    found: dict[int, torch.Tensor] = {}
    for function in functions:
        for argument in function.maker.inputs:
            if argument.update is not None:
                container: Any = argument.value
                found[container.storage[0].data_ptr()] = container.storage[0]
    return list(found.values())


def _call_all(functions: Sequence[Function]) -> None:
    for function in functions:
        function()


def _record(
    functions: Sequence[Function], device: torch.device, beside: Captured | None
) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    pool = None if beside is None else beside.graph.pool()
    fault: BaseException | None = None
    try:
        with (
            torch.cuda.device(device),
            # Other threads may use the GPU meanwhile.
            torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"),
        ):
            try:
                _call_all(functions)
            except BaseException as error:
                fault = error
                raise
    except Exception:
        # PyTorch ends a failed recording with an error of its own.
        if fault is not None:
            raise fault from None
        raise
    return graph
