"""Trainers on one GPU average as NumPy does, to the last bit."""

from collections.abc import Sequence
from multiprocessing.connection import Connection

import numpy as np
import pytest
import torch

from tandem.distributed import LocalGroup, local_groups
from tandem.distributed.kernels import average_into_all
from tandem.distributed.peer_to_peer import PeerToPeerAllReduce, PeerVectors
from tandem.memory.cuda import CudaBuffer, CudaDriver
from tests.gpu.processes import run_all

pytestmark = pytest.mark.gpu

SIZE = 5_000_077  # several blocks, and an odd end
ROUNDS = 3


class Lonely(CudaDriver):
    """A device that reports that it reaches no other, not even itself."""

    def can_reach(self, identity: str) -> bool:
        return False


def values_of(rank: int, dtype: str) -> np.ndarray:
    return np.random.default_rng(rank).normal(size=SIZE).astype(dtype)


def average(
    group: LocalGroup,
    dtype: str,
    shares: Sequence[float],
    apart: bool,
    report: Connection,
) -> None:
    """Average a few times, computing in between on the device; send what is left."""
    driver = Lonely(0) if apart else CudaDriver(0)
    own = CudaBuffer.create(driver, SIZE * np.dtype(dtype).itemsize)
    stream = driver.stream()
    vectors = PeerVectors(group, driver, own, dtype)
    all_reduce = PeerToPeerAllReduce(vectors, stream)
    vector = torch.as_tensor(own.array(SIZE, dtype), device="cuda:0")
    work = torch.cuda.ExternalStream(stream.handle, device="cuda:0")
    with torch.cuda.stream(work):
        vector.copy_(torch.from_numpy(values_of(group.rank, dtype)))
        for _ in range(ROUNDS):
            torch.cuda._sleep(20_000_000)
            vector.mul_(group.rank + 2)
            all_reduce.average(vector, shares)
        found = vector.cpu().numpy()
    report.send(found)
    all_reduce.close()
    vectors.close()
    group.barrier()
    own.close()


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(
    ("dtype", "shares"),
    [
        ("float32", [0.25, 0.75]),
        ("float64", [0.3, 0.7]),
        ("float32", [1.0, 0.0]),
        ("float32", [0.5, 0.3, 0.2]),
        ("float32", [1 / 3, 1 / 3, 1 / 3]),
    ],
)
def test_two_processes_on_one_gpu_leave_the_bits_of_numpy(
    dtype: str, shares: list[float], apart: bool
) -> None:
    trainers = len(shares)
    found = run_all(average, [(g, dtype, shares, apart) for g in local_groups(trainers)])
    expected = [values_of(rank, dtype) for rank in range(trainers)]
    for _ in range(ROUNDS):
        for rank, vector in enumerate(expected):
            vector *= np.dtype(dtype).type(rank + 2)
        average_into_all(expected, shares)
    for vector in found:
        assert vector.tobytes() == expected[0].tobytes()
