"""Where the memory of a trainer lies that is a rank: nobody else sees it but its own loader."""

import zlib
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np

from tandem.data.fill import SlotFiller
from tandem.exchange import Exchange, Gathering
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
from tandem.exchange.mpi import MpiEngine
from tandem.memory import HostSlots, SlotLayout
from tandem.memory.flat import FlatLayout, Vectors
from tandem.run.config import Config
from tandem.run.feed import InProcessLoader, Loader, ProcessLoader
from tandem.run.plan import Plan
from tandem.run.site import Shapes, Strategy


class RankSite:
    """In host memory of a rank's own process. A `Site`.

    Parameters
    ----------
    plan : Plan
        The run.
    engine : MpiEngine
        What joins the ranks.
    """

    def __init__(self, plan: Plan, engine: MpiEngine) -> None:
        layout = SlotLayout(plan.config.batch_size, plan.picture_size)
        self.slots = HostSlots.create(layout, engine.rank)
        self._config, self._engine = plan.config, engine

    def loader_side(self) -> HostSlots:
        """See `Site`."""
        return self.slots

    def open(self, meeting: Gathering, shapes: Shapes, dtype: str) -> "RankMemory":
        """See `Site`."""
        return RankMemory(self._config, self._engine, self.slots, FlatLayout.of(shapes, dtype))

    def release(self) -> None:
        """Nothing: it is the trainer's own process that made it."""


@dataclass(frozen=True)
class _Neighbours:
    """The ranks of a machine.

    Attributes
    ----------
    engine : MpiEngine
        That joins them.
    numbers : tuple of int
        Their numbers among all ranks.
    leaders : MpiEngine
        For the first of a machine, the first of all; for the others, the others.
    machines : int
        How many there are.
    """

    engine: MpiEngine
    numbers: tuple[int, ...]
    leaders: MpiEngine
    machines: int

    @classmethod
    def find(cls, world: MpiEngine) -> "_Neighbours":
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


class RankMemory:
    """Host memory of one rank. A `Memory`.

    Parameters
    ----------
    config : Config
        How the ranks exchange.
    engine : MpiEngine
        What joins them.
    slots : HostSlots
        The trainer's.
    layout : FlatLayout
        Of the parameters.
    """

    device, records = "cpu", False

    def __init__(
        self, config: Config, engine: MpiEngine, slots: HostSlots, layout: FlatLayout
    ) -> None:
        self._config, self._engine, self._slots = config, engine, slots
        self._dtype = np.dtype(layout.dtype)
        self._neighbours = _Neighbours.find(engine) if self._is_hierarchical else None
        self._parameters = self._allocate(2 * layout.nbytes)
        self._gradients = self._allocate(layout.nbytes)
        number = 0 if self._neighbours is None else self._neighbours.engine.rank
        self._own = self._parameters[number], self._gradients[number]
        size = layout.size
        weights, momenta = self._own[0][:size], self._own[0][size:]
        views = [layout.views(vector) for vector in (weights, momenta, self._own[1])]
        self.vectors = Vectors(*views)
        self.slots = slots.arrays
        self.nbytes = 2 * layout.nbytes

    @property
    def _is_hierarchical(self) -> bool:
        return self._config.collective == "hierarchical"

    def _allocate(self, nbytes: int) -> list[np.ndarray]:
        """A vector for each rank of this machine, if others see it, or for this one alone."""
        if self._neighbours is None:
            return [np.zeros(nbytes // self._dtype.itemsize, self._dtype)]
        return [part.view(self._dtype) for part in self._neighbours.engine.shared(nbytes)]

    def exchange(self, strategy: Strategy) -> Exchange:
        """See `Memory`."""
        if strategy == "gradients":
            return RankGradients(self._collective(self._gradients), self._own[1])
        collective, vector = self._collective(self._parameters), self._own[0]
        if self._config.collective == "asa16" and self._engine.size > 1:
            collective = FromCommon(collective, vector)
        return RankParameters(collective, vector)

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

    def loader(self, connection: Connection | None, filler: SlotFiller) -> Loader:
        """See `Memory`."""
        if connection is not None:
            return ProcessLoader(connection)
        return InProcessLoader(filler, self._slots)

    def wait(self) -> None:
        """See `Memory`: the host's kernels are done when their calls return."""

    def checksum(self) -> int:
        """See `Memory`."""
        return zlib.crc32(self._own[0].view(np.uint8).data)

    def close(self) -> None:
        """Nothing: host memory goes with its last user."""
