"""Spans of traces, for tests: how they nest, and how much of a step they cover."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.trace.chrome import Trace, read_trace


@dataclass(frozen=True)
class Span:
    """A span of a thread; times in microseconds."""

    name: str
    begin: float
    end: float
    args: dict[str, Any]

    @property
    def seconds(self) -> float:
        return (self.end - self.begin) / 1e6

    def holds(self, other: "Span") -> bool:
        return self.begin <= other.begin and other.end <= self.end


def threads(trace: Trace) -> dict[str, list[Span]]:
    """The spans of a process by thread, in the order of their beginnings; the longest first."""
    names = {e["tid"]: e["args"]["name"] for e in trace.events if e["name"] == "thread_name"}
    found: dict[str, list[Span]] = {name: [] for name in names.values()}
    for e in trace.events:
        if e["ph"] == "X":
            span = Span(e["name"], e["ts"], e["ts"] + e["dur"], e.get("args", {}))
            found[names[e["tid"]]].append(span)
    return {name: sorted(spans, key=lambda s: (s.begin, -s.end)) for name, spans in found.items()}


def spans(path: Path, thread: str = "trainer") -> list[Span]:
    return threads(read_trace(path))[thread]


def children(parent: Span, among: Sequence[Span]) -> list[Span]:
    """The outermost spans within another; checks that no two overlap in part."""
    found: list[Span] = []
    for span in among:
        if span is parent or not parent.holds(span):
            assert span.end <= parent.begin or span.begin >= parent.end or span.holds(parent)
        elif not (found and found[-1].holds(span)):
            assert not found or found[-1].end <= span.begin, (found[-1], span)
            found.append(span)
    return found


def leaves(parent: Span, among: Sequence[Span]) -> Iterator[Span]:
    """The innermost spans within another; checks that all nest."""
    within = children(parent, among)
    if not within:
        yield parent
    for span in within:
        inside = [other for other in among if other is not span and span.holds(other)]
        yield from leaves(span, [span, *inside])


def covered(parents: Sequence[Span], among: Sequence[Span]) -> float:
    """The share of the time of some spans that lies in their children."""
    whole = sum(parent.seconds for parent in parents)
    return sum(c.seconds for parent in parents for c in children(parent, among)) / whole
