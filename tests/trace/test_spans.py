"""How spans nest: compared with all pairs of them."""

import random
from typing import Any

import pytest

from tandem.trace.chrome import Event, Header, Trace, names
from tandem.trace.spans import Span, spans_of

TRAINER = Header(process="trainer 0", rank=0, number=0, steps=(0, 9), recorded_steps=9)
LOADER = Header(process="loader 0", rank=0, number=1, steps=(0, 9), recorded_steps=9)


def event(name: str, begin: float, end: float, pid: int = 0, tid: int = 1, **args: Any) -> Event:
    span = {"ph": "X", "name": name, "ts": begin, "dur": end - begin, "pid": pid, "tid": tid}
    return span | ({"args": args} if args else {})


def spans(*events: Event) -> list[Span]:
    tracks = [*names(TRAINER, ["trainer", "buckets"]), *names(LOADER, ["loader"])]
    return spans_of(Trace([TRAINER, LOADER], [*tracks, *events]))


def random_nesting(rng: random.Random, begin: float, end: float, depth: int = 0) -> list[Event]:
    """Spans within others, of whole microseconds; some begin or end together with their parent."""
    found = []
    while depth < 4 and begin < end:
        first = rng.randint(int(begin), int((2 * begin + end) / 3))
        last = rng.randint(first + 1, min(int(end), first + 1 + int(end - begin) // 2))
        inner = random_nesting(rng, first, last, depth + 1) if last - first > 1 else []
        found += [event(f"{depth}", first, last), *inner]
        begin = last
    return found


@pytest.mark.parametrize("seed", range(5))
def test_the_parent_is_the_shortest_span_that_goes_on(seed: int) -> None:
    rng = random.Random(seed)
    events = random_nesting(rng, 0, 400)
    rng.shuffle(events)
    found = spans(*events)
    assert len(found) == len(events) > 20
    for span in found:
        around = [
            other
            for other in found
            if other.begin <= span.begin + 1e-12
            and span.end <= other.end + 1e-12
            and other.seconds > span.seconds + 1e-12
        ]
        shortest = min((other.seconds for other in around), default=None)
        parent = span.parent
        while parent is not None and parent.seconds <= span.seconds + 1e-12:  # the same interval
            parent = parent.parent
        assert (parent and parent.seconds) == pytest.approx(shortest)


def test_threads_and_processes_nest_by_themselves() -> None:
    step, average, fill = spans(
        event("step", 0, 10), event("average", 2, 8, tid=2), event("fill", 3, 5, pid=1, tid=11)
    )
    assert step.parent is average.parent is fill.parent is None
    assert [(span.kind, span.thread) for span in (step, average, fill)] == [
        ("trainer", "trainer"),
        ("trainer", "buckets"),
        ("loader", "loader"),
    ]


def test_times_that_are_equal_but_for_rounding_nest() -> None:
    begin = 123_456_789_012.345  # microseconds, after a day and a half
    step, wait, update = spans(
        event("step", begin, begin + 10),
        event("wait", begin, begin + 3.001),
        event("update", begin + 3.001, begin + 10),
    )
    assert wait.parent is update.parent is step
