"""Trainers on one GPU average as NumPy does, to the last bit."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import numpy as np
import pytest
import torch

from tandem.distributed import LocalGroup, local_groups
from tandem.distributed.kernels import average_into_all
from tandem.distributed.peer_to_peer import PeerToPeerAllReduce, PeerVectors
from tandem.memory.cuda import CudaBuffer, CudaDriver
from tests.gpu.processes import run_all

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]

SIZE = 5_000_077  # several blocks, and an odd end
ROUNDS = 3
LONG = 1_000_000_000  # cycles: about half a second


class Lonely(CudaDriver):
    """A device that reports that it reaches no other, not even itself."""

    def can_reach(self, identity: str) -> bool:
        return False


def values_of(rank: int, dtype: str) -> np.ndarray:
    return np.random.default_rng(rank).normal(size=SIZE).astype(dtype)


@dataclass(frozen=True)
class Task:
    """What the trainers average, and whose devices are slow."""

    dtype: str
    shares: Sequence[float]
    apart: bool = False
    slow: Sequence[int] | None = None  # ranks; None: all
    part: slice = field(default_factory=lambda: slice(0, SIZE))

    def is_slow(self, rank: int) -> bool:
        return self.slow is None or rank in self.slow


def average(group: LocalGroup, task: Task, report: Connection) -> None:
    """Average a few times, computing in between on the device; send what is left.

    The device is busy before each computation, so that whoever does not wait for it reads what was
    there before; and whether it was still busy when the last average returned is sent too.
    """
    driver = Lonely(0) if task.apart else CudaDriver(0)
    own = CudaBuffer.create(driver, SIZE * np.dtype(task.dtype).itemsize)
    stream = driver.stream()
    vectors = PeerVectors(group, driver, own, task.dtype)
    all_reduce = PeerToPeerAllReduce(vectors, stream)
    vector = torch.as_tensor(own.array(SIZE, task.dtype), device="cuda:0")
    work = torch.cuda.ExternalStream(stream.handle, device="cuda:0")
    with torch.cuda.stream(work):
        vector.copy_(torch.from_numpy(values_of(group.rank, task.dtype)))
        for number in range(ROUNDS):
            if task.is_slow(group.rank):
                torch.cuda._sleep(LONG if number == ROUNDS - 1 else 20_000_000)
            vector.mul_(group.rank + 2)
            all_reduce.of(task.part).average(vector[task.part], task.shares)
        busy = not work.query()
        found = vector.cpu().numpy()
    report.send((found, busy))
    all_reduce.close()
    vectors.close()
    group.barrier()
    own.close()


def check(task: Task) -> list[bool]:
    """Compare with NumPy; return of each trainer whether its device was busy at the end."""
    trainers = len(task.shares)
    found = run_all(average, [(group, task) for group in local_groups(trainers)])
    expected = [values_of(rank, task.dtype) for rank in range(trainers)]
    for _ in range(ROUNDS):
        for rank, vector in enumerate(expected):
            vector *= np.dtype(task.dtype).type(rank + 2)
        average_into_all([vector[task.part] for vector in expected], task.shares)
    for (vector, _), numbers in zip(found, expected, strict=True):
        assert vector.tobytes() == numbers.tobytes()
    return [busy for _, busy in found]


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
def test_processes_on_one_gpu_leave_the_bits_of_numpy(
    dtype: str, shares: list[float], apart: bool
) -> None:
    check(Task(dtype, shares, apart))


@pytest.mark.parametrize("slow", [[0], [1]])
def test_a_slow_device_is_waited_for_by_devices_alone(slow: list[int]) -> None:
    """The quick trainer must wait for the slow one's values, and no host for a device."""
    busy = check(Task("float32", [0.5, 0.5], slow=slow))
    assert busy == [True, True]


def test_a_part_is_averaged_and_the_rest_is_left() -> None:
    """As gradients, in a vector that also holds what is not exchanged."""
    check(Task("float32", [0.5, 0.5], slow=[1], part=slice(1_000_003, 3_000_007)))
