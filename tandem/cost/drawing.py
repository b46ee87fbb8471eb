"""A picture of predictions: what a step is made of, and how training scales."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tandem.cost.predict import Prediction
from tandem.errors import explained
from tandem.files import replacing

_COMPUTE, _EXPOSED, _HIDDEN, _LOAD = "#0072B2", "#D55E00", "#F0C9B0", "#999999"


def draw(title: str, predictions: Sequence[Prediction], output: Path) -> None:
    """Draw a bar of the step and a point of the speed-up for each number of ranks.

    `output` is a .png, .svg or .pdf, written whole or not at all. Raises InputError if it cannot be
    written.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"font.size": 9, "svg.hashsalt": "tandem"}):
        figure = Figure(figsize=(10, 4), layout="constrained")
        bars, curve = figure.subplots(1, 2)
        _draw_steps(bars, predictions)
        _draw_speedups(curve, predictions)
        figure.suptitle(title, fontsize=10)
        with explained(output, "cannot be written"), replacing(output) as partial:
            figure.savefig(partial, format=output.suffix[1:], dpi=150)


def _draw_steps(axes: Any, predictions: Sequence[Prediction]) -> None:
    """Stack what a step is made of; beside it, what is hidden behind the computing."""
    names = [f"{p.ranks:,}" for p in predictions]
    compute = [p.compute for p in predictions]
    exposed = [p.exposed for p in predictions]
    waits = [max(0.0, p.load - p.compute - p.exposed) for p in predictions]
    hidden = [p.exchange - p.exposed for p in predictions]
    axes.bar(names, compute, 0.6, color=_COMPUTE, label="compute")
    axes.bar(names, exposed, 0.6, compute, color=_EXPOSED, label="exposed exchange")
    below = [sum(pair) for pair in zip(compute, exposed, strict=True)]
    if any(waits):
        axes.bar(names, waits, 0.6, below, color=_LOAD, label="waiting for the loader")
    if max(hidden) > 1e-3 * max(compute):
        start = [c - h for c, h in zip(compute, hidden, strict=True)]
        axes.bar(names, hidden, 0.2, start, color=_HIDDEN, label="hidden exchange")
    axes.set(xlabel="ranks", ylabel="seconds of a step")
    axes.set_ylim(top=1.25 * max(p.step for p in predictions))
    axes.legend(fontsize=8, ncols=2, loc="upper left")


def _draw_speedups(axes: Any, predictions: Sequence[Prediction]) -> None:
    ranks = [p.ranks for p in predictions]
    axes.plot(ranks, ranks, color="black", lw=0.8, label="ideal")
    axes.plot(ranks, [p.speedup for p in predictions], "o-", color=_COMPUTE, label="predicted")
    axes.set(xlabel="ranks", ylabel="speed-up over one trainer alone")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(ranks, [f"{n:,}" for n in ranks])
    axes.set_yticks(ranks, [f"{n:,}" for n in ranks])
    axes.legend(fontsize=8)
