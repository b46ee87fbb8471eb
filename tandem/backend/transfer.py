"""Copies between the host and a device for which the host waits at most once."""

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
    """Return tensors as arrays; of several on a GPU, the host waits once for all.

    Those on a GPU are copied to page-locked memory, those on the host are not copied. Anything else
    among the values is returned as it is.
    """
    copies = [_begin_copy(value) if isinstance(value, torch.Tensor) else value for value in values]
    for device in {v.device for v in values if isinstance(v, torch.Tensor) and v.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return [copy.numpy() if isinstance(copy, torch.Tensor) else copy for copy in copies]


def _begin_copy(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_cuda:
        return tensor
    target = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return target.copy_(tensor, non_blocking=True)
