"""The choices of how and when trainers exchange, by name, and what each requires of a run.

`exchange` chooses what is averaged, `collective` how ranks average it, and `rule` whether trainers
stay in step. The classes that are chosen from stand beside what they make.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from tandem.registry import Choice, Registry, Requirement

if TYPE_CHECKING:
    from tandem.distributed.allreduce import AllReduce
    from tandem.distributed.buckets import Bucket
    from tandem.distributed.exchange import Exchange
    from tandem.distributed.factory import ExchangeSettings
    from tandem.distributed.group import Group, Starter
    from tandem.distributed.rank_vector import RankVector
    from tandem.memory.flat import FlatLayout
    from tandem.memory.parameters import CudaMemory, HostMemory


@dataclass(frozen=True)
class RunFacts:
    """The facts of a run at which choices look."""

    starter: "Starter | None"  # of ranks; None where one launcher starts the trainers
    devices: tuple[str, ...]  # of each trainer, by rank, such as "cpu" or "cuda:0"
    machines: tuple[object, ...] = ()  # by rank, what identifies its machine; empty without ranks
    has_own_gpus: bool = False  # whether each trainer has a GPU to itself
    bucket_mb: float = 0.0  # of gradients; 0 for none
    precision: str = "float32"  # of products, as the setting; "float64" is that of weights too
    optimizer: str = "sgd"
    is_linear: bool = True  # whether averaging its results is a step with the averaged gradient
    is_synchronous: bool = True  # whether trainers stay in step

    @property
    def on_gpu(self) -> bool:
        return self.devices[0] != "cpu"

    @property
    def listed_devices(self) -> str:
        return ", ".join(self.devices)


class AllReduceChoice(Choice, ABC):
    """A way to average vectors over trainers."""

    @abstractmethod
    def make(
        self, vector: "RankVector", parts: Sequence[slice], group: "Group"
    ) -> "list[AllReduce]":
        """Make what averages each part of a vector over a group. Collective."""

    def sharing(self, group: "Group") -> "Group | None":
        """Return the ranks that see each other's vectors in host memory, if any need to."""
        return None

    def condition(self, facts: RunFacts) -> str:
        """Return what the bits depend on; empty where they are those of one machine's trainers."""
        return self.name


class ExchangeChoice(Choice, ABC):
    """A kind of exchange of trainers around the update."""

    # Whether there is one copy of the parameters, of which each trainer updates a part.
    shares_parameters: ClassVar[bool] = False

    def buckets(self, layout: "FlatLayout") -> "list[Bucket]":
        """Divide the gradients into buckets that are sent during the backward pass, if they are."""
        return []

    @abstractmethod
    def make(
        self, collective: AllReduceChoice, memory: "HostMemory | CudaMemory", group: "Group"
    ) -> "Exchange":
        """Make the exchange of trainers that are in step. Collective."""


class RuleChoice(Choice, ABC):
    """A rule by which trainers stay in step, or are drawn together if they don't."""

    # Whether all trainers hold the same weights after a step.
    is_synchronous: ClassVar[bool] = False

    @abstractmethod
    def make(
        self, settings: "ExchangeSettings", memory: "HostMemory | CudaMemory", group: "Group"
    ) -> "Exchange":
        """Make the exchange of several trainers. Collective."""


ALL_REDUCES: Registry[AllReduceChoice] = Registry("collective")
EXCHANGES: Registry[ExchangeChoice] = Registry("exchange")
RULES: Registry[RuleChoice] = Registry("rule")

NEEDS_RANKS = Requirement(
    lambda facts: facts.starter is not None,
    "is for trainers that are ranks: start them with mpirun -n 4 python train.py, or torchrun "
    "--nproc-per-node 4 train.py, or leave collective at auto",
)
NEEDS_MPI = Requirement(
    lambda facts: facts.starter == "mpirun",
    "is for trainers that are joined by MPI: start them with mpirun -n 4 python train.py, or use "
    "rule: bsp",
)
