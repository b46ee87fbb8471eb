"""The ways to average of the setting ``collective``, by name."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tandem.distributed.allreduce import (
    AllReduce,
    DeltaAllReduce,
    Format,
    HierarchicalAllReduce,
    LibraryAllReduce,
    NcclAllReduce,
    ShardedAllReduce,
)
from tandem.distributed.choices import ALL_REDUCES, NEEDS_RANKS, AllReduceChoice, RunFacts
from tandem.distributed.compressed import CompressedAllReduce, TransferFormat, make_piecewise
from tandem.distributed.gloo import GlooGroup
from tandem.distributed.group import Group
from tandem.distributed.rank_vector import RankVector
from tandem.registry import Requirement, setting


@ALL_REDUCES.register("auto")
@dataclass(frozen=True)
class Auto(AllReduceChoice):
    """By memory that all trainers of one launcher reach; for ranks it stands for another choice."""

    def make(self, vector: RankVector, parts: Sequence[slice], group: Group) -> list[AllReduce]:
        return vector.by_memory(parts, group)

    def sharing(self, group: Group) -> Group | None:
        return group

    def condition(self, facts: RunFacts) -> str:
        return ""


@ALL_REDUCES.register("ar")
@dataclass(frozen=True)
class Library(AllReduceChoice):
    """The library's own allreduce."""

    requires = (NEEDS_RANKS,)

    def make(self, vector: RankVector, parts: Sequence[slice], group: Group) -> list[AllReduce]:
        return vector.by_messages(parts, lambda part: LibraryAllReduce(group))

    def condition(self, facts: RunFacts) -> str:
        return "ar by gloo" if facts.starter == "torchrun" else self.name


@ALL_REDUCES.register("asa")
@dataclass(frozen=True)
class Sharded(AllReduceChoice):
    """All-to-all, sum, all-gather."""

    requires = (NEEDS_RANKS,)

    def make(self, vector: RankVector, parts: Sequence[slice], group: Group) -> list[AllReduce]:
        return vector.by_messages(parts, lambda part: ShardedAllReduce(group, part))

    def condition(self, facts: RunFacts) -> str:
        return ""


@ALL_REDUCES.register("asa16")
@dataclass(frozen=True)
class Compressed(AllReduceChoice):
    """As asa, in 16 bits."""

    wire: Format = setting(
        "float16", "asa16: transfer format, float16 or bfloat16", "float16 or bfloat16"
    )
    error_feedback: bool = setting(
        False, "asa16: add the rounding error to the next step's vector", "true or false"
    )

    requires = (
        NEEDS_RANKS,
        Requirement(
            lambda facts: facts.precision != "float64",
            "is for float32, and precision is float64: choose another of both",
        ),
    )

    def make(self, vector: RankVector, parts: Sequence[slice], group: Group) -> list[AllReduce]:
        def compress(part: Any) -> AllReduce:
            transfer = TransferFormat(self.wire)
            rounded = CompressedAllReduce(group, part, transfer, self.error_feedback)
            return DeltaAllReduce(rounded, part) if vector.is_common else rounded

        return make_piecewise(vector, parts, compress, lambda part: ShardedAllReduce(group, part))

    def condition(self, facts: RunFacts) -> str:
        buckets = f" in buckets of {facts.bucket_mb:g} MB" if facts.bucket_mb else ""
        return f"asa16 {self.wire}{' with error feedback' * self.error_feedback}{buckets}"


@ALL_REDUCES.register("hierarchical")
@dataclass(frozen=True)
class Hierarchical(AllReduceChoice):
    """Within each machine, then between machines."""

    requires = (NEEDS_RANKS,)

    def make(self, vector: RankVector, parts: Sequence[slice], group: Group) -> list[AllReduce]:
        ranks = group.local.all_gather_object(group.rank)
        machines = tuple(dict.fromkeys(group.all_gather_object(ranks)))
        is_leader = group.local.rank == 0
        leaders = group.split(0 if is_leader else 1)
        between: Sequence[AllReduce | None] = [None] * len(parts)
        if is_leader:
            between = vector.by_messages(parts, lambda part: ShardedAllReduce(leaders, part))
        return [
            HierarchicalAllReduce(within, machines, machines.index(ranks), sent)
            for within, sent in zip(vector.by_memory(parts, group.local), between, strict=True)
        ]

    def sharing(self, group: Group) -> Group | None:
        return group.local

    def condition(self, facts: RunFacts) -> str:
        numbers = {machine: n for n, machine in enumerate(dict.fromkeys(facts.machines))}
        if len(numbers) < 2:
            return ""
        return "hierarchical " + "+".join(str(numbers[machine]) for machine in facts.machines)


@ALL_REDUCES.register("nccl")
@dataclass(frozen=True)
class Nccl(AllReduceChoice):
    """NCCL's allreduce, from GPU to GPU."""

    requires = (
        Requirement(
            lambda facts: facts.starter == "torchrun",
            "is for trainers that torchrun starts: torchrun --nproc-per-node 4 "
            "train.py, or leave collective at auto",
        ),
        Requirement(
            lambda facts: facts.has_own_gpus,
            "needs a GPU for each rank, and devices are {listed_devices}: start as many ranks on a "
            "machine as it has GPUs, or use collective: asa",
        ),
    )

    def make(self, vector: RankVector, parts: Sequence[slice], group: Group) -> list[AllReduce]:
        if not isinstance(group, GlooGroup):
            raise TypeError(f"NCCL needs ranks of torchrun, not {type(group).__name__}")
        group.open_nccl()
        return [NcclAllReduce(group)] * len(parts)
