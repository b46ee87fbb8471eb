"""What collectives compute on vectors that are PyTorch's, so on GPUs too."""

import sys
from collections.abc import Sequence
from typing import Any

import torch


class TensorArithmetic:
    """A `tandem.distributed.allreduce.Arithmetic` of tensors on one device.

    The bits are those on NumPy's vectors: products and sums are rounded one by one, in one order.

    Parameters
    ----------
    device : str or torch.device
    """

    block = sys.maxsize  # a GPU is given a whole vector at once

    def __init__(self, device: str | torch.device) -> None:
        self._device = device

    def zeros(self, shape: int | tuple[int, ...], kind: str | torch.dtype) -> torch.Tensor:
        """Make a vector or a matrix, of another one's dtype or of one named as NumPy's."""
        dtype = kind if isinstance(kind, torch.dtype) else getattr(torch, kind)
        return torch.zeros(shape, dtype=dtype, device=self._device)

    def multiply(self, vector: torch.Tensor, by: float, *, out: torch.Tensor) -> None:
        """Write a vector (n,) times a number into another."""
        torch.mul(vector, by, out=out)

    def subtract(self, vector: torch.Tensor, other: torch.Tensor, *, out: torch.Tensor) -> None:
        """Write the difference of vectors (n,) into another."""
        torch.sub(vector, other, out=out)

    def add_weighted(self, target: torch.Tensor, terms: Any, shares: Sequence[float]) -> None:
        """See `tandem.distributed.allreduce.add_weighted`; the target may be any of the terms."""
        total: torch.Tensor | None = None
        for term, share in zip(terms, shares, strict=True):
            if share > 0:
                # Two kernels: one would fuse product and sum, and round once.
                product = term * share
                total = product if total is None else total.add_(product)
        if total is None:
            target.zero_()
        else:
            target.copy_(total)
