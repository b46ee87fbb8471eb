"""What ranks exchange with one another, as the configuration says, wherever their vectors lie."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from tandem.config.schema import Config
from tandem.distributed import Exchange
from tandem.distributed.allreduce import (
    AllReduce,
    Arithmetic,
    CompressedAllReduce,
    DeltaAllReduce,
    HierarchicalAllReduce,
    LibraryAllReduce,
    RankGradients,
    RankParameters,
    ShardedAllReduce,
    SharedWithin,
    Within,
)
from tandem.distributed.asynchronous import Access, ElasticAveraging, ElasticServer, GossipAveraging
from tandem.distributed.buckets import BucketedGradients, Wait, divide
from tandem.distributed.group import Engine, RankGroup
from tandem.distributed.mpi import MpiGroup
from tandem.memory.flat import FlatLayout
from tandem.training.memory import Strategy

Averages = tuple[Any, Callable[[slice], AllReduce]]
"""A rank's vector, and what gives a collective for a part of it. All ranks call that together."""


@dataclass(frozen=True)
class Neighbours:
    """The ranks of a machine, and those of the others.

    Attributes
    ----------
    engine : RankGroup
        That joins those of this machine.
    machines : tuple of tuple of int
        The ranks of each machine, by their numbers among all.
    here : int
        Which of these is this machine.
    leaders : RankGroup
        For the first of a machine, the first of all; for the others, the others.
    """

    engine: RankGroup
    machines: tuple[tuple[int, ...], ...]
    here: int
    leaders: RankGroup

    @classmethod
    def find(cls, world: RankGroup) -> "Neighbours":
        """Those of this rank. All ranks call it together."""
        engine = world.local
        ranks = engine.all_gather_object(world.rank)
        machines = tuple(dict.fromkeys(world.all_gather_object(ranks)))
        leaders = world.group(0 if engine.rank == 0 else 1)
        return cls(engine, machines, machines.index(ranks), leaders)


class Joint:
    """How a rank exchanges vectors with the others.

    All ranks make it together, and call its methods together.

    Parameters
    ----------
    config : Config
        How they exchange.
    engine : RankGroup
        What joins them.

    Attributes
    ----------
    config : Config
    engine : RankGroup
    """

    def __init__(self, config: Config, engine: RankGroup) -> None:
        self.config, self.engine = config, engine

    @cached_property
    def neighbours(self) -> Neighbours | None:
        """The ranks of this machine, if they come before those of others."""
        is_hierarchical = self.config.collective == "hierarchical"
        return Neighbours.find(self.engine) if is_hierarchical else None

    @property
    def adding(self) -> RankGroup:
        """Those ranks that send each other vectors as messages, if this is one of them."""
        return self.engine if self.neighbours is None else self.neighbours.leaders

    @property
    def is_adding(self) -> bool:
        """Whether this rank sends the others vectors."""
        return self.neighbours is None or self.neighbours.engine.rank == 0

    def averages_apart(self, strategy: Strategy) -> bool:
        """Whether vectors are averaged by another thread, while the trainer computes."""
        return strategy == "gradients" and self.config.bucket_mb > 0 and self.engine.size > 1

    def exchange(
        self,
        strategy: Strategy,
        layout: FlatLayout,
        averages: Callable[["Joint"], Averages],
        mark: Callable[[], Wait] | None = None,
    ) -> Exchange:
        """The exchange of parameters or of gradients, as a whole or in buckets.

        Parameters
        ----------
        strategy : "average" or "gradients"
        layout : FlatLayout
            Of the gradients.
        averages : callable
            What is averaged over the ranks of a `Joint`, and how.
        mark : callable, optional
            See `BucketedGradients`.
        """
        if self.averages_apart(strategy):
            most = int(self.config.bucket_mb * 1e6) // np.dtype(layout.dtype).itemsize
            buckets = divide(layout.offsets, layout.size, most)
            # Its thread must not meet the trainer's own messages.
            vector, average = averages(Joint(self.config, self.engine.copy()))
            collectives = [average(bucket.extent) for bucket in buckets]
            return BucketedGradients(buckets, vector, collectives, *([mark] if mark else []))
        vector, average = averages(self)
        if strategy == "gradients":
            return RankGradients(average(slice(0, layout.size)), vector)
        return RankParameters(average(slice(0, layout.parameters_size)), vector)

    def collective(
        self,
        strategy: Strategy,
        engine: Engine,
        vector: Any,
        arithmetic: Arithmetic | None = None,
    ) -> AllReduce:
        """What averages vectors over the ranks that send them, as `adding` says.

        Parameters
        ----------
        strategy : "average" or "gradients"
        engine : Engine
            Of those ranks, for such vectors.
        vector : float (n,)
            This rank's; if it is of parameters, they are the same at all ranks now.
        arithmetic : Arithmetic, optional
            Of such vectors; NumPy's by default.
        """
        if self.config.collective == "ar":
            return LibraryAllReduce(engine)
        if self.config.collective != "asa16":
            return ShardedAllReduce(engine, vector, arithmetic)
        from tandem.distributed.compressed import TorchTransferFormat

        wire, feedback = TorchTransferFormat(self.config.wire), self.config.error_feedback
        rounded = CompressedAllReduce(engine, vector, wire, feedback, arithmetic)
        is_common = strategy == "average" and engine.size > 1
        return DeltaAllReduce(rounded, vector) if is_common else rounded

    def over_machines(self, within: Within, between: AllReduce | None) -> AllReduce:
        """What averages within each machine, and then between their first ranks."""
        if self.neighbours is None:
            raise ValueError(f"{self.config.collective} does not tell machines apart")
        return HierarchicalAllReduce(
            within, self.neighbours.machines, self.neighbours.here, between
        )

    # In host memory

    def vectors(self, nbytes: int, dtype: str) -> list[np.ndarray]:
        """A vector for each rank of this machine, if others see it, or for this one alone."""
        if self.neighbours is None:
            return [np.zeros(nbytes // np.dtype(dtype).itemsize, dtype)]
        return [part.view(dtype) for part in self.neighbours.engine.shared(nbytes)]

    def own(self, vectors: Sequence[np.ndarray]) -> np.ndarray:
        """This rank's vector."""
        return vectors[0 if self.neighbours is None else self.neighbours.engine.rank]

    def exchange_on_host(
        self, strategy: Strategy, layout: FlatLayout, vectors: Sequence[np.ndarray]
    ) -> Exchange:
        """As `exchange`, of vectors as `vectors` gave them. Parameters are in them already."""

        def averages(joint: Joint) -> Averages:
            def average(part: slice) -> AllReduce:
                parts = [vector[part] for vector in vectors]
                sent = partial(joint.collective, strategy, joint.adding, parts[0])
                if joint.neighbours is None:
                    return sent()
                within = SharedWithin(joint.neighbours.engine, parts)
                return joint.over_machines(within, sent() if joint.is_adding else None)

            return self.own(vectors), average

        return self.exchange(strategy, layout, averages)

    # Ranks that are not in step

    @property
    def is_loose(self) -> bool:
        """Whether ranks are not in step."""
        return self.config.rule != "bsp" and self.engine.size > 1

    def loose_exchange(self, weights: np.ndarray, access: Access = nullcontext) -> Exchange:
        """The exchange of ranks that are not in step, of weights that are the same at first.

        Parameters
        ----------
        weights : float (n,)
            This rank's, on the host.
        access : callable, optional
            See `AsynchronousExchange`.
        """
        config, engine = self.config, self.engine
        if not isinstance(engine, MpiGroup):
            raise TypeError(f"rule {config.rule} needs MPI, not {type(engine).__name__}")
        if config.rule == "gosgd":
            return GossipAveraging(
                engine, weights, engine.copy(), config.gosgd_p, config.seed, access
            )
        asks, answers = engine.copy(), engine.copy()
        server = None
        if engine.rank == 0:
            server = ElasticServer(weights.copy(), asks, answers, config.easgd_alpha)
            server.start()
        return ElasticAveraging(
            engine,
            weights,
            asks,
            answers,
            server,
            config.easgd_alpha,
            config.easgd_tau,
            access,
        )
