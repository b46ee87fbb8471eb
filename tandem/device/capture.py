"""Recording what functions make a GPU do, to have it done again without the host's part."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from pytensor.compile.executor import Function

from tandem.device.devices import as_device
from tandem.device.shared import DeviceSharedVariable


def capture(
    functions: Sequence[Function], device: str | torch.device = "cpu", warmups: int = 3
) -> Callable[[], None]:
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

    Returns
    -------
    callable
        Replays on the stream that PyTorch uses when it is called. It keeps the functions' memory
        for intermediate values, and must not run twice at a time.

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
    if place.type == "cpu":
        return lambda: _call_all(functions)
    return _record(functions, place)


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


def _record(functions: Sequence[Function], device: torch.device) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        _call_all(functions)
    return graph.replay
