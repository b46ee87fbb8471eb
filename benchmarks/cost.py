"""What an exchange over ranks costs: a model that is linear in what is sent, waited for and added.

Latency and bandwidth (as in Thakur, Rabenseifner, Gropp 2005, "Optimization of collective
communication operations in MPICH"), with two kinds of way, within a machine and between machines.
What ranks share is divided: bytes between machines go through one cable for each machine, and
copying and adding is done by its cores.

    seconds = sum of rate_i * load_i

Loads follow from the strategy, the number of parameters and the layout; rates are fitted to what
was measured.
"""

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

import numpy as np
from scipy.optimize import least_squares

STRATEGIES = ("ar", "asa", "asa16", "hierarchical")


@dataclass(frozen=True)
class Layout:
    """Where ranks are.

    Attributes
    ----------
    machines : int
        How many, alike.
    ranks_each : int
        Ranks on each machine.
    cores_each : float
        Cores of each machine; those beyond one for each rank don't count.
    """

    machines: int
    ranks_each: int
    cores_each: float = math.inf

    @property
    def ranks(self) -> int:
        """On all machines."""
        return self.machines * self.ranks_each

    @property
    def busy_cores(self) -> float:
        """Of a machine."""
        return min(self.cores_each, self.ranks_each)


@dataclass(frozen=True)
class Load:
    """What one exchange asks for.

    Attributes
    ----------
    steps_within, steps_between : float
        Messages that have to wait for one another.
    bytes_within : float
        Passed on by MPI within a machine, by each of its busy cores.
    bytes_between : float
        That leave a machine.
    added, rounded : float
        Elements that are added or copied in memory, and turned into 16 bits or back, by each busy
        core.
    """

    steps_within: float = 0
    steps_between: float = 0
    bytes_within: float = 0
    bytes_between: float = 0
    added: float = 0
    rounded: float = 0


@dataclass(frozen=True)
class Rates:
    """Seconds for one of each of what is in a `Load`; NaN where nothing was measured."""

    steps_within: float
    steps_between: float
    bytes_within: float
    bytes_between: float
    added: float
    rounded: float


def load(strategy: str, parameters: int, layout: Layout) -> Load:
    """What an exchange of float32 gradients asks for.

    Parameters
    ----------
    strategy : str
        One of `STRATEGIES`.
    parameters : int
        Elements of the vector.
    layout : Layout
        Where the ranks are.
    """
    if layout.ranks == 1:
        return Load()
    if strategy == "hierarchical":
        return _hierarchical(parameters, layout)
    size = parameters * (2 if strategy == "asa16" else 4)
    r, every, cores = layout.ranks_each, layout.ranks, layout.busy_cores
    if strategy == "ar":
        # MPI halves a long vector again and again, with neighbours first: seen on a cable to take
        # the least bytes that are possible. Back it goes the same way.
        out = 2 * size * (layout.machines - 1) / layout.machines
        inside: float = 2 * size * (r - 1)
        steps = 2 * math.log2(every)
    else:
        # All to all: each rank sends its part to each other one. All-gather, a ring: each passes on
        # to the next what comes from the one before, so that one of a machine sends out of it.
        ring, ends = size * (every - 1) / every, layout.machines > 1
        out = size * r * (every - r) / every + ring * ends
        inside = size * r * (r - 1) / every + ring * (r - ends)
        steps = 2 * (every - 1)
    # And two barriers. Ranks that share a core wait for their turns.
    waits = (steps + 2 * math.log2(every)) * r / cores
    return Load(
        steps_within=waits if layout.machines == 1 else 0,
        steps_between=waits if layout.machines > 1 else 0,
        bytes_within=inside / cores,
        bytes_between=out,
        added=0 if strategy == "asa16" else parameters * r / cores,
        rounded=(3 + 1 / every) * parameters * r / cores if strategy == "asa16" else 0,
    )


def _hierarchical(parameters: int, layout: Layout) -> Load:
    """Within a machine, sums and copies in shared memory; between machines, ASA of leaders."""
    between = load("asa", parameters, Layout(layout.machines, 1))
    r, cores = layout.ranks_each, layout.busy_cores
    return Load(
        steps_within=4 * math.log2(r) * r / cores,
        steps_between=between.steps_between,
        bytes_between=between.bytes_between,
        # All vectors are added, the others copy the leader's; and the leader alone adds what comes
        # from other machines.
        added=parameters * ((r + r - 1) * (r > 1) / cores + (layout.machines > 1)),
    )


def seconds(rates: Rates, asked: Load) -> float:
    """How long an exchange lasts. A rate that is not known counts only if it is asked for."""
    pairs = zip(astuple(rates), astuple(asked), strict=True)
    return sum(rate * amount for rate, amount in pairs if amount)


def fit(loads: Sequence[Load], measured: Sequence[float]) -> Rates:
    """Rates by which the logarithms of predicted and measured seconds differ least, in squares.

    So a tenth too much weighs as much as a tenth too little, of a millisecond as of a second.

    Parameters
    ----------
    loads : sequence of Load
        Of exchanges.
    measured : sequence of float
        Their seconds, each above 0.

    Raises
    ------
    ValueError
        There are fewer measurements than rates.
    """
    rows, times = np.array([astuple(each) for each in loads], float), np.array(measured, float)
    asked = rows.any(axis=0)
    if len(rows) < asked.sum():
        raise ValueError(f"{asked.sum()} rates can't be fitted to {len(rows)} measurements")
    relative = rows[:, asked] / times[:, None]
    # Each rate alone can't be larger than what would explain a measurement by itself.
    start = np.log(1 / relative.max(axis=0))
    best = least_squares(lambda logs: np.log(relative @ np.exp(logs)), start)
    found = np.full(len(fields(Rates)), np.nan)
    found[asked] = np.exp(best.x)
    return Rates(*found.tolist())


def speedup(ranks: int, compute: float, exchange: float) -> float:
    """How many times faster ranks are than one, each at the same number of images in a step.

    Parameters
    ----------
    ranks : int
        How many.
    compute, exchange : float
        Seconds of a step; nothing overlaps.
    """
    return ranks * compute / (compute + exchange)


@dataclass(frozen=True)
class Network:
    """A network as Theano-MPI trained it (Ma, Mao, Taylor 2016, arXiv 1605.08325), on eight GPUs.

    Attributes
    ----------
    name : str
        The network's.
    parameters : int
        How many; the paper trained GoogLeNet with its auxiliary classifiers or without, which is
        not known here: this is with them.
    batch : int
        Images of a rank in a step.
    exchange : mapping of str to float
        Seconds of communication for 5,120 images, by strategy.
    speedup : float
        Of its slowest strategy, over one GPU.
    """

    name: str
    parameters: int
    batch: int
    exchange: dict[str, float]
    speedup: float

    @property
    def steps(self) -> float:
        """Of eight ranks, for 5,120 images."""
        return 5120 / (8 * self.batch)

    @property
    def compute(self) -> float:
        """Seconds of one GPU for a step.

        From the slowest strategy, whose rounded figure says most: with T for 5,120 images on one
        GPU, ``T / speedup = T / 8 + exchange``.
        """
        alone = max(self.exchange.values()) / (1 / self.speedup - 1 / 8)
        return alone / 8 / self.steps


THEANO_MPI = (
    Network("AlexNet", 60_965_224, 128, {"ar": 2.01, "asa": 0.75, "asa16": 0.47}, 5.3),
    Network("GoogLeNet", 13_378_280, 32, {"ar": 2.07, "asa": 1.96, "asa16": 1.76}, 7.1),
    Network("VGG-16", 138_357_544, 32, {"ar": 41.4, "asa": 8.6, "asa16": 4.84}, 4.3),
)
