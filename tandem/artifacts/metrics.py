"""Sums of losses, errors and seconds between two lines of the record."""

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from operator import add
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

_Count = Annotated[int, Field(ge=0, lt=1 << 63)]
_Finite = Annotated[float, Field(allow_inf_nan=False)]

_Sum = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]


@dataclass(frozen=True)
class Sums:
    """Sums over pictures, which add up over trainers.

    Trainers that compute one graph together may count an error elsewhere than its picture.
    """

    images: _Count = 0
    loss: _Finite = 0.0
    # Pictures whose label is not ranked first (top1_errors), nor among the first five
    # (top5_errors), and what the metrics of the run add up; NaN where it is not known.
    values: Mapping[str, _Sum | tuple[_Sum, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("top1_errors", "top5_errors"):
            errors = self.values.get(name, 0)
            if isinstance(errors, tuple) or errors < 0:
                raise ValueError(f"{name}: found {errors}, expected a number of pictures")

    def __add__(self, other: "Sums") -> "Sums":
        names = {**self.values, **other.values}
        values = {name: _added(self._sum(name), other._sum(name)) for name in names}
        return Sums(self.images + other.images, self.loss + other.loss, values)

    def _sum(self, name: str) -> float | tuple[float, ...] | None:
        """A sum; None where there is nothing to add up, NaN where it has not been counted."""
        return self.values.get(name, math.nan if self.images else None)

    def error(self, k: int) -> float:
        """The top-k error, of 1 or 5; NaN without images, or where errors are not counted."""
        errors = self.values.get(f"top{k}_errors", math.nan)
        return errors / self.images if self.images and not isinstance(errors, tuple) else math.nan

    @property
    def mean_loss(self) -> float:
        """The mean of the loss; NaN without images."""
        return self.loss / self.images if self.images else math.nan

    def as_json(self) -> dict[str, Any]:
        """All sums beside each other, as in files of before there were metrics."""
        values = {name: _plain(value) for name, value in self.values.items()}
        return {"loss": self.loss, **values, "images": self.images}


def _added(
    one: float | tuple[float, ...] | None, other: float | tuple[float, ...] | None
) -> float | tuple[float, ...]:
    if one is None or other is None:
        return (one if other is None else other) or 0
    if isinstance(one, tuple) or isinstance(other, tuple):
        pair = [value if isinstance(value, tuple) else (value,) for value in (one, other)]
        return tuple(map(add, *pair))
    return one + other


def _plain(value: float | tuple[float, ...]) -> Any:
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return value if math.isfinite(value) else None


def _nested(value: Any) -> Any:
    """Return what `Sums.as_json` returned, as its fields."""
    if not isinstance(value, dict):
        return value
    values = {
        key: tuple(sums) if isinstance(sums, list) else sums
        for key, sums in value.items()
        if key not in ("images", "loss")
    }
    return {key: value[key] for key in ("images", "loss") if key in value} | {"values": values}


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

    # By rank: another order would give other last bits.
    sums: tuple[Annotated[Sums, BeforeValidator(_nested)], ...] = ()
    seconds: Seconds = Seconds()  # of trainer 0

    def __post_init__(self) -> None:
        whole = sum(self.sums, Sums())
        for name in ("top1_errors", "top5_errors"):
            errors = whole.values.get(name, 0)
            if isinstance(errors, tuple) or errors > whole.images:
                raise ValueError(f"{name}: found {errors}, expected at most images, {whole.images}")
