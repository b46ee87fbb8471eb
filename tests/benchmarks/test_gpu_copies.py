"""The exchange that is timed on a GPU, by two trainers on a simulated one."""

import os
import threading
from functools import partial
from multiprocessing import Pipe
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from benchmarks import gpu_copies
from tandem.distributed import local_groups
from tests.support.simulated_gpu import SimulatedDriver, on_host

PARAMETERS = 4096


class Driver(SimulatedDriver):
    """Two threads stand for two processes. Their memory is looked at when they have ended."""

    alive: ClassVar[list["Driver"]] = []

    def __init__(self, device: int) -> None:
        super().__init__(device)
        self.alive.append(self)
        self.process = threading.get_ident()

    def export(self, address: int) -> bytes:
        return super().export(address).replace(b"%d" % self.process, b"%d" % os.getpid(), 1)


def test_averages_and_gradients_are_timed_beside_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors: list[torch.Tensor] = []
    asked: list[int] = []

    def as_tensor(array: Any, device: str) -> torch.Tensor:
        vectors.append(torch.from_numpy(on_host(array)))
        return vectors[-1]

    def average(*arguments: Any) -> None:
        asked.append(arguments[3])
        SimulatedDriver(0).average(*arguments)

    monkeypatch.setattr(gpu_copies, "CudaDriver", Driver)
    all_reduce = partial(gpu_copies.PeerToPeerAllReduce, kernel=average)
    monkeypatch.setattr(gpu_copies, "PeerToPeerAllReduce", all_reduce)
    monkeypatch.setattr("torch.as_tensor", as_tensor)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    here, there = Pipe()
    trainers = [
        threading.Thread(
            target=gpu_copies._exchange, args=(group, PARAMETERS, 2, 3, there), daemon=True
        )
        for group in local_groups(2)
    ]
    for trainer in trainers:
        trainer.start()
    for trainer in trainers:
        trainer.join(30)
    assert here.poll(0)
    found = here.recv()
    assert [len(measured.seconds) for measured in found] == [2, 2, 2]
    assert [measured.name.split(",")[0] for measured in found] == [
        "average",
        "gradients",
        "a copy of weights and momenta on the GPU",
    ]
    # Of each trainer, in 3 rounds of 3: half of the gradients, and of weights and momenta.
    assert sorted(asked) == 18 * [PARAMETERS // 2] + 18 * [PARAMETERS]
    np.testing.assert_array_equal(vectors[0], vectors[1])
    Driver.alive.clear()
