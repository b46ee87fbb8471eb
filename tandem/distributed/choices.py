"""The choices of how and when trainers exchange, by name, and what each requires of a run.

`exchange` chooses what is averaged, `collective` how ranks average it, and `rule` whether trainers
stay in step. The classes that are chosen from stand beside what they make.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from tandem.registry import Choice, Registry, Requirement, setting

if TYPE_CHECKING:
    from tandem.distributed.group import Group, Starter


@dataclass(frozen=True)
class RunFacts:
    """What choices look at in a run.

    Attributes
    ----------
    starter : "mpirun", "torchrun" or None
        What started the trainers as ranks; None where one launcher starts them.
    devices : tuple of str
        One for each trainer, by rank, such as "cpu" or "cuda:0".
    machines : tuple
        By rank, what identifies the machine of a rank; empty without ranks.
    has_own_gpus : bool
        Whether each trainer has a GPU to itself.
    bucket_mb : float
        Megabytes of a bucket of gradients; 0 for none.
    precision : str
        Of products, as the setting; "float64" is that of weights too.
    """

    starter: "Starter | None"
    devices: tuple[str, ...]
    machines: tuple[object, ...] = ()
    has_own_gpus: bool = False
    bucket_mb: float = 0.0
    precision: str = "float32"

    @property
    def on_gpu(self) -> bool:
        """Whether the trainers work on GPUs."""
        return self.devices[0] != "cpu"

    @property
    def listed_devices(self) -> str:
        """The devices, for messages."""
        return ", ".join(self.devices)


class AllReduceChoice(Choice):
    """A way to average vectors over trainers."""

    def sharing(self, group: "Group") -> "Group | None":
        """Give the ranks that see each other's vectors in host memory, if any need to."""
        return None

    def condition(self, facts: RunFacts) -> str:
        """What the bits depend on; empty where they are those of one machine's trainers."""
        return self.name


class ExchangeChoice(Choice):
    """What the trainers exchange around the update.

    Attributes
    ----------
    shares_parameters : bool
        Whether there is one copy of the parameters, of which each trainer updates a part.
    """

    shares_parameters: ClassVar[bool] = False


class RuleChoice(Choice):
    """Whether trainers stay in step, and what draws them together if they don't.

    Attributes
    ----------
    is_synchronous : bool
        Whether all trainers hold the same weights after a step.
    """

    is_synchronous: ClassVar[bool] = False


ALL_REDUCES: Registry[AllReduceChoice] = Registry("collective")
EXCHANGES: Registry[ExchangeChoice] = Registry("exchange")
RULES: Registry[RuleChoice] = Registry("rule")

NEEDS_RANKS = Requirement(
    lambda facts: facts.starter is not None,
    "is for trainers that are ranks: start them with mpirun -n 4 python train.py, or torchrun "
    "--standalone --nproc-per-node 4 train.py, or leave collective at auto",
)
NEEDS_MPI = Requirement(
    lambda facts: facts.starter == "mpirun",
    "is for trainers that are joined by MPI: start them with mpirun -n 4 python train.py, or use "
    "rule: bsp",
)


@ALL_REDUCES.register("auto")
@dataclass(frozen=True)
class Auto(AllReduceChoice):
    """The shared memory of one machine's trainers; of ranks, what suits them."""

    def condition(self, facts: RunFacts) -> str:
        return ""


@ALL_REDUCES.register("ar")
@dataclass(frozen=True)
class Ar(AllReduceChoice):
    """The library's own allreduce."""

    requires = (NEEDS_RANKS,)

    def condition(self, facts: RunFacts) -> str:
        return "ar by gloo" if facts.starter == "torchrun" else self.name


@ALL_REDUCES.register("asa")
@dataclass(frozen=True)
class Asa(AllReduceChoice):
    """All-to-all, sum, all-gather."""

    requires = (NEEDS_RANKS,)

    def condition(self, facts: RunFacts) -> str:
        return ""


@ALL_REDUCES.register("asa16")
@dataclass(frozen=True)
class Asa16(AllReduceChoice):
    """As asa, in 16 bits."""

    wire: Literal["float16", "bfloat16"] = setting(
        "float16",
        "asa16: transfer format, float16 or bfloat16",
        "float16 or bfloat16",
    )
    error_feedback: bool = setting(
        False,
        "asa16: add the rounding error to the next step's vector",
        "true or false",
    )

    requires = (
        NEEDS_RANKS,
        Requirement(
            lambda facts: facts.precision != "float64",
            "is for float32, and precision is float64: choose another of both",
        ),
    )

    def condition(self, facts: RunFacts) -> str:
        buckets = f" in buckets of {facts.bucket_mb:g} MB" if facts.bucket_mb else ""
        return f"asa16 {self.wire}{' with error feedback' * self.error_feedback}{buckets}"


@ALL_REDUCES.register("hierarchical")
@dataclass(frozen=True)
class Hierarchical(AllReduceChoice):
    """Within each machine, then between machines."""

    requires = (NEEDS_RANKS,)

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
            "is for trainers that torchrun starts: torchrun --standalone --nproc-per-node 4 "
            "train.py, or leave collective at auto",
        ),
        Requirement(
            lambda facts: facts.has_own_gpus,
            "needs a GPU for each rank, and devices are {listed_devices}: start as many ranks on a "
            "machine as it has GPUs, or use collective: asa",
        ),
    )


@EXCHANGES.register("average")
@dataclass(frozen=True)
class Average(ExchangeChoice):
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


@RULES.register("bsp")
@dataclass(frozen=True)
class Bsp(RuleChoice):
    """All in step."""

    is_synchronous = True


@RULES.register("easgd")
@dataclass(frozen=True)
class Easgd(RuleChoice):
    """Elastic averaging, by a server."""

    easgd_alpha: float = setting(
        0.5,
        "easgd: moving rate of weights and consensus weights",
        "a number above 0 and below 1",
        gt=0,
        lt=1,
    )
    easgd_tau: int = setting(
        1,
        "easgd: steps between exchanges with the server",
        "a whole number of steps of at least 1",
        ge=1,
    )

    requires = (NEEDS_MPI,)


@RULES.register("gosgd")
@dataclass(frozen=True)
class Gosgd(RuleChoice):
    """Gossip."""

    gosgd_p: float = setting(
        0.1,
        "gosgd: probability of sending after a step",
        "a number above 0 and at most 1",
        gt=0,
        le=1,
    )

    requires = (NEEDS_MPI,)
