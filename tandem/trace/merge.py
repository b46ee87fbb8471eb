"""The traces of all processes of a run, as one."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from tandem.errors import InputError
from tandem.trace.chrome import Trace, read_trace
from tandem.validation import shown

MERGED = "trace.json"
_NAME = re.compile(r"trace-\d+(-loader)?\.json")


def trace_file(rank: int, is_loader: bool = False) -> str:
    """Name of the file in the run folder that one process writes."""
    return f"trace-{rank}{'-loader' if is_loader else ''}.json"


def trace_files(run: Path) -> list[Path]:
    """List the files that processes of a run have written, in no order."""
    return [path for path in run.glob("trace-*.json") if _NAME.fullmatch(path.name)]


def remove_traces(run: Path) -> None:
    """Remove what an earlier start of a run has recorded, maybe with more trainers."""
    for path in trace_files(run):
        path.unlink(missing_ok=True)


def merge(run: Path) -> Trace:
    """Merge the traces of a run's processes; times are since the first event.

    The clocks of a rank's trainer and loader are shifted by the trainer's offset. Raises
    `InputError` if there is no trace, if one cannot be read, or if they are of different runs.
    """
    traces = {path: read_trace(path) for path in trace_files(run)}
    if not traces:
        what = f"no {trace_file(0)}" if run.is_dir() else "no such folder"
        raise InputError(
            f"{run}: found {what}, expected the folder of a run with the setting trace: steps or"
            " ops"
        )
    traces = dict(sorted(traces.items(), key=lambda item: item[1].processes[0].number))
    _check_alike(traces)
    headers = [header for trace in traces.values() for header in trace.processes]
    offsets = {h.rank: h.clock_offset_ns / 1000 for h in headers if h.kind == "trainer"}
    events = []
    for header, trace in zip(headers, traces.values(), strict=True):
        for event in trace.events:
            if "ts" in event:
                event["ts"] += offsets.get(header.rank, 0)
            events.append(event)
    first = min((event["ts"] for event in events if "ts" in event), default=0)
    for event in events:
        if "ts" in event:
            event["ts"] = round(event["ts"] - first, 3)
    # The times include the offsets now.
    return Trace([replace(header, clock_offset_ns=0) for header in headers], events)


def _check_alike(traces: Mapping[Path, Trace]) -> None:
    """Refuse processes of different runs, and what a process has not written under this name."""
    first = next(iter(traces))
    for path, trace in traces.items():
        if len(trace.processes) > 1:
            raise InputError(f"{path}: found {len(trace.processes)} processes, expected one")
        (header,) = trace.processes
        name = trace_file(header.rank, header.kind == "loader")
        if path.name != name:
            raise InputError(
                f"{path}: found the trace of {header.process}, expected it to be named {name}"
            )
        ours, theirs = trace.run, traces[first].run
        for key in {**theirs, **ours}:
            if ours.get(key) != theirs.get(key):
                raise InputError(
                    f"{path}: {key} is {shown(ours.get(key))}, but {shown(theirs.get(key))} in "
                    f"{first.name}; expected traces of one run: remove those of an earlier one"
                )
