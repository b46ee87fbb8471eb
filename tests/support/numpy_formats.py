"""Formats of 16 bits by NumPy alone: slow, and the oracle of PyTorch's."""

import numpy as np

from tandem.distributed.compressed import TransferFormat


class NumpyTransferFormat(TransferFormat):
    """A format whose conversions are NumPy's."""

    def __init__(self, name: str) -> None:
        self._is_half = name == "float16"
        self.largest_exponent = 15 if self._is_half else None

    def narrow(self, source: np.ndarray, target: np.ndarray) -> None:
        """bfloat16 is float32's upper half, rounded to the nearest, ties to even."""
        if self._is_half:
            target[:] = source.astype(np.float16).view(np.uint16)
            return
        bits = source.view(np.uint32).astype(np.uint64)
        target[:] = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16

    def widen(self, source: np.ndarray, target: np.ndarray) -> None:
        """Exact."""
        if self._is_half:
            target[:] = source.view(np.float16)
        else:
            target[:] = (source.astype(np.uint32) << 16).view(np.float32)
