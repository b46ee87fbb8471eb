"""Files in Chrome's format: written and read, and those that are refused."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.errors import InputError
from tandem.trace.chrome import Header, Trace, names, read_trace, write_trace
from tandem.trace.program import report
from tandem.trace.table import tabulate

SPAN = {"ph": "X", "name": "step", "ts": 1.5, "dur": 2, "pid": 0, "tid": 1}
OP = {"op": "Conv2d", "layer": "conv1", "phase": "forward", "flops": 8, "bytes": 4, "kind": "copy"}
HEADER = Header(process="trainer 0", rank=0, number=0, steps=(20, 40), recorded_steps=20)


def content(**changes: Any) -> dict[str, Any]:
    """What a file of one process holds, with other keys in its header."""
    about = {"format": "tandem trace 1", "process": "trainer 0", "rank": 0, "number": 0}
    about |= {"steps": [20, 40], "recorded_steps": 20, **changes}
    return {"traceEvents": [SPAN], "otherData": about}


def test_a_trace_of_one_process_is_read_as_it_was_written(tmp_path: Path) -> None:
    header = Header(**vars(HEADER) | {"run": {"batch_size": 4}, "dropped": 3, "host": "a"})
    events = [*names(header, ["trainer", "buckets"]), SPAN, {**SPAN, "args": OP}]
    events.append({**SPAN, "args": {key: OP[key] for key in ("op", "layer", "phase")}})
    path = tmp_path / "trace-0.json"
    write_trace(path, Trace([header], events))
    assert read_trace(path) == Trace([header], events)
    assert json.loads(path.read_text())["otherData"]["process"] == "trainer 0"


def test_a_merged_trace_has_the_header_of_the_first_process_at_its_top(tmp_path: Path) -> None:
    loader = Header(process="loader 0", rank=0, number=1, steps=(20, 40), recorded_steps=19)
    path = tmp_path / "trace.json"
    write_trace(path, Trace([HEADER, loader], [SPAN]))
    assert read_trace(path).processes == [HEADER, loader]
    about = json.loads(path.read_text())["otherData"]
    assert about["process"] == "trainer 0"
    assert [each["process"] for each in about["processes"]] == ["trainer 0", "loader 0"]


def refused(path: Path, text: str | bytes) -> str:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InputError) as caught:
        read_trace(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message.removeprefix(f"{path}: ")


def cut(text: str) -> str:
    return text[: len(text) // 2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON: Expecting value"),
        (cut(json.dumps(content())), "not JSON: "),
        (b"\x89PNG\r\n\x1a\n\x00\xff", "not JSON: "),
        ("[" * 100_000, "not JSON: "),
        ("3", "holds 3; expected a trace, with traceEvents"),
        ('{"loss": 3}', 'holds {"loss": 3}; expected a trace, with traceEvents'),
        (json.dumps([SPAN]), "is a trace of another program; expected one of format"),
        (json.dumps({"traceEvents": [SPAN], "otherData": [1]}), "is a trace of another program; "),
        (
            json.dumps(content(format="tandem trace 2")),
            'is a trace of format "tandem trace 2"; expected one of format "tandem trace 1"',
        ),
        (json.dumps(content(rank="a")), 'rank is "a": input should be a valid integer'),
        (json.dumps(content(steps=[1, 2, 3])), "steps is [1, 2, 3]: "),
        (json.dumps(content(processes=[])), "processes is []; expected a list of processes"),
        (json.dumps(content(processes=[3])), "holds 3; expected keys and their values"),
    ],
)
def test_what_is_no_trace_is_refused_in_one_sentence(
    text: str | bytes, message: str, tmp_path: Path
) -> None:
    assert refused(tmp_path / "trace-0.json", text).startswith(message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda event: "step", "expected an event whose ph is one of X, C, s, f, M"),
        (lambda event: event | {"ph": "Q"}, "expected an event whose ph is one of X, C, s, f, M"),
        (lambda event: event | {"ph": ["X"]}, "expected an event whose ph is one of X, C, s, f, M"),
        (lambda event: event | {"name": 3}, "its name is 3"),
        (lambda event: event | {"pid": True}, "its pid is true"),
        (lambda event: event | {"ts": None}, "its ts is null"),
        (lambda event: event | {"ts": float("nan")}, "its ts is NaN"),
        (lambda event: event | {"ts": 1 << 63}, "its ts is 9223372036854775808"),
        (lambda event: event | {"ts": float("-inf")}, "its ts is -Infinity"),
        (lambda event: event | {"dur": -1}, "its dur is below 0"),
        (lambda event: event | {"args": [1]}, "its args are [1]"),
        (lambda event: event | {"args": OP | {"flops": "8"}}, 'its flops is "8"'),
        (lambda event: event | {"args": {"op": "Conv2d"}}, "its layer is null"),
    ],
)
def test_a_damaged_event_is_refused_in_one_sentence(
    change: Callable[[Any], Any], message: str, tmp_path: Path
) -> None:
    values = content() | {"traceEvents": [SPAN, change(SPAN)]}
    found = refused(tmp_path / "trace-0.json", json.dumps(values))
    assert found.startswith("event 1 is ")
    assert found.endswith(message)


def test_damage_anywhere_is_refused_or_does_no_harm(tmp_path: Path) -> None:
    rng = random.Random(0)
    flow = {"ph": "s", "cat": "flow", "id": 1, "name": "flow", "ts": 2, "pid": 0, "tid": 1}
    memory = {"ph": "C", "name": "memory", "ts": 2, "pid": 0, "args": {"resident": 1}}
    events = [*names(HEADER, ["trainer"]), SPAN, {**SPAN, "args": OP}, flow, memory]
    path = tmp_path / "trace-0.json"
    write_trace(path, Trace([HEADER], events))
    whole = path.read_bytes()
    refusals = []
    for _ in range(600):
        damaged = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            first = rng.randrange(len(damaged))
            damaged[first : first + rng.randint(0, 3)] = rng.choices(b'0179eE-+.[]{}",:ntX', k=2)
        path.write_bytes(damaged[: rng.choice([None, None, rng.randrange(len(damaged))])])
        try:
            trace = read_trace(path)
        except InputError as error:
            refusals.append(str(error))
        else:
            assert report(trace, tabulate(trace), path)
    assert 300 < len(refusals) < 600
    assert not any("\n" in message for message in refusals)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_trace(tmp_path / "trace-0.json")
