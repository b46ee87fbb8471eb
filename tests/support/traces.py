"""Spans in a trace of one process, for tests."""

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from tandem.trace.chrome import read_trace
from tandem.trace.recorder import Recorder, clock
from tandem.trace.spans import STEP, Span, spans_of


def spans_in(path: Path, thread: str = "trainer") -> list[Span]:
    """The spans of a thread, which nest, in the order in which they begin."""
    found = [span for span in spans_of(read_trace(path)) if span.thread == thread]
    assert found
    assert all(s.parent is None or s.end <= s.parent.end + 1e-8 for s in found)
    return found


def steps_in(spans: Sequence[Span]) -> list[Span]:
    return [span for span in spans if span.name == STEP]


def parts_of(parent: Span, spans: Sequence[Span]) -> list[str]:
    """Names of the spans directly within another."""
    return [span.name for span in spans if span.parent is parent]


def coverage(spans: Sequence[Span], name: str = STEP) -> float:
    """The share of the time of a span of this name that spans directly within it cover.

    It is the median of all of them: between two spans a busy machine may do something else.
    """
    covered = {span: 0.0 for span in spans if span.name == name}
    for span in spans:
        if span.parent in covered:
            covered[span.parent] += span.seconds
    return median(seconds / span.seconds for span, seconds in covered.items())


def span_seconds(calls: int = 20_000) -> float:
    """Measure what recording one span costs, in seconds: a call beside one that is recorded."""
    recorder = Recorder("trainer 0", 0, Path(), (0, 1), {})
    recorder.begin_step()

    def seconds(function: Callable[[], None]) -> float:
        begin = clock()
        for _ in range(calls):
            function()
        return (clock() - begin) / 1e9 / calls

    def nothing() -> None:
        pass

    plain, recorded = nothing, recorder.wrap(nothing, "nothing")
    return min(seconds(recorded) - seconds(plain) for _ in range(3))
