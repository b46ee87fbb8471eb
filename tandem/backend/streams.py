"""Where PyTorch works: on which GPU, and on a stream that was made elsewhere."""

from contextlib import AbstractContextManager, nullcontext

import torch

from tandem.backend.runtime import as_device


def use_device(device: str | torch.device) -> None:
    """Make a device the one that this process's PyTorch works on, unless told otherwise.

    PyTorch goes back to this device after each call. To be called before the first work on a GPU,
    in a process that uses the device by a `tandem.memory.cuda.CudaDriver` too: the driver's calls
    go to the device that is the present one.

    Parameters
    ----------
    device : str or torch.device
        "cpu", for which nothing is to be done, or a CUDA device as "cuda:1".

    Raises
    ------
    InputError
        The device is not there.
    """
    place = as_device(device)
    if place.type == "cuda":
        torch.cuda.set_device(place)


def on_stream(device: str | torch.device, handle: int | None) -> AbstractContextManager:
    """Let PyTorch put its work on a stream, while the context lasts.

    A captured step and every function of a `device_mode` run where this says, so work that others
    put on the stream before and after is done before and after.

    Parameters
    ----------
    device : str or torch.device
        "cpu", or the stream's device as "cuda:0".
    handle : int or None
        The driver's pointer to the stream, which must live as long as work is put on it; None for
        PyTorch's own, and on a CPU, which has none.

    Raises
    ------
    InputError
        The device is not there.
    """
    place = as_device(device)
    if handle is None or place.type == "cpu":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.ExternalStream(handle, device=place))
