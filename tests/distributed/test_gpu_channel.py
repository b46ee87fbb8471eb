"""The channel between GPUs: its order against a fake CUDA driver, its values on simulated GPUs."""

import itertools
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tandem.distributed import LocalGroup, gpu_channel, local_groups, make_channel
from tandem.distributed.channel import GroupChannel, HostChannel
from tandem.distributed.gpu_channel import PeerChannel
from tandem.distributed.peer_to_peer import PATTERN, EventBarrier, PeerVectors, device_barrier
from tandem.memory.cuda import CudaBuffer
from tandem.memory.parameters import CudaMemory
from tests.support.collectives import SHAPES, check_channel
from tests.support.fake_cuda import FakeDriver, FakeMachine, FakeStream
from tests.support.simulated_gpu import SimulatedDriver, in_use
from tests.support.threads import run_threads

ROUNDS = 7


class FakeChannel(PeerChannel):
    """On a fake device, for which tensors of the host are memory of its own."""

    def _new(self, shape: Any, like: torch.Tensor) -> torch.Tensor:
        return self.adopted(super()._new(shape, like))

    def _write(self, turn: int, start: int, block: torch.Tensor) -> None:
        super()._write(turn, start, self.adopted(block.contiguous()))

    def adopted(self, block: torch.Tensor) -> torch.Tensor:
        driver: Any = self._driver
        driver.adopt(block.numpy())
        return block


class Trainer:
    """One trainer in a thread of its own, whose device has yet to work."""

    def __init__(self, group: LocalGroup, machine: FakeMachine, device: int, regions: int) -> None:
        self.group, self.regions = group, regions
        self.driver: Any = FakeDriver(machine, device)
        self.stream = self.driver.stream()
        self.found: list[list[torch.Tensor]] = []

    def begin(self, length: Callable[[int], int]) -> None:
        """Gather, and pass from all to all, in turn, as a host does that waits for nothing."""
        rank, size = self.group.rank, self.group.size
        vectors = [self._region() for _ in range(self.regions)]
        channel = FakeChannel(
            self.group,
            [vectors[0], vectors[-1]],
            device_barrier(vectors[0]),
            self.stream,
        )
        self.channel, label = channel, ("", 0, (), "")
        for turn in range(ROUNDS):
            n = length(turn)
            block = torch.full((n, 3), 10.0 * turn + rank)
            self.found.append(channel.all_gather(label, block, [(n, 3)] * size))
            # Columns of a table: not memory in one piece.
            table = torch.arange(2.0 * n * size).view(2 * n, size) + 1000 * rank + 10 * turn
            blocks = [table[:, to] for to in range(size)]
            self.found.append(channel.all_to_all(label, blocks, [(2 * n,)] * size))

    def _region(self) -> PeerVectors:
        own = CudaBuffer.create(self.driver, 4096)
        return PeerVectors(self.group, self.driver, own, "uint8")

    def spoiled(self, length: Callable[[int], int]) -> int:
        """How many blocks hold anything else than was sent."""
        rank, size, count = self.group.rank, self.group.size, 0
        for turn in range(ROUNDS):
            n, gathered, passed = length(turn), *self.found[2 * turn : 2 * turn + 2]
            for other in range(size):
                column = torch.arange(2.0 * n * size).view(2 * n, size)[:, rank]
                count += not torch.equal(gathered[other], torch.full((n, 3), 10.0 * turn + other))
                count += not torch.equal(passed[other], column + 1000 * other + 10 * turn)
        return count


def trainers_of(
    machine: FakeMachine,
    devices: Sequence[int],
    order: Sequence[int] | None = None,
    length: Callable[[int], int] = lambda turn: 20 + turn,
    regions: int = 2,
) -> tuple[list[Trainer], int]:
    """Let trainers meet. Their devices work at the end, the first of `order` before the others.

    Without an order each works when somebody waits for it. Returns the number of spoiled blocks.
    """
    trainers = [
        Trainer(group, machine, device, regions)
        for group, device in zip(local_groups(len(devices)), devices, strict=True)
    ]
    run_threads([lambda t=t: t.begin(length) for t in trainers])
    if order is not None:
        assert not any(trainer.stream.waits for trainer in trainers), "a host has waited"
        machine.work_off([trainers[rank].stream for rank in order])
    for trainer in trainers:
        trainer.stream.synchronize()
    return trainers, sum(trainer.spoiled(length) for trainer in trainers)


@pytest.mark.parametrize("devices", [(0,), (0, 0), (0, 1), (0, 1, 0)])
def test_devices_work_in_any_order_after_hosts_that_wait_for_none(devices: Sequence[int]) -> None:
    for order in itertools.permutations(range(len(devices))):
        trainers, spoiled = trainers_of(FakeMachine(2), devices, order)
        assert spoiled == 0
        run_threads([trainer.channel.close for trainer in trainers])
        assert not trainers[0].driver.machine.allocations


def test_one_region_would_not_do() -> None:
    orders = list(itertools.permutations(range(2)))
    assert any(trainers_of(FakeMachine(2), (0, 1), order, regions=1)[1] for order in orders)


@pytest.mark.parametrize("left_out", ["record", "wait"])
def test_every_event_is_needed(monkeypatch: pytest.MonkeyPatch, left_out: str) -> None:
    def cross(self: EventBarrier, stream: FakeStream, message: Any = None) -> Any:
        if left_out != "record":
            self._own[self._turn].record(stream)
        messages = self._group.all_gather_object(message)
        if left_out != "wait":
            for events in self._others:
                stream.wait_for_event(events[self._turn])
        self._turn = 1 - self._turn
        return messages

    monkeypatch.setattr(EventBarrier, "cross", cross)
    orders = list(itertools.permutations(range(2)))
    assert any(trainers_of(FakeMachine(2), (0, 1), order)[1] for order in orders)


@pytest.mark.parametrize("devices", [(0, 0), (0, 1, 0)])
def test_a_region_grows_when_its_readers_are_done(devices: Sequence[int]) -> None:
    machine = FakeMachine(2)
    trainers, spoiled = trainers_of(machine, devices, length=lambda turn: 20 * 2**turn)
    assert spoiled == 0
    assert max(a.bytes.nbytes for a in machine.allocations) > 4096
    run_threads([trainer.channel.close for trainer in trainers])
    assert not machine.allocations


def test_what_a_trainer_copies_is_its_own_and_the_others_blocks() -> None:
    trainers, _ = trainers_of(FakeMachine(2), (0, 1), length=lambda turn: 10)
    # To its region 120 bytes, and as many from the other's; then one column of 20 numbers each.
    log = [entry for entry in trainers[0].driver.log if not entry.endswith(str(PATTERN))]
    assert log == ROUNDS * [*2 * ["copy 120"], *2 * ["copy 80"]]
    assert trainers[0].channel.received == ROUNDS * 200


# By simulated GPUs


class ThreadDriver(SimulatedDriver):
    """A simulated GPU of a trainer in a thread, which is a process to the others."""

    def __init__(self, device: int, rank: int) -> None:
        super().__init__(device)
        self.process = -1 - rank

    def export(self, address: int) -> bytes:
        return f"/proc/{os.getpid()}/fd/{self._mapped[address][1]}".encode()


def memory_on(device: int, rank: int) -> Any:
    """What a channel needs of a trainer's memory."""
    memory = object.__new__(CudaMemory)
    memory.driver = ThreadDriver(device, rank)  # type: ignore[assignment]
    memory.stream = memory.driver.stream()
    return memory


def meet(devices: Sequence[int], expected: type[Any]) -> None:
    """Check every conversion between trainers on these devices, and that all is given back."""

    def work(group: LocalGroup) -> None:
        memory = memory_on(devices[group.rank], group.rank)
        channel = make_channel(memory, group)
        assert type(channel) is expected
        for shape in SHAPES[:2]:
            check_channel(channel, shape)
        channel.close()

    before = set(in_use)
    run_threads([lambda group=group: work(group) for group in local_groups(len(devices))])
    assert in_use == before


@pytest.mark.parametrize("devices", [(0, 0), (1, 2, 3)])
def test_gpus_that_reach_each_other_read_each_others_memory(
    monkeypatch: pytest.MonkeyPatch, devices: Sequence[int]
) -> None:
    monkeypatch.setattr(gpu_channel, "FIRST_SIZE", 64)
    meet(devices, PeerChannel)


def test_gpus_that_are_apart_meet_by_way_of_the_host(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        meet((0, 1), HostChannel)
    assert "cuda:0 and cuda:1 can't reach each other's memory" in caplog.text


@pytest.mark.parametrize("takes", [False, True])
def test_ranks_on_gpus_send_from_where_their_mpi_takes_it(
    monkeypatch: pytest.MonkeyPatch, takes: bool
) -> None:
    """From the GPU only if all ranks' MPI takes its memory."""
    monkeypatch.setattr(LocalGroup, "starter", "mpirun")
    monkeypatch.setattr(LocalGroup, "takes_gpu_memory", lambda self: takes or self.rank == 0)
    given: set[type] = set()

    def note(original: Any) -> Any:
        def call(self: LocalGroup, vector: Any, *rest: Any) -> None:
            given.add(type(vector))
            arrays = [a.numpy() if isinstance(a, torch.Tensor) else a for a in (vector, *rest)]
            original(self, *arrays)

        return call

    for name in ("all_gather", "all_to_all_parts"):
        monkeypatch.setattr(LocalGroup, name, note(getattr(LocalGroup, name)))
    meet((0, 2), GroupChannel)
    assert given == {torch.Tensor if takes else np.ndarray}
