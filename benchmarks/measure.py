"""Timing and comparing: contenders in turn, many rounds, ratios of medians.

A machine that is shared or grows warm slows everything that runs at that time. So contenders run in
turn, round after round, and the result is a ratio: of the medians, with the quartiles of the ratio
within each round.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

from tandem.processor import STEERING, processor_model
from tandem.text_table import aligned

Step = Callable[[], Any]
Kind = Literal["speed", "time"]


@dataclass(frozen=True)
class Measured:
    """Seconds of one contender, each the mean of a round's repetitions."""

    name: str
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        return quartiles(self.seconds)

    def scaled(self, factor: float) -> "Measured":
        """Scale to another amount of work."""
        return Measured(self.name, tuple(factor * seconds for seconds in self.seconds))


@dataclass(frozen=True)
class Comparison:
    """A comparison of two contenders: a line of the table."""

    question: str  # such as "training step, batch 64, 227 pixels"
    name: str
    peer: str
    # "speed": the ratio is the peer's time over ours, more is better; "time": the other way round.
    kind: Kind
    ratio: float  # of the medians
    low: float  # quartiles of the ratios within each round
    high: float
    target: float | None  # of the ratio; None for information only
    seconds: float  # medians
    peer_seconds: float
    rounds: int

    @property
    def reached(self) -> bool | None:
        """Return whether the ratio reaches the target; None without one."""
        if self.target is None:
            return None
        return self.ratio >= self.target if self.kind == "speed" else self.ratio <= self.target


@dataclass(frozen=True)
class Figure:
    """A value without a peer: a line of the table."""

    question: str
    name: str
    value: float
    unit: str
    target: float  # the upper limit

    @property
    def reached(self) -> bool:
        """Return whether the value is at most the target."""
        return self.value <= self.target


@dataclass(frozen=True)
class Part:
    """A part of a whole's time: a line of the table."""

    question: str  # the whole
    name: str
    seconds: float  # medians
    whole_seconds: float
    operations: int  # floating-point operations if counted, else 0
    rate: float  # operations per second that the machine reaches

    @property
    def reached(self) -> None:
        """A part has no target."""


Found = Comparison | Figure | Part


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """Return the first and third quartile; for a single value, the value itself."""
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4)
    return low, high


def measure(
    contenders: Mapping[str, Step],
    rounds: int,
    repeats: int = 1,
    synchronize: Callable[[], None] = lambda: None,
    warmups: int = 1,
    settle: float = 0.0,
) -> list[Measured]:
    """Time contenders in turn, each called `repeats` times in a row in each round.

    `synchronize` waits for the device before each reading of the clock; `warmups` are rounds that
    do not count; each turn begins with calls that do not count, for `settle` seconds.
    """

    def turn(step: Step) -> float:
        ready = time.perf_counter() + settle
        while time.perf_counter() < ready:
            step()
        return seconds_per_call(step, repeats, synchronize)

    turns = {name: partial(turn, step) for name, step in contenders.items()}
    return [*in_turn(turns, rounds, warmups).values()]


def seconds_per_call(
    call: Step, times: int = 1, synchronize: Callable[[], None] = lambda: None
) -> float:
    """Return the mean seconds of a call, over several in a row."""
    synchronize()
    begun = time.perf_counter()
    for _ in range(times):
        call()
    synchronize()
    return (time.perf_counter() - begun) / times


def in_turn(
    turns: Mapping[str, Callable[[], float]], rounds: int, warmups: int = 1
) -> dict[str, Measured]:
    """Let contenders, which time themselves, take turns; the first rounds do not count."""
    found: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(warmups + rounds):
        for name, turn in turns.items():
            seconds = turn()
            if number >= warmups:
                found[name].append(seconds)
    return {name: Measured(name, tuple(seconds)) for name, seconds in found.items()}


def compare(
    question: str,
    ours: Measured,
    peer: Measured,
    kind: Kind = "speed",
    target: float | None = None,
) -> Comparison:
    """Compare two contenders that were measured in the same rounds."""
    pairs = list(zip(ours.seconds, peer.seconds, strict=True))
    if kind == "speed":
        ratio, ratios = peer.median / ours.median, [theirs / own for own, theirs in pairs]
    else:
        ratio, ratios = ours.median / peer.median, [own / theirs for own, theirs in pairs]
    low, high = quartiles(ratios)
    return Comparison(
        question,
        ours.name,
        peer.name,
        kind,
        ratio,
        low,
        high,
        target,
        ours.median,
        peer.median,
        len(pairs),
    )


def row(found: Found) -> dict[str, Any]:
    """Return a result as a JSON object."""
    numbers = {k: float(f"{v:.4g}") for k, v in asdict(found).items() if isinstance(v, float)}
    return asdict(found) | numbers | {"reached": found.reached}


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Format rows as text, one block for each question."""
    rows = list(rows)
    blocks = []
    for question in dict.fromkeys(row["question"] for row in rows):
        cells = [_cells(row) for row in rows if row["question"] == question]
        lines = aligned(cells, left=range(len(cells[0])))
        blocks += [question, *(f"  {line}" for line in lines)]
    return "\n".join(blocks)


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    if "unit" in row:
        value, target = (f"{row[key]:g} {row['unit']}" for key in ("value", "target"))
        return row["name"], value, "", "", f"at most {target}: {'yes' if row['reached'] else 'NO'}"
    if "whole_seconds" in row:
        share = row["seconds"] / row["whole_seconds"]
        cells = row["name"], f"{1000 * row['seconds']:.1f} ms", f"{share:.1%}"
        if not row["operations"]:
            return *cells, "", ""
        rate = row["operations"] / row["seconds"]
        return *cells, f"{rate / 1e9:.0f} GFLOP/s", f"{rate / row['rate']:.0%} of the machine's"
    unit, sign = ("speed", "at least") if row["kind"] == "speed" else ("time", "at most")
    target = row["target"]
    return (
        row["name"],
        f"{row['ratio']:.2f} x the {unit} of",
        row["peer"],
        f"({row['low']:.2f} to {row['high']:.2f})",
        "" if target is None else f"{sign} {target:g}: {'yes' if row['reached'] else 'NO'}",
    )


def setting() -> dict[str, Any]:
    """Return the hardware, versions and steering environment of a measurement."""
    import importlib.metadata as metadata

    import torch

    packages = ("torch", "pytensor", "numpy", "numba", "pillow", "h5py")
    return {
        "processor": processor_model() or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "steering": {name: os.environ[name] for name in STEERING if name in os.environ},
        "system": platform.platform(),
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in packages},
    }


def machine() -> str:
    """Return the line above a table: processor, cores, vector instructions and what limits them."""
    now = setting()
    parts = [now["processor"], f"{now['cores']} cores", now["capability"]]
    if now["steering"]:
        limits = " ".join(f"{name}={value}" for name, value in now["steering"].items())
        parts.append(f"emulated by {limits}")
    return ", ".join(parts)


def parser_of(description: str | None, **options: Any) -> argparse.ArgumentParser:
    """Make a parser whose ``--help`` shows a docstring as it is; `options` are argparse's."""
    return argparse.ArgumentParser(
        description=description,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        **options,
    )


def run(
    description: str | None,
    answer: Callable[..., Iterator[Found]],
    rounds: int,
    **choices: Sequence[str],
) -> int:
    """Run the command line of a benchmark: print JSON lines, then a table; return the exit status.

    `answer` takes the number of rounds, and for each option of `choices` one of its choices or
    None; it yields results.
    """
    parser = parser_of(description)
    parser.add_argument("--rounds", type=int, default=rounds, help=f"default {rounds}")
    for name, words in choices.items():
        parser.add_argument(f"--{name}", choices=words, help="one of them; all without")
    rows = []
    for found in answer(**vars(parser.parse_args())):
        rows.append(row(found))
        print(json.dumps(rows[-1]), flush=True)
    sys.stderr.write(f"{machine()}\n{table(rows)}\n")
    return 0
