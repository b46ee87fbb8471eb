"""The exchange between GPUs, against a fake CUDA driver and NumPy."""

import copy
import itertools
import logging
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from tandem.distributed import LocalGroup, local_groups, peer_to_peer
from tandem.distributed.allreduce import AllReduce, HierarchicalAllReduce
from tandem.distributed.buckets import BucketedGradients, divide
from tandem.distributed.gpu_staging import GpuVector
from tandem.distributed.kernels import average_into_all
from tandem.distributed.peer_to_peer import EventBarrier, PeerToPeerAllReduce, PeerVectors
from tandem.errors import InputError
from tandem.memory.cuda import CudaBuffer
from tests.support.averages import MOST_GROWTH, growth, weights
from tests.support.fake_cuda import FakeDriver, FakeEvent, FakeMachine, FakeStream, fake_memory
from tests.support.threads import run_threads

BLOCK = 1024  # bytes, so that small vectors have several blocks
ALL_APART = frozenset(frozenset(pair) for pair in ((0, 1), (0, 2), (1, 2)))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_to_peer, "BLOCK", BLOCK)
    monkeypatch.setattr(peer_to_peer, "PATTERN", 64)


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
        self.stream = self.driver.stream()
        self.vector = CudaBuffer.create(self.driver, values.nbytes)
        self.array = self.vector.array(values.shape, values.dtype)
        self.results: list[np.ndarray] = []

    def begin(self, shares: Sequence[float], rounds: int = 2) -> None:
        """Begin steps and exchanges, one after another, as a host does that waits for nothing."""
        self.vectors = PeerVectors(self.group, self.driver, self.vector, self.values.dtype.name)
        self.driver.log.clear()
        self.all_reduce = PeerToPeerAllReduce(self.vectors, self.stream, self.driver.average)
        for number in range(rounds):
            values = self.values * (number + 1)
            self.stream.work.append(lambda values=values: self.driver.write(self.array, values))
            self.all_reduce.average(None, shares)
            self.stream.work.append(lambda: self.results.append(self.driver.read(self.array)))

    def end(self) -> None:
        self.all_reduce.close()
        self.vectors.close()
        assert not self.driver.locked
        self.group.barrier()
        self.vector.close()


def exchange(
    machine: FakeMachine,
    devices: Sequence[int],
    size: int = 3000,
    shares: Sequence[float] | None = None,
    dtype: str = "float32",
    order: Sequence[int] | None = None,
    rounds: int = 2,
) -> tuple[list[Trainer], list[float]]:
    """Let trainers exchange. Their devices work at the end, the first of `order` before the others.

    Without an order each works when somebody waits for it.
    """
    rng = np.random.default_rng(len(devices))
    counts = rng.integers(1, 10, len(devices))
    weights = list(shares or (counts / counts.sum()).tolist())
    trainers = [
        Trainer(group, machine, device, rng.normal(size=size).astype(dtype))
        for group, device in zip(local_groups(len(devices)), devices, strict=True)
    ]
    run_threads([lambda t=t: t.begin(weights, rounds) for t in trainers])
    if order is not None:
        assert not any(t.results or t.stream.waits for t in trainers), "a host has waited"
        machine.work_off([trainers[rank].stream for rank in order])
    run_threads([t.end for t in trainers])
    return trainers, weights


def assert_averaged(trainers: list[Trainer], shares: list[float]) -> None:
    """Every vector holds the bits that the exchange on the host would have left."""
    rounds = len(trainers[0].results)
    assert rounds
    assert all(len(t.results) == rounds for t in trainers)
    for number in range(rounds):
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
    run_threads([lambda t=t: t.begin([1.0, 0.0], rounds=1) for t in trainers])
    run_threads([t.end for t in trainers])
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
    run_threads([lambda t=t: t.begin(shares, rounds=1) for t in trainers])
    run_threads([t.end for t in trainers])
    for trainer in trainers:
        assert abs(growth(before, trainer.results[0])) < MOST_GROWTH


@pytest.mark.parametrize("devices", [(0, 0), (0, 1)])
def test_a_shard_is_added_where_it_lies_and_written_everywhere(devices: tuple[int, ...]) -> None:
    trainers, _ = exchange(FakeMachine(2), devices, size=2048)
    assert trainers[0].driver.log == 2 * ["average 2"]


def test_what_goes_through_the_host_does_so_in_blocks() -> None:
    trainers, _ = exchange(FakeMachine(2, apart=ALL_APART), (0, 1), size=2048)
    # The other's shard to the host; four blocks of this one's: the other's from the host, the
    # average to it; the other's average.
    block = [f"upload {BLOCK}", "average 2", f"download {BLOCK}"]
    assert trainers[0].driver.log == 2 * [f"download {4 * 1024}", *4 * block, f"upload {4 * 1024}"]


def test_more_trainers_than_the_kernel_adds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_to_peer, "MOST_TRAINERS", 1)
    with pytest.raises(InputError, match="2 trainers share a machine's GPUs: 1 can"):
        exchange(FakeMachine(), (0, 0))


def test_devices_that_cannot_reach_each_other_are_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        exchange(FakeMachine(3, apart=frozenset([frozenset((0, 2))])), (0, 1, 2, 0))
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("cuda:0 and cuda:2 can't reach each other")


def test_who_copies_wrong_bytes_exchanges_through_the_host(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pairs = frozenset([frozenset((0, 2))])
    with caplog.at_level(logging.WARNING):
        trainers, shares = exchange(FakeMachine(3, corrupt=pairs), (0, 1, 2, 0))
    assert_averaged(trainers, shares)
    assert [trainer.vectors.is_any_apart for trainer in trainers] == [True] * 4
    assert [trainers[1].vectors.is_apart(rank) for rank in range(4)] == [False] * 4
    assert [trainers[2].vectors.is_apart(rank) for rank in range(4)] == [True, False, False, True]
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("cuda:0 and cuda:2 copy wrong bytes from each other")


# In what order devices work


THREE = list(itertools.permutations(range(3)))


@pytest.mark.parametrize("devices", [(0, 0, 0), (0, 1, 0)])
def test_devices_work_in_any_order_after_hosts_that_wait_for_none(devices: tuple[int, ...]) -> None:
    for order in THREE:
        trainers, shares = exchange(FakeMachine(2), devices, order=order, rounds=3)
        assert [len(t.results) for t in trainers] == [3, 3, 3]
        assert_averaged(trainers, shares)


@pytest.mark.parametrize("left_out", ["record", "wait"])
@pytest.mark.parametrize("turn", [0, 1])
def test_every_event_is_needed(monkeypatch: pytest.MonkeyPatch, left_out: str, turn: int) -> None:
    """Before the shards are added, and before the next step."""

    def cross(self: EventBarrier, stream: FakeStream) -> None:
        if self._turn != turn or left_out != "record":
            self._own[self._turn].record(stream)
        self._group.barrier()
        if self._turn != turn or left_out != "wait":
            for events in self._others:
                stream.wait_for_event(events[self._turn])
        self._turn = 1 - self._turn

    monkeypatch.setattr(EventBarrier, "cross", cross)

    def all_orders() -> None:
        for order in THREE:
            assert_averaged(*exchange(FakeMachine(1), (0, 0, 0), order=order, rounds=3))

    with pytest.raises(AssertionError):
        all_orders()


@pytest.mark.parametrize("slow", [0, 1, 2])
@pytest.mark.parametrize("late", [[FakeEvent, "record"], [FakeStream, "wait_for_event"]])
def test_an_event_is_recorded_again_when_all_streams_wait_for_it(
    monkeypatch: pytest.MonkeyPatch, slow: int, late: tuple[type, str]
) -> None:
    """Also when one host is later than the others, to record or to wait."""
    original, events = getattr(*late), list[FakeEvent]()
    machine, groups = FakeMachine(3), local_groups(3)
    make = FakeDriver.event

    def event(self: FakeDriver, shared: bool = False) -> FakeEvent:
        events.append(make(self, shared))
        return events[-1]

    def later(self: Any, *arguments: Any) -> None:
        if threading.current_thread().name == "slow":
            time.sleep(0.005)
        original(self, *arguments)

    def begin(trainer: Trainer) -> None:
        threading.current_thread().name = "slow" if trainer.group.rank == slow else "fast"
        trainer.begin([0.5, 0.25, 0.25], rounds=3)

    monkeypatch.setattr(*late, later)
    monkeypatch.setattr(FakeDriver, "event", event)
    values = np.ones(3000, "float32")
    trainers = [Trainer(group, machine, rank, values) for rank, group in enumerate(groups)]
    run_threads([lambda t=t: begin(t) for t in trainers])
    run_threads([t.end for t in trainers])
    assert len(events) == 6
    for event_ in events:
        assert event_.history == 3 * ["record", "wait", "wait"]


@pytest.mark.parametrize("refused", ["export_event", "open_event"])
def test_without_shared_events_each_host_waits_for_its_device(
    monkeypatch: pytest.MonkeyPatch, refused: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if only one trainer can't share them."""
    original = getattr(FakeDriver, refused)

    def refuse(self: FakeDriver, *arguments: Any) -> Any:
        if self.device == 1:
            raise InputError("events of cuda:1 can't be shared")
        return original(self, *arguments)

    monkeypatch.setattr(FakeDriver, refused, refuse)
    with caplog.at_level(logging.WARNING):
        trainers, shares = exchange(FakeMachine(2), (0, 1, 0))
    assert_averaged(trainers, shares)
    # Before and after each of two exchanges, and at the end.
    assert [t.stream.waits for t in trainers] == [5, 5, 5]
    (message,) = caplog.messages
    assert message.endswith("waits for the GPUs, which is slower: events of cuda:1 can't be shared")


def ignore(*_: Any) -> None:
    """Stands where a wait was."""


@pytest.mark.parametrize("left_out", ["step", "blocks"])
def test_every_wait_for_what_goes_through_the_host_is_needed(
    monkeypatch: pytest.MonkeyPatch, left_out: str
) -> None:
    original = FakeStream.synchronize

    def synchronize(self: FakeStream) -> None:
        caller = sys._getframe(1).f_code.co_name
        if caller == "close" or (caller == "cross") != (left_out == "step"):
            original(self)

    monkeypatch.setattr(FakeStream, "synchronize", synchronize)
    with pytest.raises(AssertionError, match=r"^assert b'"):
        assert_averaged(*exchange(FakeMachine(2, apart=ALL_APART), (0, 1)))


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
        memory.stream.work.append(lambda: found.__setitem__(number, driver.read(array)))
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
        assert vector.size == 3000
        assert (vector == expected).all()


@pytest.mark.parametrize("left_out", [FakeStream, GpuVector])
def test_a_wait_that_is_left_out_over_machines_shows(
    monkeypatch: pytest.MonkeyPatch, left_out: type
) -> None:
    monkeypatch.setattr(left_out, "synchronize" if left_out is FakeStream else "wait", ignore)
    with pytest.raises(AssertionError):
        test_machines_of_gpus_average_within_and_then_between(EXACT, frozenset())


EXTENTS = {"a": (0, 1100), "b": (1100, 2000), "c": (2000, 3000)}


def in_buckets(order: Sequence[int]) -> list[list[np.ndarray]]:
    """What two trainers' gradients hold after three steps of buckets; the hosts wait for no device.

    The devices work at the end: of the streams of steps and of exchanges the first of `order`
    before the others.
    """
    machine, streams, closing = FakeMachine(), [FakeStream(FakeMachine(), 0)] * 4, []
    found: list[list[np.ndarray]] = [[], []]
    buckets = divide({name: begin for name, (begin, _) in EXTENTS.items()}, 3000, 1500)
    hosts = threading.Barrier(3)

    def trainer(group: LocalGroup) -> None:
        rank, driver = group.rank, FakeDriver(machine, bound=True)
        memory = fake_memory(driver, 3000)
        array = memory.flat["gradients"]
        vector = GpuVector(memory, "gradients", group, is_apart=True)
        vector.own = np.zeros(3000)  # of which slices are taken
        streams[2 * rank : 2 * rank + 2] = memory.stream, vector.stream
        all_reduces = vector.by_memory([bucket.extent for bucket in buckets], group)
        exchange = BucketedGradients(buckets, vector, all_reduces)
        for step in range(3):
            exchange.before_gradients([0.5, 0.5])
            for name, (begin, end) in reversed(EXTENTS.items()):
                piece = array.buffer.array(end - begin, "float32", 4 * begin)
                values = np.full(end - begin, 4.0**step * (rank + 1), np.float32)
                memory.stream.work.append(partial(driver.write, piece, values))
                exchange.on_gradient_ready(name)
            exchange.before_update([0.5, 0.5])
            memory.stream.work.append(lambda: found[rank].append(driver.read(array)))
        hosts.wait(30)
        hosts.wait(30)
        exchange.leave()

    def devices() -> None:
        hosts.wait(30)
        closing.extend(stream.waits for stream in streams)
        machine.work_off([streams[number] for number in order])
        hosts.wait(30)

    run_threads([*(partial(trainer, group) for group in local_groups(2)), devices])
    assert closing == [0, 0, 0, 0]
    return found


def test_buckets_are_averaged_beside_the_step_in_any_order_of_work() -> None:
    for order in itertools.permutations(range(4)):
        for vectors in in_buckets(order):
            assert len(vectors) == 3
            for step, vector in enumerate(vectors):
                assert (vector == 1.5 * 4.0**step).all()
