"""Whole runs of train.py, and from them Table 1 of the original.

Ding, Wang, Mao and Taylor 2014, "Theano-based large-scale visual recognition with multiple GPUs",
arXiv 1412.2302: seconds per 20 iterations of 256 pictures, with and without parallel loading, one
and two trainers.
"""

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.pictures import write_data_folder
from tandem.artifacts.metrics_log import TrainRecord, read_records
from tandem.errors import InputError

PROGRAM = Path(__file__).parents[1] / "train.py"
POLL_SECONDS = 0.1
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
        folder, begun = Path(name), time.monotonic()
        command = [sys.executable, str(PROGRAM), "--data_folder", str(data)]
        command += ["--weights_dir", str(folder / "run"), *settings]
        with (folder / "errors.txt").open("w") as errors:
            process = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True
            )
        try:
            while True:
                ended = process.poll() is not None
                found = _train_records(folder / "run" / "record.jsonl")
                if len(found) >= reports:
                    return found[skip:reports]
                if ended:
                    reason = (folder / "errors.txt").read_text()
                    raise InputError(
                        f"{' '.join(command)} ended with {process.returncode} after {len(found)} "
                        f"of {reports} reports:\n{reason}"
                    )
                if time.monotonic() - begun > seconds:
                    raise InputError(f"{' '.join(command)} made {len(found)} reports in time")
                time.sleep(POLL_SECONDS)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


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
