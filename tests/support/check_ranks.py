"""What each rank checks of its group, under mpirun or torchrun: every vector against NumPy.

Prints "checked" on rank 0 when all is well; a failed check ends the job with its traceback.
"""

import itertools
import mmap
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tandem.distributed import ExchangeSettings, make_channel, make_exchange, mpi, open_host_memory
from tandem.distributed.allreduce import (
    AllReduce,
    LibraryAllReduce,
    ShardedAllReduce,
)
from tandem.distributed.asynchronous import ElasticAveraging, GossipAveraging
from tandem.distributed.buckets import BucketedGradients, divide
from tandem.distributed.channel import GroupChannel, OutOfStep
from tandem.distributed.compressed import CompressedAllReduce
from tandem.distributed.gloo import GlooGroup
from tandem.distributed.gpu_staging import GpuVector
from tandem.distributed.group import RankGroup
from tandem.distributed.kernels import average_into_all
from tandem.distributed.mpi import MpiGroup
from tandem.distributed.rank_vector import HostVector, RankVector
from tandem.distributed.ranks import join
from tandem.distributed.shares import weights_and_divisor
from tandem.memory import HostSlots, SlotLayout
from tandem.memory.flat import FlatLayout
from tandem.memory.parameters import HostMemory
from tests.support import collectives
from tests.support import simulated_gpu as simulated_gpu
from tests.support.averages import MOST_GROWTH, growth, weights
from tests.support.fake_cuda import FakeDriver, FakeMachine, fake_memory
from tests.support.numpy_formats import NumpyTransferFormat
from tests.support.tiny import open_files

SIZES = (1, 1500, 70_001)


def vectors(ranks: int, size: int, dtype: str = "float32", turn: int = 0) -> list[np.ndarray]:
    """Every rank's vector, the same at every rank."""
    rng = np.random.default_rng([ranks, size, turn])
    return [
        (10.0 ** rng.uniform(-6, 0) * rng.normal(size=size)).astype(dtype) for _ in range(ranks)
    ]


def uneven(ranks: int) -> list[float]:
    """Shares of which the last is none, unless there is one only."""
    counts = np.arange(ranks, 0, -1.0)
    if ranks > 1:
        counts[-1] = 0
    return (counts / counts.sum()).tolist()


def exact(every: Sequence[np.ndarray], shares: Sequence[float]) -> np.ndarray:
    """The average in float64."""
    total = np.zeros(every[0].shape)
    for vector, share in zip(every, shares, strict=True):
        if share:
            total += share * vector.astype(float)
    return total


def largest(vectors: Sequence[np.ndarray]) -> float:
    return max(float(np.abs(vector).max()) for vector in vectors)


def averaged(
    group: RankGroup, collective: AllReduce, own: np.ndarray, shares: Sequence[float]
) -> np.ndarray:
    """The vector after an exchange, checked to have the same bits at every rank."""
    if shares[group.rank] == 0:
        own.fill(np.nan)  # it is not to be read
    collective.average(own, shares)
    assert len(set(group.all_gather_object(own.tobytes()))) == 1
    return own


def check_gather(group: RankGroup) -> None:
    for length in (0, 1, 400, 504, 505, 100_000):
        messages = group.all_gather_object((group.rank, b"x" * length))
        assert messages == tuple((rank, b"x" * length) for rank in range(group.size))
    # One long message among short ones.
    lengths = [len(m) for m in group.all_gather_object(b"y" * (5000 if group.rank == 0 else 3))]
    assert lengths == [5000] + [3] * (group.size - 1)


def check_parts(group: RankGroup) -> None:
    """Parts of different sizes from each rank to each, by arrays, and where MPI takes them tensors.

    Rank i sends j numbers more to rank j than rank j to itself, and none where i + j is 2.
    """
    ranks = range(group.size)
    table = [[0 if i + j == 2 else 1000 * i + j for j in ranks] for i in ranks]
    for kind in (np.float32, np.uint8, np.int64):
        values = [[np.full(table[i][j], 10 * i + j, kind) for j in ranks] for i in ranks]
        sent = np.concatenate(values[group.rank])
        wanted = np.concatenate([values[i][group.rank] for i in ranks])
        sent_parts = extents([table[group.rank][j] for j in ranks])
        parts = extents([table[i][group.rank] for i in ranks])
        group.all_to_all_parts(sent, sent_parts, received := np.zeros_like(wanted), parts)
        np.testing.assert_array_equal(received, wanted)
        if isinstance(group, MpiGroup):
            tensor = torch.zeros(len(wanted), dtype=torch.from_numpy(wanted).dtype)
            group.all_to_all_parts(torch.from_numpy(sent), sent_parts, tensor, parts)
            np.testing.assert_array_equal(tensor.numpy(), wanted)


def extents(lengths: Sequence[int]) -> list[slice]:
    ends = np.cumsum([0, *lengths]).tolist()
    return [slice(a, b) for a, b in itertools.pairwise(ends)]


def check_channel_of_ranks(group: RankGroup) -> None:
    """Tensors by a channel, their bytes, and ranks that have made different calls."""
    channel = GroupChannel(group.split(0))
    rank, size = group.rank, group.size
    for turn in range(5):
        label = ("AllGather", turn, (7,), "float32")
        block = torch.full((rank + turn, 2), 10.0 * turn + rank)
        found = channel.all_gather(label, block, [(r + turn, 2) for r in range(size)])
        for other, tensor in enumerate(found):
            assert torch.equal(tensor, torch.full((other + turn, 2), 10.0 * turn + other))
        blocks = [torch.full((turn, to), 10 * rank + to) for to in range(size)]
        found = channel.all_to_all(label, blocks, [(turn, rank)] * size)
        for other, tensor in enumerate(found):
            assert torch.equal(tensor, torch.full((turn, rank), 10 * other + rank))
        gathered = sum(8 * (r + n) for n in range(turn + 1) for r in range(size) if r != rank)
        swapped = sum(8 * n * rank for n in range(turn + 1)) * (size - 1)
        assert channel.received == gathered + swapped
    if size > 1:
        with pytest.raises(OutOfStep, match=r"rank 0: call 10, AllGather 0 .*1: .*Gather 1"):
            channel.all_gather(("AllGather", rank, (1,), "float32"), block, [(1,)] * size)
    channel.close()


def check_functions(group: RankGroup) -> None:
    """Graphs with conversions of every kind, against NumPy."""
    memory: Any = None  # of nobody's shared memory
    channel = make_channel(memory, group)
    assert isinstance(channel, GroupChannel)
    for shape in collectives.SHAPES:
        collectives.check_channel(channel, shape)
    collectives.check_channel(channel, collectives.SHAPES[0], "int64")
    collectives.check_channel(channel, collectives.SHAPES[0], "bool")
    channel.close()


def check_sums(group: RankGroup) -> None:
    """The library's own is near the exact average; the sharded one has one machine's bits."""
    for dtype, tolerance in (("float32", 1e-6), ("float64", 1e-14)):
        for size in SIZES:
            every, shares = vectors(group.size, size, dtype), uneven(group.size)
            own = every[group.rank].copy()
            found = averaged(group, LibraryAllReduce(group), own.copy(), shares)
            expected = exact(every, shares)
            np.testing.assert_allclose(found, expected, atol=tolerance * largest(every))
            found = averaged(group, ShardedAllReduce(group, own), own, shares)
            average_into_all(every, shares)
            assert found.tobytes() == every[0].tobytes()


def check_growth(group: RankGroup) -> None:
    """Vectors that are the same at every rank do not grow, whatever the order of the sum."""
    counts = [128] * (group.size - 1) + [45]
    before = weights()
    for shares in ([1 / group.size] * group.size, [n / sum(counts) for n in counts]):
        for collective in (LibraryAllReduce(group), ShardedAllReduce(group, before)):
            collective.average(found := before.copy(), shares)
            assert abs(growth(before, found)) < MOST_GROWTH


def check_rounded(group: RankGroup) -> None:
    """The error of ASA16 against the bound of its docstring."""
    for wire, unit in (
        (NumpyTransferFormat("float16"), 2.0**-11),
        (NumpyTransferFormat("bfloat16"), 2.0**-8),
    ):
        for size in SIZES:
            every, shares = vectors(group.size, size), uneven(group.size)
            own = every[group.rank].copy()
            found = averaged(group, CompressedAllReduce(group, own, wire, False), own, shares)
            error = np.abs(found - exact(every, shares))
            sizes = exact([np.abs(v) for v in every], shares)
            # Of float32 beside: each product, sum and rounding by itself.
            bound = (2 * unit + unit**2) * sizes + 2.0**-40 * largest(every)
            bound += 2 * group.size * 2.0**-24 * sizes
            assert (error <= bound).all()
            if group.size > 1 and size > 1:
                assert error.max() > 0.1 * unit * sizes.max()  # it did travel in 16 bits


def check_feedback(group: RankGroup) -> None:
    """With feedback, the sum over many steps is off by one step's rounding, else by many."""
    if group.size == 1:
        return
    shares, steps, size = [1 / group.size] * group.size, 30, 3000
    every = vectors(group.size, size)
    errors = {}
    for feedback in (False, True):
        collective = CompressedAllReduce(group, every[0], NumpyTransferFormat("bfloat16"), feedback)
        total = np.zeros(size)
        for _ in range(steps):  # the same gradients each time, so that errors do not cancel
            total += averaged(group, collective, every[group.rank].copy(), shares)
        errors[feedback] = np.abs(total - steps * exact(every, shares)).max()
    sizes = exact([np.abs(v) for v in every], shares).max()
    assert errors[True] <= 4 * 2.0**-8 * sizes
    assert errors[False] > 4 * errors[True]


def on_machines(group: RankGroup) -> RankGroup:
    """Make another group of the same ranks, on simulated machines of one and two of them."""
    found, copies = group.split(0), group.split(0)
    vars(found)["local"] = group.split((group.rank + 1) // 2)
    split = found.split
    vars(found)["split"] = lambda color: on_machines(copies) if is_whole(color) else split(color)

    def is_whole(color: int) -> bool:
        return len(set(copies.all_gather_object(color))) == 1

    if isinstance(found, GlooGroup) and isinstance(copies, GlooGroup):
        vars(found)["open_nccl"] = lambda: vars(found).update(_nccl=copies._gloo)
    return found


EXCHANGES: tuple[dict[str, Any], ...] = (
    {"collective": "ar", "exchange": "gradients"},
    {"collective": "asa"},
    {"collective": "asa", "exchange": "gradients", "bucket_mb": 0.004},
    {"collective": "asa16"},
    {"collective": "asa16", "exchange": "gradients", "bucket_mb": 0.004},
    {"collective": "asa16", "wire": "bfloat16", "error_feedback": True},
    {"collective": "hierarchical"},
    {"collective": "hierarchical", "exchange": "gradients"},
    {"collective": "hierarchical", "exchange": "gradients", "bucket_mb": 0.004},
)
SHAPES = {"a": (100,), "b": (900,), "c": (10,), "d": (3000,)}


def check_exchanges(group: RankGroup) -> None:
    """What a run exchanges, in host memory, on GPUs by way of the host, and from GPU to GPU."""
    ways = ["host", "staged", "direct"] if isinstance(group, MpiGroup) else ["host", "staged"]
    machines = on_machines(group)
    for settings in EXCHANGES:
        found = [check_exchange(machines, settings, way) for way in ways]
        if settings["collective"] != "ar":
            assert len(set(found)) == 1  # the same bits
    for settings in ({}, {"exchange": "gradients"}, {"exchange": "gradients", "bucket_mb": 0.004}):
        if isinstance(group, GlooGroup):
            nccl = {"collective": "nccl", **settings}
            check_exchange(machines, nccl, "by gloo in NCCL's place")


def check_exchange(group: RankGroup, given: dict[str, Any], way: str) -> bytes:
    """Three rounds of one exchange against NumPy; the bits at the end."""
    vars(group)["takes_gpu_memory"] = lambda: way == "direct"
    layout, settings = FlatLayout.of(SHAPES, "float32", states=("momentum",)), given.copy()
    is_common = settings.get("exchange", "average") == "average"
    is_rounded = settings["collective"] == "asa16"
    count = layout.parameters_size if is_common else layout.size
    shares, memory = uneven(group.size), memory_of(group, settings, way)
    vector = memory.flat["parameters" if is_common else "gradients"]
    own = vector[memory.rank] if isinstance(memory, HostMemory) else vector
    own[:] = start = vectors(1, count)[0] if is_common else np.zeros(count)
    assert own.size == start.size
    group.barrier()
    exchange = make_exchange(ExchangeSettings.of(settings), memory, group)
    for turn in range(3):
        # Of parameters in 16 bits, what has changed travels: it may be small beside them.
        size = 1e-4 if is_rounded and is_common else 1.0
        changes = [np.float32(size) * v for v in vectors(group.size, count, turn=turn)]
        every = [own + change for change in changes]
        exchange.before_gradients(shares)
        own[:] = every[group.rank]
        if shares[group.rank] == 0 and not is_rounded:
            own.fill(np.nan)  # it is not to be read
        for name in reversed(SHAPES):
            exchange.on_gradient_ready(name)
        # Whatever buckets are in flight:
        assert group.all_gather_object(turn) == (turn,) * group.size
        exchange.before_update(shares)
        exchange.after_update(shares)
        atol = 1e-6 * largest(every)
        if is_rounded:
            unit = 2.0**-8 if settings.get("wire") == "bfloat16" else 2.0**-11
            atol += 8 * unit * largest(changes if is_common else every)
        np.testing.assert_allclose(own, exact(every, shares), rtol=1e-6, atol=atol)
        assert len(set(group.all_gather_object(own.tobytes()))) == 1
    found = own.tobytes()
    exchange.leave()
    assert way == "host" or not memory.driver.locked
    memory.close()
    return found


def memory_of(group: RankGroup, settings: dict[str, Any], way: str) -> Any:
    """A rank's memory, on the host or on a GPU: two ranks of a machine share one, or have two."""
    layout = FlatLayout.of(SHAPES, "float32", states=("momentum",))
    if way == "host":
        slots = HostSlots.create(SlotLayout.of_pictures(1, 8), group.rank)
        return open_host_memory(ExchangeSettings.of(settings), slots, group, layout)
    number = group.rank % 2 if "bucket_mb" in settings else 0
    gpu = simulated_gpu.SimulatedSlots(number, SlotLayout.of_pictures(1, 8))
    return gpu.trainer_memory(layout, gpu.driver(), lambda stream: nullcontext())


class FakeGpu:
    """A vector of this rank on a fake GPU, which does its work only when somebody waits for it."""

    def __init__(self, group: RankGroup, values: np.ndarray, is_apart: bool = False) -> None:
        self.driver = FakeDriver(FakeMachine(), bound=True)
        memory = fake_memory(self.driver, values.size, values.dtype.name)
        self.stream, self.array = memory.stream, memory.flat["gradients"]
        self.write(values)
        self.stream.synchronize()
        vars(group)["takes_gpu_memory"] = lambda: False
        self.vector = GpuVector(memory, "gradients", group, is_apart)
        self.vector.own = values  # of which slices are taken

    def read(self) -> np.ndarray:
        return self.driver.read(self.array)

    def write(self, values: np.ndarray, begin: int = 0) -> None:
        piece = self.array.buffer.array(values.shape, values.dtype, begin * values.itemsize)
        self.stream.work.append(partial(self.driver.write, piece, values.copy()))


class HostCopy:
    """The same in host memory."""

    def __init__(self, group: RankGroup, values: np.ndarray, is_apart: bool = False) -> None:
        self.vector: RankVector = HostVector([values.copy()])

    def read(self) -> np.ndarray:
        return self.vector.own.copy()

    def write(self, values: np.ndarray, begin: int = 0) -> None:
        self.vector.own[begin : begin + values.size] = values


KINDS = (HostCopy, FakeGpu)
Kind = type[FakeGpu] | type[HostCopy]


def check_working(group: RankGroup) -> None:
    """What the trainer computes waits for what another thread has put on a stream of its own."""
    for is_apart, expected in ((False, []), (True, ["done"])):
        gpu, done = FakeGpu(group, np.zeros(10), is_apart), list[str]()
        stream: Any = gpu.vector.stream if is_apart else gpu.driver.stream()
        with gpu.vector.working():
            stream.work.append(partial(done.append, "done"))
        gpu.vector.rejoin()
        gpu.stream.synchronize()
        assert done == expected


def check_buckets(group: RankGroup, kind: Kind) -> None:
    """Whatever gets ready first, the bits are those of one vector; on the host and on a GPU."""
    offsets, size = {"a": 0, "b": 100, "c": 1000, "d": 1010}, 3000
    ends = dict(zip(offsets, [*list(offsets.values())[1:], size], strict=True))
    buckets, shares = divide(offsets, size, 1500), uneven(group.size)
    apart = group.split(0)
    own = kind(apart, np.zeros(size, np.float32), is_apart=True)
    parts = [bucket.extent for bucket in buckets]
    work = own.vector.by_messages(parts, partial(ShardedAllReduce, apart))
    exchange = BucketedGradients(buckets, own.vector, work)
    for turn in range(3):
        every = vectors(group.size, size, turn=turn)
        exchange.before_gradients(shares)
        for name in np.random.default_rng([group.rank, turn]).permutation(list(offsets)):
            begin = offsets[name]
            own.write(every[group.rank][begin : ends[name]], begin)
            exchange.on_gradient_ready(name)
        if turn == 1:  # nobody uses them: the next step waits for them
            continue
        group.barrier()
        exchange.before_update(shares)
        average_into_all(every, shares)
        assert own.read().tobytes() == every[0].tobytes()
    exchange.leave()


def check_elastic(group: RankGroup, kind: Kind) -> None:
    """Visits in turn, against the equations; then the consensus, and the server's end."""
    alpha, size = 0.3, 1000
    every = [vectors(1, size)[0].copy() for _ in range(group.size)]
    center = every[0].copy()
    assert isinstance(group, MpiGroup)
    own = kind(group, every[group.rank])
    rule = ElasticAveraging(group, own.vector, size, alpha, 2)
    held = own.read()
    for turn in range(4):
        for rank in range(group.size):
            change = vectors(group.size, size, turn=turn)[rank]
            every[rank] += change
            if turn % 2:  # two steps to a visit
                before = center.copy()
                center += np.float32(alpha) * (every[rank] - before)
                every[rank] -= np.float32(alpha) * (every[rank] - before)
            if rank == group.rank:
                held += change
                own.write(held)
                rule.after_update([])
                held = own.read() if turn % 2 else held
            group.barrier()
    np.testing.assert_allclose(own.read(), every[group.rank], rtol=1e-5, atol=1e-6)
    with rule.consensus_weights():
        np.testing.assert_allclose(own.read(), center, rtol=1e-5, atol=1e-6)
        assert len(set(group.all_gather_object(own.read().tobytes()))) == 1
        with rule.consensus_weights():
            assert len(set(group.all_gather_object(own.read().tobytes()))) == 1
    np.testing.assert_allclose(own.read(), every[group.rank], rtol=1e-5, atol=1e-6)
    rule.leave()
    assert rule.server is None or not rule.server.is_alive()


def check_gossip(group: RankGroup, kind: Kind) -> None:
    """However they mix, shares add up to 1 and the consensus stays what it was."""
    assert isinstance(group, MpiGroup)
    every = vectors(group.size, 200_000)
    own = kind(group, every[group.rank])
    rule = GossipAveraging(group, own.vector, 200_000, 0.7, 3)
    for step in range(25):
        rule.after_update([])
        if step % 10 == 9:
            kept = None
            with rule.consensus_weights():
                np.testing.assert_allclose(own.read(), np.mean(every, axis=0), atol=1e-5)
                assert len(set(group.all_gather_object(own.read().tobytes()))) == 1
                kept = sum(group.all_gather_object(rule.share))
            assert abs(kept - 1) < 1e-12
    if group.size > 1:
        spread = np.abs(np.array(every) - np.mean(every, axis=0)).max()
        assert np.abs(own.read() - np.mean(every, axis=0)).max() < spread
    rule.leave()


def check_direct(group: RankGroup) -> None:
    """An MPI that takes GPU memory is given it when all is computed; by tensors on the CPU."""
    assert isinstance(group, MpiGroup)
    assert MpiGroup.takes_gpu_memory(group) in (False, True)
    every, shares, waits = vectors(group.size, 5000), uneven(group.size), []
    tensor = torch.from_numpy(every[group.rank].copy())
    if shares[group.rank] == 0:
        tensor.fill_(float("nan"))
    original = mpi._wait_for_stream
    mpi._wait_for_stream = lambda tensor: waits.append(tensor.clone())
    LibraryAllReduce(group).average(tensor, shares)
    np.testing.assert_allclose(tensor.numpy(), exact(every, shares), atol=1e-6)
    if group.size > 1:
        (weighed,) = waits  # when it was weighed, not yet summed
        own = weights_and_divisor(shares)[0][group.rank] * every[group.rank]
        np.testing.assert_allclose(weighed.numpy(), own, rtol=1e-6)
        before = len(waits)
        ShardedAllReduce(group, tensor).average(tensor, shares)
        assert len(waits) == before + 2  # and so before each message
    mpi._wait_for_stream = original


def check_many(group: RankGroup) -> None:
    """What is closed is free: more groups, one after another, than there can be at a time."""
    for number in range(600):  # of 2048 that MPICH has
        team = group.split(0)
        team.split(0).split(0).split(0).close()
        if number % 100 == 0:
            team.local.shared_memory(1 << 20)
        team.close()
        if number == 0:
            before = mapped()
    assert mapped() == before


def check_connections(group: RankGroup) -> None:
    """What is closed has no connections left."""
    counts: list[int] = []
    stopped: list[RankGroup] = []
    for _ in range(5):
        team = group.split(0)
        team.split(0).split(group.rank % 2).barrier()
        nccl = SimpleNamespace(shutdown=lambda team=team: stopped.append(team))
        vars(team)["_nccl"] = nccl
        team.close()
        counts.append(open_files())
        assert stopped.pop() is team
    assert counts[-1] <= counts[0]


def mapped() -> int:
    """How many pieces of memory this process shares with others."""
    return Path("/proc/self/maps").read_text().count("/dev/shm/")


def check_heartbeats(group: RankGroup) -> None:
    """Each heartbeat comes once, to its rank only, and nobody waits for it."""
    heartbeats = group.split(0)
    assert heartbeats.beats() == set()
    others = set(range(group.size)) - {group.rank}
    for _ in range(2):
        found: set[int] = set()
        deadline = time.monotonic() + 30
        while found != others and time.monotonic() < deadline:
            for rank in others:
                heartbeats.beat(rank)
            time.sleep(0.02)
            found |= heartbeats.beats()
        assert found == others
        group.barrier()
        time.sleep(0.2)  # what was asked for is fetched
        heartbeats.beats()
        assert heartbeats.beats() == set()
        group.barrier()


def check_groups(group: RankGroup) -> None:
    """Groups keep their messages apart; ranks of one machine share memory."""
    odd = group.split(group.rank % 2)
    expected = [r for r in range(group.size) if r % 2 == group.rank % 2]
    assert list(odd.all_gather_object(group.rank)) == expected
    assert expected[odd.rank] == group.rank
    copy, local = odd.split(0), group.local
    assert list(copy.all_gather_object(group.rank)) == expected
    assert (local.rank, local.size) == (group.rank, group.size)
    parts = local.shared_memory(1000)
    assert not any(part.any() for part in parts)
    group.barrier()
    parts[group.rank][:] = group.rank + 1
    group.barrier()
    assert [set(part.tolist()) for part in parts] == [{r + 1} for r in range(group.size)]


def check_pages(group: RankGroup) -> None:
    """Every part of shared memory can be page-locked: no other has a page of it."""
    driver, made = FakeDriver(FakeMachine()), []
    for nbytes in (1000, 3 * mmap.PAGESIZE, 1):
        parts = group.local.shared_memory(nbytes)
        made.append(parts)
        assert [part.shape for part in parts] == [(nbytes,)] * group.size
        for part in parts:
            driver.lock_pages(part)
        group.barrier()
        parts[group.rank][:] = group.rank + 1
        group.barrier()
        assert [set(part.tolist()) for part in parts] == [{r + 1} for r in range(group.size)]


CHECKS: tuple[Callable[[RankGroup], None], ...] = (
    check_gather,
    check_parts,
    check_channel_of_ranks,
    check_functions,
    check_pages,
    check_sums,
    check_growth,
    check_rounded,
    check_feedback,
    check_exchanges,
    check_working,
    *(partial(check_buckets, kind=kind) for kind in KINDS),
)
OF_MPI = (
    check_direct,
    check_many,
    *(partial(check_elastic, kind=kind) for kind in KINDS),
    *(partial(check_gossip, kind=kind) for kind in KINDS),
)
OF_TORCHRUN = (check_connections, check_heartbeats, check_groups)


def main() -> None:
    """Run every check; all ranks go through them together."""
    group = join()
    for check in (*CHECKS, *(OF_MPI if isinstance(group, MpiGroup) else OF_TORCHRUN)):
        try:
            check(group)
        except BaseException:
            sys.stderr.write(f"rank {group.rank}: {traceback.format_exc()}\n")
            sys.stderr.flush()
            group.abort(1)
    group.barrier()
    if group.rank == 0:
        print("checked", group.size)


if __name__ == "__main__":
    main()
