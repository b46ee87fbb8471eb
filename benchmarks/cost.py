"""The cost of an exchange over ranks: a model linear in bytes, messages and additions.

Latency and bandwidth (as in Thakur, Rabenseifner, Gropp 2005, "Optimization of collective
communication operations in MPICH"), with two kinds of link, within a machine and between machines.
Shared resources are divided: bytes between machines go through one cable for each machine, and its
cores copy and add.

    seconds = sum of rate_i * load_i

Loads follow from the all-reduce, the number of parameters and the layout; rates are fitted to
measurements.
"""

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

import numpy as np
from scipy.optimize import least_squares

STRATEGIES = ("ar", "asa", "asa16", "hierarchical")


@dataclass(frozen=True)
class Layout:
    """Layout of ranks over identical machines."""

    machines: int
    ranks_each: int
    cores_each: float = math.inf  # more than one for each rank do not count

    @property
    def ranks(self) -> int:
        return self.machines * self.ranks_each

    @property
    def busy_cores(self) -> float:
        return min(self.cores_each, self.ranks_each)


@dataclass(frozen=True)
class Load:
    """Load of one exchange."""

    steps_within: float = 0  # messages that wait for one another
    steps_between: float = 0
    bytes_within: float = 0  # forwarded by MPI within a machine, by each of its busy cores
    bytes_between: float = 0  # sent by each machine
    added: float = 0  # elements added or copied in memory by each busy core
    rounded: float = 0  # elements converted to 16 bits or back by each busy core


@dataclass(frozen=True)
class Rates:
    """Seconds per unit of each part of a `Load`; NaN if not measured."""

    steps_within: float
    steps_between: float
    bytes_within: float
    bytes_between: float
    added: float
    rounded: float


def load(strategy: str, parameters: int, layout: Layout) -> Load:
    """Return the load of exchanging `parameters` float32 gradients by one of `STRATEGIES`."""
    if layout.ranks == 1:
        return Load()
    if strategy == "hierarchical":
        return _hierarchical(parameters, layout)
    size = parameters * (2 if strategy == "asa16" else 4)
    r, every, cores = layout.ranks_each, layout.ranks, layout.busy_cores
    if strategy == "ar":
        # MPI halves a long vector repeatedly, with neighbours first, which was measured to send the
        # least possible bytes over a cable. The way back is the same.
        out = 2 * size * (layout.machines - 1) / layout.machines
        inside: float = 2 * size * (r - 1)
        steps = 2 * math.log2(every)
    else:
        # All-to-all: each rank sends a part to each other rank. All-gather, a ring: each forwards
        # what it receives to the next, so one rank of a machine sends to the next machine.
        ring, ends = size * (every - 1) / every, layout.machines > 1
        out = size * r * (every - r) / every + ring * ends
        inside = size * r * (r - 1) / every + ring * (r - ends)
        steps = 2 * (every - 1)
    # Two barriers are added. Ranks that share a core wait for their turns.
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
    """Sums and copies in shared memory within a machine, ASA of leaders between machines."""
    between = load("asa", parameters, Layout(layout.machines, 1))
    r, cores = layout.ranks_each, layout.busy_cores
    return Load(
        steps_within=4 * math.log2(r) * r / cores,
        steps_between=between.steps_between,
        bytes_between=between.bytes_between,
        # All vectors are added and the others copy the leader's; only the leader adds the parts of
        # other machines.
        added=parameters * ((r + r - 1) * (r > 1) / cores + (layout.machines > 1)),
    )


def seconds(rates: Rates, asked: Load) -> float:
    """Return the seconds of an exchange; an unknown rate counts only if it is needed."""
    pairs = zip(astuple(rates), astuple(asked), strict=True)
    return sum(rate * amount for rate, amount in pairs if amount)


def fit(loads: Sequence[Load], measured: Sequence[float]) -> Rates:
    """Fit rates by least squares of the logarithms of predicted and measured seconds.

    So relative errors have equal weight, for milliseconds and for seconds. Raises ValueError if
    there are fewer measurements than rates.
    """
    rows, times = np.array([astuple(each) for each in loads], float), np.array(measured, float)
    asked = rows.any(axis=0)
    if len(rows) < asked.sum():
        raise ValueError(f"{asked.sum()} rates can't be fitted to {len(rows)} measurements")
    relative = rows[:, asked] / times[:, None]
    # No rate is larger than one that explains a measurement alone.
    start = np.log(1 / relative.max(axis=0))
    best = least_squares(lambda logs: np.log(relative @ np.exp(logs)), start)
    found = np.full(len(fields(Rates)), np.nan)
    found[asked] = np.exp(best.x)
    return Rates(*found.tolist())


def speedup(ranks: int, compute: float, exchange: float) -> float:
    """Return the speed-up over one rank from the seconds of a step, without overlap."""
    return ranks * compute / (compute + exchange)


@dataclass(frozen=True)
class Network:
    """A network trained by Theano-MPI on eight GPUs (Ma, Mao, Taylor 2016, arXiv 1605.08325)."""

    name: str
    # GoogLeNet's include the auxiliary classifiers; the paper does not state if it trained them.
    parameters: int
    batch: int  # images per rank and step
    exchange: dict[str, float]  # seconds of communication for 5,120 images, by all-reduce
    speedup: float  # of the slowest all-reduce over one GPU

    @property
    def steps(self) -> float:
        """Number of steps of eight ranks for 5,120 images."""
        return 5120 / (8 * self.batch)

    @property
    def compute(self) -> float:
        """Seconds of one GPU for a step.

        From the slowest all-reduce, whose rounded value is the most precise: with T for 5,120
        images on one GPU, ``T / speedup = T / 8 + exchange``.
        """
        alone = max(self.exchange.values()) / (1 / self.speedup - 1 / 8)
        return alone / 8 / self.steps


THEANO_MPI = (
    Network("AlexNet", 60_965_224, 128, {"ar": 2.01, "asa": 0.75, "asa16": 0.47}, 5.3),
    Network("GoogLeNet", 13_378_280, 32, {"ar": 2.07, "asa": 1.96, "asa16": 1.76}, 7.1),
    Network("VGG-16", 138_357_544, 32, {"ar": 41.4, "asa": 8.6, "asa16": 4.84}, 4.3),
)
