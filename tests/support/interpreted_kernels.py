"""Kernels for GPUs run by Triton's interpreter, in a process of its own.

Triton decides when it is imported whether it interprets.
"""

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytensor.tensor as pt
import pytest
import torch

from tandem.backend import lower
from tandem.ops import PoolNorm, PoolNormGrad


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
    """Run the lowerings for a GPU of both Ops; return all results, in their order.

    Memory that is allocated is full of garbage before it is written.
    """
    inputs = [pt.tensor(dtype="float32", shape=array.shape) for array in (x, b, g)]
    forward = op.make_node(*inputs[:2])
    back = PoolNormGrad(op.size, op.stride, op.norm, x.shape[2:])
    backward = back.make_node(*forward.outputs[:2], inputs[2])
    calls = [
        lower(node.op, node, device=torch.device("cuda"), compiled=False).call
        for node in (forward, backward)
    ]
    torch.use_deterministic_algorithms(True)  # fills what is allocated
    try:
        results = calls[0](images(x, dtype, device), torch.tensor(b, device=device))
        gradients = calls[1](*results[:2], images(g, dtype, device))
    finally:
        torch.use_deterministic_algorithms(False)
    found = [*results, *gradients]
    return [t.to(torch.int8 if t is results[1] else torch.float32).cpu().numpy() for t in found]
