"""What each rank checks of the collectives, under mpirun or torchrun: every vector against NumPy.

Prints "checked" on rank 0 when all is well; a failed check ends the job with its traceback.
"""

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
import torch

from tandem.config.schema import Config
from tandem.distributed.allreduce import (
    AllReduce,
    CompressedAllReduce,
    DeltaAllReduce,
    HierarchicalAllReduce,
    LibraryAllReduce,
    RankGradients,
    RankParameters,
    ShardedAllReduce,
    SharedWithin,
)
from tandem.distributed.asynchronous import ElasticAveraging, ElasticServer, GossipAveraging
from tandem.distributed.buckets import BucketedGradients, divide
from tandem.distributed.gloo import GlooGroup, NcclGroup
from tandem.distributed.group import RankGroup
from tandem.distributed.kernels import average_into_all
from tandem.distributed.mpi import MpiGroup
from tandem.distributed.tensor_arithmetic import TensorArithmetic
from tandem.launch.ranks import join
from tandem.memory import HostSlots, SlotLayout
from tandem.memory.cuda import CudaBuffer
from tandem.memory.flat import FlatLayout
from tandem.training.memory import Site
from tandem.training.rank_memory import Lane, OnLane, RankSite, Staged
from tests.support import simulated_gpu as simulated_gpu
from tests.support.fake_cuda import FakeDriver, FakeMachine, FakeStream
from tests.support.numpy_formats import NumpyTransferFormat

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


def averaged(
    engine: RankGroup, collective: AllReduce, own: np.ndarray, shares: Sequence[float]
) -> np.ndarray:
    """The vector after an exchange, checked to have the same bits at every rank."""
    if shares[engine.rank] == 0:
        own.fill(np.nan)  # it is not to be read
    collective.average(own, shares)
    assert len(set(engine.all_gather_object(own.tobytes()))) == 1
    return own


def check_gather(engine: RankGroup) -> None:
    for length in (0, 1, 400, 504, 505, 100_000):
        messages = engine.all_gather_object((engine.rank, b"x" * length))
        assert messages == tuple((rank, b"x" * length) for rank in range(engine.size))
    # One long message among short ones.
    lengths = [len(m) for m in engine.all_gather_object(b"y" * (5000 if engine.rank == 0 else 3))]
    assert lengths == [5000] + [3] * (engine.size - 1)


def check_shard_sum(engine: RankGroup) -> None:
    """The bits are those of trainers on one machine."""
    for dtype in ("float32", "float64"):
        for size in SIZES:
            every = vectors(engine.size, size, dtype)
            own = every[engine.rank].copy()
            found = averaged(engine, ShardedAllReduce(engine, own), own, uneven(engine.size))
            average_into_all(every, uneven(engine.size))
            assert found.tobytes() == every[0].tobytes()


def check_all_reduce(engine: RankGroup) -> None:
    for dtype, tolerance in (("float32", 1e-6), ("float64", 1e-14)):
        for size in SIZES:
            every, shares = vectors(engine.size, size, dtype), uneven(engine.size)
            own = every[engine.rank].copy()
            found = averaged(engine, LibraryAllReduce(engine), own, shares)
            scale = max(np.abs(v).max() for v in every)
            np.testing.assert_allclose(found, exact(every, shares), atol=tolerance * scale)


def check_rounded(engine: RankGroup) -> None:
    """The error of ASA16 against the bound of its docstring."""
    for wire, unit in (
        (NumpyTransferFormat("float16"), 2.0**-11),
        (NumpyTransferFormat("bfloat16"), 2.0**-8),
    ):
        for size in SIZES:
            every, shares = vectors(engine.size, size), uneven(engine.size)
            own = every[engine.rank].copy()
            found = averaged(engine, CompressedAllReduce(engine, own, wire, False), own, shares)
            error = np.abs(found - exact(every, shares))
            sizes = exact([np.abs(v) for v in every], shares)
            largest = max(float(np.abs(v).max()) for v in every)
            # Of float32 beside: each product, sum and rounding by itself.
            bound = (2 * unit + unit**2) * sizes + 2.0**-40 * largest
            bound += 2 * engine.size * 2.0**-24 * sizes
            assert (error <= bound).all()
            if engine.size > 1 and size > 1:
                assert error.max() > 0.1 * unit * sizes.max()  # it did travel in 16 bits


def check_feedback(engine: RankGroup) -> None:
    """With feedback, the sum over many steps is off by one step's rounding, else by many."""
    if engine.size == 1:
        return
    shares, steps, size = [1 / engine.size] * engine.size, 30, 3000
    every = vectors(engine.size, size)
    errors = {}
    for feedback in (False, True):
        collective = CompressedAllReduce(
            engine, every[0], NumpyTransferFormat("bfloat16"), feedback
        )
        total = np.zeros(size)
        for _ in range(steps):  # the same gradients each time, so that errors do not cancel
            total += averaged(engine, collective, every[engine.rank].copy(), shares)
        errors[feedback] = np.abs(total - steps * exact(every, shares)).max()
    sizes = exact([np.abs(v) for v in every], shares).max()
    assert errors[True] <= 4 * 2.0**-8 * sizes
    assert errors[False] > 4 * errors[True]


def check_from_common(engine: RankGroup) -> None:
    """Weights in 16 bits: small updates of large weights are not lost."""
    rng = np.random.default_rng(7)
    start = rng.normal(size=5000).astype(np.float32)
    own, wire = start.copy(), NumpyTransferFormat("float16")
    shares = [1 / engine.size] * engine.size
    collective = DeltaAllReduce(CompressedAllReduce(engine, own, wire, False), own)
    expected = start.astype(float)
    for turn in range(5):
        changes = [1e-6 * v / np.abs(v).max() for v in vectors(engine.size, 5000, turn=turn)]
        own += changes[engine.rank]
        averaged(engine, collective, own, shares)
        expected += exact(changes, shares)
    # float16 itself has a spacing of 2**-10 there.
    assert np.abs(own - expected).max() < 2e-6


def on_machines(engine: RankGroup) -> RankGroup:
    """Another engine of the same ranks, who say that their machines have one and two of them."""
    found, copies = engine.copy(), engine.copy()
    vars(found)["local"] = engine.group((engine.rank + 1) // 2)
    vars(found)["copy"] = lambda: on_machines(copies)
    if isinstance(copies, GlooGroup):
        vars(found)["nccl"] = lambda: NcclGroup(copies.gloo)
    return found


JOINTS: tuple[dict[str, Any], ...] = (
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


def check_joint(engine: RankGroup) -> None:
    """What a run exchanges, in host memory, on GPUs by way of the host, and from GPU to GPU."""
    ways = ["host", "staged", "direct"] if isinstance(engine, MpiGroup) else ["host", "staged"]
    for settings in JOINTS:
        config = Config(**settings)
        found = [check_exchange(on_machines(engine), config, way) for way in ways]
        if config.collective != "ar":
            assert len(set(found)) == 1  # the same bits
    for settings in ({}, {"exchange": "gradients"}, {"exchange": "gradients", "bucket_mb": 0.004}):
        if isinstance(engine, GlooGroup):
            config = Config(collective="nccl", **settings)
            check_exchange(on_machines(engine), config, "by gloo in NCCL's place")


def check_exchange(engine: RankGroup, config: Config, way: str) -> bytes:
    """Three rounds of one exchange against NumPy; the bits at the end."""
    vars(engine)["takes_gpu_memory"] = lambda: way == "direct"
    layout, strategy = FlatLayout.of(SHAPES, "float32", states=("momentum",)), config.exchange
    count = layout.size if strategy == "gradients" else layout.parameters_size
    shares, memory = uneven(engine.size), memory_of(engine, config, way)
    group = memory._gradients if strategy == "gradients" else memory._parameters
    own = memory._joint.own(group) if way == "host" else memory._tensor(group).numpy()
    start = vectors(1, count)[0] if strategy == "average" else np.zeros(count)
    own[:] = start
    exchange = memory.exchange(strategy)
    for turn in range(3):
        # Of parameters in 16 bits, what has changed travels: it may be small beside them.
        size = 1e-4 if config.collective == "asa16" and strategy == "average" else 1.0
        changes = [np.float32(size) * v for v in vectors(engine.size, count, turn=turn)]
        every = [own + change for change in changes]
        exchange.before_gradients(shares)
        own[:] = every[engine.rank]
        if shares[engine.rank] == 0 and config.collective != "asa16":
            own.fill(np.nan)  # it is not to be read
        for name in reversed(SHAPES):
            exchange.on_gradient_ready(name)
        assert (
            engine.all_gather_object(turn) == (turn,) * engine.size
        )  # whatever buckets are on their way
        exchange.before_update(shares)
        exchange.after_update(shares)
        atol = 1e-6 * largest(every)
        if config.collective == "asa16":
            unit = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[config.wire]
            atol += 8 * unit * largest(changes if strategy == "average" else every)
        np.testing.assert_allclose(own, exact(every, shares), rtol=1e-6, atol=atol)
        assert len(set(engine.all_gather_object(own.tobytes()))) == 1
    found = own.tobytes()
    exchange.leave()
    memory.close()
    assert way == "host" or not memory._driver.locked
    return found


def largest(vectors: Sequence[np.ndarray]) -> float:
    return max(float(np.abs(vector).max()) for vector in vectors)


def memory_of(engine: RankGroup, config: Config, way: str) -> Any:
    """A rank's memory, on the host or on a GPU: of two neighbours on one, or on two apart."""
    slots = SlotLayout(1, 8)
    if way == "host":
        site: Site = RankSite(HostSlots.create(slots, engine.rank), config, engine)
    else:
        number = engine.rank % 2 if config.bucket_mb else 0
        site = simulated_gpu.PretendRankSite(number, slots, (), config=config, engine=engine)
    return site.open(engine, SHAPES, "float32")


def check_hierarchy(engine: RankGroup) -> None:
    """A machine of which nobody has a share, and one of several ranks."""
    machine = (engine.rank + 1) // 2
    local = engine.group(machine)
    leaders = engine.group(0 if local.rank == 0 else 1)
    machines = list(dict.fromkeys(engine.all_gather_object(local.all_gather_object(engine.rank))))
    nobody = [float(rank in machines[-1]) / len(machines[-1]) for rank in range(engine.size)]
    for size in SIZES:
        for shares in (uneven(engine.size), nobody):
            every = vectors(engine.size, size)
            parts = [part.view(np.float32) for part in local.shared(4 * size)]
            own = parts[local.rank]
            own[:] = every[engine.rank]
            between = ShardedAllReduce(leaders, own) if local.rank == 0 else None
            collective = HierarchicalAllReduce(
                SharedWithin(local, parts), machines, machine, between
            )
            found = averaged(engine, collective, own, shares)
            scale = max(np.abs(v).max() for v in every)
            np.testing.assert_allclose(found, exact(every, shares), atol=1e-6 * scale)


def check_sides(engine: RankGroup) -> None:
    """Parameters are averaged after the update only, gradients before it only."""
    for kind, side in ((RankParameters, "after_update"), (RankGradients, "before_update")):
        for method in ("before_update", "after_update"):
            own = np.full(10, float(engine.rank))
            exchange = kind(ShardedAllReduce(engine, own), own)
            getattr(exchange, method)([1 / engine.size] * engine.size)
            mean = (engine.size - 1) / 2
            np.testing.assert_allclose(own, mean if method == side else engine.rank)


def check_staged(engine: RankGroup) -> None:
    """A vector on a GPU that does nothing unasked, averaged by way of the host."""
    driver, shares = FakeDriver(FakeMachine(), bound=True), [1 / engine.size] * engine.size
    stream, buffer = driver.stream(), CudaBuffer.create(driver, 4 * 3000, "vector")
    array, copy = buffer.array((3000,), "float32"), np.zeros(3000, np.float32)
    lane = Lane(driver, stream, stream, lambda stream: nullcontext())
    staged = Staged(lane, buffer.address, ShardedAllReduce(engine, copy))
    for turn in range(2):
        every = vectors(engine.size, 3000, turn=turn)
        stream.work.append(partial(driver.write, array, every[engine.rank]))
        staged.average(copy, shares)
        average_into_all(every, shares)
        assert driver.read(array).tobytes() == every[0].tobytes()


class Later(AllReduce):
    """Puts on a stream what is to be done to a vector on its GPU."""

    def __init__(self, stream: FakeStream, work: Callable[[], None]) -> None:
        self._stream, self._work = stream, work

    def average(self, vector: Any, shares: Sequence[float]) -> None:
        self._stream.work.append(self._work)


def check_lane(engine: RankGroup) -> None:
    """What another thread has put on a stream of its own is done when it returns."""
    driver = FakeDriver(FakeMachine(), bound=True)
    computes, apart, done = driver.stream(), driver.stream(), []
    for stream, expected in ((computes, []), (apart, ["done"])):
        lane = Lane(driver, computes, stream, lambda stream: nullcontext())
        OnLane(lane, Later(stream, lambda: done.append("done"))).average(None, [])
        assert done == expected


def check_buckets(engine: RankGroup) -> None:
    """Whatever gets ready first, the bits are those of one vector; on the host and on a GPU."""
    offsets, size = {"a": 0, "b": 100, "c": 1000, "d": 1010}, 3000
    ends = dict(zip(offsets, [*list(offsets.values())[1:], size], strict=True))
    buckets, shares = divide(offsets, size, 1500), uneven(engine.size)
    apart = engine.copy()
    for on_gpu in (False, True):
        driver, own = FakeDriver(FakeMachine(), bound=True), np.zeros(size, np.float32)
        stream, buffer = driver.stream(), CudaBuffer.create(driver, 4 * size, "gradients")
        array = buffer.array((size,), "float32")
        lane = Lane(driver, stream, driver.stream(), lambda stream: nullcontext())
        work: list[AllReduce] = [ShardedAllReduce(apart, own[b.extent]) for b in buckets]
        mark: list[Callable[[], Callable[[], None]]] = []
        if on_gpu:
            places = [buffer.address + 4 * bucket.extent.start for bucket in buckets]
            work = [
                OnLane(lane, Staged(lane, place, sums))
                for place, sums in zip(places, work, strict=True)
            ]
            mark = [lane.mark]
        exchange = BucketedGradients(buckets, own, work, *mark)
        for turn in range(3):
            every = vectors(engine.size, size, turn=turn)
            mine = every[engine.rank]
            exchange.before_gradients(shares)
            for name in np.random.default_rng([engine.rank, turn]).permutation(list(offsets)):
                part = slice(offsets[name], ends[name])
                if on_gpu:
                    piece = buffer.array((part.stop - part.start,), "float32", 4 * part.start)
                    stream.work.append(partial(driver.write, piece, mine[part]))
                else:
                    own[part] = mine[part]
                exchange.on_gradient_ready(name)
            if turn == 1:  # nobody uses them: the next step waits for them
                continue
            engine.barrier()
            exchange.before_update(shares)
            average_into_all(every, shares)
            found = driver.read(array) if on_gpu else own
            assert found.tobytes() == every[0].tobytes()
        exchange.leave()


class OnHost:
    """Weights of a rank, and how a rule gets at them."""

    def __init__(self, values: np.ndarray) -> None:
        self.weights, self.staged = values.copy(), nullcontext

    def read(self) -> np.ndarray:
        return self.weights.copy()

    def write(self, values: np.ndarray) -> None:
        self.weights[:] = values


class OnGpu:
    """The same on a GPU that does nothing unasked."""

    def __init__(self, values: np.ndarray) -> None:
        self.driver, self.weights = FakeDriver(FakeMachine(), bound=True), values.copy()
        buffer, self.stream = CudaBuffer.create(self.driver, values.nbytes), self.driver.stream()
        self.array = buffer.array(values.shape, values.dtype)
        lane = Lane(self.driver, self.stream, self.stream, lambda stream: nullcontext())
        self.staged = lambda: lane.on_host(self.weights, buffer.address)
        self.write(values)
        self.stream.synchronize()

    def read(self) -> np.ndarray:
        return self.driver.read(self.array)

    def write(self, values: np.ndarray) -> None:
        self.stream.work.append(partial(self.driver.write, self.array, values.copy()))


def check_elastic(engine: RankGroup) -> None:
    """Visits in turn, against the equations; then the centre, and the server's end."""
    for place in (OnHost, OnGpu):
        check_elastic_at(engine, place)


def check_elastic_at(engine: RankGroup, place: type[OnHost] | type[OnGpu]) -> None:
    alpha, size = 0.3, 1000
    every = [vectors(1, size)[0].copy() for _ in range(engine.size)]
    centre = every[0].copy()
    assert isinstance(engine, MpiGroup)
    own, asks, answers = place(every[engine.rank]), engine.copy(), engine.copy()
    server = ElasticServer(every[0].copy(), asks, answers, alpha) if engine.rank == 0 else None
    if server is not None:
        server.start()
    rule = ElasticAveraging(engine, own.weights, asks, answers, server, alpha, 2, own.staged)
    held = own.read()
    for turn in range(4):
        for rank in range(engine.size):
            change = vectors(engine.size, size, turn=turn)[rank]
            every[rank] += change
            if turn % 2:  # two steps to a visit
                before = centre.copy()
                centre += np.float32(alpha) * (every[rank] - before)
                every[rank] -= np.float32(alpha) * (every[rank] - before)
            if rank == engine.rank:
                held += change
                own.write(held)
                rule.after_update([])
                held = own.read() if turn % 2 else held
            engine.barrier()
    np.testing.assert_allclose(own.read(), every[engine.rank], rtol=1e-5, atol=1e-6)
    with rule.consensus_weights():
        np.testing.assert_allclose(own.read(), centre, rtol=1e-5, atol=1e-6)
        assert len(set(engine.all_gather_object(own.read().tobytes()))) == 1
        with rule.consensus_weights():
            assert len(set(engine.all_gather_object(own.read().tobytes()))) == 1
    np.testing.assert_allclose(own.read(), every[engine.rank], rtol=1e-5, atol=1e-6)
    rule.leave()
    assert server is None or not server.is_alive()


def check_gossip(engine: RankGroup) -> None:
    """However they mix, shares add up to 1 and the consensus stays what it was."""
    for place in (OnHost, OnGpu):
        check_gossip_at(engine, place)


def check_gossip_at(engine: RankGroup, place: type[OnHost] | type[OnGpu]) -> None:
    assert isinstance(engine, MpiGroup)
    every = vectors(engine.size, 200_000)
    own = place(every[engine.rank])
    rule = GossipAveraging(engine, own.weights, engine.copy(), 0.7, 3, own.staged)
    for step in range(25):
        rule.after_update([])
        if step % 10 == 9:
            kept = None
            with rule.consensus_weights():
                np.testing.assert_allclose(own.read(), np.mean(every, axis=0), atol=1e-5)
                assert len(set(engine.all_gather_object(own.read().tobytes()))) == 1
                kept = sum(engine.all_gather_object(rule.share))
            assert abs(kept - 1) < 1e-12
    if engine.size > 1:
        spread = np.abs(np.array(every) - np.mean(every, axis=0)).max()
        assert np.abs(own.read() - np.mean(every, axis=0)).max() < spread
    rule.leave()


def check_tensors(engine: RankGroup) -> None:
    """What NCCL does on GPUs, by gloo on the CPU: parameters or gradients, at uneven weights."""
    from torch.distributed import HashStore, ProcessGroupGloo

    assert isinstance(engine, GlooGroup)
    alone: Any = ProcessGroupGloo(HashStore(), 0, 1)
    for group, size in ((engine.gloo, engine.size), (alone, 1)):
        every, shares = vectors(size, 5000), uneven(size)
        rank = group.rank()
        tensor = torch.from_numpy(every[rank].copy())
        if shares[rank] == 0:
            tensor.fill_(float("nan"))
        address = tensor.data_ptr()
        exchange = RankParameters(LibraryAllReduce(NcclGroup(group)), tensor)
        exchange.before_update(shares)
        exchange.after_update(shares)
        assert tensor.data_ptr() == address
        np.testing.assert_allclose(tensor.numpy(), exact(every, shares), atol=1e-6)
        if group is not alone:
            assert len(set(engine.all_gather_object(tensor.numpy().tobytes()))) == 1


def check_direct(engine: RankGroup) -> None:
    """An MPI that takes GPUs' memory is given it when all is computed; by tensors on the CPU."""
    assert isinstance(engine, MpiGroup)
    assert engine.takes_gpu_memory() in (False, True)
    every, shares, waits = vectors(engine.size, 5000), uneven(engine.size), []
    tensor = torch.from_numpy(every[engine.rank].copy())
    if shares[engine.rank] == 0:
        tensor.fill_(float("nan"))
    direct = engine.on_gpus(lambda: waits.append(tensor.clone()))
    LibraryAllReduce(direct).average(tensor, shares)
    np.testing.assert_allclose(tensor.numpy(), exact(every, shares), atol=1e-6)
    if engine.size > 1:
        (weighed,) = waits  # in its place in the order: weighed, not yet summed
        own = shares[engine.rank] * every[engine.rank]
        np.testing.assert_allclose(weighed.numpy(), own, rtol=1e-6)
        before = len(waits)
        ShardedAllReduce(direct, tensor, TensorArithmetic("cpu")).average(tensor, shares)
        assert len(waits) == before + 2  # and so before each message


def check_many(engine: RankGroup) -> None:
    """What is closed is free: more groups, one after another, than there can be at a time."""
    for number in range(600):  # of 2048 that MPICH has
        team = engine.copy()
        team.copy().group(0).copy().close()
        if number % 100 == 0:
            team.local.shared(1 << 20)
        team.close()
        if number == 0:
            before = mapped()
    assert mapped() == before


def check_connections(engine: RankGroup) -> None:
    """What is closed has no connections left."""
    open_files: list[int] = []
    stopped: list[RankGroup] = []
    for _ in range(5):
        team = engine.copy()
        team.copy().group(engine.rank % 2).barrier()
        nccl = SimpleNamespace(shutdown=lambda team=team: stopped.append(team))
        vars(team)["_nccl"].append(nccl)
        team.close()
        open_files.append(len(list(Path("/proc/self/fd").iterdir())))
        assert stopped.pop() is team
    assert open_files[-1] <= open_files[0]


def mapped() -> int:
    """How many pieces of memory this process shares with others."""
    return Path("/proc/self/maps").read_text().count("/dev/shm/")


def check_signs(engine: RankGroup) -> None:
    """Each sign is heard once, by whom it is meant for, and nobody waits for it."""
    pulse = engine.copy()
    assert pulse.heard() == set()
    others = set(range(engine.size)) - {engine.rank}
    for _ in range(2):
        found: set[int] = set()
        deadline = time.monotonic() + 30
        while found != others and time.monotonic() < deadline:
            for rank in others:
                pulse.beat(rank)
            time.sleep(0.02)
            found |= pulse.heard()
        assert found == others
        engine.barrier()
        time.sleep(0.2)  # what was asked for is fetched
        pulse.heard()
        assert pulse.heard() == set()
        engine.barrier()


def check_groups(engine: RankGroup) -> None:
    """Groups do not hear each other, nor do copies; ranks of one machine share memory."""
    odd = engine.group(engine.rank % 2)
    expected = [r for r in range(engine.size) if r % 2 == engine.rank % 2]
    assert list(odd.all_gather_object(engine.rank)) == expected
    assert expected[odd.rank] == engine.rank
    copy, local = odd.copy(), engine.local
    assert list(copy.all_gather_object(engine.rank)) == expected
    assert (local.rank, local.size) == (engine.rank, engine.size)
    parts = local.shared(1000)
    assert not any(part.any() for part in parts)
    engine.barrier()
    parts[engine.rank][:] = engine.rank + 1
    engine.barrier()
    assert [set(part.tolist()) for part in parts] == [{r + 1} for r in range(engine.size)]


CHECKS: tuple[Callable[[RankGroup], None], ...] = (
    check_gather,
    check_shard_sum,
    check_all_reduce,
    check_rounded,
    check_feedback,
    check_from_common,
    check_hierarchy,
    check_joint,
    check_sides,
    check_staged,
    check_lane,
    check_buckets,
)
OF_MPI = (check_direct, check_many, check_elastic, check_gossip)
OF_TORCHRUN = (check_tensors, check_connections, check_signs, check_groups)


def main() -> None:
    """Run every check; all ranks go through them together."""
    engine = join()
    for check in (*CHECKS, *(OF_MPI if isinstance(engine, MpiGroup) else OF_TORCHRUN)):
        try:
            check(engine)
        except BaseException:
            sys.stderr.write(f"rank {engine.rank}: {traceback.format_exc()}\n")
            sys.stderr.flush()
            engine.abort(1)
    engine.barrier()
    if engine.rank == 0:
        print("checked", engine.size)


if __name__ == "__main__":
    main()
