"""Calls, totals and medians of a trace: of spans, of layers and of Ops.

PyDTNN's tracer has these columns, for the events of each layer (forward, backward, allreduce, wait,
update). Here the exchange has spans of its own: it averages buckets of parameters, not layers.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from statistics import median
from typing import Any

from tandem.trace.chrome import Trace
from tandem.trace.spans import STEP, Span, spans_of

REST = "(rest)"  # of a step: in no span within it
LINES = "(lines)"  # of compiled functions
_PHASES = "forward", "backward", "update"


@dataclass(frozen=True)
class Row:
    """Spans of one name and place; times in seconds.

    `share` is that of the time of all steps, None where there is none. `path` begins with the kind
    of process and the thread, and ends with the name; of layers it is (layer, phase), of Ops (Op,
    kind of work).
    """

    path: tuple[str, ...]
    calls: int
    total: float
    median: float
    share: float | None
    flops: int = 0
    nbytes: int = 0


@dataclass(frozen=True)
class Table:
    """The rows of a trace: of spans, and, where there are lines of functions, of layers and Ops."""

    spans: Sequence[Row]
    layers: Sequence[Row]
    ops: Sequence[Row]

    def as_json(self) -> dict[str, Any]:
        """Plain values of all rows."""
        return asdict(self)


def tabulate(trace: Trace) -> Table:
    """Add up the spans of a trace, over all processes of a kind."""
    spans = spans_of(trace)
    steps = sum(span.seconds for span in spans if span.name == STEP)
    lines = [span for span in spans if span.is_op and span.around(STEP)]
    return Table(_span_rows(spans, steps), _layer_rows(lines, steps), _op_rows(lines, steps))


def _span_rows(spans: Sequence[Span], steps: float) -> list[Row]:
    """Make the rows of spans, each after its parent; the Ops of a span share one row."""
    times: dict[tuple[str, ...], list[float]] = defaultdict(list)
    rest = {span: span.seconds for span in spans if span.name == STEP}
    for span in spans:
        times[_path(span)].append(span.seconds)
        if span.parent in rest:
            rest[span.parent] -= span.seconds
    for span, seconds in rest.items():
        times[*_path(span), REST].append(seconds)
    places: dict[tuple[str, ...], int] = {}
    for path in times:
        for length in range(1, len(path) + 1):
            places.setdefault(path[:length], len(places))
    rows = [_row(path, seconds, steps) for path, seconds in times.items()]
    return sorted(rows, key=lambda row: [places[row.path[: n + 1]] for n in range(len(row.path))])


def _layer_rows(lines: Sequence[Span], steps: float) -> list[Row]:
    """Rows of layers and phases; a call is all that one step computes for a layer in a phase.

    Layers are in the order in which their forward passes end: where they begin, a mask of a late
    layer may be drawn early.
    """
    found: dict[tuple[str, ...], dict[Span | None, list[Span]]] = {}
    ends: dict[str, int] = {}
    for number, span in enumerate(lines):
        layer, phase = span.args["layer"], span.args["phase"]
        found.setdefault((layer, phase), defaultdict(list))[span.around(STEP)].append(span)
        if phase == "forward":
            ends[layer] = number
    rows = []
    for path, calls in found.items():
        times = [sum(span.seconds for span in those) for those in calls.values()]
        rows.append(_row(path, times, steps, chain(*calls.values())))
    return sorted(
        rows, key=lambda row: (ends.get(row.path[0], len(lines)), row.path[0], _phase(row))
    )


def _phase(row: Row) -> int:
    return _PHASES.index(row.path[1]) if row.path[1] in _PHASES else len(_PHASES)


def _op_rows(lines: Iterable[Span], steps: float) -> list[Row]:
    """Rows of Ops and their kinds of work, the longest first."""
    found: dict[tuple[str, ...], list[Span]] = defaultdict(list)
    for span in lines:
        found[span.name, span.args.get("kind", "")].append(span)
    rows = [_row(p, [span.seconds for span in those], steps, those) for p, those in found.items()]
    return sorted(rows, key=lambda row: -row.total)


def _row(
    path: tuple[str, ...], times: Sequence[float], steps: float, lines: Iterable[Span] = ()
) -> Row:
    total, args = sum(times), [span.args for span in lines]
    return Row(
        path,
        calls=len(times),
        total=total,
        median=median(times),
        share=total / steps if steps else None,
        flops=sum(each.get("flops", 0) for each in args),
        nbytes=sum(each.get("bytes", 0) for each in args),
    )


def _path(span: Span) -> tuple[str, ...]:
    """Kind of process, thread, and names from the outermost span to this one."""
    names: list[str] = []
    around: Span | None = span
    while around is not None:
        names.append(LINES if around.is_op else around.name)
        around = around.parent
    return (span.kind, span.thread, *reversed(names))
