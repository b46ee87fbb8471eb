"""Where the memory of a trainer lies that is a rank: on the host, or on a GPU."""

import contextlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from tandem.config.schema import Config
from tandem.data.minibatch import MinibatchBuilder
from tandem.distributed import Exchange, Group
from tandem.distributed.allreduce import AllReduce, LibraryAllReduce
from tandem.distributed.buckets import Wait
from tandem.distributed.factory import Averages, Joint
from tandem.distributed.gloo import GlooGroup
from tandem.distributed.group import RankGroup
from tandem.distributed.mpi import MpiGroup
from tandem.distributed.peer_to_peer import PeerAverage, PeerVectors, PeerWithin
from tandem.memory import HostSlots, SlotLayout
from tandem.memory.cuda import CudaBuffer, Driver, Event, Stream
from tandem.memory.flat import FlatLayout, Vectors
from tandem.training.input_pipeline import InProcessLoader, Loader, ProcessLoader
from tandem.training.memory import CudaMemory, CudaSite, Shapes, Site, Strategy
from tandem.training.run_spec import RunSpec


def rank_site(spec: RunSpec, engine: RankGroup) -> Site:
    """The site of a rank: on the host, or on the GPU that the spec gives it."""
    slots = SlotLayout(spec.config.batch_size, spec.picture_size)
    device = spec.devices[engine.rank]
    if device == "cpu":
        return RankSite(HostSlots.create(slots, engine.rank), spec.config, engine)
    number = int(device.partition(":")[2])
    return CudaRankSite(
        number, slots, (), spec.config.deterministic, config=spec.config, engine=engine
    )


@dataclass(frozen=True)
class RankSite:
    """In host memory of a rank's own process. A `Site`.

    Attributes
    ----------
    slots : HostSlots
        The trainer's.
    config : Config
        How the ranks exchange.
    engine : RankGroup
        What joins them.
    """

    slots: HostSlots
    config: Config
    engine: RankGroup

    def loader_side(self) -> HostSlots:
        """See `Site`."""
        return self.slots

    def open(self, group: Group, shapes: Shapes, dtype: str) -> "RankMemory":
        """See `Site`."""
        return RankMemory(
            self.slots,
            Joint(self.config, self.engine),
            FlatLayout.of(shapes, dtype, states=("momentum",)),
        )

    def release(self) -> None:
        """Nothing: it is the trainer's own process that made it."""


class RankMemory:
    """Host memory of one rank. A `Memory`.

    Parameters
    ----------
    slots : HostSlots
        The trainer's.
    joint : Joint
        Where its vectors lie, and how they are exchanged.
    layout : FlatLayout
        Of the parameters.
    """

    device, records = "cpu", False

    def __init__(self, slots: HostSlots, joint: Joint, layout: FlatLayout) -> None:
        self._slots, self._joint, self._layout = slots, joint, layout
        self._parameters = joint.vectors(layout.parameters_nbytes, layout.dtype)
        self._gradients = joint.vectors(layout.nbytes, layout.dtype)
        self._own = joint.own(self._parameters)
        weights, momenta = self._own[: layout.size], self._own[layout.size :]
        vectors = (weights, momenta, joint.own(self._gradients))
        own, momentum, gradients = (layout.views(vector) for vector in vectors)
        self.vectors = Vectors(own, {"momentum": momentum}, gradients)
        self.slots = slots.arrays
        self.nbytes = layout.parameters_nbytes

    def exchange(self, strategy: Strategy) -> Exchange:
        """See `Memory`."""
        if self._joint.is_loose:
            return self._joint.loose_exchange(self._own[: self._layout.size])
        vectors = self._gradients if strategy == "gradients" else self._parameters
        return self._joint.exchange_on_host(strategy, self._layout, vectors)

    def updated(self, strategy: Strategy) -> Vectors | None:
        """See `Memory`: a rank shares nothing."""
        return None

    def loader(self, connection: Connection | None, filler: MinibatchBuilder) -> Loader:
        """See `Memory`."""
        if connection is not None:
            return ProcessLoader(connection)
        return InProcessLoader(filler, self._slots)

    def wait(self) -> None:
        """See `Memory`: the host's kernels are done when their calls return."""

    def checksum(self) -> int:
        """See `Memory`."""
        return zlib.crc32(self._own.view(np.uint8).data)

    def close(self) -> None:
        """Nothing: host memory goes with its last user."""


@dataclass(frozen=True)
class CudaRankSite(CudaSite):
    """On a rank's GPU. A `Site`.

    Attributes
    ----------
    config : Config
        How the ranks exchange.
    engine : RankGroup
        What joins them.
    """

    config: Config = field(kw_only=True)
    engine: RankGroup = field(kw_only=True)

    def open(self, group: Group, shapes: Shapes, dtype: str) -> CudaMemory:
        """See `CudaSite`. Another trainer may have been in this process before."""
        from tandem.backend import give_back_memory

        give_back_memory()
        return super().open(group, shapes, dtype)

    def memory(self, group: Group, layout: FlatLayout, *where: Any) -> CudaMemory:
        """See `CudaSite`."""
        return CudaRankMemory(self, group, layout, *where)


class CudaRankMemory(CudaMemory):
    """Memory of one rank on its GPU.

    Ranks of a machine that come first among themselves copy from GPU to GPU. Ranks that send each
    other messages do so from GPU to GPU where NCCL or the MPI takes what lies there, and else by
    page-locked host memory.
    """

    def exchange(self, strategy: Strategy) -> Exchange:
        """See `Memory`."""
        site = self._site
        if not isinstance(site, CudaRankSite):
            raise TypeError(f"a rank's memory lies on a rank's site, not on {type(site).__name__}")
        joint = Joint(site.config, site.engine)
        if joint.engine.size == 1:
            return Exchange()
        is_apart = joint.averages_apart(strategy)
        stream = self._driver.stream() if is_apart else self._stream
        lane = Lane(self._driver, self._stream, stream, self._use)
        if joint.is_loose:
            address = self._parameters.address
            weights = self._copy(address, self._layout.size)
            return joint.loose_exchange(weights, lambda: lane.on_host(weights, address))
        return joint.exchange(
            strategy, self._layout, partial(self._averages, strategy, lane), lane.mark
        )

    def _averages(self, strategy: Strategy, lane: "Lane", joint: Joint) -> Averages:
        """See `Joint.exchange`."""
        own = self._gradients if strategy == "gradients" else self._parameters
        vector, between = self._between(strategy, own, lane, joint)
        peers = self._peers(own, lane, joint)

        def average(part: slice) -> AllReduce:
            if peers is None:
                return OnLane(lane, between(part))
            sent = between(part) if joint.is_adding else None
            return OnLane(lane, joint.over_machines(PeerWithin(peers, part), sent))

        return vector, average

    def _between(self, strategy: Strategy, own: CudaBuffer, lane: "Lane", joint: Joint) -> Averages:
        """What this rank sends the others, as `joint.adding` says, and what averages it."""
        from tandem.distributed.tensor_arithmetic import TensorArithmetic

        vector, adding = self._tensor(own), joint.adding
        if joint.config.collective == "nccl":
            if not isinstance(adding, GlooGroup):
                raise TypeError(f"NCCL needs ranks of torchrun, not {type(adding).__name__}")
            added = LibraryAllReduce(adding.nccl())
            return vector, lambda part: added
        if _all_take_gpu_memory(joint.engine) and isinstance(adding, MpiGroup):
            direct, arithmetic = adding.on_gpus(lane.wait), TensorArithmetic(self.device)
            return vector, lambda part: joint.collective(strategy, direct, vector[part], arithmetic)
        copy = self._copy(own.address, len(vector) if joint.is_adding else 0)

        def staged(part: slice) -> AllReduce:
            address = own.address + part.start * copy.itemsize
            return Staged(lane, address, joint.collective(strategy, joint.adding, copy[part]))

        return copy, staged

    def _peers(self, own: CudaBuffer, lane: "Lane", joint: Joint) -> PeerAverage | None:
        """What averages within this machine, if that is done apart."""
        if joint.neighbours is None:
            return None
        local = joint.neighbours.engine
        vectors = PeerVectors(local, self._driver, own, self._layout.dtype, local.shared)
        peers = PeerAverage(vectors, lane.stream, self._average())
        self._to_close += [peers.close, vectors.close]
        return peers

    def _copy(self, address: int, count: int) -> np.ndarray:
        """A copy, in page-locked host memory, of so many elements on the GPU."""
        copy = np.zeros(count, self._layout.dtype)
        if count:
            pages = copy.view(np.uint8)
            self._driver.lock_pages(pages)
            self._to_close.append(partial(self._driver.unlock_pages, pages))
            self._driver.download(copy, address, self._stream)
            self.wait()
        return copy

    def _tensor(self, own: CudaBuffer) -> Any:
        """A vector of this rank as PyTorch sees it."""
        from tandem.backend import as_tensor

        size = own.nbytes // np.dtype(self._layout.dtype).itemsize
        return as_tensor(own.array((size,), self._layout.dtype), self.device)


def _all_take_gpu_memory(engine: RankGroup) -> bool:
    """Whether all ranks are joined by an MPI that takes what lies on GPUs."""
    # All ranks do the same, whatever another's machine has.
    return all(engine.all_gather_object(isinstance(engine, MpiGroup) and engine.takes_gpu_memory()))


@dataclass(frozen=True)
class Lane:
    """On which stream of a GPU its vectors are averaged.

    Attributes
    ----------
    driver : Driver
        Of the GPU.
    computes : Stream
        On which the trainer computes.
    stream : Stream
        That one, or another if another thread averages while the trainer computes.
    use : callable
        Gives the context in which PyTorch works on a stream.
    """

    driver: Driver
    computes: Stream
    stream: Stream
    use: Callable[[Any], AbstractContextManager]
    _free: list[Event] = field(init=False, default_factory=list)

    def wait(self) -> None:
        """Wait for all work so far on the stream."""
        self.stream.synchronize()

    @contextlib.contextmanager
    def on_host(self, copy: np.ndarray, address: int) -> Iterator[None]:
        """A context in which a page-locked copy stands for what lies on the GPU.

        It is copied both ways, also for those who only read or only write.
        """
        self.driver.download(copy, address, self.stream)
        self.wait()
        yield
        self.driver.upload(address, copy, self.stream)
        # The copy is written to next time: what is read of it now must have been read.
        self.wait()

    def mark(self) -> Wait:
        """Give what waits for all that the trainer has begun to compute."""
        event = self._free.pop() if self._free else self.driver.event()
        event.record(self.computes)

        def wait() -> None:
            with self.driver.borrowed():
                event.synchronize()
            self._free.append(event)

        return wait


class OnLane(AllReduce):
    """A collective of vectors on a GPU, in whatever thread it is called.

    Parameters
    ----------
    lane : Lane
        On which it works.
    inner : AllReduce
    """

    def __init__(self, lane: Lane, inner: AllReduce) -> None:
        self._lane, self._inner = lane, inner

    def average(self, vector: Any, shares: Sequence[float]) -> None:
        """See `AllReduce`."""
        lane = self._lane
        with lane.driver.borrowed(), lane.use(lane.stream):
            self._inner.average(vector, shares)
            if lane.stream is not lane.computes:
                lane.wait()  # for whoever computes on


class Staged(AllReduce):
    """A collective of vectors on GPUs, each by way of a copy on the host, which it is called with.

    Parameters
    ----------
    lane : Lane
        On which to copy.
    address : int
        Of the vector on the GPU.
    inner : AllReduce
        What averages the copies, which are page-locked.
    """

    def __init__(self, lane: Lane, address: int, inner: AllReduce) -> None:
        self._lane, self._address, self._inner = lane, address, inner

    def average(self, vector: np.ndarray, shares: Sequence[float]) -> None:
        """See `AllReduce`."""
        with self._lane.on_host(vector, self._address):
            self._inner.average(vector, shares)
