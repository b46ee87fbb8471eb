"""One driver for the process of the tests; whatever else uses the GPU is a process of its own."""

import os
from collections.abc import Iterator

import pytest
import torch

from tandem.memory.cuda import CudaDriver

# PyTorch looks once whether products are the same every time: at its first one.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(scope="session")
def driver() -> CudaDriver:
    return CudaDriver(0)


@pytest.fixture(autouse=True)
def former_settings() -> Iterator[None]:
    """Precision and determinism are the whole process's."""
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
