"""Exchanges of vectors around the update, by trainers that are in step."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tandem.distributed.allreduce import AllReduce, shard
from tandem.distributed.choices import (
    EXCHANGES,
    RULES,
    AllReduceChoice,
    ExchangeChoice,
    RuleChoice,
)
from tandem.distributed.group import Group
from tandem.distributed.rank_vector import HostVector, RankVector
from tandem.memory.parameters import CudaMemory, FlatName, HostMemory
from tandem.registry import Requirement, setting

if TYPE_CHECKING:
    from tandem.distributed.buckets import Bucket
    from tandem.distributed.factory import ExchangeSettings
    from tandem.memory.flat import FlatLayout


class Exchange:
    """The exchange of trainers around the update. The base class does nothing: one trainer.

    A trainer calls these methods in every step, in this order, and a strategy overrides those that
    it needs. After gradients that are not finite there is no update. `leave` closes the vector.

    `is_synchronous` is whether all trainers hold the same weights after a step, and so make each
    together.
    """

    is_synchronous = True

    def __init__(self, vector: RankVector | None = None) -> None:
        self._vector = vector

    def before_gradients(self, shares: Sequence[float]) -> None:
        """Get ready: the gradients of a step are about to be computed.

        Shares are each trainer's part of the global minibatch, by rank, which add up to 1; or all 1
        where gradients are terms of a sum.
        """

    def on_gradient_ready(self, name: str) -> None:
        """Called when a parameter's gradient is ready, during the backward pass."""

    def after_gradients(self, number: int, rows: int, is_last: bool) -> None:
        """Called after each pass of a step with `sum_rows`: its group's number and valid rows.

        `is_last` is whether it is this trainer's last group of the step.
        """

    def votes_after(self, step: int, every: int) -> bool:
        """Return whether all trainers vote on step number `step`, from 1, together.

        Every `every` steps they exchange messages for a report in any case.
        """
        return self.is_synchronous or step % every == 0

    def before_update(self, shares: Sequence[float]) -> None:
        """Exchange gradients."""

    def after_update(self, shares: Sequence[float]) -> None:
        """Exchange parameters."""

    def consensus_weights(self) -> AbstractContextManager[None]:
        """Context manager: swap in the consensus weights. Collective."""
        return nullcontext()

    def leave(self) -> None:
        """End the exchange, and give up other trainers' memory. Collective, when all went well."""
        if self._vector is not None:
            self._vector.close()


class ExchangeParameters(Exchange):
    """Average weights and optimizer state after the update: the original's strategy.

    The update is linear in the gradient, so this equals averaging gradients before it, in exact
    arithmetic, at twice the bytes (Ding et al. 2014, arXiv 1412.2302, section 2.2).
    """

    def __init__(self, all_reduce: AllReduce, vector: RankVector) -> None:
        super().__init__(vector)
        self._all_reduce, self._own = all_reduce, vector.own

    def after_update(self, shares: Sequence[float]) -> None:
        self._all_reduce.average(self._own, shares)


class ExchangeGradients(Exchange):
    """Average the gradients, then let every trainer make the same update: half the bytes."""

    def __init__(self, all_reduce: AllReduce, vector: RankVector) -> None:
        super().__init__(vector)
        self._all_reduce, self._own = all_reduce, vector.own

    def before_update(self, shares: Sequence[float]) -> None:
        self._all_reduce.average(self._own, shares)


class ExchangeShared(Exchange):
    """One vector of parameters for all trainers, of which each updates a shard.

    Each computes gradients into a vector of its own. Between two barriers, trainer i averages shard
    i of the gradients, in rank order, into trainer 0's vector, and then updates shard i of the
    parameters from there. So nothing is averaged twice, and nothing updated twice. The result is
    that of `ExchangeGradients`.
    """

    def __init__(self, group: Group, gradients: Sequence[np.ndarray]) -> None:
        super().__init__()
        self._group = group
        part = shard(gradients[0].size, group.size, group.rank)
        self._parts = [vector[part] for vector in gradients]

    def before_update(self, shares: Sequence[float]) -> None:
        from tandem.distributed import kernels

        # From here on nobody computes with the weights, until all of them have been updated.
        self._group.barrier()
        kernels.average_into_first(self._parts, shares)

    def after_update(self, shares: Sequence[float]) -> None:
        self._group.barrier()


def rank_vector(
    memory: HostMemory | CudaMemory, name: FlatName, group: Group, is_apart: bool = False
) -> RankVector:
    """Return a vector of a trainer's memory as a group reaches it. Collective.

    One that is apart is averaged by another thread while the trainer computes.
    """
    vector: RankVector
    if isinstance(memory, HostMemory):
        vector = HostVector(memory.flat[name], memory.rank, name == "parameters")
    else:
        from tandem.distributed.gpu_staging import GpuVector

        vector = GpuVector(memory, name, group, is_apart)
    vector.exact = memory.layout.untrained_extent
    return vector


@RULES.register("bsp")
@dataclass(frozen=True)
class InStep(RuleChoice):
    """Bulk synchronous: all trainers in step, by the settings `exchange` and `collective`."""

    is_synchronous = True

    def make(
        self, settings: "ExchangeSettings", memory: HostMemory | CudaMemory, group: Group
    ) -> Exchange:
        return settings.exchange.make(settings.collective, memory, group)


@dataclass(frozen=True)
class _Parameters(ExchangeChoice):
    """Weights and optimizer state, after the update."""

    requires = (
        Requirement(
            # Ranks that are not in step never average the results of one step.
            lambda facts: facts.is_linear or not facts.is_synchronous,
            "averages the results of updates, which is for sgd, whose update is linear in the "
            "gradient: averaging {optimizer}'s results is not {optimizer}; use gradients, "
            "or leave it at auto",
        ),
    )

    def make(
        self, collective: AllReduceChoice, memory: HostMemory | CudaMemory, group: Group
    ) -> Exchange:
        vector, whole = rank_vector(memory, "parameters", group), memory.layout.parameters_size
        (all_reduce,) = collective.make(vector, [slice(0, whole)], group)
        return ExchangeParameters(all_reduce, vector)


@EXCHANGES.register("auto")
@dataclass(frozen=True)
class Auto(_Parameters):
    """By the optimizer: `tandem.config.resolve` replaces it; until then, as average."""


@EXCHANGES.register("average")
@dataclass(frozen=True)
class Average(_Parameters):
    """Weights and optimizer state, after the update."""


@EXCHANGES.register("gradients")
@dataclass(frozen=True)
class Gradients(ExchangeChoice):
    """Gradients, before the update."""

    bucket_mb: float = setting(
        0.0,
        "of ranks: MB of gradients sent during the backward pass; 0: none",
        "a number of megabytes of at least 0",
        ge=0,
    )

    requires = (
        Requirement(
            lambda facts: facts.starter is not None,
            "is for trainers that are ranks, see collective: start them with mpirun or torchrun, "
            "or set it to 0",
            setting="bucket_mb",
        ),
    )

    def buckets(self, layout: "FlatLayout") -> "list[Bucket]":
        if not self.bucket_mb:
            return []
        from tandem.distributed.buckets import divide

        most = int(self.bucket_mb * 1e6) // np.dtype(layout.dtype).itemsize
        return divide(layout.offsets, layout.size, most)

    def make(
        self, collective: AllReduceChoice, memory: HostMemory | CudaMemory, group: Group
    ) -> Exchange:
        layout = memory.layout
        if not self.bucket_mb:
            vector = rank_vector(memory, "gradients", group)
            (all_reduce,) = collective.make(vector, [slice(0, layout.size)], group)
            return ExchangeGradients(all_reduce, vector)
        from tandem.distributed.buckets import BucketedGradients

        buckets = self.buckets(layout)
        apart = group.split(0)  # its thread's messages are kept apart from the trainer's
        vector = rank_vector(memory, "gradients", apart, is_apart=True)
        parts = [bucket.extent for bucket in buckets]
        return BucketedGradients(buckets, vector, collective.make(vector, parts, apart))


@EXCHANGES.register("shared")
@dataclass(frozen=True)
class Shared(ExchangeChoice):
    """Gradients; one copy of the parameters, of which each trainer updates a part."""

    shares_parameters = True
    requires = (
        Requirement(
            lambda facts: facts.starter is None,
            "is one copy of the weights for trainers that one machine starts; ranks have their "
            "own: use average or gradients",
        ),
        Requirement(
            lambda facts: not facts.on_gpu,
            "is one copy of the weights in the host's memory, for trainers on cpu; on GPUs use "
            "average or gradients",
        ),
    )

    def make(
        self, collective: AllReduceChoice, memory: HostMemory | CudaMemory, group: Group
    ) -> Exchange:
        if not isinstance(memory, HostMemory):
            raise TypeError("GPUs have no memory that all trainers share")
        return ExchangeShared(group, memory.flat["gradients"])
