"""The traces of all processes of a run, as one."""

from dataclasses import replace
from pathlib import Path

from tandem.errors import InputError
from tandem.trace.chrome import Event, Header, Trace, read_trace
from tandem.validation import shown

MERGED = "trace.json"
PATTERN = "trace-*.json"
_OF_MACHINES = ("processor", "threads", "devices")  # of a run; they differ where machines do


def trace_file(rank: int, is_loader: bool = False) -> str:
    """Name of the file in the run folder that one process writes."""
    return f"trace-{rank}{'-loader' if is_loader else ''}.json"


def merge(run: Path) -> Trace:
    """Merge the traces of a run's processes; times are since the first event.

    The clocks of a rank's trainer and loader are shifted by the trainer's offset. Raises
    `InputError` if there is no trace, if one cannot be read, or if they are of different runs.
    """
    paths = [*run.glob(PATTERN)]
    if not paths:
        what = f"no {PATTERN}" if run.is_dir() else "no such folder"
        raise InputError(
            f"{run}: found {what}, expected the folder of a run with the setting trace: steps or"
            " ops"
        )
    traces = {path: read_trace(path) for path in paths}
    paths.sort(key=lambda path: traces[path].processes[0].number)
    _check_alike(paths, traces)
    headers = [header for path in paths for header in traces[path].processes]
    offsets = {h.rank: h.clock_offset_ns for h in headers if h.kind == "trainer"}
    events: list[Event] = []
    for path in paths:
        events += _shifted(traces[path], offsets)
    first = min((event["ts"] for event in events if "ts" in event), default=0)
    for event in events:
        if "ts" in event:
            event["ts"] = round(event["ts"] - first, 3)
    # The offsets are in the times now.
    return Trace([replace(header, clock_offset_ns=0) for header in headers], events)


def _shifted(trace: Trace, offsets: dict[int, int]) -> list[Event]:
    """The events of one process, by the clock of rank 0."""
    (header,) = trace.processes
    offset = offsets.get(header.rank, 0) / 1000
    for event in trace.events if offset else ():
        if "ts" in event:
            event["ts"] += offset
    return [*trace.events]


def _check_alike(paths: list[Path], traces: dict[Path, Trace]) -> None:
    """Refuse processes that are of different runs, or the same one twice."""
    seen: dict[int, Path] = {}
    for path in paths:
        headers = traces[path].processes
        if len(headers) > 1:
            raise InputError(f"{path}: found {len(headers)} processes, expected one")
        number = headers[0].number
        if number in seen:
            raise InputError(f"{path}: is of the same process as {seen[number].name}")
        seen[number] = path
        if key := _difference(traces[paths[0]].processes[0], headers[0]):
            ours, theirs = (traces[p].run.get(key) for p in (path, paths[0]))
            raise InputError(
                f"{path}: {key} is {shown(ours)}, but {shown(theirs)} in {paths[0].name}; expected"
                " traces of one run: remove those of an earlier one"
            )


def _difference(one: Header, other: Header) -> str:
    """The first key that two processes of a run would have alike, but have not."""
    keys = (key for key in {**one.run, **other.run} if key not in _OF_MACHINES)
    return next((key for key in keys if one.run.get(key) != other.run.get(key)), "")
