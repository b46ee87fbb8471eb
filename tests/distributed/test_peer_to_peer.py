"""The exchange between GPUs, against a fake CUDA driver and NumPy."""

import copy
import logging
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tandem.distributed import LocalGroup, local_groups, peer_to_peer
from tandem.distributed.allreduce import AllReduce, HierarchicalAllReduce
from tandem.distributed.gpu_staging import GpuVector
from tandem.distributed.kernels import average_into_all
from tandem.distributed.peer_to_peer import PeerToPeerAllReduce, PeerVectors, average_source
from tandem.memory.cuda import CudaBuffer
from tests.support.averages import MOST_GROWTH, growth, weights
from tests.support.fake_cuda import FakeDriver, FakeMachine, FakeStream, fake_memory
from tests.support.threads import run_threads

BLOCK = 1024  # bytes, so that small vectors have several blocks
ALL_APART = frozenset(frozenset(pair) for pair in ((0, 1), (0, 2), (1, 2)))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_to_peer, "BLOCK", BLOCK)


class Trainer:
    """One trainer in a thread of its own: a step that the device has yet to do, and an exchange."""

    def __init__(
        self,
        group: LocalGroup,
        machine: FakeMachine,
        device: int,
        values: np.ndarray,
    ) -> None:
        self.group, self.values = group, values
        self.driver = FakeDriver(machine, device)
        self.vector = CudaBuffer.create(self.driver, values.nbytes)
        self.array = self.vector.array(values.shape, values.dtype)
        self.results: list[np.ndarray] = []

    def run(self, shares: Sequence[float], rounds: int = 2) -> None:
        vectors = PeerVectors(self.group, self.driver, self.vector, self.values.dtype.name)
        stream = self.driver.stream()
        all_reduce = PeerToPeerAllReduce(vectors, stream, self.driver.average)
        for number in range(rounds):
            values = self.values * (number + 1)
            stream.work.append(lambda values=values: self.driver.write(self.array, values))
            all_reduce.average(None, shares)
            # The next step reads the vector as it is when the exchange has returned.
            self.results.append(self.driver.read(self.array))
        all_reduce.close()
        vectors.close()
        assert not self.driver.locked
        self.group.barrier()
        self.vector.close()


def exchange(
    machine: FakeMachine,
    devices: Sequence[int],
    size: int = 3000,
    shares: Sequence[float] | None = None,
    dtype: str = "float32",
) -> tuple[list[Trainer], list[float]]:
    rng = np.random.default_rng(len(devices))
    counts = rng.integers(1, 10, len(devices))
    weights = list(shares or (counts / counts.sum()).tolist())
    trainers = [
        Trainer(group, machine, device, rng.normal(size=size).astype(dtype))
        for group, device in zip(local_groups(len(devices)), devices, strict=True)
    ]
    run_threads([lambda t=t: t.run(weights) for t in trainers])
    return trainers, weights


def assert_averaged(trainers: list[Trainer], shares: list[float]) -> None:
    """Every vector holds the bits that the exchange on the host would have left."""
    for number in range(2):
        vectors = [t.values * (number + 1) for t in trainers]
        average_into_all(vectors, shares)
        for trainer in trainers:
            assert trainer.results[number].tobytes() == vectors[0].tobytes()


@pytest.mark.parametrize("devices", [(0, 0), (0, 1), (0, 1, 2), (1, 0, 1, 2)])
@pytest.mark.parametrize("apart", [frozenset(), frozenset([frozenset((0, 1))]), ALL_APART])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_all_vectors_hold_the_bits_of_the_average(
    devices: tuple[int, ...], apart: frozenset[frozenset[int]], dtype: str
) -> None:
    machine = FakeMachine(3, apart=apart)
    trainers, shares = exchange(machine, devices, dtype=dtype)
    assert_averaged(trainers, shares)
    assert not machine.allocations


def test_a_trainer_alone_copies_nothing() -> None:
    trainers, _ = exchange(FakeMachine(), (0,))
    assert not trainers[0].driver.log


@pytest.mark.parametrize("size", [1, 255, 256, 1024, 1025, 5000])
def test_vectors_of_any_size(size: int) -> None:
    assert_averaged(*exchange(FakeMachine(2), (0, 1), size))


@pytest.mark.parametrize("apart", [frozenset(), ALL_APART])
def test_a_trainer_without_pictures_is_not_read(apart: frozenset[frozenset[int]]) -> None:
    machine = FakeMachine(2, apart=apart)
    values = [np.ones(3000, "float32"), np.full(3000, np.nan, "float32")]
    trainers = [
        Trainer(group, machine, device, value)
        for group, device, value in zip(local_groups(2), (0, 1), values, strict=True)
    ]
    run_threads([lambda t=t: t.run([1.0, 0.0], rounds=1) for t in trainers])
    for trainer in trainers:
        assert (trainer.results[0] == 1).all()


@pytest.mark.parametrize("apart", [frozenset(), ALL_APART])
@pytest.mark.parametrize("counts", [(1, 1, 1), (128, 128, 45)])
def test_an_average_of_equal_vectors_does_not_grow(
    counts: tuple[int, ...], apart: frozenset[frozenset[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_to_peer, "BLOCK", 1 << 20)
    machine, before = FakeMachine(3, apart=apart), weights()
    trainers = [Trainer(g, machine, device, before) for device, g in enumerate(local_groups(3))]
    shares = [count / sum(counts) for count in counts]
    run_threads([lambda t=t: t.run(shares, rounds=1) for t in trainers])
    for trainer in trainers:
        assert abs(growth(before, trainer.results[0])) < MOST_GROWTH


def test_shards_are_read_and_written_in_blocks() -> None:
    trainers, _ = exchange(FakeMachine(2), (0, 1), size=2048)
    # In each of two rounds, four blocks: read the other's, add, write to the other.
    block = [f"copy {BLOCK}", "average 2", f"copy {BLOCK}"]
    assert trainers[0].driver.log == 2 * 4 * block


def test_on_one_device_a_shard_is_added_where_it_lies() -> None:
    trainers, _ = exchange(FakeMachine(1), (0, 0), size=2048)
    assert trainers[0].driver.log == 2 * ["average 2", f"copy {4 * 1024}"]


def test_devices_that_cannot_reach_each_other_are_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        exchange(FakeMachine(3, apart=frozenset([frozenset((0, 2))])), (0, 1, 2, 0))
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("cuda:0 and cuda:2 can't reach each other")


def ignore(*_: Any) -> None:
    """Stands where a wait was."""


@pytest.mark.parametrize("apart", [frozenset(), ALL_APART])
def test_a_wait_that_is_left_out_shows(
    monkeypatch: pytest.MonkeyPatch, apart: frozenset[frozenset[int]]
) -> None:
    monkeypatch.setattr(FakeStream, "synchronize", ignore)
    with pytest.raises(AssertionError):
        assert_averaged(*exchange(FakeMachine(2, apart=apart), (0, 1)))


@pytest.mark.parametrize("apart", [frozenset(), ALL_APART])
def test_every_single_wait_is_needed(
    monkeypatch: pytest.MonkeyPatch, apart: frozenset[frozenset[int]]
) -> None:
    """Without the wait for the step, and without each of the waits for copies, in turn."""
    original = peer_to_peer.PeerToPeerAllReduce._finish
    waits = 3 if apart else 1
    for left_out in range(waits):
        calls: dict[int, int] = {}

        def finish(self: Any, left_out: int = left_out, calls: dict[int, int] = calls) -> None:
            number = calls[id(self)] = calls.get(id(self), -1) + 1
            if number % waits != left_out:
                original(self)

        monkeypatch.setattr(peer_to_peer.PeerToPeerAllReduce, "_finish", finish)
        with pytest.raises(AssertionError):
            assert_averaged(*exchange(FakeMachine(2, apart=apart), (0, 1)))


def test_the_kernel_adds_in_rank_order_and_fuses_nothing() -> None:
    source = average_source("float32", 3)
    assert (
        "__fdiv_rn(__fadd_rn(__fadd_rn(__fmul_rn(x0[i], s0), __fmul_rn(x1[i], s1)), "
        "__fmul_rn(x2[i], s2)), divisor)" in source
    )
    assert "double divisor, const double *x0, double s0" in average_source("float64", 1)


class Between(AllReduce):
    """The sum over machines of one process, each of which a thread leads."""

    def __init__(self, machines: int) -> None:
        self._barrier, self._vectors = threading.Barrier(machines), [np.zeros(0)] * machines

    def of(self, machine: int) -> AllReduce:
        found = copy.copy(self)
        found._machine = machine
        return found

    def average(self, vector: np.ndarray, shares: Sequence[float]) -> None:
        self._vectors[self._machine] = vector.copy()
        self._barrier.wait(30)
        pairs = zip(self._vectors, shares, strict=True)
        vector[:] = sum(v * np.float32(s) for v, s in pairs if s)  # ones, or none
        self._barrier.wait(30)


MACHINES = ((0,), (1, 2), (3, 4))


def over_machines(machines: Sequence[FakeMachine], shares: Sequence[float]) -> list[np.ndarray]:
    """What two parts of every vector hold that machines of GPUs have averaged, one after another.

    The first ranks send their vectors by way of the host. Vectors are ones, times two to the rank.
    """
    between, found = Between(len(machines)), [np.zeros(0)] * 5
    parts = (slice(0, 1100), slice(1100, 3000))

    def rank(machine: int, group: LocalGroup) -> None:
        number, device = MACHINES[machine][group.rank], group.rank
        driver = FakeDriver(machines[machine], device, bound=True)
        memory = fake_memory(driver, 3000)
        array = memory.flat["gradients"]
        on_gpu = GpuVector(memory, "gradients", group)
        values = np.full(3000, 2.0**number if shares[number] else np.nan, np.float32)
        memory.stream.work.append(lambda: driver.write(array, values))
        staged = on_gpu.by_messages(parts, lambda part: between.of(machine))
        for within, sent in zip(on_gpu.by_memory(parts, group), staged, strict=True):
            all_reduce = HierarchicalAllReduce(
                within, MACHINES, machine, None if group.rank else sent
            )
            all_reduce.average(None, shares)
        found[number] = driver.read(array)
        on_gpu.close()

    calls = []
    for machine, ranks in enumerate(MACHINES):
        calls += [lambda m=machine, g=group: rank(m, g) for group in local_groups(len(ranks))]
    run_threads(calls)
    return found


EXACT = [0.5, 0.125, 0.125, 0.25, 0.0]  # in float32


@pytest.mark.parametrize("apart", [frozenset(), ALL_APART])
@pytest.mark.parametrize(
    "shares",
    [
        EXACT,
        [0.0, 0.0, 0.0, 0.5, 0.5],  # nobody on two machines
        [1 / 3, 0.0, 0.0, 1 / 3, 1 / 3],  # divided once, by all
    ],
)
def test_machines_of_gpus_average_within_and_then_between(
    shares: list[float], apart: frozenset[frozenset[int]]
) -> None:
    expected = np.float32(sum(share * 2.0**rank for rank, share in enumerate(shares)))
    found = over_machines([FakeMachine(2, apart=apart) for _ in MACHINES], shares)
    for vector in found:
        assert (vector == expected).all()


@pytest.mark.parametrize("left_out", [FakeStream, GpuVector])
def test_a_wait_that_is_left_out_over_machines_shows(
    monkeypatch: pytest.MonkeyPatch, left_out: type
) -> None:
    monkeypatch.setattr(left_out, "synchronize" if left_out is FakeStream else "wait", ignore)
    with pytest.raises(AssertionError):
        test_machines_of_gpus_average_within_and_then_between(EXACT, frozenset())
