"""The speed of a trainer from the seconds that lines of its steps took."""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.cost.machine import DEFAULT, Speed
from tandem.ops.work import Work

_SMALL = 1 << 14  # bytes: a line of fewer takes as long as its call
_STREAM = "update"  # the kind that passes through the most memory, which is in no cache
_USUAL = "elementwise"
_ADDITION = 12  # bytes for each operation where numbers of 4 bytes are added


@dataclass(frozen=True)
class TimedLine:
    """The work of a line of a program, and the seconds that it took.

    The conversion of an operand is a line without work, of the kind of the line that needs it.
    """

    work: Work
    seconds: float

    @property
    def is_view(self) -> bool:
        """Return whether it neither computes nor moves anything, for itself or for another line."""
        return self.work.kind == "view"

    @property
    def works(self) -> bool:
        """Return whether it has work of its own."""
        return bool(self.work.flops or self.work.nbytes)


@dataclass(frozen=True)
class TimedSteps:
    """Steps of one network; times in seconds."""

    lines: list[TimedLine]  # of one step
    step: float  # that of which these are the lines
    slowest: float


def fit_speed(lines: Sequence[TimedLine], steps: float, trainers: int, threads: int) -> Speed:
    """Fit the speed by which steps take as long as they did.

    The rate of a kind is that of all its lines together, so the longest count most. The time
    between lines, and that of views, is divided by the number of lines that work.

    Parameters
    ----------
    lines : sequence of TimedLine
        All lines of some steps, maybe of several networks.
    steps : float
        Seconds of these steps together.
    trainers, threads : int
        How many trainers worked at once, and the threads of each.

    Raises
    ------
    ValueError
        No line is an update of weights, by which the bandwidth of memory is measured.
    """
    working = [line for line in lines if line.works]
    small = [line.seconds for line in working if line.work.nbytes < _SMALL]
    call = statistics.median(small) if small else 0.0
    flops: dict[str, int] = defaultdict(int)
    nbytes: dict[str, int] = defaultdict(int)
    seconds: dict[str, float] = defaultdict(float)
    for line in lines:
        flops[line.work.kind] += line.work.flops
        nbytes[line.work.kind] += line.work.nbytes
        called = min(call, 0.9 * line.seconds) if line.works else 0.0
        seconds[line.work.kind] += line.seconds - called
    if not nbytes[_STREAM]:
        raise ValueError("no line updates weights")
    bandwidth = nbytes[_STREAM] / seconds[_STREAM]
    rates = {kind: amount / seconds[kind] for kind, amount in flops.items() if amount}
    between = steps - sum(line.seconds for line in lines if not line.is_view)
    return Speed(
        trainers=trainers,
        threads=threads,
        bandwidth=bandwidth,
        call=call + max(between, 0.0) / len(working),
        rates={DEFAULT: rates.get(_USUAL, bandwidth / _ADDITION), **dict(sorted(rates.items()))},
    )
