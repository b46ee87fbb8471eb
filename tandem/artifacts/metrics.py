"""Sums of losses, errors and seconds between two lines of the record."""

from dataclasses import astuple, dataclass
from operator import add
from typing import Annotated

from pydantic import Field

_Count = Annotated[int, Field(ge=0)]
_Finite = Annotated[float, Field(allow_inf_nan=False)]


@dataclass(frozen=True)
class MetricSums:
    """Sums over pictures, which add up over trainers."""

    loss: _Finite = 0.0  # cross-entropies, in nats
    top1_errors: _Count = 0  # pictures whose label is not ranked first
    top5_errors: _Count = 0  # nor among the first five
    images: _Count = 0

    def __add__(self, other: "MetricSums") -> "MetricSums":
        return MetricSums(*map(add, astuple(self), astuple(other)))


@dataclass(frozen=True)
class Seconds:
    """Seconds of one trainer, by what it did; what a GPU does counts where it is waited for."""

    compute: _Finite = 0.0
    load_wait: _Finite = 0.0
    exchange: _Finite = 0.0
    steps: _Finite = 0.0  # whole training steps, the others included

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(*map(add, astuple(self), astuple(other)))


@dataclass(frozen=True)
class Pending:
    """Metrics since the last line about training, when a checkpoint is written."""

    sums: tuple[MetricSums, ...] = ()  # by rank: another order would give other last bits
    seconds: Seconds = Seconds()  # of trainer 0
