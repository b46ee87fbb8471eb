"""Tables of the systems before this one: their figures, ours on two cores, and predictions.

    python -m benchmarks.original --table 1

1. Ding, Wang, Mao, Taylor 2014 (arXiv 1412.2302), Table 1: seconds per 20 iterations of 256
   pictures, with and without parallel loading, one and two trainers.
2. Theano-MPI (Ma, Mao, Taylor 2016, arXiv 1605.08325): communication and speed-up by all-reduce.
3. Theano-MPI's README: computing, communication and speed-up by network.
4. Synkhronos (Stooke, Abbeel 2017, arXiv 1710.04162): ResNet-50 by data-parallel functions.
5. PyDTNN (Barrachina et al. 2021): AlexNet on CIFAR-10.

A core stands for a GPU or node, and steps are small, so that each ends in ten minutes on two idle
cores; seconds are for 5,120 pictures unless a column says otherwise. Predictions are of
`tandem.cost` for the original's machine: computing as published, or as it follows from what was.
"""

import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import machine, parser_of
from benchmarks.pictures import write_data_folder
from benchmarks.published import (
    PARAMETERS,
    THEANO_MPI,
    TIMED,
    Timed,
    exchange_seconds,
    node_rates,
    settings_of,
)
from benchmarks.team import run_until
from tandem.artifacts.metrics_log import TrainRecord, read_records
from tandem.cost.exchange import Layout, Rates, load, seconds, speedup
from tandem.cost.machine import ASSUMED_BITS
from tandem.text_table import aligned

PROGRAM = Path(__file__).parents[1] / "train.py"
GLOBAL_BATCH, ITERATIONS = 256, 20
ORIGINAL = {(True, 2): 19.72, (True, 1): 32.76, (False, 2): 26.23, (False, 1): 43.52}
"""Seconds of Table 1 by parallel loading and trainers: cuDNN R2, two GeForce GTX Titan Black."""


@dataclass(frozen=True)
class Run:
    """A run of Table 1."""

    parallel_loading: bool
    devices: tuple[str, ...]
    keeps: bool = False  # whether the GPU keeps all pictures

    @property
    def name(self) -> str:
        trainers = "one trainer" if len(self.devices) == 1 else f"{len(self.devices)} trainers"
        gpus = len(set(self.devices))
        shared = "" if gpus == len(self.devices) else f" on {gpus} GPU"
        kept = ", pictures kept on the GPU" if self.keeps else ""
        return (
            f"{trainers}{shared}, parallel loading {'on' if self.parallel_loading else 'off'}{kept}"
        )

    def settings(self, batch: int = GLOBAL_BATCH) -> list[str]:
        """Return its settings for the command line; `batch` is the global one."""
        settings = [
            *("--devices", *self.devices),
            *("--para_load", str(self.parallel_loading).lower()),
            *("--batch_size", str(batch // len(self.devices))),
        ]
        if self.devices[0] != "cpu":
            settings += ["--data_on_gpu", str(self.keeps).lower()]
        return settings


def table_runs(gpus: int) -> list[Run]:
    """Return the runs of Table 1, and one with pictures on the GPU; two trainers share one GPU."""
    one, two = ("cuda:0",), ("cuda:0", "cuda:1") if gpus > 1 else ("cuda:0", "cuda:0")
    runs = [Run(loading, devices) for devices in (one, two) for loading in (True, False)]
    return [*runs, Run(True, one, keeps=True)]


def noise_for_runs(folder: Path, side: int = 256, classes: int = 1000) -> Path:
    """Write an epoch of 102,400 pictures of noise, from four files; return the folder."""
    return write_data_folder(folder, 4 * GLOBAL_BATCH, side, classes, repeat=100)


def run_records(
    data: Path, settings: Sequence[str], reports: int, seconds: float, skip: int = 0
) -> list[TrainRecord]:
    """Start a run, end it after `reports` reports, and return these without the first `skip`.

    Raises InputError if the run fails, ends before, or takes more than `seconds`.
    """
    with tempfile.TemporaryDirectory() as name:
        run, found = Path(name) / "run", []

        def is_done() -> bool:
            found[:] = _train_records(run / "record.jsonl")
            return len(found) >= reports

        command = [sys.executable, str(PROGRAM), "--data_folder", str(data)]
        run_until(is_done, [*command, "--weights_dir", str(run), *settings], seconds)
        return found[skip:reports]


def _train_records(path: Path) -> list[TrainRecord]:
    records = read_records(path) if path.exists() else []
    return [record for record in records if isinstance(record, TrainRecord)]


def hidden_share(records: Sequence[TrainRecord]) -> float:
    """Return the part of a trainer's time in which it did not wait for pictures."""
    waited = sum(record.load_wait_seconds for record in records)
    return 1 - waited / sum(
        record.compute_seconds + record.load_wait_seconds + record.exchange_seconds
        for record in records
    )


def run_row(run: Run, records: Sequence[TrainRecord]) -> dict[str, Any]:
    """Return the result of a run as printed."""
    rates = [record.images_per_second for record in records]
    return {
        "what": "run",
        "name": run.name,
        "images_per_second": round(statistics.median(rates), 1),
        "least and most": [round(min(rates), 1), round(max(rates), 1)],
        "reports": len(rates),
        "loading hidden": round(hidden_share(records), 4),
    }


def table_rows(rates: Mapping[Run, float]) -> list[dict[str, Any]]:
    """Return Table 1 from images per second, beside the original's; None where none is known."""
    images = GLOBAL_BATCH * ITERATIONS
    rows = []
    for loading in (True, False):
        row: dict[str, Any] = {"what": "table 1", "parallel loading": "yes" if loading else "no"}
        for trainers in (2, 1):
            found = [
                images / rate
                for run, rate in rates.items()
                if (run.parallel_loading, len(run.devices), run.keeps) == (loading, trainers, False)
            ]
            row[f"seconds, {trainers} trainers"[: None if trainers > 1 else -1]] = (
                round(found[0], 3) if found else None
            )
        for trainers in (2, 1):
            row[f"original, {trainers} x Titan Black"] = ORIGINAL[loading, trainers]
        rows.append(row)
    return rows


Cells = tuple[str, ...]
PCI_EXPRESS, NVLINK = 15.75e9, 20e9  # bytes/s one way by specification: 3.0 of 16 lanes; one link
STOOKE_SPEEDUP, STOOKE_RATE, STOOKE_GPUS = 7.5, 830.0, 8  # images/s, Tesla P100
STOOKE_BATCH = 32  # of each GPU, the default of its demo
PYDTNN = {"PyDTNN": 0.50, "TensorFlow with Horovod": 0.85}  # ks to 70 %, 8 processes of 6 threads
OURS = {"AlexNet": 32, "GoogLeNet": 8, "VGG-16": 4, "ResNet-50": 8}  # pictures of a trainer's step
SHORT = [
    *("--threads", "1", "--n_epochs", "1", "--learning_rate", "0.0001", "--live_view", "false"),
    *("--tensorboard", "false", "--snapshot_minutes", "0"),
]
WAIT = 500  # seconds of a run


def predicted_loading(loading: bool, gpus: int) -> float:
    """Predict seconds of Table 1 from those of one GPU: halves, and the exchange of averages."""
    alone = ORIGINAL[loading, 1]
    rates = Rates(steps_within=0.0, bytes_within=1 / PCI_EXPRESS, added=0.0)
    averages = load("asa", 2 * PARAMETERS["AlexNet"], Layout(1, gpus))  # weights and momenta
    return alone / gpus + ITERATIONS * seconds(rates, averages)


def predicted_resnet(gpus: int = STOOKE_GPUS) -> float:
    """Predict Synkhronos's speed-up from the images per second of one GPU, by one NVLink each."""
    computing = STOOKE_BATCH / (STOOKE_RATE / STOOKE_SPEEDUP)
    rates = Rates(steps_within=0.0, bytes_within=1 / NVLINK, added=0.0)
    gradients = load("asa", PARAMETERS["ResNet-50"], Layout(1, gpus))
    return speedup(gpus, computing, seconds(rates, gradients))


def loading_table(data: Path, batch: int = 64, more: Sequence[str] = ()) -> Iterator[Cells]:
    """Make the runs of Table 1; `batch` is of all trainers."""
    yield "parallel loading", "trainers", "here, s", "original, s", "predicted, s"
    for loading, trainers in ORIGINAL:
        run = Run(loading, ("cpu",) * trainers)
        words = [*SHORT, "--print_freq", "2", *more, *run.settings(batch)]
        found = run_records(data, words, 5, WAIT, skip=1)
        here = GLOBAL_BATCH * ITERATIONS / run_row(run, found)["images_per_second"]
        figures = ORIGINAL[loading, trainers], predicted_loading(loading, trainers)
        name = "yes" if loading else "no"
        yield name, f"{trainers}", f"{here:.1f}", *(f"{figure:.2f}" for figure in figures)


def exchange_table(rounds: int = 3, scale: float = 1.0) -> Iterator[Cells]:
    """Time the all-reduces of two ranks, each with `scale` of a network's parameters."""
    from benchmarks.ranks import Job, run

    yield (
        *("network, all-reduce", "here, 2 ranks, s", "8 GPUs: original, s", "speed-up"),
        *("predicted by NCCL, s", "speed-up"),
    )
    rates = node_rates()
    for network in THEANO_MPI:
        job = Job(1, 2, (round(scale * network.parameters),), rounds)
        found = {row["name"]: statistics.median(row["seconds"]) for row in run(job)}
        model = exchange_seconds(network.parameters, 8, rates, ASSUMED_BITS)
        for name, spent in network.exchange.items():
            published = speedup(8, network.compute, spent / network.steps)
            yield (
                f"{network.name}, {network.batch}, {name}",
                f"{found[name] * 4 * network.steps:.2f}",
                f"{spent:.2f}",
                f"{published:.1f}",
                f"{model * network.steps:.2f}",
                f"{speedup(8, network.compute, model):.1f}",
            )


def model_table(
    data: Path,
    networks: Sequence[Timed] = TIMED,
    crop: int | None = None,
    more: Sequence[str] = (),
) -> Iterator[Cells]:
    """Train each network with one trainer and with two, of one thread each."""
    yield (
        *("network", "trainers", "here: computing, s", "communication, s", "speed-up"),
        *("original", "predicted"),
    )
    rates = node_rates()
    for network in networks:
        if (network.name, network.batch) == ("VGG-16", 16):  # it is there with 32 too
            continue
        batch, alone = OURS[network.name], 0.0
        for trainers in (1, 2, 4, 8):
            here: Cells = ("", "", "")
            if trainers <= 2:
                run = Run(True, ("cpu",) * trainers)
                words = [*SHORT, *settings_of(network, crop), "--exchange", "gradients"]
                words += ["--print_freq", "1", *more, *run.settings(batch * trainers)]
                found = run_records(data, words, 5, WAIT, skip=1)
                rate = statistics.median(record.images_per_second for record in found)
                alone = alone or rate
                whole = GLOBAL_BATCH * ITERATIONS / rate
                sent = sum(record.exchange_seconds for record in found)
                part = sent / (sent + sum(r.compute_seconds + r.load_wait_seconds for r in found))
                here = f"{whole * (1 - part):.1f}", f"{whole * part:.1f}", f"{rate / alone:.2f}"
            exchange = exchange_seconds(network.parameters, trainers, rates, ASSUMED_BITS)
            figures = (
                {1: 1.0, **network.speedups}[trainers],
                speedup(trainers, network.compute, exchange),
            )
            name = f"{network.name}, {batch} here, {network.batch} there"
            yield name, f"{trainers}", *here, *(f"{figure:.2f}" for figure in figures)


def function_table(options: Sequence[str] = ("--batch", "8", "--steps", "4")) -> Iterator[Cells]:
    """Run `examples.parallel_resnet` with one worker and with two."""
    yield "workers", "here, images/s", "speed-up", "original, images/s", "speed-up", "predicted"
    alone = 0.0
    for workers in (1, 2):
        command = [sys.executable, "-m", "examples.parallel_resnet", "--workers", str(workers)]
        ended = subprocess.run(
            [*command, *options], stdout=subprocess.PIPE, text=True, check=True, timeout=WAIT
        )
        rate = float(re.findall(r"^\d+ workers: ([\d.]+) images/s$", ended.stdout, re.M)[-1])
        alone = alone or rate
        yield f"{workers}", f"{rate:.2f}", f"{rate / alone:.2f}", "", "", ""
    yield (
        *(f"{STOOKE_GPUS}", "", "", f"{STOOKE_RATE:.0f}", f"{STOOKE_SPEEDUP}"),
        f"{predicted_resnet():.2f}",
    )


def fit_table(pictures: int = 1280, width: float = 1.0) -> Iterator[Cells]:
    """Train AlexNet for CIFAR-10 by `fit`, of one process and of two, a round after the first."""
    from benchmarks.front import Sizes, fit

    yield "", "processes", "here, s of 50,000 pictures", "original, ks to 70 %"
    for processes in (1, 2):
        with (
            tempfile.TemporaryDirectory() as folder,
            fit(Path(folder) / "run", processes, Sizes(pictures, width=width)) as ours,
        ):
            ours.seconds_per_step(1)
            epoch = ours.seconds_per_step(1) * 50_000 / pictures
        yield "tandem.keras", f"{processes}", f"{epoch:.0f}", ""
    for name, spent in PYDTNN.items():
        yield name, "8", "", f"{spent:.2f}"


TABLES: dict[int, tuple[Callable[..., Iterator[Cells]], str]] = {
    1: (
        loading_table,
        "original: two GeForce GTX Titan Black; predicted: PCI Express 3.0 assumed between them",
    ),
    2: (
        exchange_table,
        "predicted: the NCCL of its README's Tesla K80, whatever the all-reduce; the seconds of "
        "computing follow from the speed-up of the slowest",
    ),
    3: (model_table, "original: Tesla K80 by NCCL; predicted by rates that are fitted to it"),
    4: (
        function_table,
        "original: DGX-1; predicted from the images per second of one GPU that follow, 32 images "
        "each, the default of its demo, and one NVLink each, assumed",
    ),
    5: (
        fit_table,
        "one process has a thread for each core, two have one each; no prediction: the rates of "
        "the original's machine are not known here, and its figures by processes neither",
    ),
}


def main(arguments: list[str] | None = None) -> int:
    """Measure and print a table; return the exit status."""
    parser = parser_of(__doc__, prog="python -m benchmarks.original")
    parser.add_argument("--table", type=int, choices=TABLES, required=True)
    make, note = TABLES[parser.parse_args(arguments).table]
    with tempfile.TemporaryDirectory() as folder:
        needs_pictures = make in (loading_table, model_table)
        given = [noise_for_runs(Path(folder) / "data")] if needs_pictures else []
        cells = []
        for row in make(*given):
            sys.stderr.write(f"{'  '.join(filter(None, row))}\n")
            cells.append(row)
    print(machine())
    print("\n".join(aligned(cells, left=range(1))))
    print(note)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
