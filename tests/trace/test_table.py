"""Calls, totals and medians: compared with loops over what was put in."""

import random
import statistics
from collections import defaultdict

import pytest

from tandem.trace.chrome import Event, Header, Trace, names
from tandem.trace.table import LINES, REST, Row, tabulate
from tests.trace.test_spans import LOADER, TRAINER, event

SECOND = [
    Header(**vars(header) | {"process": f"{header.kind} 1", "rank": 1, "number": number})
    for number, header in ((2, TRAINER), (3, LOADER))
]
OPS = (
    ("conv1", "forward", "Conv2d", "convolution", 3000),
    ("conv1", "forward", "Relu", "relu", 10),
    ("fc8", "forward", "Dot", "product", 500),
    ("fc8", "backward", "Dot", "product", 900),
    ("conv1", "backward", "ConvWeightGrad", "convolution weight", 4000),
    ("conv1", "update", "MomentumStep", "update", 40),
)


def make() -> tuple[list[Event], dict[tuple[str, ...], list[float]]]:
    """Steps of two trainers, and the seconds of everything in them."""
    rng = random.Random(0)
    events: list[Event] = []
    seconds: dict[tuple[str, ...], list[float]] = defaultdict(list)

    def add(path: tuple[str, ...], begin: int, length: int, pid: int, thread: int = 1) -> int:
        events.append(event(path[-1], begin, begin + length, pid, 10 * pid + thread))
        seconds[path].append(length / 1e6)
        return begin + length

    for pid in (0, 2):
        now = 0
        for _ in range(5):
            begin = now
            now = add(("trainer", "trainer", "step", "wait"), now + 3, rng.randint(1, 50), pid)
            first = now
            for layer, phase, op, kind, flops in OPS:
                length = rng.randint(10, 90)
                args = {"op": op, "layer": layer, "phase": phase, "kind": kind}
                args |= {"flops": flops, "bytes": 2 * flops}
                events.append(event(op, now, now + length, pid, 10 * pid + 1, **args))
                seconds[op, kind].append(length / 1e6)
                seconds["trainer", "trainer", "step", "gradients", LINES].append(length / 1e6)
                seconds[layer, phase, str(pid), str(begin)].append(length / 1e6)
                now += length
            add(("trainer", "trainer", "step", "gradients"), first, now - first, pid)
            add(("trainer", "buckets", "average"), first + 5, rng.randint(1, 50), pid, 2)
            add(
                ("trainer", "trainer", "step"), begin, now + 7 - begin, pid
            )  # begin + 3 to now are covered
            seconds["trainer", "trainer", "step", REST].append(10e-6)
            now += 20
            add(("loader", "loader", "fill"), begin, 60, pid + 1)
    add(("trainer", "trainer", "save"), now + 10_000, 1000, 0)
    return events, seconds


EVENTS, SECONDS = make()
HEADERS = [TRAINER, LOADER, *SECOND]
TRACKS = [e for h in HEADERS for e in names(h, [h.kind, "buckets"][: 2 - h.number % 2])]
STEPS = sum(SECONDS["trainer", "trainer", "step"])


def assert_times(row: Row, seconds: list[float]) -> None:
    assert row.calls == len(seconds)
    assert row.total == pytest.approx(sum(seconds))
    assert row.median == pytest.approx(statistics.median(seconds))
    assert row.share == pytest.approx(sum(seconds) / STEPS)


def test_spans_stand_behind_the_ones_around_them() -> None:
    table = tabulate(Trace(HEADERS, [*TRACKS, *EVENTS]))
    assert [row.path for row in table.spans] == [
        ("trainer", "trainer", "step"),
        ("trainer", "trainer", "step", "wait"),
        ("trainer", "trainer", "step", "gradients"),
        ("trainer", "trainer", "step", "gradients", LINES),
        ("trainer", "trainer", "step", REST),
        ("trainer", "trainer", "save"),
        ("trainer", "buckets", "average"),
        ("loader", "loader", "fill"),
    ]
    for row in table.spans:
        assert_times(row, SECONDS[row.path])


def test_a_call_of_a_layer_is_all_that_a_step_computes_for_it() -> None:
    table = tabulate(Trace(HEADERS, [*TRACKS, *EVENTS]))
    assert [row.path for row in table.layers] == [
        ("conv1", "forward"),
        ("conv1", "backward"),
        ("conv1", "update"),
        ("fc8", "forward"),
        ("fc8", "backward"),
    ]
    for row in table.layers:
        steps = [sum(times) for path, times in SECONDS.items() if path[:2] == row.path]
        assert_times(row, steps)
        flops = sum(each[4] for each in OPS if each[:2] == row.path)
        assert (row.calls, row.flops, row.nbytes) == (10, 10 * flops, 20 * flops)


def test_ops_are_in_the_order_of_their_time() -> None:
    table = tabulate(Trace(HEADERS, [*TRACKS, *EVENTS]))
    assert {row.path for row in table.ops} == {each[2:4] for each in OPS}
    assert [row.total for row in table.ops] == sorted((r.total for r in table.ops), reverse=True)
    for row in table.ops:
        assert_times(row, SECONDS[row.path])
        assert row.nbytes == 2 * row.flops == 20 * sum(e[4] for e in OPS if e[2:4] == row.path)


def test_without_steps_there_are_no_shares() -> None:
    fills = [e for e in EVENTS if e["pid"] == 1]
    (row,) = tabulate(Trace([LOADER], [*names(LOADER, ["loader"]), *fills])).spans
    assert (row.calls, row.share) == (5, None)


def test_lines_outside_of_steps_belong_to_no_layer() -> None:
    line = event("Conv2d", 0, 9, op="Conv2d", layer="conv1", phase="forward")
    table = tabulate(Trace([TRAINER], [event("validate", 0, 10), line]))
    assert (table.layers, table.ops) == ([], [])
    assert [row.path[-1] for row in table.spans] == ["validate", LINES]


def test_layers_are_in_the_order_in_which_their_forward_passes_end() -> None:
    lines = [("fc6", "forward"), ("conv1", "forward"), ("fc6", "forward"), ("loss", "forward")]
    lines += [("loss", "other"), ("state", "update"), ("fc6", "update"), ("fc6", "backward")]
    events = [
        event("Dot", number, number + 1, op="Dot", layer=layer, phase=phase)
        for number, (layer, phase) in enumerate(lines)
    ]
    table = tabulate(Trace([TRAINER], [event("step", 0, 9), *events]))
    assert [row.path for row in table.layers] == [
        ("conv1", "forward"),
        ("fc6", "forward"),
        ("fc6", "backward"),
        ("fc6", "update"),
        ("loss", "forward"),
        ("loss", "other"),
        ("state", "update"),
    ]


def test_rows_are_plain_values() -> None:
    found = tabulate(Trace(HEADERS, [*TRACKS, *EVENTS])).as_json()
    assert {*found} == {"spans", "layers", "ops"}
    assert found["ops"][0].keys() >= {"path", "calls", "total", "median", "flops"}
