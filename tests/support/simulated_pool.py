"""Pools of `tandem.parallel` on GPUs that are host memory, see `simulated_gpu`."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tandem.memory.cuda import CudaArray
from tandem.parallel import devices, pool
from tandem.parallel.gpu import Gpu
from tests.support.simulated_gpu import SimulatedDriver, on_host


@dataclass(frozen=True)
class SimulatedGpu(Gpu):
    """A simulated GPU of a rank."""

    torch_device = "cpu"
    permits_sharing: bool = True  # of memory and events between processes

    def driver(self) -> Any:
        return SimulatedDriver(self.number, self.permits_sharing)

    def compile_average(self, driver: Any, dtype: np.dtype) -> Any:
        return driver.average

    def memory(self, array: CudaArray) -> Any:
        return on_host(array)


@contextmanager
def simulated_gpus(count: int, permits_sharing: bool = True) -> Iterator[None]:
    """Context in which pools that are made find so many simulated GPUs."""

    def gpu_of(device: str) -> Gpu | None:
        if device == "cpu":
            return None
        return SimulatedGpu(int(device.removeprefix("cuda:")), permits_sharing)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "cuda_device_count", lambda: count)
        patch.setattr(devices, "missing_for_gpus", lambda: None)
        patch.setattr(pool, "gpu_of", gpu_of)
        yield
