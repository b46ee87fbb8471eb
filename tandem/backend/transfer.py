"""Copies between the host and a device."""

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray

from tandem.backend.shared import tensor_over


def upload(array: NDArray[Any], device: str | torch.device) -> torch.Tensor:
    """Copy an array to a device, in turn on this thread's stream.

    The host waits only where the array does not lie in page-locked memory; where it does, it must
    stay as it is until the stream has passed the copy.
    """
    return tensor_over(array).to(device, non_blocking=True, copy=True)


def download(values: Sequence[Any]) -> list[Any]:
    """Return tensors as arrays: page-locked ones if they were on a GPU, else over their memory.

    The host waits for each copy: PyTorch would remember the stream of another, and ask that stream
    when the array is dropped, which may be after the stream. Anything else among the values is
    returned as it is.
    """
    return [
        _on_host(value).numpy() if isinstance(value, torch.Tensor) else value for value in values
    ]


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
