"""Resident variables: the same extent of every rank's memory, which all ranks see."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from tandem.memory import HostBuffer
from tandem.parallel.messages import Extent


class Residents(ABC):
    """The memory of a pool's resident variables, as one rank has it."""

    device: str

    @abstractmethod
    def variable(self, extent: Extent, name: str | None) -> Any:
        """Make this rank's variable over an extent, with the value that lies there."""


class HostResidents(Residents):
    """Resident variables in host memory: one buffer for each rank, which only grows."""

    device = "cpu"

    def __init__(self, buffers: Sequence[HostBuffer], rank: int) -> None:
        self.buffers, self._rank = buffers, rank

    def variable(self, extent: Extent, name: str | None) -> Any:
        from tandem.backend import device_shared

        return device_shared(None, name, "cpu", self.array(extent, self._rank))

    def array(self, extent: Extent, rank: int) -> np.ndarray:
        """A rank's value, in place."""
        return self.buffers[rank].array(extent.shape, np.dtype(extent.dtype), extent.offset)
