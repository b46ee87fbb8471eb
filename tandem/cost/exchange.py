"""The cost of an exchange between trainers: a model linear in bytes, messages and additions.

Latency and bandwidth (as in Thakur, Rabenseifner, Gropp 2005, "Optimization of collective
communication operations in MPICH"), with two kinds of link, within a machine and between machines.
Shared resources are divided: bytes between machines go through one cable for each machine, and its
cores copy and add.

    seconds = sum of rate_i * load_i

Loads follow from the all-reduce, the number of elements and the layout; rates are fitted to
measurements.
"""

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

import numpy as np

from tandem.distributed import ALL_REDUCES

# Of ranks: ``auto`` stands for another, and of NCCL there is no model.
STRATEGIES = tuple(name for name in ALL_REDUCES if name not in ("auto", "nccl"))
LOCAL = ("memory", "shared")  # of trainers that one launcher starts on one machine


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
    messages: float = 0  # by pipes between trainers of one launcher, one after another
    averaged: float = 0  # elements read and written in shared memory by each busy core


@dataclass(frozen=True)
class Rates:
    """Seconds per unit of each part of a `Load`; NaN if not measured."""

    steps_within: float = math.nan
    steps_between: float = math.nan
    bytes_within: float = math.nan
    bytes_between: float = math.nan
    added: float = math.nan
    rounded: float = math.nan
    messages: float = math.nan
    averaged: float = math.nan


def load(strategy: str, parameters: int, layout: Layout) -> Load:
    """Return the load of exchanging `parameters` float32 numbers, such as gradients.

    The strategy is one of `STRATEGIES`, or on one machine of `LOCAL`. Raises ValueError for others.
    """
    if strategy not in STRATEGIES + LOCAL:
        raise ValueError(f"there is no model of {strategy}")
    if layout.ranks == 1:
        return Load()
    if strategy in LOCAL:
        return _in_memory(strategy, parameters, layout)
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


def _in_memory(strategy: str, parameters: int, layout: Layout) -> Load:
    """Averages in memory that all trainers of a machine see, between two barriers.

    Each trainer averages a shard of all vectors and writes it into all of them, or with "shared"
    into the first one only. Barriers are messages to trainer 0, one from each, and its answers.
    """
    if layout.machines > 1:
        raise ValueError(f"{strategy}: no memory is shared by {layout.machines} machines")
    r, cores = layout.ranks_each, layout.busy_cores
    touched = 1 if strategy == "memory" else (r + 1) / (2 * r)
    return Load(messages=4 * (r - 1), averaged=touched * parameters * r / cores)


def seconds(rates: Rates, asked: Load) -> float:
    """Return the seconds of an exchange; an unknown rate counts only if it is needed."""
    pairs = zip(astuple(rates), astuple(asked), strict=True)
    return sum(rate * amount for rate, amount in pairs if amount)


def not_measured(rates: Rates, asked: Sequence[Load]) -> list[str]:
    """Return the names of the rates that loads need and that are not known."""
    return [
        field.name
        for field in fields(Rates)
        if math.isnan(getattr(rates, field.name)) and any(getattr(a, field.name) for a in asked)
    ]


def fit(loads: Sequence[Load], measured: Sequence[float]) -> Rates:
    """Fit rates by least squares of the logarithms of predicted and measured seconds.

    So relative errors have equal weight, for milliseconds and for seconds. Raises ValueError if
    there are fewer measurements than rates.
    """
    from scipy.optimize import least_squares

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
