"""Formats of 16 bits in which vectors travel between machines, by PyTorch's conversions."""

from typing import Any, Literal

import torch

Format = Literal["float16", "bfloat16"]


class TorchTransferFormat:
    """A `tandem.distributed.allreduce.TransferFormat`, for arrays of NumPy's and for tensors.

    Parameters
    ----------
    name : "float16" or "bfloat16"
        float16 has 11 significant bits and reaches from 6e-5 to 65504; bfloat16 has 8, and
        float32's range.
    """

    def __init__(self, name: Format) -> None:
        self._dtype = torch.float16 if name == "float16" else torch.bfloat16
        # Below 2**15, rounding up included, nothing overflows float16.
        self.largest_exponent = 15 if name == "float16" else None

    def narrow(self, source: Any, target: Any) -> None:
        """Round float32 (n,) to the nearest, ties to even, into uint16 (n,)."""
        self._seen(target).copy_(torch.as_tensor(source))

    def widen(self, source: Any, target: Any) -> None:
        """Write what uint16 (n,) stand for into float32 (n,)."""
        torch.as_tensor(target).copy_(self._seen(source))

    def _seen(self, bits: Any) -> torch.Tensor:
        return torch.as_tensor(bits).view(self._dtype)
