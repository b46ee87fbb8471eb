"""A machine's rates from the trace of a run, recorded with ``trace: ops``.

They are those of the trainers as they worked in the run, so many at once, and hold for other sizes
of the minibatch, other exchanges and other numbers of ranks of the same network.
"""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.config.schema import Config
from tandem.cost.fitting import TimedLine, fit_speed
from tandem.cost.machine import Machine
from tandem.errors import InputError
from tandem.layers.network import COLOURS
from tandem.ops.work import Work
from tandem.trace.chrome import Trace, read_trace
from tandem.trace.merge import merge
from tandem.trace.spans import STEP, Span, spans_of
from tandem.validation import shown

_COMPUTING = ("gradients", "update")  # parts of a step
_TRAINER = "trainer"


def machine_of_trace(path: Path, config: Config, classes: int) -> Machine:
    """Take the rates of a machine from a trace, of one trainer or of all processes.

    Parameters
    ----------
    path : Path
        The trace, or the folder of a run with its traces.
    config : Config
        Settings of the run that is to be predicted.
    classes : int
        Number of the network's classes.

    Raises
    ------
    InputError
        The file cannot be read, or is no trace; it is one of another network, of a loader alone, or
        without Ops.
    """
    trace = merge(path) if path.is_dir() else read_trace(path)
    _check_network(path, trace.run, config, classes)
    if all(header.kind != _TRAINER for header in trace.processes):
        names = ", ".join(header.process for header in trace.processes)
        raise InputError(f"{path}: is the trace of {names}; expected one with a trainer")
    spans = spans_of(trace)
    lines = _lines(spans)
    if not lines:
        what = shown(trace.run.get("trace"))
        raise InputError(f"{path}: holds no Ops, its run had trace {what}; expected trace: ops")
    trainers, threads = _trainers(trace), trace.run.get("threads")
    threads = threads if isinstance(threads, int) and threads > 0 else 1
    computing = sum(span.seconds for span in spans if _is_computing(span))
    try:
        speed = fit_speed(lines, computing, trainers, threads)
    except ValueError as error:
        raise InputError(f"{path}: {error}; expected a trace of whole steps") from None
    processor = trace.run.get("processor")
    return Machine(
        processor=processor if isinstance(processor, str) else "",
        speeds=(speed,),
        load=_load(trace.run, spans),
    )


def _check_network(path: Path, run: Mapping[str, Any], config: Config, classes: int) -> None:
    """Refuse the trace of another network, or with settings that change its rates."""
    wanted = {
        "network": config.network,
        "network_options": dict(config.options),
        "crop_size": config.crop_size,
        "classes": classes,
        "width": config.width,
        "precision": "float32" if config.precision == "auto" else config.precision,
    }
    chosen = {"threads": config.threads, "convolutions": config.convolutions}
    wanted |= {key: value for key, value in chosen.items() if value != "auto"}
    if run.get("crop_size") is None:  # of rows of arrays
        del wanted["crop_size"]
    for key, value in wanted.items():
        if run.get(key) != value:
            raise InputError(
                f"{path}: is the trace of a run with {key} {shown(run.get(key))}; expected "
                f"{shown(value)}, as rates of a trace hold for its own network and settings"
            )


def _trainers(trace: Trace) -> int:
    """Count the trainers that worked at once on a machine: of one process alone, all of the run."""
    hosts = Counter(header.host for header in trace.processes if header.kind == _TRAINER)
    alone, of_run = sum(hosts.values()) == 1, trace.run.get("trainers")
    return of_run if alone and isinstance(of_run, int) and of_run > 0 else max(hosts.values())


def _lines(spans: Sequence[Span]) -> list[TimedLine]:
    """The lines of all steps whose work is known."""
    return [
        TimedLine(Work(_kind(span), span.args["flops"], span.args["bytes"]), span.seconds)
        for span in spans
        if span.is_op and "kind" in span.args and span.around(STEP)
    ]


def _kind(span: Span) -> str:
    """The kind of an Op's work; of optimizers without an Op of their own too there are updates."""
    kind = str(span.args["kind"])
    updates = span.args.get("phase") == "update"
    return "update" if updates and kind == "elementwise" else kind


def _is_computing(span: Span) -> bool:
    parent = span.parent
    return span.name in _COMPUTING and parent is not None and parent.name == STEP


def _load(run: Mapping[str, Any], spans: Sequence[Span]) -> float | None:
    """Bytes of pixels a second that a loader filled; None if there is no span of it."""
    fills = [span.seconds for span in spans if span.name == "fill"]
    side, batch = run.get("crop_size"), run.get("sum_rows") or run.get("batch_size")
    if not fills or not isinstance(side, int) or not isinstance(batch, int):
        return None
    return batch * COLOURS * side**2 / statistics.median(fills)
