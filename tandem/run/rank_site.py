"""Where the memory of a trainer lies that is a rank: on the host, or on a GPU."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from tandem.data.fill import SlotFiller
from tandem.exchange import Exchange, Gathering
from tandem.exchange.buckets import BucketedGradients, Wait, divide
from tandem.exchange.collective import (
    AllReduce,
    Collective,
    FromCommon,
    Hierarchical,
    RankGradients,
    RankParameters,
    RoundedShardSum,
    ShardSum,
)
from tandem.exchange.engine import RankEngine
from tandem.exchange.mpi import DirectSum, MpiEngine
from tandem.exchange.rules import Elastic, ElasticServer, Gossip
from tandem.exchange.torchrun import TensorSum, TorchEngine
from tandem.memory import HostSlots, SlotLayout
from tandem.memory.cuda import Driver, Event, Stream
from tandem.memory.flat import FlatLayout, Vectors
from tandem.run.config import Config
from tandem.run.feed import InProcessLoader, Loader, ProcessLoader
from tandem.run.plan import Plan
from tandem.run.site import CudaMemory, CudaSite, Shapes, Site, Strategy


def rank_site(plan: Plan, engine: RankEngine) -> Site:
    """The site of a rank: on the host, or on the GPU that the plan gives it."""
    slots = SlotLayout(plan.config.batch_size, plan.picture_size)
    device = plan.devices[engine.rank]
    if device == "cpu":
        return RankSite(HostSlots.create(slots, engine.rank), plan.config, engine)
    number = int(device.partition(":")[2])
    return CudaRankSite(
        number, slots, (), plan.config.deterministic, config=plan.config, engine=engine
    )


@dataclass(frozen=True)
class _Neighbours:
    """The ranks of a machine.

    Attributes
    ----------
    engine : RankEngine
        That joins them.
    numbers : tuple of int
        Their numbers among all ranks.
    leaders : RankEngine
        For the first of a machine, the first of all; for the others, the others.
    machines : int
        How many there are.
    """

    engine: RankEngine
    numbers: tuple[int, ...]
    leaders: RankEngine
    machines: int

    @classmethod
    def find(cls, world: RankEngine) -> "_Neighbours":
        """Those of this rank. All ranks call it together."""
        engine = world.local
        is_leader = engine.rank == 0
        leaders = world.group(0 if is_leader else 1)
        machines = sum(world.gather(is_leader))
        return cls(engine, engine.gather(world.rank), leaders, machines)

    @property
    def is_leader(self) -> bool:
        """Whether this rank is the first of its machine."""
        return self.engine.rank == 0


class Joint:
    """What a rank exchanges with the others: vectors on the host, averaged as configured.

    All ranks make it together, and call its methods together.

    Parameters
    ----------
    config : Config
        How they exchange.
    engine : RankEngine
        What joins them.
    """

    def __init__(self, config: Config, engine: RankEngine) -> None:
        self._config, self._engine = config, engine
        is_hierarchical = config.collective == "hierarchical"
        self._neighbours = _Neighbours.find(engine) if is_hierarchical else None

    def vectors(self, nbytes: int, dtype: str) -> list[np.ndarray]:
        """A vector for each rank of this machine, if others see it, or for this one alone."""
        if self._neighbours is None:
            return [np.zeros(nbytes // np.dtype(dtype).itemsize, dtype)]
        return [part.view(dtype) for part in self._neighbours.engine.shared(nbytes)]

    def own(self, vectors: list[np.ndarray]) -> np.ndarray:
        """This rank's vector."""
        return vectors[0 if self._neighbours is None else self._neighbours.engine.rank]

    def exchange(
        self,
        strategy: Strategy,
        vectors: list[np.ndarray],
        layout: FlatLayout,
        staging: "Staging | None" = None,
    ) -> Exchange:
        """The exchange of parameters, which the vectors hold already, or of gradients.

        Parameters
        ----------
        strategy : "average" or "gradients"
        vectors : list of float (n,)
            As `vectors` gave them.
        layout : FlatLayout
            Of the gradients, which may be exchanged in buckets.
        staging : Staging, optional
            Where the vectors are copies of those on GPUs.
        """
        own = self.own(vectors)
        if strategy == "gradients" and self._config.bucket_mb and self._engine.size > 1:
            return self._in_buckets(vectors, layout, staging)
        collective = self._collective(vectors)
        if strategy == "average" and self._config.collective == "asa16" and self._engine.size > 1:
            collective = FromCommon(collective, own)
        if staging is not None:
            collective = staging.stage(collective, own)
        kind = RankGradients if strategy == "gradients" else RankParameters
        return kind(collective, own)

    def _in_buckets(
        self, vectors: list[np.ndarray], layout: FlatLayout, staging: "Staging | None"
    ) -> BucketedGradients:
        most = int(self._config.bucket_mb * 1e6) // np.dtype(layout.dtype).itemsize
        buckets = divide(layout.offsets, layout.size, most)
        # Its thread must not meet the trainer's own messages.
        apart, own = Joint(self._config, self._engine.copy()), self.own(vectors)
        collectives = [apart._collective([v[b.extent] for v in vectors]) for b in buckets]
        if staging is None:
            return BucketedGradients(buckets, own, collectives)
        staged = [
            staging.stage(collective, own, bucket.extent.start)
            for bucket, collective in zip(buckets, collectives, strict=True)
        ]
        return BucketedGradients(buckets, own, staged, staging.mark)

    @property
    def is_loose(self) -> bool:
        """Whether ranks are not in step."""
        return self._config.rule != "bsp" and self._engine.size > 1

    def loose_exchange(self, weights: np.ndarray) -> Exchange:
        """The exchange of ranks that are not in step, of weights that are the same at first."""
        config, engine = self._config, self._engine
        if not isinstance(engine, MpiEngine):
            raise TypeError(f"rule {config.rule} needs MPI, not {type(engine).__name__}")
        if config.rule == "gosgd":
            return Gossip(engine, weights, engine.copy(), config.gosgd_p, config.seed)
        asks, answers = engine.copy(), engine.copy()
        server = None
        if engine.rank == 0:
            server = ElasticServer(weights.copy(), asks, answers, config.easgd_alpha)
            server.start()
        return Elastic(engine, weights, asks, answers, server, config.easgd_alpha, config.easgd_tau)

    def _collective(self, vectors: list[np.ndarray]) -> Collective:
        name, engine = self._config.collective, self._engine
        if name == "ar":
            return AllReduce(engine)
        if name == "asa16":
            from tandem.device.wire import TorchWire

            wire = TorchWire(self._config.wire)
            return RoundedShardSum(engine, vectors[0], wire, self._config.error_feedback)
        if self._neighbours is None:
            return ShardSum(engine, vectors[0])
        here = self._neighbours
        between = ShardSum(here.leaders, vectors[0]) if here.is_leader else None
        return Hierarchical(here.engine, here.numbers, vectors, between, here.machines)


@dataclass(frozen=True)
class RankSite:
    """In host memory of a rank's own process. A `Site`.

    Attributes
    ----------
    slots : HostSlots
        The trainer's.
    config : Config
        How the ranks exchange.
    engine : RankEngine
        What joins them.
    """

    slots: HostSlots
    config: Config
    engine: RankEngine

    def loader_side(self) -> HostSlots:
        """See `Site`."""
        return self.slots

    def open(self, meeting: Gathering, shapes: Shapes, dtype: str) -> "RankMemory":
        """See `Site`."""
        return RankMemory(self.slots, Joint(self.config, self.engine), FlatLayout.of(shapes, dtype))

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
        self._parameters = joint.vectors(2 * layout.nbytes, layout.dtype)
        self._gradients = joint.vectors(layout.nbytes, layout.dtype)
        self._own = joint.own(self._parameters)
        weights, momenta = self._own[: layout.size], self._own[layout.size :]
        vectors = (weights, momenta, joint.own(self._gradients))
        self.vectors = Vectors(*(layout.views(vector) for vector in vectors))
        self.slots = slots.arrays
        self.nbytes = 2 * layout.nbytes

    def exchange(self, strategy: Strategy) -> Exchange:
        """See `Memory`."""
        if self._joint.is_loose:
            return self._joint.loose_exchange(self._own[: self._layout.size])
        vectors = self._gradients if strategy == "gradients" else self._parameters
        return self._joint.exchange(strategy, vectors, self._layout)

    def updated(self, strategy: Strategy) -> Vectors | None:
        """See `Memory`: a rank shares nothing."""
        return None

    def loader(self, connection: Connection | None, filler: SlotFiller) -> Loader:
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
    engine : RankEngine
        What joins them.
    """

    config: Config = field(kw_only=True)
    engine: RankEngine = field(kw_only=True)

    def memory(self, meeting: Gathering, layout: FlatLayout, *where: Any) -> CudaMemory:
        """See `CudaSite`."""
        return CudaRankMemory(self, meeting, layout, *where)


class CudaRankMemory(CudaMemory):
    """Memory of one rank on its GPU: what is exchanged passes through page-locked host memory."""

    def exchange(self, strategy: Strategy) -> Exchange:
        """See `Memory`."""
        site = self._site
        if not isinstance(site, CudaRankSite):
            raise TypeError(f"a rank's memory lies on a rank's site, not on {type(site).__name__}")
        if site.engine.size == 1:
            return Exchange()
        from tandem.device import as_tensor

        direct = self._direct(site)
        if direct is not None:
            own = self._gradients if strategy == "gradients" else self._parameters
            size = own.nbytes // np.dtype(self._layout.dtype).itemsize
            tensor = as_tensor(own.array((size,), self._layout.dtype), self.device)
            return (RankGradients if strategy == "gradients" else RankParameters)(direct, tensor)
        joint = Joint(site.config, site.engine)
        own = self._gradients if strategy == "gradients" else self._parameters
        vectors = joint.vectors(own.nbytes, self._layout.dtype)
        copy = joint.own(vectors)
        self._driver.lock_pages(copy.view(np.uint8))
        self._driver.download(copy, own.address, self._stream)
        self.wait()
        apart = bool(site.config.bucket_mb)
        staging = Staging(self._driver, self._stream, own.address, apart)
        return joint.exchange(strategy, vectors, self._layout, staging)

    def _direct(self, site: CudaRankSite) -> Collective | None:
        """What averages from GPU to GPU, on the trainer's stream; None: by way of the host."""
        config, engine = site.config, site.engine
        if config.collective == "nccl":
            if not isinstance(engine, TorchEngine):
                raise TypeError(f"NCCL needs ranks of torchrun, not {type(engine).__name__}")
            return TensorSum(engine.nccl())
        if config.collective != "ar" or config.bucket_mb or not isinstance(engine, MpiEngine):
            return None
        # All ranks do the same, whatever another's machine has.
        takes = all(engine.gather(engine.takes_gpu_memory()))
        return DirectSum(engine, self.wait) if takes else None


class Staging:
    """How a vector on a GPU is averaged on the host.

    Parameters
    ----------
    driver : Driver
        Of the GPU.
    computes : Stream
        On which the trainer computes.
    address : int
        Of the vector.
    apart : bool
        Whether another thread averages, while the trainer computes on.
    """

    def __init__(self, driver: Driver, computes: Stream, address: int, apart: bool) -> None:
        self._driver, self._computes, self._address = driver, computes, address
        self._stream = driver.stream() if apart else computes
        self._free: list[Event] = []

    def stage(self, collective: Collective, vector: np.ndarray, first: int = 0) -> "Staged":
        """Average by a collective what begins at an element of the vector on the GPU.

        `vector` is page-locked, and what the collective averages.
        """
        address = self._address + first * vector.itemsize
        return Staged(self._driver, self._stream, address, collective)

    def mark(self) -> Wait:
        """Give what waits for all that the trainer has begun to compute."""
        event = self._free.pop() if self._free else self._driver.event()
        event.record(self._computes)

        def wait() -> None:
            with self._driver.borrowed():
                event.synchronize()
            self._free.append(event)

        return wait


class Staged(Collective):
    """A collective of vectors on GPUs, each by way of a copy on the host, which it is called with.

    Parameters
    ----------
    driver : Driver
        Of the GPU.
    stream : Stream
        On which to copy.
    address : int
        Of the vector on the GPU.
    inner : Collective
        What averages the copies.
    """

    def __init__(self, driver: Driver, stream: Stream, address: int, inner: Collective) -> None:
        self._driver, self._stream, self._address = driver, stream, address
        self._inner = inner

    def average(self, vector: np.ndarray, shares: Sequence[float]) -> None:
        """See `Collective`."""
        with self._driver.borrowed():
            self._driver.download(vector, self._address, self._stream)
            self._stream.synchronize()
            self._inner.average(vector, shares)
            self._driver.upload(self._address, vector, self._stream)
            # The next exchange writes to the copy: what is read of it now must have been read.
            self._stream.synchronize()
