"""Draw the results of benchmarks again.

python -m benchmarks.draw benchmarks/results/TIME.jsonl picture.svg
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import LogFormatter

from benchmarks.measure import parser_of

BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#999999"  # also for the colour-blind
Rows = Sequence[Mapping[str, Any]]


@contextmanager
def picture(path: Path, panels: int, dpi: int, **options: Any) -> Iterator[Any]:
    """Context manager: the axes of panels side by side, then drawn as a PNG or SVG file.

    `options` are those of ``pyplot.subplots``.
    """
    figure, axes = pyplot.subplots(1, panels, layout="constrained", **options)
    yield axes
    figure.savefig(path, dpi=dpi)
    pyplot.close(figure)


def draw(rows: Rows, path: Path) -> None:
    """Draw comparisons, beside the parts of a step, as a PNG or SVG file."""
    compared = [row for row in rows if "peer" in row]
    parts = [row for row in rows if "whole_seconds" in row and row["name"] != "all"]
    height = 1.5 + 0.26 * max(len(compared) + len({r["question"] for r in compared}), len(parts), 4)
    with picture(path, 2, dpi=120, figsize=(15, height), width_ratios=(2, 1)) as axes:
        _draw_comparisons(axes[0], compared)
        _draw_parts(axes[1], parts)


def speed(row: Mapping[str, Any], key: str) -> float:
    """Return a ratio as one of speeds, so that more is always better."""
    return row[key] if row["kind"] == "speed" else 1 / row[key]


def _draw_comparisons(axes: Axes, rows: Rows) -> None:
    """Draw a point with its quartiles for each row, and a mark at its target."""
    labels: list[str] = []
    asked = None
    for row in rows:
        if row["question"] != asked:
            asked = row["question"]
            axes.text(0.01, len(labels), asked, transform=axes.get_yaxis_transform(), va="center")
            labels.append("")
        y, value = len(labels), speed(row, "ratio")
        colour = ORANGE if row["reached"] is False else BLUE
        axes.plot(sorted([speed(row, "low"), speed(row, "high")]), [y, y], color=colour, lw=2)
        axes.plot(value, y, "o", color=colour)
        if row["target"] is not None:
            axes.plot(speed(row, "target"), y, "|", color="black", ms=14, mew=2)
        labels.append(f"{row['name']} against {row['peer']}")
    axes.axvline(1, color=GREY, lw=1, zorder=0)
    axes.set_xscale("log")
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.set_ylim(len(labels), -1)
    for axis in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
        axis(LogFormatter(minor_thresholds=(2, 1)))
    axes.set_xlabel("speed over the peer's: median, quartiles, and | the target")


def _draw_parts(axes: Axes, rows: Rows) -> None:
    """Draw a bar for each part, with its rate where operations were counted."""
    for y, row in enumerate(rows):
        axes.barh(y, 1000 * row["seconds"], color=BLUE)
        if row["operations"]:
            rate = row["operations"] / row["seconds"] / 1e9
            axes.text(1000 * row["seconds"], y, f" {rate:.0f} GFLOP/s", va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.3)
    axes.set_xlabel("milliseconds of a training step")


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw a file of results; return the exit status."""
    parser = parser_of(__doc__)
    parser.add_argument("results", type=Path, help="a file of JSON lines")
    parser.add_argument("picture", type=Path, help="the PNG or SVG file to write")
    options = parser.parse_args(arguments)
    rows = [json.loads(line) for line in options.results.read_text().splitlines()]
    draw(rows, options.picture)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
