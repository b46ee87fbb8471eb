"""Spans of a trace, and how they nest."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from tandem.trace.chrome import Event, Trace

STEP = "step"  # the outermost span of a trainer's step
_ROUNDING = 1e-8  # seconds: times are multiples of 1 ns, in floating point


@dataclass(eq=False, slots=True)
class Span:
    """One span of a thread; times in seconds.

    `kind` is that of its process, trainer or loader; `parent` is the shortest span of the same
    thread that is still open when it begins.
    """

    kind: str
    process: int
    thread: str
    name: str
    begin: float
    end: float
    args: dict[str, Any]
    parent: "Span | None" = field(default=None, repr=False)

    @property
    def seconds(self) -> float:
        """Return how long it lasts."""
        return self.end - self.begin

    @property
    def is_op(self) -> bool:
        """Return whether it is one line of a compiled function."""
        return "op" in self.args

    def around(self, name: str) -> "Span | None":
        """Return the innermost span of this name around it, or itself."""
        found: Span | None = self
        while found is not None and found.name != name:
            found = found.parent
        return found


def spans_of(trace: Trace) -> list[Span]:
    """Return all spans, by process and thread, each after its parent."""
    kinds = {header.number: header.kind for header in trace.processes}
    threads = {
        (event["pid"], event["tid"]): str(event["args"].get("name"))
        for event in trace.events
        if event["ph"] == "M" and event["name"] == "thread_name"
    }
    events = [event for event in trace.events if event["ph"] == "X"]
    events.sort(key=lambda e: (e["pid"], e["tid"], e["ts"], -e["dur"]))
    found: list[Span] = []
    for place, those in groupby(events, key=lambda e: (e["pid"], e["tid"])):
        thread = threads.get(place, str(place[1]))
        found += _nested([_span(event, kinds.get(place[0], "?"), thread) for event in those])
    return found


def _span(event: Event, kind: str, thread: str) -> Span:
    begin = event["ts"] / 1e6
    end = begin + event["dur"] / 1e6
    return Span(kind, event["pid"], thread, event["name"], begin, end, event.get("args", {}))


def _nested(spans: list[Span]) -> Iterator[Span]:
    """The spans of a thread, in the order in which they begin, with their parents."""
    around: list[Span] = []
    for span in spans:
        while around and around[-1].end <= span.begin + _ROUNDING:
            around.pop()
        span.parent = around[-1] if around else None
        around.append(span)
        yield span
