"""Files in Chrome's trace event format, which Perfetto and ``chrome://tracing`` show.

A file is a JSON object: ``traceEvents``, a list, and ``otherData``, the fields of `Header`. Times
are in microseconds. Events are spans ("X"), counters ("C"), the two ends of a flow ("s", "f") and
names and places of processes and threads ("M"). The format: Google's "Trace Event Format",
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from tandem.errors import InputError
from tandem.files import write_text
from tandem.validation import read_json, shown, validated

FORMAT: Literal["tandem trace 1"] = "tandem trace 1"
_Types = tuple[type, ...]  # of a value from JSON
_TEXT: _Types = (str,)
_WHOLE: _Types = (int,)
_NUMBER: _Types = (int, float)
_MAPPING: _Types = (dict,)
_PLACE = {"name": _TEXT, "pid": _WHOLE, "tid": _WHOLE}
_KEYS: Mapping[str, Mapping[str, _Types]] = {
    "X": {**_PLACE, "ts": _NUMBER, "dur": _NUMBER},
    "C": {"name": _TEXT, "ts": _NUMBER, "pid": _WHOLE, "args": _MAPPING},
    "s": {**_PLACE, "ts": _NUMBER, "id": _WHOLE},
    "f": {**_PLACE, "ts": _NUMBER, "id": _WHOLE},
    "M": {**_PLACE, "args": _MAPPING},
}
_OP_KEYS = {"op": _TEXT, "layer": _TEXT, "phase": _TEXT}
_WORK_KEYS = {"kind": _TEXT, "flops": _WHOLE, "bytes": _WHOLE}  # where lengths are known
_LIMIT = 1 << 63  # of numbers

Event = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Header:
    """The description that the trace of one process has of itself."""

    format: Literal["tandem trace 1"] = FORMAT
    process: str  # such as trainer 0
    rank: int
    number: int  # pid of the events: 2 * rank of a trainer, 2 * rank + 1 of its loader
    steps: tuple[int, int]  # half-open, counted from 0 at the start of the process
    recorded_steps: int
    dropped: int = 0  # oldest events, for which the buffer had no room
    clock_offset_ns: int = 0  # to add to this process's clock for that of rank 0
    host: str = ""
    run: dict[str, Any] = field(default_factory=dict)  # network, batch_size, precision, ...

    @property
    def kind(self) -> str:
        """Return what the process does: trainer or loader."""
        return self.process.partition(" ")[0]


@dataclass(frozen=True)
class Trace:
    """Headers of processes, that of the first trainer first, and the events of all."""

    processes: Sequence[Header]
    events: Sequence[Event]

    @property
    def run(self) -> Mapping[str, Any]:
        """Network and settings of the run."""
        return self.processes[0].run


def write_trace(path: Path, trace: Trace) -> None:
    """Write a trace, whole or not at all. The top level has the header of its first process."""
    headers = [asdict(header) for header in trace.processes]
    content = {
        "traceEvents": trace.events,
        "displayTimeUnit": "ms",
        "otherData": headers[0] | ({"processes": headers} if len(headers) > 1 else {}),
    }
    write_text(path, json.dumps(content, separators=(",", ":")) + "\n")


def read_trace(path: Path) -> Trace:
    """Read a trace of one process or a merged one.

    Raises `InputError` if the file cannot be read or is not a trace that Tandem wrote.
    """
    content = read_json(path)
    events = content.get("traceEvents") if isinstance(content, dict) else content
    if not isinstance(events, list):
        raise InputError(f"{path}: holds {shown(content)}; expected a trace, with traceEvents")
    about = content.get("otherData") if isinstance(content, dict) else None
    about = about if isinstance(about, dict) else {}
    found = about.get("format")
    if found != FORMAT:
        what = "of another program" if found is None else f"of format {shown(found)}"
        raise InputError(f"{path}: is a trace {what}; expected one of format {shown(FORMAT)}")
    headers = about.get("processes", [about])
    if not isinstance(headers, list) or not headers:
        raise InputError(f"{path}: processes is {shown(headers)}; expected a list of processes")
    processes = [validated(Header, values, source=path) for values in headers]
    for number, event in enumerate(events):
        if fault := _fault(event):
            raise InputError(f"{path}: event {number} is {shown(event)}; {fault}")
    return Trace(processes, events)


def names(header: Header, threads: Sequence[str]) -> list[Event]:
    """Make the events that name a process and its threads, which have the tids of `tids`."""
    found = _named("process", header.number, 0, header.process)
    for thread, tid in tids(header, threads).items():
        found += _named("thread", header.number, tid, thread)
    return found


def tids(header: Header, threads: Sequence[str]) -> dict[str, int]:
    """Number the threads of a process, in the order in which they are to be shown.

    No two processes have a number in common, and none is that of its process: Perfetto would call
    that thread the main one.
    """
    return {thread: 10 * header.number + place for place, thread in enumerate(threads, 1)}


def _named(what: str, pid: int, tid: int, name: str) -> list[Event]:
    place = {"ph": "M", "pid": pid, "tid": tid}
    return [
        place | {"name": f"{what}_name", "args": {"name": name}},
        place | {"name": f"{what}_sort_index", "args": {"sort_index": tid or pid}},
    ]


def _fault(event: Any) -> str:
    """Return what is wrong with an event, or nothing."""
    keys = _KEYS.get(str(event.get("ph"))) if isinstance(event, dict) else None
    if keys is None:
        return f"expected an event whose ph is one of {', '.join(_KEYS)}"
    for key, types in keys.items():
        if not _fits(event.get(key), types):
            return f"its {key} is {shown(event.get(key))}"
    if event.get("dur", 0) < 0:
        return "its dur is below 0"
    args = event.get("args", {})
    if not isinstance(args, dict):
        return f"its args are {shown(args)}"
    return _fault_of_op(args) if "op" in args else ""


def _fault_of_op(args: Mapping[str, Any]) -> str:
    for key, types in _OP_KEYS.items():
        if not _fits(args.get(key), types):
            return f"its {key} is {shown(args.get(key))}"
    for key, types in _WORK_KEYS.items():
        if key in args and not _fits(args[key], types):
            return f"its {key} is {shown(args[key])}"
    return ""


def _fits(value: Any, types: _Types) -> bool:
    """Return whether a value is of a type, which a bool is not of int; numbers are finite."""
    if type(value) not in types:
        return False
    return types is _TEXT or types is _MAPPING or -_LIMIT < value < _LIMIT
