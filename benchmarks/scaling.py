"""Measure exchanges over ranks, fit a cost model, and predict how training scales.

    make bench-ranks                              measure, fit, draw
    python -m benchmarks.scaling RESULTS.jsonl    fit and draw earlier measurements

Prints a table of the measurements of `benchmarks.ranks`, the fitted rates, and predictions for 8,
64 and 512 ranks training the networks of Theano-MPI: computing time from its table, and the
exchange of this program over cables of several speeds.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.measure import parser_of, quartiles, setting
from benchmarks.published import THEANO_MPI, PublishedNetwork
from benchmarks.ranks import CABLE_SPEED, PEERS
from tandem.cost.exchange import (
    STRATEGIES,
    Layout,
    Rates,
    fit,
    load,
    not_measured,
    seconds,
    speedup,
)
from tandem.cost.machine import ExchangeRates

RESULTS = Path(__file__).parent / "results"
RANKS = (8, 64, 512)
RANKS_EACH = 8  # of each machine, in predictions
FASTER = (10e9, 100e9)  # bit/s, of cables not measured
COLOURS = {"ar": "#999999", "asa": "#0072B2", "asa16": "#D55E00", "hierarchical": "#009E73"}
STYLES = (":", "--", "-")
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Model:
    """Fitted rates and their errors."""

    rates: Rates
    errors: tuple[float, ...]  # predicted over measured seconds, minus 1, for each measurement

    @classmethod
    def of(cls, rows: Sequence[Row]) -> "Model":
        """Fit the rates to rows of our strategies."""
        loads = [load(row["name"], row["parameters"], layout_of(row)) for row in rows]
        times = [statistics.median(row["seconds"]) for row in rows]
        rates = fit(loads, times)
        errors = (seconds(rates, asked) / t - 1 for asked, t in zip(loads, times, strict=True))
        return cls(rates, tuple(errors))

    def at(self, bits_per_second: float) -> Rates:
        """Return the rates with a cable of another speed."""
        return replace(self.rates, bytes_between=8 / bits_per_second)


def layout_of(row: Row) -> Layout:
    return Layout(row["machines"], row["ranks_each"], row["cores_each"])


def is_fitted(row: Row) -> bool:
    return row["name"] in STRATEGIES


def predict(
    network: PublishedNetwork, strategy: str, ranks: int, rates: Rates
) -> tuple[float, float]:
    """Predict the seconds of an exchange and the speed-up, with a core per rank.

    Each machine has `RANKS_EACH` ranks, or all of them if they are fewer.
    """
    each = min(ranks, RANKS_EACH)
    exchange = seconds(rates, load(strategy, network.parameters, Layout(ranks // each, each)))
    return exchange, speedup(ranks, network.compute, exchange)


def measured_table(rows: Sequence[Row], model: Model | None) -> str:
    """Format the measurements, a block for each layout and size."""
    predicted = {}
    if model is not None:
        ours = [row for row in rows if is_fitted(row)]
        predicted = {id(r): e + 1 for r, e in zip(ours, model.errors, strict=True)}
    lines = []
    for layout in dict.fromkeys(map(_key, rows)):
        machines, each, parameters = layout
        lines.append(f"{machines} machine(s) of {each} rank(s), {parameters:,} parameters")
        here = [row for row in rows if _key(row) == layout]
        peers = {r["name"]: statistics.median(r["seconds"]) for r in here if r["name"] in PEERS}
        lines += [_line(row, peers, predicted.get(id(row))) for row in here]
    return "\n".join(lines)


def _key(row: Row) -> tuple[int, int, int]:
    return row["machines"], row["ranks_each"], row["parameters"]


def _line(row: Row, peers: Mapping[str, float], predicted: float | None) -> str:
    median, (low, high) = statistics.median(row["seconds"]), quartiles(row["seconds"])
    ranks, nbytes = row["machines"] * row["ranks_each"], 4 * row["parameters"]
    needed = nbytes * (1 if row["name"] == "MPI message" else 2 * (ranks - 1) / ranks)
    parts = [
        f"  {row['name']:15} {1e3 * median:9.2f} ms ({1e3 * low:.2f} to {1e3 * high:.2f})",
        f"{needed / median / 1e9:6.2f} GB/s",
    ]
    for title, key in (("received by a rank", "bytes_received"), ("by cable", "bytes_by_cable")):
        if row[key] is not None:
            parts.append(f"{title} {row[key] / 1e6:.2f} MB")
    if row["name"] in STRATEGIES:
        parts += [f"{peers[peer] / median:.2f} x the speed of {peer}" for peer in PEERS[:2]]
    if predicted is not None:
        parts.append(f"model {predicted:.2f} x")
    return ", ".join(parts)


def rates_table(model: Model) -> str:
    """Format the rates in usual units, and how well they fit."""
    r = model.rates
    off = sorted(map(abs, model.errors))
    gigabytes = [1e-9 / rate for rate in (r.bytes_within, r.bytes_between)]
    millions = [1e-6 / rate for rate in (r.added, r.rounded)]
    return "\n".join(
        [
            f"a step waits {1e6 * r.steps_within:.0f} us within a machine, "
            f"{1e6 * r.steps_between:.0f} us between machines",
            f"by MPI, a core passes on {gigabytes[0]:.3g} GB/s within a machine",
            f"between machines go {gigabytes[1]:.3g} GB/s",
            f"a core adds {millions[0]:.0f} and rounds {millions[1]:.0f} million elements/s",
            f"of {len(off)} measurements, half are within {statistics.median(off):.0%}, all within "
            f"{off[-1]:.0%}",
        ]
    )


def machine_section(model: Model) -> str:
    """Format the rates as `tandem.cost.machine` reads them."""
    rates = ExchangeRates.of(model.rates).model_dump(exclude_none=True)
    return yaml.safe_dump({"exchange": rates}, sort_keys=False).rstrip()


def predicted_table(model: Model) -> str:
    """Format predictions for the networks of Theano-MPI beside its measurements."""
    lines = ["seconds of exchange in 5,120 images / speed-up, predicted unless marked as measured"]
    for network in THEANO_MPI:
        lines.append(f"{network.name}, {network.batch} images a rank, {network.parameters:,}")
        for strategy, exchange in network.exchange.items():
            faster = speedup(8, network.compute, exchange / network.steps)
            cell = f"{exchange:.2f} / {faster:.1f}"
            lines.append(f"  Theano-MPI, {strategy}, measured on 8 GPUs: {cell}")
        for bits in (CABLE_SPEED, *FASTER):
            for strategy in STRATEGIES:
                found = [predict(network, strategy, n, model.at(bits)) for n in RANKS]
                steps = [5120 / (n * network.batch) for n in RANKS]
                cells = [
                    f"{n}: {e * s:.2f} / {f:.1f}"
                    for n, s, (e, f) in zip(RANKS, steps, found, strict=True)
                ]
                lines.append(f"  {bits / 1e9:g} Gbit/s, {strategy}, ranks {', '.join(cells)}")
    return "\n".join(lines)


def draw(rows: Sequence[Row], model: Model, path: Path) -> None:
    """Draw how well the model fits and what it predicts.

    Parameters
    ----------
    rows : sequence of mapping
        The measurements.
    model : Model
        The model fitted to them.
    path : Path
        A PNG or SVG file.
    """
    from benchmarks.draw import picture  # imports Matplotlib

    with picture(path, 1 + len(THEANO_MPI), dpi=60, figsize=(18, 6)) as axes:
        _draw_fit(axes[0], rows, model)
        for panel, network in zip(axes[1:], THEANO_MPI, strict=True):
            _draw_speedup(panel, network, model)
        handles_labels = axes[1].get_legend_handles_labels()
        axes[0].figure.legend(*handles_labels, fontsize=8, ncols=5, loc="outside lower right")


def _draw_fit(axes: Any, rows: Sequence[Row], model: Model) -> None:
    """Draw a point for each measurement: predicted over measured."""
    ours = [row for row in rows if is_fitted(row)]
    times = np.array([statistics.median(row["seconds"]) for row in ours])
    fitted = times * (1 + np.array(model.errors))
    for strategy, colour in COLOURS.items():
        for machines, mark in ((1, "o"), (2, "^")):
            chosen = [r["name"] == strategy and r["machines"] == machines for r in ours]
            if any(chosen):
                label = f"{strategy}, {machines} machine{'s' * (machines > 1)}"
                axes.plot(times[chosen], fitted[chosen], mark, color=colour, label=label, ms=5)
    ends = [times.min(), times.max()]
    axes.plot(ends, ends, color="black", lw=1)
    axes.set(xscale="log", yscale="log", xlabel="measured seconds", ylabel="seconds by the model")
    axes.set_title("An exchange: measured, and by the model", fontsize=10)
    axes.legend(fontsize=7)


def _draw_speedup(axes: Any, network: PublishedNetwork, model: Model) -> None:
    """Draw the part of the ideal speed-up over ranks, and that of Theano-MPI."""
    ranks = [2**k for k in range(10)]
    for bits, style in zip((CABLE_SPEED, *FASTER), STYLES, strict=True):
        for strategy, colour in COLOURS.items():
            found = [predict(network, strategy, n, model.at(bits))[1] / n for n in ranks]
            label = f"{strategy}, {bits / 1e9:g} Gbit/s"
            axes.plot(ranks, found, style, color=colour, label=label, lw=1.5)
    for strategy, exchange in network.exchange.items():
        faster = speedup(8, network.compute, exchange / network.steps)
        label = f"{strategy}, Theano-MPI, measured"
        axes.plot(8, faster / 8, "*", color=COLOURS[strategy], ms=12, mec="black", label=label)
    axes.set(xscale="log", xlabel="ranks, eight on a machine", ylabel="part of the ideal speed-up")
    axes.set_xticks(ranks, [str(n) for n in ranks])
    axes.set_ylim(0, 1.05)
    axes.set_title(f"{network.name}, {network.batch} images a rank", fontsize=10)


def report(rows: Sequence[Row], path: Path) -> None:
    """Print the tables, and draw as far as the measurements allow."""
    ours = [row for row in rows if is_fitted(row)]
    model = Model.of(ours)
    print(measured_table(rows, model))
    print(rates_table(model))
    print(f"for the file of a machine, see tandem cost:\n{machine_section(model)}")
    wanted = [load(strategy, 1, Layout(2, 2)) for strategy in STRATEGIES]
    wanted += [load(strategy, 1, Layout(1, 2)) for strategy in STRATEGIES]
    if names := not_measured(model.rates, wanted):
        print(f"no prediction: nothing was measured for {', '.join(names)}")
        return
    print(predicted_table(model))
    draw(rows, model, path)
    print(f"drawn in {path}")


def main(arguments: Sequence[str]) -> int:
    """Measure unless given a file, then fit and draw; return the exit status."""
    epilog = "Other options are those of benchmarks.ranks."
    parser = parser_of(__doc__, prog="python -m benchmarks.scaling", epilog=epilog)
    parser.add_argument("results", nargs="?", type=Path, help="draw this file of measurements")
    own = [word for word in arguments if word in ("-h", "--help") or word.endswith(".jsonl")]
    path = parser.parse_args(own).results
    if path is None:
        command = [sys.executable, "-m", "benchmarks.ranks", *arguments]
        result = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if result.returncode:
            return result.returncode
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / time.strftime("ranks-%Y%m%d-%H%M%S.jsonl")
        path.write_text(json.dumps(_setting()) + "\n" + result.stdout)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    report([row for row in rows if "parameters" in row], path.with_suffix(".png"))
    return 0


def _setting() -> dict[str, Any]:
    import importlib.metadata as metadata

    return setting() | {"mpi4py": metadata.version("mpi4py")}


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
