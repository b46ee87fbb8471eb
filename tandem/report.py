"""One page of a run: result, curves, filters, pictures, timeline, settings and machine.

In the run's folder:  tandem report runs/demo
Another file:         tandem report runs/demo --output demo.html

The page needs no other file. Its timeline is of a run with trace: steps or ops.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.artifacts.checkpoint import read_header
from tandem.artifacts.metrics_log import ValidationRecord
from tandem.artifacts.page import Page
from tandem.artifacts.run_folder import CONFIGURATION, list_checkpoints
from tandem.artifacts.visualize import contact_sheet, filter_grid
from tandem.cli import CommandLine, Options, PathOption, option, run_program
from tandem.config.schema import Config
from tandem.data.manifest import read_manifest
from tandem.errors import InputError
from tandem.look import ACROSS, LookOptions, class_names, read_pictures
from tandem.plot import TYPE, Run, draw, read_run
from tandem.trace.merge import merge, trace_files
from tandem.trace.spans import STEP, Span, spans_of
from tandem.validation import read_yaml, shown

log = logging.getLogger(__name__)

PAGE = "report.html"
_SAMPLES = 16
_STEPS = 4  # of the timeline
_FILTER_PIXELS = 120  # on each side, at least


class ReportOptions(Options):
    """Options of ``tandem report``."""

    run: PathOption = option(..., "folder of a run", "a path", "argument")
    output: PathOption | None = option(
        None, f"file to write (default: {PAGE} in the folder)", "a file", "text"
    )


def run_report(
    arguments: Sequence[str] | None, description: str | None, program: str | None = None
) -> int:
    """Write the page of the run that a command line names; return the exit status."""
    return run_program(ReportOptions, report, CommandLine(arguments, description, program))


def report(options: ReportOptions) -> None:
    """Write the page of a run.

    Raises InputError if the run has no record, a file of it is damaged, or the page cannot be
    written.
    """
    import matplotlib as mpl

    folder = options.run
    run = read_run(folder, folder.absolute().name)
    settings = read_yaml(folder / CONFIGURATION)
    page = Page(f"Run {run.name}")
    _add_result(page, run)
    page.section("Curves")
    with mpl.rc_context(TYPE):
        page.figure(draw([run]), "Loss, errors, learning rate, speed and parts of the time")
    if run.filters is not None:
        page.section("Filters of the first layer", "Each is scaled by its largest weight.")
        scale = -(-_FILTER_PIXELS // max(run.filters.shape[2:]) // 2)
        from PIL import Image

        page.picture(Image.fromarray(filter_grid(run.filters, scale)), "Filters of the first layer")
    _add_pictures(page, settings)
    _add_timeline(page, folder)
    page.section("Settings")
    page.table(("setting", "value"), [(key, shown(v, quoted=False)) for key, v in settings.items()])
    if checkpoints := list_checkpoints(folder):
        page.section("Machine", "The bits of the run depend on this.")
        page.table(("what", "value"), read_header(checkpoints[-1]).conditions.items())
    output = options.output or folder / PAGE
    page.write(output)
    log.info("wrote %s", output)


def _add_result(page: Page, run: Run) -> None:
    rows = []
    counted = [record for record in run.validated if not math.isnan(record.top1_error)]
    last, best = run.validated[-1:], sorted(counted, key=lambda record: record.top1_error)
    for name, records in (("last", last), ("best by top-1 error", best[:1])):
        rows += [(name, *_values(record)) for record in records]
    if rows:
        page.section("Result")
        page.table(("validation", "epoch", "step", "loss", "top-1 error", "top-5 error"), rows)
    else:
        page.section("Result", "No epoch has been validated yet.")


def _values(record: ValidationRecord) -> tuple[Any, ...]:
    errors = (
        "" if math.isnan(error) else f"{100 * error:.2f} %"
        for error in (record.top1_error, record.top5_error)
    )
    return record.epoch, record.step, record.loss, *errors


def _add_pictures(page: Page, settings: Mapping[str, Any]) -> None:
    """Add training pictures as the network gets them, if they are still there."""
    try:
        names = {name: value for name, value in settings.items() if name in Config.model_fields}
        options = LookOptions(**Config(**names).model_dump(), count=_SAMPLES)
        manifest = read_manifest(options.manifest_path)
        found = read_pictures(options, manifest)
    except (InputError, ValueError) as error:
        log.info("without pictures of the data: %s", error)
        return
    classes = class_names(manifest)
    captions = [(classes[label],) for label in found.labels]
    page.section("Training pictures", "With the crops and mirroring of the first epoch.")
    sheet = contact_sheet(found.crops, captions, 1, ["#DDDDDD"] * len(captions), ACROSS)
    page.picture(sheet, "Training pictures")


def _add_timeline(page: Page, folder: Path) -> None:
    """Add what each thread did in the first traced steps, if the run was traced."""
    if not trace_files(folder):
        return
    trace = merge(folder)
    names = {header.number: header.process for header in trace.processes}
    spans = [span for span in spans_of(trace) if not span.is_op]
    steps = [span for span in spans if span.name == STEP and span.process == 0][:_STEPS]
    if not steps:
        return
    begin, end = steps[0].begin, steps[-1].end
    parts = [
        span
        for span in spans
        if span.name != STEP and span.end > begin and span.begin < end and _is_outermost(span)
    ]
    page.section("Timeline", f"The first {len(steps)} steps of {', '.join(names.values())}.")
    page.figure(_draw_timeline(parts, names, begin, end), "Timeline")


def _is_outermost(span: Span) -> bool:
    return span.parent is None or span.parent.name == STEP


def _draw_timeline(
    spans: Sequence[Span], names: Mapping[int, str], begin: float, end: float
) -> Any:
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    lanes = sorted({(span.process, span.thread) for span in spans})
    kinds = list(dict.fromkeys(span.name for span in spans))
    figure: Any = Figure(figsize=(11, 1.2 + 0.45 * len(lanes)), layout="constrained")
    axis = figure.subplots()
    for number, kind in enumerate(kinds):
        colour = colormaps["tab20"](number % 20)
        for row, lane in enumerate(lanes):
            bars = [
                (1000 * (span.begin - begin), 1000 * span.seconds)
                for span in spans
                if span.name == kind and (span.process, span.thread) == lane
            ]
            label = kind if row == 0 else None
            axis.broken_barh(bars, (row - 0.4, 0.8), facecolors=colour, label=label)
    axis.set_yticks(range(len(lanes)), [f"{names[p]}, {thread}" for p, thread in lanes])
    axis.set(xlim=(0, 1000 * (end - begin)), ylim=(len(lanes) - 0.4, -0.6), xlabel="milliseconds")
    figure.legend(loc="outside lower center", ncols=6, frameon=False)
    return figure
