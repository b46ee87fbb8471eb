"""Draw one run or compare several: curves, parts of the time, and first filters.

One run:       tandem plot runs/demo
Several runs:  tandem plot runs/a runs/b --output comparison.svg
"""

import logging
import math
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tandem.artifacts.checkpoint import read_checkpoint
from tandem.artifacts.metrics_log import TrainRecord, ValidationRecord, read_records
from tandem.artifacts.run_folder import RECORD, find_checkpoint, list_checkpoints
from tandem.artifacts.visualize import colour_filters, filter_grid
from tandem.cli import CommandLine, Options, PathOption, launch_commands, option, run_program
from tandem.errors import InputError, explained
from tandem.files import replacing

log = logging.getLogger("tandem.plot")  # __name__ is __main__ in the program

# Okabe and Ito's colours, distinct also for the colour-blind; markers for print in black.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = "osD^vPX"
_SUFFIXES = (".png", ".pdf", ".svg")
_NEUTRAL = "#555555"
_MOST_POINTS = 150  # of a line; more are averaged in bins, with a band of their range
TYPE: Any = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.fontsize": 9,
    "hatch.linewidth": 0.6,
    "svg.fonttype": "none",  # text stays text
}
# Parts of the time: name, colour, hatching.
_PARTS = (
    ("computing", "#56B4E9", ""),
    ("waiting for loader", "#E69F00", "////"),
    ("exchanging", "#CC79A7", "...."),
)

Values = npt.NDArray[np.float64]
Records = Sequence[TrainRecord | ValidationRecord]


@dataclass(frozen=True)
class Run:
    """One run to draw."""

    name: str  # in the legend
    train: tuple[TrainRecord, ...]
    validation: tuple[ValidationRecord, ...]
    filters: npt.NDArray | None = None  # (filter, RGB, row, column) of its newest checkpoint

    @property
    def validated(self) -> tuple[ValidationRecord, ...]:
        """Of the epochs that had a validation."""
        return tuple(record for record in self.validation if record.images)

    @property
    def earlier_epochs(self) -> int:
        """Epochs before the first that is recorded: those of a former `fit`."""
        firsts = [r.epoch for r in self.train[:1]] + [r.epoch for r in self.validation[:1]]
        return max(1, min(firsts, default=1)) - 1

    @property
    def seconds(self) -> Values:
        """(training record, computing or waiting or exchanging), of trainer 0."""
        parts = [(r.compute_seconds, r.load_wait_seconds, r.exchange_seconds) for r in self.train]
        return np.array(parts, float).reshape(-1, len(_PARTS))


@dataclass(frozen=True)
class Style:
    """Colour and marker of a run's lines."""

    colour: str
    marker: str

    def line(self, points: int, strong: bool = False, hollow: bool = False) -> dict[str, Any]:
        """Keywords for matplotlib: a thin line with few markers, or a strong one with more."""
        face = "white" if hollow else self.colour
        look = {"color": self.colour, "marker": self.marker, "markerfacecolor": face}
        if strong:
            every = max(1, points // 30)
            return look | {"lw": 1.8, "ms": 5, "markevery": every, "ls": "--" if hollow else "-"}
        every = max(1, points // 8)
        return look | {"lw": 0.9, "ms": 3.5, "markevery": (every // 2, every)}


STYLES = tuple(Style(*pair) for pair in zip(_COLOURS, _MARKERS, strict=True))


def draw_runs(runs: Path | Sequence[Path], output: Path) -> None:
    """Draw loss, errors, learning rate, speed, parts of the time, and the first filters.

    `runs` are folders of runs, or their files ``record.jsonl``; `output` is a .png, .pdf or .svg,
    written whole or not at all. Raises InputError if a record is missing, damaged or empty, all
    checkpoints are damaged, or the picture cannot be written.
    """
    if output.suffix.lower() not in _SUFFIXES:
        raise InputError(f"{output}: a picture is written as one of {', '.join(_SUFFIXES)}")
    paths = [runs] if isinstance(runs, Path) else list(runs)
    if len(paths) > len(STYLES):
        raise InputError(f"{len(paths)} runs were given; at most {len(STYLES)} can be told apart")
    figure = draw([read_run(path, name) for path, name in zip(paths, _names(paths), strict=True)])
    import matplotlib as mpl

    with explained(output, "cannot be written"), replacing(output) as partial, mpl.rc_context(TYPE):
        figure.savefig(partial, format=output.suffix[1:].lower(), dpi=150)


class PlotOptions(Options):
    """Options of ``python -m tandem.plot``."""

    runs: tuple[str, ...] = option(
        ..., "folders of runs, or their record.jsonl", "a path", "arguments"
    )
    output: PathOption | None = option(
        None,
        f"{', '.join(_SUFFIXES)} (default: curves.png in the folder of one run, comparison.png "
        "beside the folder of the first of several)",
        "a file",
        "text",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program as ``python -m tandem.plot``; return its exit status."""
    program = "python -m tandem.plot"
    return run_plot(arguments, launch_commands(__doc__, "plot", program), program)


def run_plot(
    arguments: Sequence[str] | None, description: str | None, program: str | None = None
) -> int:
    """Draw the runs that the command line names; return the exit status."""
    return run_program(PlotOptions, plot, CommandLine(arguments, description, program))


def plot(options: PlotOptions) -> None:
    """Draw the runs that the options name."""
    runs = [Path(run) for run in options.runs]
    folder = _folder(runs[0])
    several = folder.resolve().parent / "comparison.png"
    output = options.output or (folder / "curves.png" if len(runs) == 1 else several)
    draw_runs(runs, output)
    log.info("wrote %s", output)


def _folder(run: Path) -> Path:
    return run if run.is_dir() else run.parent


def _names(paths: Sequence[Path]) -> list[str]:
    """The runs by the names of their folders; by their paths where these are alike."""
    folders = [_folder(path).resolve() for path in paths]
    count = Counter(folder.name for folder in folders)
    return [
        folder.name if count[folder.name] == 1 else str(path)
        for folder, path in zip(folders, paths, strict=True)
    ]


def read_run(path: Path, name: str) -> Run:
    """Read the record and the filters of a run, given its folder or its record."""
    file = path / RECORD if path.is_dir() else path
    records = read_records(file)
    if not records:
        raise InputError(f"{file}: nothing is recorded yet, so there is nothing to draw")
    return Run(
        name,
        tuple(record for record in records if isinstance(record, TrainRecord)),
        tuple(record for record in records if isinstance(record, ValidationRecord)),
        _read_filters(file.parent),
    )


def _read_filters(folder: Path) -> npt.NDArray | None:
    if not list_checkpoints(folder):
        return None
    newest = find_checkpoint(folder, "latest")
    return None if newest is None else colour_filters(read_checkpoint(newest).weights)


def binned(x: Values, y: Values, most: int = _MOST_POINTS) -> tuple[Values, Values, Values, Values]:
    """Average neighbouring points of a line in at most `most` bins: x, mean, least, largest.

    Values that are not finite are left out; a bin without any other is NaN.
    """
    size = max(1, -(-len(x) // most))
    bins = -(-len(x) // size)
    padded = np.full((2, bins * size), np.nan)
    padded[:, : len(x)] = x, y
    places, values = padded.reshape(2, bins, size)
    values[~np.isfinite(values)] = np.nan
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # of empty bins
        means = np.nanmean(places, axis=1), np.nanmean(values, axis=1)
        return *means, np.nanmin(values, axis=1), np.nanmax(values, axis=1)


@dataclass(frozen=True)
class Panel:
    """One of the diagrams."""

    axis: Any  # of matplotlib
    in_epochs: bool  # whether the axis counts epochs; steps until an epoch has been validated

    def places(self, run: Run, records: Records) -> Values:
        """Positions of records along the axis."""
        steps = np.array([record.step for record in records], float)
        ends = {0: run.earlier_epochs, **{r.step: r.epoch for r in run.validation}}
        if not self.in_epochs or len(ends) < 2:
            return steps + run.earlier_epochs * self.in_epochs
        known, epochs = np.array([*ends.items()], float).T
        pace = (epochs[-1] - epochs[-2]) / (known[-1] - known[-2])  # of the last, beyond it
        return np.interp(steps, known, epochs) + pace * np.maximum(steps - known[-1], 0)

    def thin(self, run: Run, style: Style, values: Sequence[float], label: str = "") -> None:
        """Draw values of training records."""
        x, mean, least, largest = binned(self.places(run, run.train), np.array(values, float))
        if len(x) < len(values):
            self.axis.fill_between(x, least, largest, color=style.colour, alpha=0.15, lw=0)
        self.axis.plot(x, mean, label=label or None, **style.line(len(x)))

    def strong(
        self, run: Run, style: Style, values: Sequence[float], label: str, hollow: bool = False
    ) -> None:
        """Draw values of validation records."""
        look = style.line(len(values), strong=True, hollow=hollow)
        places = self.places(run, run.validated)
        self.axis.plot(places, values, label=label, clip_on=False, zorder=3, **look)

    def finish(self, title: str, several: bool = False) -> None:
        """Add title, axes and legend; its handles are neutral for `several` runs."""
        self.axis.set_title(title)
        self.axis.set_xlabel("epochs" if self.in_epochs else "steps")
        self.axis.set_xlim(left=0)
        if self.axis.get_yscale() == "linear" and not self.axis.dataLim.y0 < 0:
            self.axis.set_ylim(bottom=0)
        self.axis.grid(alpha=0.3)
        handles, labels = self.axis.get_legend_handles_labels()
        if labels:
            # Several runs draw the same quantities: one handle for each.
            first = dict(reversed(list(zip(labels, handles, strict=True))))
            shown = self.axis.legend(handles=list(first.values())[::-1], framealpha=0.9)
            for handle in shown.legend_handles if several else ():
                handle.set(color=_NEUTRAL, marker="", lw=handle.get_linewidth() + 0.4)


def draw(runs: Sequence[Run]) -> Any:
    """Draw runs on one page: a matplotlib Figure."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(TYPE):
        # Not pyplot's: that would need a window system and keep the figure.
        figure: Any = Figure(figsize=(11, 9), layout="constrained")
        curves, below = figure.subfigures(2, 1, height_ratios=(5.6, 3.0))
        in_epochs = all(run.validation and run.validation[-1].step for run in runs)
        panels = [
            Panel(axis, in_epochs) for axis in curves.subplots(2, 2, height_ratios=(3.2, 2)).flat
        ]
        for panel, (name, paint) in zip(panels, _CURVES, strict=True):
            for run, style in zip(runs, STYLES, strict=False):
                paint(panel, run, style)
            panel.finish(name, several=len(runs) > 1)
        _draw_below(below, runs, in_epochs)
        _name_runs(figure, runs)
    return figure


def _name_runs(figure: Any, runs: Sequence[Run]) -> None:
    from matplotlib.lines import Line2D

    if len(runs) == 1:
        figure.suptitle(runs[0].name, fontsize=13, fontweight="bold")
        return
    handles = [Line2D([], [], **style.line(1, strong=True)) for style in STYLES[: len(runs)]]
    names = [run.name for run in runs]
    columns = min(4, len(runs))
    figure.legend(
        handles, names, loc="outside upper center", ncols=columns, frameon=False, fontsize=11
    )


def _draw_loss(panel: Panel, run: Run, style: Style) -> None:
    panel.thin(run, style, [record.loss for record in run.train], "training")
    panel.strong(run, style, [record.loss for record in run.validated], "validation")


def _draw_errors(panel: Panel, run: Run, style: Style) -> None:
    train = [math.nan if r.top1_error is None else 100 * r.top1_error for r in run.train]
    if not np.isnan(train).all():
        panel.thin(run, style, train, "training top-1")
    top1 = [100 * record.top1_error for record in run.validated]
    top5 = [100 * record.top5_error for record in run.validated]
    panel.strong(run, style, top1, "validation top-1")
    panel.strong(run, style, top5, "validation top-5", hollow=True)


def _draw_rate(panel: Panel, run: Run, style: Style) -> None:
    rates = [record.learning_rate for record in run.train]
    panel.thin(run, style, rates)
    if any(rate > 0 for rate in rates):
        panel.axis.set_yscale("log")


def _draw_speed(panel: Panel, run: Run, style: Style) -> None:
    panel.thin(run, style, [record.images_per_second for record in run.train])


_CURVES = (
    ("Loss (nats)", _draw_loss),
    ("Error (%)", _draw_errors),
    ("Learning rate", _draw_rate),
    ("Images per second, all trainers together", _draw_speed),
)


def _draw_below(figure: Any, runs: Sequence[Run], in_epochs: bool) -> None:
    """Draw the parts of the time, and the filters of runs that have any."""
    with_filters = [run for run in runs if run.filters is not None]
    widths = [2.0, *(2.0 / len(with_filters) for _ in with_filters)]
    first, *others = figure.subplots(1, len(widths), width_ratios=widths, squeeze=False)[0]
    if len(runs) == 1:
        panel = Panel(first, in_epochs)
        _draw_time_by_step(panel, runs[0])
        panel.finish("Where the time of trainer 0 goes (%)")
    else:
        _draw_time_by_run(first, runs)
    for axis, run in zip(others, with_filters, strict=True):
        _draw_filters(axis, run, alone=len(runs) == 1)


def _draw_time_by_step(panel: Panel, run: Run) -> None:
    """Stacked shares of the seconds that trainer 0 measured."""
    if not run.train:
        return
    places = panel.places(run, run.train)
    binned_parts = [binned(places, part) for part in run.seconds.T]
    x, means = binned_parts[0][0], np.array([mean for _, mean, *_ in binned_parts])
    whole = means.sum(axis=0)
    shares = 100 * means / np.where(whole > 0, whole, 1)
    panel.axis.set_ylim(0, 100)
    areas = panel.axis.stackplot(x, shares, labels=[name for name, *_ in _PARTS])
    for area, (_, colour, hatch) in zip(areas, _PARTS, strict=True):
        area.set(facecolor=colour, edgecolor="black", hatch=hatch, linewidth=0.4)


def _draw_time_by_run(axis: Any, runs: Sequence[Run]) -> None:
    """Draw one bar for each run, of the shares of all its seconds."""
    axis.set_title("Where the time of trainer 0 went (%)")
    sums = np.array([run.seconds.sum(axis=0) for run in runs])
    whole = sums.sum(axis=1, keepdims=True)
    shares = 100 * sums / np.where(whole > 0, whole, 1)
    rows, left = np.arange(len(runs)), np.zeros(len(runs))
    for (name, colour, hatch), widths in zip(_PARTS, shares.T, strict=True):
        look = {"color": colour, "edgecolor": "black", "hatch": hatch, "linewidth": 0.4}
        axis.barh(rows, widths, 0.6, left=left, label=name, **look)
        for row, width, start in zip(rows, widths, left, strict=True):
            if width >= 7:
                box = {"facecolor": "white", "edgecolor": "none", "pad": 1.2, "alpha": 0.85}
                place = (start + width / 2, row)
                axis.annotate(f"{width:.0f}", place, ha="center", va="center", bbox=box)
        left += widths
    axis.set_yticks(rows, [run.name for run in runs])
    axis.set_xlim(0, 100)
    axis.set_ylim(len(runs) - 0.4, -0.6)
    axis.spines["left"].set_visible(False)
    axis.tick_params(axis="y", length=0)
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3, frameon=False)


def _draw_filters(axis: Any, run: Run, alone: bool) -> None:
    if run.filters is not None:
        axis.imshow(filter_grid(run.filters), interpolation="nearest")
    axis.set_anchor("NW")
    axis.set_title("Filters of the first layer" if alone else f"Filters of {run.name}")
    axis.set_axis_off()


if __name__ == "__main__":
    raise SystemExit(main())
