"""Merge the traces of a run's processes, and add up their spans: where does the time go?

After a run with trace: steps or ops:   tandem trace runs/a
Into another file:                      tandem trace runs/a --output a.json
One file, and only its table:           tandem trace runs/a/trace-0.json
All rows, for programs:                 tandem trace runs/a --json

The merged trace is shown by https://ui.perfetto.dev ("Open trace file"), which keeps it in the
browser, and by chrome://tracing.
"""

import json
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tandem.cli import CommandLine, Options, PathOption, option, run_program
from tandem.errors import InputError, explained
from tandem.files import make_folder
from tandem.text_table import aligned
from tandem.trace.chrome import Header, Trace, read_trace, write_trace
from tandem.trace.merge import MERGED, merge, trace_files
from tandem.trace.table import Row, Table, tabulate
from tandem.validation import listed, shown

VIEWER = "https://ui.perfetto.dev"
_SPAN_HEADS = ("process", "thread", "span", "calls", "total s", "median ms", "of the steps")
_LAYER_HEADS = ("layer", "phase", "calls", "total s", "median ms", "of the steps", "GFLOP/s")
_WIDTH = 100  # characters
_OP_HEADS = ("Op", "kind of work", *_LAYER_HEADS[2:], "GB/s")


class TraceOptions(Options):
    """Options of ``tandem trace``."""

    run: PathOption = option(..., "folder of a run, or one trace", "a path", "argument")
    output: PathOption | None = option(
        None, f"file of the merged trace (default: {MERGED} in the folder)", "a path", "text"
    )
    as_json: bool = option(False, "print all rows as JSON", "true or false", alias="json")


def run_trace(
    arguments: Sequence[str] | None, description: str | None, program: str | None = None
) -> int:
    """Merge and print the traces that a command line names; return the exit status."""

    def work(options: TraceOptions) -> None:
        trace, path = (_read if options.run.is_file() else _merge)(options)
        table = tabulate(trace)
        text = as_json(trace, table) if options.as_json else report(trace, table, path)
        sys.stdout.write(text)

    return run_program(TraceOptions, work, CommandLine(arguments, description, program))


def _read(options: TraceOptions) -> tuple[Trace, Path]:
    """Read one file."""
    if options.output is not None:
        raise InputError(
            f"--output: found it with the file {options.run}, expected it with the folder of a run"
        )
    return read_trace(options.run), options.run


def _merge(options: TraceOptions) -> tuple[Trace, Path]:
    """Merge the files of a run, and write the result."""
    trace, path = merge(options.run), options.output or options.run / MERGED
    if path.resolve() in (file.resolve() for file in trace_files(options.run)):
        raise InputError(f"--output: found {path}, which is one of the traces to merge")
    make_folder(path.parent)
    with explained(path, "cannot be written"):
        write_trace(path, trace)
    return trace, path


def report(trace: Trace, table: Table, path: Path) -> str:
    """The tables of a trace, and how to look at it."""
    lines = _about(trace)
    lines += ["", *aligned([_SPAN_HEADS, *map(_span_cells, table.spans)], left=range(3))]
    if table.ops:
        layers = [_op_cells(row)[:-1] for row in table.layers]
        lines += ["", *aligned([_LAYER_HEADS, *layers], left=range(2))]
        lines += ["", *aligned([_OP_HEADS, *map(_op_cells, table.ops)], left=range(2))]
    lines += ["", f"{path}: open it in {VIEWER} or chrome://tracing"]
    return "\n".join(lines) + "\n"


def as_json(trace: Trace, table: Table) -> str:
    """One JSON object: the run, its processes, and all rows; times in seconds."""
    processes = [asdict(header) for header in trace.processes]
    for process in processes:
        del process["run"]
    return json.dumps({"run": trace.run, "processes": processes, **table.as_json()}) + "\n"


def _about(trace: Trace) -> list[str]:
    """Return what it is a trace of, and what is missing of it."""
    hosts = dict.fromkeys(header.host for header in trace.processes)
    names = listed([header.process for header in trace.processes])
    first, end = trace.processes[0].steps
    about = {key: value for key, value in trace.run.items() if key != "processor"}  # it is long
    run = ", ".join(f"{key} {shown(value, quoted=False)}" for key, value in about.items())
    return [
        *textwrap.wrap(run, _WIDTH),
        f"{names} on {listed([*hosts])}; steps {first} to {end - 1}, counted from 0 at the start",
        *filter(None, map(_shortage, trace.processes)),
    ]


def _shortage(header: Header) -> str:
    """Return what a process has not recorded, or nothing."""
    wanted = header.steps[1] - header.steps[0]
    parts = []
    if header.recorded_steps < wanted:
        parts.append(f"wrote {header.recorded_steps} of {wanted} steps")
    if header.dropped:
        parts.append(f"dropped its {header.dropped:,} oldest events, as its buffer was full")
    return f"{header.process} {' and '.join(parts)}" if parts else ""


def _span_cells(row: Row) -> list[str]:
    kind, thread, *names = row.path
    name = f"{'  ' * (len(names) - 1)}{names[-1]}"
    return [kind, thread, name, *_times(row)]


def _op_cells(row: Row) -> list[str]:
    rates = (f"{n / row.total / 1e9:,.1f}" if n and row.total else "" for n in _work(row))
    return [*row.path, *_times(row), *rates]


def _work(row: Row) -> tuple[int, int]:
    return row.flops, row.nbytes


def _times(row: Row) -> list[str]:
    share = "" if row.share is None else f"{row.share:.1%}"
    return [f"{row.calls:,}", f"{row.total:,.3f}", f"{row.median * 1e3:,.3f}", share]
