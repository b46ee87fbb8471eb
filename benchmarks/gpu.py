"""How fast is training on a GPU, against the same network in plain PyTorch?

    python -m benchmarks.gpu                              steps, copies, exchange and whole runs
    python -m benchmarks.gpu --parts steps --seconds 280  what can be timed in that time
    python -m benchmarks.gpu --parts steps --modes ours compiled max-autotune-sliced
    python -m benchmarks.gpu --parts runs --data data/imagenet -- --crop_size 227

Run it from the project's top folder on a machine with an otherwise idle GPU. Steps have their data
in memory. Each contender is timed in turn with the first one, a few steps of each at a time, so
that a GPU that grows warm slows both, and reported at once. A time is the median over the rounds
after warm-up, with its quartiles. Whole runs read prepared data or files of noise, and end in Table
1 of the original. Prints JSON lines, then tables.
"""

import argparse
import json
import math
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from benchmarks.gpu_contenders import CONTENDERS, REFERENCE, StepSetting
from benchmarks.gpu_copies import exchange_seconds, upload_copies
from benchmarks.measure import Comparison, Measured, Step, compare, measure, parser_of
from benchmarks.original import (
    hidden_share,
    noise_for_runs,
    run_records,
    run_row,
    table_rows,
    table_runs,
)
from benchmarks.roofline import Rates, floor_seconds, measure_rates, step_flops
from examples.resident_step import PAPER, Sizes
from tandem.backend import give_back_memory, on_stream
from tandem.backend.precision import set_tf32
from tandem.config.hardware import cuda_device_count, missing_for_gpus
from tandem.memory.cuda import CudaDriver
from tandem.text_table import aligned

PEAK_TFLOPS = {
    # name of the device: dense bfloat16, tf32, float32, from NVIDIA's data sheets
    "H200": (989.4, 494.7, 66.9),
    "H100 PCIe": (756.0, 378.0, 51.0),
    "H100": (989.4, 494.7, 66.9),
    "A100": (312.0, 156.0, 19.5),
    "L40S": (362.0, 183.0, 91.6),
}
FLOOR_GOAL, HIDDEN_GOAL = 0.5, 0.97
COPY_SECONDS, EXCHANGE_SECONDS, RUN_SECONDS = 15.0, 45.0, 90.0  # guesses, on the side of too long
WARM_UP, REPORTS = 5, 15  # reports of a run: those that do not count, and those that do

Row = dict[str, Any]


class Budget:
    """Seconds to spend; what does not fit is left out, and named."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._end = clock, clock() + seconds
        self.left_out: list[str] = []

    @property
    def left(self) -> float:
        return self._end - self._clock()

    def allows(self, name: str, seconds: float) -> bool:
        """Return whether there is time for what takes `seconds`; if not, its name is kept."""
        fits = seconds <= self.left
        if not fits:
            self.left_out.append(name)
        return fits


@dataclass
class Report:
    """Rows that are printed as soon as they are found, and all together at the end."""

    rows: list[Row] = field(default_factory=list)

    def __call__(self, row: Row) -> None:
        self.rows.append(row)
        print(json.dumps(row), flush=True)

    @contextmanager
    def failures(self, name: str) -> Iterator[None]:
        """Context manager: report what fails, and continue with what is next."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self({"what": "failure", "name": name, "error": f"{type(error).__name__}: {error}"})

    @property
    def failed(self) -> bool:
        return any(row["what"] == "failure" for row in self.rows)


@dataclass(frozen=True)
class Session:
    """The state that all parts share."""

    options: argparse.Namespace
    budget: Budget
    report: Report
    place: StepSetting
    synchronize: Callable[[], None] = torch.cuda.synchronize

    @property
    def rounds(self) -> tuple[int, int]:
        return self.options.rounds, self.options.repeats


def peak_flops(device_name: str, precision: str) -> float | None:
    """Return the specified operations per second of a device; None if unknown."""
    column = ("bfloat16", "tf32", "float32").index(precision)
    known = (rates for name, rates in PEAK_TFLOPS.items() if name in device_name)
    rates = next(known, None)
    return None if rates is None else 1e12 * rates[column]


def step_row(measured: Measured, sizes: Sizes, peak: float | None, floor: float) -> Row:
    """Return the result of a step as printed, given the device's peak rate and the least time."""
    flops = step_flops(sizes.network(), sizes.batch) / measured.median
    return {
        "what": "step",
        "name": measured.name,
        "images_per_second": round(sizes.batch / measured.median, 1),
        **_milliseconds(measured),
        "share_of_peak": None if peak is None else round(flops / peak, 4),
        "share_of_floor": round(floor / measured.median, 4),
    }


def against(found: Comparison | None) -> Row:
    """Return how much faster the first contender is, as printed in the row of its peer."""
    if found is None:
        return dict.fromkeys(("first is faster by", "in rounds"))
    return {
        "first is faster by": round(found.ratio, 3),
        "in rounds": [round(found.low, 3), round(found.high, 3)],
    }


def goal_row(name: str, value: float, goal: float) -> Row:
    """Return as printed whether a value is at least its goal."""
    values = {"value": round(value, 4), "goal": goal, "reached": value >= goal}
    return {"what": "goal", "name": name, **values}


def copy_row(measured: Measured, nbytes: int) -> Row:
    """Return the result of a copy of `nbytes` as printed."""
    return {
        "what": "copy",
        "name": measured.name,
        "gigabytes_per_second": round(nbytes / measured.median / 1e9, 2),
        **_milliseconds(measured),
    }


def _milliseconds(measured: Measured) -> Row:
    low, high = measured.quartiles
    return {
        "milliseconds": round(1e3 * measured.median, 3),
        "quartiles": [round(1e3 * low, 3), round(1e3 * high, 3)],
        "rounds": len(measured.seconds),
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format rows as text, one block for each kind, with column names."""
    blocks = []
    for what in dict.fromkeys(row["what"] for row in rows):
        some = [row for row in rows if row["what"] == what]
        columns = [key for key in some[0] if key != "what"]
        cells = [columns, *([_shown(row.get(column)) for column in columns] for row in some)]
        blocks += [*aligned(cells, left=range(len(columns))), ""]
    return "\n".join(blocks)


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return " to ".join(str(item) for item in value)
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return "-" if value is None else str(value)


def setting(options: argparse.Namespace) -> Row:
    """Return the hardware and versions of the measurement."""
    return {
        "what": "setting",
        "device": torch.cuda.get_device_name(0),
        "precision": options.precision,
        "batch": options.batch,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "python": sys.version.split()[0],
    }


def time_steps(session: Session, rates: Rates, peak: float | None) -> None:
    """Time each contender in turn with the first, and report it at once."""
    place, report = session.place, session.report
    floor = floor_seconds(place.sizes.network(), place.sizes.batch, place.precision, rates)
    first: dict[str, Step] = {}
    for name in session.options.modes:
        contender = CONTENDERS[name]
        if not session.budget.allows(name, contender.seconds):
            continue
        with report.failures(name):
            step = contender.make(place)
            own, found = _time(session, name, step, first)
            report(step_row(own, place.sizes, peak, floor) | against(found))
            if not first:
                first[name] = step
                if name == REFERENCE:
                    report(goal_row("part of the floor", floor / own.median, FLOOR_GOAL))
            elif found and contender.goal is not None and REFERENCE in first:
                report(goal_row(f"speed of {name}", found.ratio, contender.goal))
        step = None  # its memory is needed
        give_back_memory()


def _time(
    session: Session, name: str, step: Step, first: Mapping[str, Step]
) -> tuple[Measured, Comparison | None]:
    """Time a contender in turn with the first, if it is not the first itself."""
    steps = {**first, name: step}
    *before, own = measure(steps, *session.rounds, session.synchronize, warmups=3)
    return own, compare("a training step", before[0], own) if before else None


def steps_part(session: Session) -> None:
    """Measure what the device reaches, then steps."""
    precision = session.place.precision
    set_tf32(precision == "tf32")
    torch.backends.cudnn.benchmark = True
    # Each compiled contender has its own version of one function; without one PyTorch would run
    # the function as it is.
    torch._dynamo.config.recompile_limit = 4 * len(CONTENDERS)
    rates = measure_rates(session.place.device, precision, session.synchronize)
    session.report(
        {
            "what": "rates",
            "name": "a large product, a large copy",
            "teraflops": round(rates.products / 1e12, 1),
            "terabytes_per_second": round(rates.memory / 1e12, 3),
        }
    )
    time_steps(session, rates, peak_flops(torch.cuda.get_device_name(0), precision))


def copies_part(session: Session) -> None:
    """Time a minibatch's way to the GPU."""
    place = session.place
    if place.driver is None or not session.budget.allows("copies", COPY_SECONDS):
        return
    with session.report.failures("copies"):
        copies, nbytes = upload_copies(place.driver, place.sizes.batch, place.sizes.stored)
        for measured in measure(copies, *session.rounds, session.synchronize):
            session.report(copy_row(measured, nbytes))


def exchange_part(session: Session) -> None:
    """Time the exchange of two trainers."""
    if session.budget.allows("exchange", EXCHANGE_SECONDS):
        with session.report.failures("exchange"):
            for measured, nbytes in exchange_seconds(*session.rounds):
                session.report(copy_row(measured, nbytes))


def runs_part(session: Session) -> None:
    """Make the runs of the original's Table 1, and report it."""
    with tempfile.TemporaryDirectory() as folder:
        data = session.options.data or noise_for_runs(Path(folder) / "data")
        rates = {}
        for run in table_runs(cuda_device_count()):
            if not session.budget.allows(run.name, RUN_SECONDS):
                continue
            with session.report.failures(run.name):
                settings = run_settings(session.options) + run.settings()
                limit = min(session.budget.left, 5 * RUN_SECONDS)
                records = run_records(data, settings, WARM_UP + REPORTS, limit, WARM_UP)
                row = run_row(run, records)
                rates[run] = row["images_per_second"]
                session.report(row)
                if run.parallel_loading and not run.keeps:
                    hidden = hidden_share(records)
                    session.report(goal_row(f"loading hidden, {run.name}", hidden, HIDDEN_GOAL))
    for row in table_rows(rates):
        session.report(row)


def run_settings(options: argparse.Namespace) -> list[str]:
    """Return the settings that all runs share."""
    return [
        *("--precision", options.precision, "--n_epochs", "1", "--print_freq", "20"),
        *("--live_view", "false", "--tensorboard", "false", "--snapshot_minutes", "0"),
        *options.settings,
    ]


PARTS = {
    "steps": steps_part,
    "copies": copies_part,
    "exchange": exchange_part,
    "runs": runs_part,
}


def run(options: argparse.Namespace, report: Report) -> None:
    """Measure everything and report each result."""
    driver = CudaDriver(0)
    report(setting(options))
    place = StepSetting(replace(PAPER, batch=options.batch), options.precision, driver)
    session = Session(options, Budget(options.seconds), report, place)
    stream = driver.stream()
    with on_stream(place.device, stream.handle):
        for name in options.parts:
            PARTS[name](session)
    for name in session.budget.left_out:
        report({"what": "left out", "name": name, "reason": "no time"})


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--precision", default="bfloat16", choices=["float32", "tf32", "bfloat16"])
    parser.add_argument("--batch", type=int, default=256, help="images of a step (default 256)")
    parser.add_argument("--rounds", type=int, default=30, help="measured rounds (default 30)")
    parser.add_argument("--repeats", type=int, default=10, help="in a round (default 10)")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="in all; what has no time is left out"
    )
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default all", metavar="PART"
    )
    parser.add_argument(
        "--modes",
        nargs="+",
        choices=CONTENDERS,
        default=list(CONTENDERS),
        metavar="MODE",
        help=f"contenders, in this order: {', '.join(CONTENDERS)}; default all",
    )
    parser.add_argument("--data", type=Path, help="a prepared data set for whole runs")
    parser.add_argument("settings", nargs="*", help="more settings of these runs, after --")
    options = parser.parse_args(arguments)
    options.modes = list(dict.fromkeys(options.modes))
    return options


def main(arguments: list[str] | None = None) -> int:
    """Measure, and print; return the exit status."""
    options = parse(arguments)
    missing = missing_for_gpus() if cuda_device_count() else "no GPU was found"
    if missing:
        sys.stderr.write(f"error: this benchmark needs a GPU: {missing}\n")
        return 2
    report = Report()
    signal.signal(signal.SIGTERM, _end)
    try:
        run(options, report)
    finally:
        print(table(report.rows))
    return 1 if report.failed else 0


def _end(number: int, frame: Any) -> NoReturn:
    """End as after an exception: the table is printed, and no run is left behind."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    raise SystemExit(main())
