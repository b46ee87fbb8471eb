"""The rates of a machine, in a YAML file: how fast it computes, loads and exchanges.

::

    processor: Intel Xeon
    speeds:                   # of ONE of the trainers that work at once
    - trainers: 1
      threads: 2              # of each trainer
      bandwidth: 4.4e+10      # bytes/s of operands and results
      call: 2.0e-05           # seconds of every line beside its work
      rates:                  # FLOP/s by kind, see tandem.ops.work
        default: 2.0e+10
        convolution: 3.4e+11
    load: 1.2e+08             # bytes/s of pixels that a loader fills
    exchange:                 # seconds per unit, see tandem.cost.exchange.Load
      averaged: 4.0e-10

PyDTNN's four keys are accepted too, in its units: `cpu_speed` in FLOP/s and `memory_bw` in bytes/s
replace all rates and bandwidths, `network_bw` in bit/s and `network_lat` in seconds what is between
machines.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self, cast

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from tandem.cost.exchange import Load, Rates
from tandem.errors import InputError, explained
from tandem.files import write_text
from tandem.validation import read_yaml, shown, shown_size, unknown, validated

_LARGEST = 1 << 20  # bytes of a file
DEFAULT = "default"  # the rate of a kind that has none of its own

# Between machines, where nothing was measured: 10 Gbit/s Ethernet by TCP.
ASSUMED_BITS = 10e9  # bit/s
ASSUMED_LATENCY = 50e-6  # seconds


def _number(value: Any) -> Any:
    """Make text a number: YAML 1.1 takes 4e12, without a point and a sign, as text."""
    if not isinstance(value, str):
        return value
    try:
        return float(value)
    except ValueError:
        return value


Number = Annotated[float, BeforeValidator(_number)]


def _quantity(unit: str, default: Any = ..., least: str = "gt") -> Any:
    """Field of a finite number of a unit, above 0 or with ``ge`` at least 0."""
    words = {"gt": "above 0", "ge": "of at least 0"}[least]
    details: Any = {"allowed": f"a number of {unit} {words}"}
    bounds: Any = {least: 0}
    return Field(default, json_schema_extra=details, allow_inf_nan=False, **bounds)


def _count(meaning: str, default: Any = ...) -> Any:
    return Field(default, ge=1, json_schema_extra={"allowed": f"{meaning}, a number of at least 1"})


def _rates(found: Mapping[str, Any]) -> dict[str, float]:
    """Check the rates by kind of work."""
    from tandem.ops.work import KINDS  # it imports PyTensor

    numbers = {kind: _number(rate) for kind, rate in found.items()}
    for kind, rate in numbers.items():
        if kind not in (DEFAULT, *KINDS):
            raise ValueError(unknown(kind, [DEFAULT, *KINDS], kind="kind"))
        is_number = isinstance(rate, int | float) and not isinstance(rate, bool)
        if not (is_number and 0 < rate < math.inf):
            raise ValueError(f"{kind} is {shown(rate)}, expected a number of FLOP/s above 0")
    if DEFAULT not in numbers:
        raise ValueError(f"no rate {DEFAULT!r}, which kinds without one of their own have")
    return {kind: float(rate) for kind, rate in numbers.items()}


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Speed(_Part):
    """The speed of each trainer while `trainers` work on the machine at once."""

    trainers: int = _count("the trainers that work at once")
    threads: int = _count("the threads of each trainer")
    bandwidth: Number = _quantity("bytes/s")
    call: Number = _quantity("seconds", 0.0, "ge")
    rates: Annotated[dict[str, Any], AfterValidator(_rates)] = Field(  # FLOP/s
        json_schema_extra={"allowed": "FLOP/s by kind of work"}
    )

    def rate(self, kind: str) -> float:
        """Return the FLOP/s of a kind, or of the kind that its first words name, or the default."""
        words = kind.split()
        names = (" ".join(words[:count]) for count in range(len(words), 0, -1))
        return next((self.rates[name] for name in names if name in self.rates), self.rates[DEFAULT])

    def seconds(self, kind: str, flops: float, nbytes: float) -> float:
        """Return the seconds of a line: by its operations or its bytes, whichever takes longer.

        A line without work, such as a view of memory, takes none.
        """
        if not flops and not nbytes:
            return 0.0
        return max(flops / self.rate(kind), nbytes / self.bandwidth) + self.call

    def slower(self, factor: float) -> "Speed":
        """Return the speed of which everything takes `factor` times as long."""
        changes = {
            "bandwidth": self.bandwidth / factor,
            "call": self.call * factor,
            "rates": {kind: rate / factor for kind, rate in self.rates.items()},
        }
        return self.model_copy(update=changes)


class ExchangeRates(_Part):
    """Seconds per unit of the parts of an exchange; None if not measured."""

    steps_within: Number | None = _quantity("seconds", None, "ge")
    steps_between: Number | None = _quantity("seconds", None, "ge")
    bytes_within: Number | None = _quantity("seconds per byte", None, "ge")
    bytes_between: Number | None = _quantity("seconds per byte", None, "ge")
    added: Number | None = _quantity("seconds per element", None, "ge")
    rounded: Number | None = _quantity("seconds per element", None, "ge")
    messages: Number | None = _quantity("seconds", None, "ge")
    averaged: Number | None = _quantity("seconds per element", None, "ge")

    @classmethod
    def of(cls, rates: Rates) -> Self:
        """Take those of fitted rates that were measured."""
        found = dataclasses.asdict(rates)
        return cls(**{name: value for name, value in found.items() if not math.isnan(value)})


@dataclass(frozen=True)
class KnownRates:
    """All rates of an exchange, and the names of those that were assumed, not measured."""

    rates: Rates
    assumed: frozenset[str]

    def assumptions(self, asked: Load) -> list[str]:
        """Return the names of the assumed rates that an exchange needs."""
        needed = (name for name, amount in dataclasses.asdict(asked).items() if amount)
        return [name for name in needed if name in self.assumed]


class Machine(_Part):
    """A machine of a cluster, whose machines are all alike."""

    processor: str = ""
    # Its GPUs: trainers up to this number do not slow each other down.
    devices: int = Field(default=0, ge=0, json_schema_extra={"allowed": "a number of GPUs"})
    speeds: tuple[Speed, ...] = ()
    load: Number | None = _quantity("bytes/s", None)
    exchange: ExchangeRates = ExchangeRates()
    # PyDTNN's keys:
    cpu_speed: Number | None = _quantity("FLOP/s", None)
    memory_bw: Number | None = _quantity("bytes/s", None)
    network_bw: Number | None = _quantity("bit/s", None)
    network_lat: Number | None = _quantity("seconds", None, "ge")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a machine's file. Raises InputError if it cannot be used."""
        if path.is_file() and (size := path.stat().st_size) > _LARGEST:
            raise InputError(
                f"{path}: has {shown_size(size)}; expected the rates of a machine, in a few kB of "
                "YAML (a trace is named by --from)"
            )
        return cls.of(read_yaml(path), path)

    @classmethod
    def of(cls, values: Mapping[str, Any], source: object = "") -> Self:
        """Make a machine of plain values. Raises InputError, which names the `source`."""
        where, speeds = f"{source}: " if str(source) else "", values.get("speeds", [])
        if not isinstance(speeds, list | tuple):
            raise InputError(f"{where}speeds is {shown(speeds)}; it must be a list of speeds")
        made = tuple(
            validated(Speed, speed, source=f"{where}speeds, entry {number}")
            for number, speed in enumerate(speeds, start=1)
        )
        machine = validated(cls, {**values, "speeds": made}, source=source)
        if len({speed.trainers for speed in made}) < len(made):
            raise InputError(f"{where}speeds has two entries for one number of trainers")
        if not made and None in (machine.cpu_speed, machine.memory_bw):
            raise InputError(
                f"{where}holds no speeds; expected speeds, which 'tandem cost --calibrate' "
                "measures, or cpu_speed and memory_bw"
            )
        return machine

    def save(self, path: Path) -> None:
        """Write the file that `read` reads. Raises InputError if it cannot be written."""
        with explained(path, "cannot be written"):
            write_text(path, yaml.safe_dump(self.plain(), sort_keys=False))

    def plain(self) -> dict[str, Any]:
        """Return the plain values of which `of` makes the machine."""
        return self.model_dump(mode="json", exclude_none=True, exclude_defaults=True)

    def speed(self, trainers: int) -> Speed:
        """Return the speed of each of a number of trainers that work at once.

        It is that measured with the most trainers up to this number; more share what these have.
        """
        known = self._speeds()
        nearest = max(
            (speed for speed in known if speed.trainers <= trainers),
            key=lambda speed: speed.trainers,
            default=min(known, key=lambda speed: speed.trainers),
        )
        together = max(nearest.trainers, self.devices)
        return nearest.slower(max(1.0, trainers / together))

    @property
    def trainers(self) -> int:
        """The most trainers that were measured at once, or its number of GPUs."""
        return max(self.devices, *(speed.trainers for speed in self._speeds()))

    @property
    def fewest(self) -> int:
        """The fewest trainers that were measured at once; 1 of GPUs, which share nothing."""
        return 1 if self.devices else min(speed.trainers for speed in self._speeds())

    @property
    def cores(self) -> float:
        """The cores that copy and add in an exchange; on GPUs one for each trainer."""
        if self.devices:
            return math.inf
        return max(speed.trainers * speed.threads for speed in self._speeds())

    def exchange_rates(self, trainers: int) -> KnownRates:
        """Return the rates of an exchange of a number of trainers; assume those not measured.

        Within a machine an assumed rate follows from the bandwidth of memory, which each element
        passes once for every operand and result, and a message takes `ASSUMED_LATENCY`; between
        machines a cable has `ASSUMED_BITS`.
        """
        byte = 1 / self.speed(min(trainers, self.trainers)).bandwidth
        assumed = {
            "steps_within": ASSUMED_LATENCY,
            "steps_between": ASSUMED_LATENCY,
            "bytes_within": 2 * byte,  # read and written
            "bytes_between": 8 / ASSUMED_BITS,
            "added": 12 * byte,  # two operands and a result of 4 bytes
            "rounded": 6 * byte,
            "messages": ASSUMED_LATENCY,
            "averaged": 8 * byte,
        }
        known = self.exchange.model_dump(exclude_none=True)
        if self.network_bw is not None:
            known["bytes_between"] = 8 / self.network_bw
        if self.network_lat is not None:
            known["steps_between"] = self.network_lat
        return KnownRates(Rates(**{**assumed, **known}), frozenset(assumed) - set(known))

    def _speeds(self) -> tuple[Speed, ...]:
        """Return the speeds, with PyDTNN's numbers in place of theirs where there are any."""
        if not self.speeds:
            rates, bandwidth = {DEFAULT: self.cpu_speed}, cast(float, self.memory_bw)
            return (Speed(trainers=1, threads=1, bandwidth=bandwidth, rates=rates),)
        changes: dict[str, Any] = {}
        if self.cpu_speed is not None:
            changes["rates"] = {DEFAULT: self.cpu_speed}
        if self.memory_bw is not None:
            changes["bandwidth"] = self.memory_bw
        return tuple(speed.model_copy(update=changes) for speed in self.speeds)
