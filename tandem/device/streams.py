"""PyTorch's work on a stream that was made elsewhere."""

from contextlib import AbstractContextManager, nullcontext

import torch

from tandem.device.devices import as_device


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
