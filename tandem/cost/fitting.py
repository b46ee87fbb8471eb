"""The speed of a trainer from the seconds that lines of its step took."""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.cost.machine import DEFAULT, Speed
from tandem.ops.work import Work

_SMALL = 1 << 14  # bytes: a line of fewer takes as long as its call
_STREAM = "update"  # the kind that passes through the most memory, none of it in a cache
_USUAL = "elementwise"


@dataclass(frozen=True)
class TimedLine:
    """The work of a line of a program, and the seconds that it took, those of its operands'
    conversions included."""

    work: Work
    seconds: float

    @property
    def is_work(self) -> bool:
        """Whether it computes or moves anything; a view does not."""
        return bool(self.work.flops or self.work.nbytes)


def fit_speed(lines: Sequence[TimedLine], step: float, trainers: int, threads: int) -> Speed:
    """Fit a speed by which steps take as long as those of which these are the lines.

    The rate of a kind is that of all its lines together, so its longest lines count most. What no
    line explains, between the lines and in views of memory, is divided by the number of lines.

    Parameters
    ----------
    lines : sequence of TimedLine
        All lines of one step, or of one step of several networks.
    step : float
        Seconds of that step, or of these.
    trainers, threads : int
        How many trainers were working at once, and the threads of each.

    Raises
    ------
    ValueError
        No line is an update, or none computes element by element.
    """
    working = [line for line in lines if line.is_work]
    small = [line.seconds for line in working if line.work.nbytes < _SMALL]
    call = statistics.median(small) if small else 0.0
    flops: dict[str, float] = defaultdict(float)
    nbytes: dict[str, float] = defaultdict(float)
    seconds: dict[str, float] = defaultdict(float)
    for line in working:
        flops[line.work.kind] += line.work.flops
        nbytes[line.work.kind] += line.work.nbytes
        seconds[line.work.kind] += max(line.seconds - call, line.seconds / 10)
    for kind in (_STREAM, _USUAL):
        if not flops[kind]:
            raise ValueError(f"no line is of the kind {kind!r}")
    rates = {kind: amount / seconds[kind] for kind, amount in flops.items() if amount}
    rest = max(step - sum(line.seconds for line in working), 0.0)
    return Speed(
        trainers=trainers,
        threads=threads,
        bandwidth=nbytes[_STREAM] / seconds[_STREAM],
        call=call + rest / len(working),
        rates={DEFAULT: rates[_USUAL], **rates},
    )
