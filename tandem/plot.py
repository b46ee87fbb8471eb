"""Draw the learning curves of one run, or of several beside each other.

One run:       python -m tandem.plot runs/demo
Several runs:  python -m tandem.plot runs/a runs/b --output curves.png
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.errors import InputError
from tandem.files import replacing
from tandem.run.record import TrainRecord, ValidationRecord, read_records

log = logging.getLogger(__name__)

# Okabe and Ito's colours, told apart by people of every kind of colour vision.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_THIN: dict[str, Any] = {"alpha": 0.55, "lw": 1}
_DOTS: dict[str, Any] = {"marker": "o", "ms": 4}
_SQUARES: dict[str, Any] = {"marker": "s", "ms": 4, "ls": "--", "mfc": "white"}
_SUFFIXES = (".png", ".pdf", ".svg")


Records = Sequence[TrainRecord | ValidationRecord]


@dataclass(frozen=True)
class Curve:
    """The record of one run, and where its points lie along the axis.

    Attributes
    ----------
    name : str
        What the legend calls the run.
    train : tuple of TrainRecord
    validation : tuple of ValidationRecord
    """

    name: str
    train: tuple[TrainRecord, ...]
    validation: tuple[ValidationRecord, ...]

    @property
    def steps_per_epoch(self) -> float | None:
        """Known once an epoch has been validated."""
        last = self.validation[-1] if self.validation else None
        return last.step / last.epoch if last and last.epoch and last.step else None


def draw_curves(records: Path | Sequence[Path], output: Path) -> None:
    """Draw loss, errors, learning rate and where the time went.

    Parameters
    ----------
    records : Path or sequence of Path
        Files ``record.jsonl``, or the folders of runs that hold them.
    output : Path
        The picture to write, whole or not at all: .png, .pdf or .svg.

    Raises
    ------
    InputError
        A record is missing, damaged or empty, or the picture cannot be written.
    """
    if output.suffix.lower() not in _SUFFIXES:
        raise InputError(f"{output}: a picture is written as one of {', '.join(_SUFFIXES)}")
    paths = [records] if isinstance(records, Path) else list(records)
    if len(paths) > len(_COLOURS):
        raise InputError(
            f"{len(paths)} runs were given; at most {len(_COLOURS)} can be told apart by colour"
        )
    curves = [_read_curve(path) for path in paths]
    figure = _draw(curves)
    try:
        with replacing(output) as partial:
            figure.savefig(partial, format=output.suffix[1:].lower(), dpi=150)
    except OSError as error:
        raise InputError(f"{output}: cannot be written ({error.strerror})") from error


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit status."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", force=True)
    options = _parser().parse_args(argv)
    output = options.output
    if output is None:
        output = _folder(options.runs[0]) / "curves.png" if len(options.runs) == 1 else None
    try:
        if output is None:
            raise InputError("several runs were given: say with --output FILE where to draw them")
        draw_curves(options.runs, output)
    except InputError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    log.info("wrote %s", output)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tandem.plot",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, or its record.jsonl"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help=f"{', '.join(_SUFFIXES)} (default: curves.png in the folder of the one run)",
    )
    return parser


def _folder(run: Path) -> Path:
    return run if run.is_dir() else run.parent


def _read_curve(path: Path) -> Curve:
    file = path / "record.jsonl" if path.is_dir() else path
    records = read_records(file)
    if not records:
        raise InputError(f"{file}: nothing is recorded yet, so there is nothing to draw")
    return Curve(
        file.resolve().parent.name,
        tuple(record for record in records if isinstance(record, TrainRecord)),
        tuple(record for record in records if isinstance(record, ValidationRecord)),
    )


@dataclass(frozen=True)
class Panel:
    """One of the four drawings.

    Attributes
    ----------
    axis : matplotlib.axes.Axes
    in_epochs : bool
        Whether the axis counts epochs, or steps where no epoch has been validated yet.
    """

    axis: Any
    in_epochs: bool

    def places(self, curve: Curve, records: Records) -> list[float]:
        """Where records lie along the axis."""
        scale = (curve.steps_per_epoch or 1) if self.in_epochs else 1
        return [record.step / scale for record in records]

    def line(self, curve: Curve, records: Records, values: Sequence[float], **style: Any) -> None:
        """Draw one quantity of one run."""
        self.axis.plot(self.places(curve, records), values, **style)

    def finish(self) -> None:
        """Label what has been drawn."""
        self.axis.set_xlabel("epochs" if self.in_epochs else "steps")
        self.axis.set_xlim(left=0)
        if self.axis.get_yscale() == "linear":
            self.axis.set_ylim(bottom=0)
        self.axis.grid(alpha=0.3)
        handles, labels = self.axis.get_legend_handles_labels()
        if labels:
            # Several runs draw the same quantities; one handle explains each.
            first = dict(reversed(list(zip(labels, handles, strict=True))))
            self.axis.legend(handles=list(first.values())[::-1], framealpha=0.9)


def _draw(curves: Sequence[Curve]) -> Any:
    from matplotlib.figure import Figure

    # A Figure of its own, not pyplot's: no window system is asked for, and nothing stays behind.
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    in_epochs = all(curve.steps_per_epoch for curve in curves)
    panels = [Panel(axis, in_epochs) for axis in figure.subplots(2, 2).flat]
    colours = _COLOURS[: len(curves)]
    single = len(curves) == 1
    drawings = (_draw_loss, _draw_errors, _draw_rate, _draw_times if single else _draw_speed)
    for panel, draw in zip(panels, drawings, strict=True):
        for curve, colour in zip(curves, colours, strict=True):
            draw(panel, curve, colour)
        panel.finish()
    if single:
        figure.suptitle(curves[0].name)
    else:
        _name_runs(figure, curves, colours)
    return figure


def _name_runs(figure: Any, curves: Sequence[Curve], colours: Sequence[str]) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=colour, lw=3) for colour in colours]
    names = [curve.name for curve in curves]
    figure.legend(handles, names, loc="outside upper center", ncols=4, frameon=False)


def _draw_loss(panel: Panel, curve: Curve, colour: str) -> None:
    panel.axis.set_title("Loss (nats)")
    for label, records, style in (
        ("training", curve.train, _THIN),
        ("validation", curve.validation, _DOTS),
    ):
        losses = [record.loss for record in records]
        panel.line(curve, records, losses, label=label, color=colour, **style)


def _draw_errors(panel: Panel, curve: Curve, colour: str) -> None:
    panel.axis.set_title("Error (%)")
    train = [100 * r.top1_error for r in curve.train if r.top1_error is not None]
    if len(train) == len(curve.train) > 0:
        panel.line(curve, curve.train, train, label="training top-1", color=colour, **_THIN)
    top1 = [100 * record.top1_error for record in curve.validation]
    top5 = [100 * record.top5_error for record in curve.validation]
    panel.line(curve, curve.validation, top1, label="validation top-1", color=colour, **_DOTS)
    panel.line(curve, curve.validation, top5, label="validation top-5", color=colour, **_SQUARES)


def _draw_rate(panel: Panel, curve: Curve, colour: str) -> None:
    panel.axis.set_title("Learning rate")
    rates = [record.learning_rate for record in curve.train]
    panel.line(curve, curve.train, rates, color=colour)
    if any(rate > 0 for rate in rates):
        panel.axis.set_yscale("log")


def _draw_times(panel: Panel, curve: Curve, colour: str) -> None:
    """Shares of the seconds that trainer 0 measured, one above the other."""
    panel.axis.set_title("Where the time of trainer 0 goes (%)")
    seconds = [(r.compute_seconds, r.load_wait_seconds, r.exchange_seconds) for r in curve.train]
    shares = [[100 * part / (sum(parts) or 1) for part in parts] for parts in seconds]
    if shares:
        panel.axis.set_ylim(0, 100)
        panel.axis.stackplot(
            panel.places(curve, curve.train),
            *zip(*shares, strict=True),
            labels=("computing", "waiting for the loader", "exchanging"),
            colors=(colour, *_COLOURS[4:6]),
        )


def _draw_speed(panel: Panel, curve: Curve, colour: str) -> None:
    panel.axis.set_title("Images per second, all trainers together")
    speeds = [record.images_per_second for record in curve.train]
    panel.line(curve, curve.train, speeds, color=colour)


if __name__ == "__main__":
    raise SystemExit(main())
