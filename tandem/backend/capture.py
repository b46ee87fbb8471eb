"""Recording what functions make a GPU do, to have it done again without the host's part."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from pytensor.compile.executor import Function

from tandem.backend.runtime import as_device
from tandem.backend.shared import DeviceSharedVariable


@dataclass(frozen=True, eq=False)
class Captured:
    """Functions, recorded; calling it does what they do.

    On a GPU it is replayed on the stream that PyTorch uses at the time of the call, and must not
    run twice at a time.

    Attributes
    ----------
    functions : tuple of Function
        Kept, since a recording reads their constants where they lie.
    graph : torch.cuda.CUDAGraph or None
        The recording; None on a CPU.
    """

    functions: tuple[Function, ...]
    graph: Any

    def __call__(self) -> None:
        """Do what the functions do, in their order."""
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

    A replay costs the host one call. It reads and writes the memory that the functions use: what is
    to change from one replay to the next, a learning rate or a minibatch, is a `device_shared`
    variable, whose address stays. On a CPU there is nothing to record: the functions are called.

    Before it records it calls the functions a few times, since PyTorch and its compiler choose
    kernels and set up memory when they first run. Then all variables have their former values
    again.

    Parameters
    ----------
    functions : sequence of Function
        Of a `device_mode` of the device, with neither inputs nor outputs, over variables made by
        `device_shared` on it.
    device : str or torch.device
        "cpu", or a CUDA device as "cuda:0".
    warmups : int
        How many calls before the recording, at least 1.
    beside : Captured, optional
        A recording that is never replayed at the same time as this one, as the step on the other
        slot: the two share their memory for intermediate values.

    Returns
    -------
    Captured

    Raises
    ------
    InputError
        The device is not there.
    ValueError
        A function can't be recorded; the message says why.
    """
    place = as_device(device)
    if warmups < 1:
        raise ValueError(f"warmups must be at least 1, not {warmups}")
    for function in functions:
        check_capturable(function)
    saved = [(tensor, tensor.clone()) for tensor in _written(functions)]
    for _ in range(warmups):
        _call_all(functions)
    for tensor, value in saved:
        tensor.copy_(value)
    graph = None if place.type == "cpu" else _record(functions, place, beside)
    return Captured(tuple(functions), graph)


def check_capturable(function: Function) -> None:
    """Refuse a function whose kernels depend on the host from call to call.

    Raises
    ------
    ValueError
        It has inputs or outputs, uses a shared variable that is not on the device, or reads values
        from the device to know what to do.
    """
    name = function.name or "the function"
    maker = function.maker
    given = [i.variable for i in maker.inputs if not i.shared]
    elsewhere = [v for v in function.get_shared() if not isinstance(v, DeviceSharedVariable)]
    if given or maker.outputs:
        raise ValueError(
            f"{name} can't be recorded: it has inputs {given} and {len(maker.outputs)} outputs; "
            "what it takes and gives must be in device shared variables"
        )
    if elsewhere:
        raise ValueError(f"{name} can't be recorded: {elsewhere} are not on the device")
    program = cast(Any, function.vm).program
    if program.tells:
        raise ValueError(f"{name} can't be recorded: it is to tell of each update when it runs")
    if program.breaks:
        raise ValueError(
            f"{name} can't be recorded: it reads values from the device to know what to do\n"
            f"{program.source}"
        )


def _written(functions: Sequence[Function]) -> list[torch.Tensor]:
    """The memory of every variable that some function updates, once each."""
    found: dict[int, torch.Tensor] = {}
    for function in functions:
        for place in function.maker.inputs:
            if place.update is not None:
                container: Any = place.value
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
    fault: list[BaseException] = []
    try:
        with (
            torch.cuda.device(device),
            # What other threads do with the GPU meanwhile does no harm.
            torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"),
            _noting(fault),
        ):
            _call_all(functions)
    except Exception:
        # PyTorch ends a recording that has failed with an error of its own.
        if fault:
            raise fault[0] from None
        raise
    return graph


@contextmanager
def _noting(fault: list[BaseException]) -> Iterator[None]:
    """Remember what is raised."""
    try:
        yield
    except BaseException as error:
        fault.append(error)
        raise
