"""Kernels for GPUs run by Triton's interpreter, in a process of its own.

Triton decides when it is imported whether it interprets.
"""

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from tandem.ops import PoolNorm


@contextmanager
def interpreter() -> Iterator[ProcessPoolExecutor]:
    """A process to which functions of this module can be submitted."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            pool.submit(abs, 0).result()  # starts it
        yield pool


def images(array: np.ndarray, dtype: str = "float32", device: str = "cpu") -> torch.Tensor:
    given = torch.tensor(array, device=device)
    return given.to(getattr(torch, dtype), memory_format=torch.channels_last)


def pool_norm(
    x: np.ndarray,
    b: np.ndarray,
    g: np.ndarray,
    op: PoolNorm,
    dtype: str = "float32",
    device: str = "cpu",
) -> list[np.ndarray]:
    """Run both kernels, on memory full of garbage; return y, places, z, dx and the bias's gradient.

    z is garbage where `op` does not normalise.
    """
    from tandem.backend import pool_norm_kernels

    settings = (op.size, op.stride, op.norm)
    results = [images(np.full(g.shape, 99.0), t, device) for t in (dtype, "int8", dtype)]
    wide = images(x, dtype, device)
    pool_norm_kernels.forward(wide, torch.tensor(b, device=device), results, *settings)
    dx = torch.full_like(wide, 99)
    sums = pool_norm_kernels.backward((*results[:2], images(g, dtype, device)), dx, *settings)
    found = [*results, dx, sums]
    return [t.to(torch.int8 if t is results[1] else torch.float32).cpu().numpy() for t in found]
