"""How fast is training on a GPU, against the same network in plain PyTorch?

    python -m benchmarks.gpu                                   a step with its data in memory
    python -m benchmarks.gpu --precision float32 --batch 128
    python -m benchmarks.gpu --data data/imagenet              also whole runs, with the loader
    python -m benchmarks.gpu --quick                           fewer variants of both sides

Run it from the project's top folder on a machine with an otherwise idle GPU. Contenders run in
turn, a few steps of each at a time, so that a GPU that grows warm slows all. A time is the median
over the rounds after warm-up, with its quartiles. Prints JSON lines, then a table.
"""

import argparse
import json
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.measure import Measured, Step, measure
from benchmarks.plain_alexnet import plain_step, step_flops
from examples.resident_step import PAPER, ResidentStep, Sizes
from tandem.artifacts.metrics_log import TrainRecord, read_records
from tandem.backend import capture, device_mode, on_stream
from tandem.config.hardware import cuda_device_count, missing_for_gpus
from tandem.distributed import LocalGroup, local_groups
from tandem.distributed.peer_to_peer import PeerToPeerAllReduce, PeerVectors
from tandem.errors import InputError
from tandem.memory import Slot, SlotLayout
from tandem.memory.cuda import CudaBuffer, CudaDriver, CudaSlot, SlotUploader

PEAK_TFLOPS = {
    # name of the device: dense bfloat16, tf32, float32, from NVIDIA's data sheets
    "H200": (989.4, 494.7, 66.9),
    "H100 PCIe": (756.0, 378.0, 51.0),
    "H100": (989.4, 494.7, 66.9),
    "A100": (312.0, 156.0, 19.5),
    "L40S": (362.0, 183.0, 91.6),
}
PARAMETERS = 60_965_224
OUR_VARIANTS: dict[str, dict[str, bool]] = {
    "ours, compiled, fused, captured": {"compile": True},
    "ours, compiled, captured": {"compile": True},
    "ours, tuned, fused, captured": {"compile": True, "tune": True},
    "ours, captured": {},
    "ours, compiled": {"compile": True},
    "ours": {},
}
"""Arguments of `device_mode`. Fused: gradient and update in one function; captured: CUDA graph."""


def peak_flops(device_name: str, precision: str) -> float | None:
    """Return the specified operations per second of a device; None if unknown."""
    column = ("bfloat16", "tf32", "float32").index(precision)
    known = (rates for name, rates in PEAK_TFLOPS.items() if name in device_name)
    rates = next(known, None)
    return None if rates is None else 1e12 * rates[column]


def step_row(measured: Measured, sizes: Sizes, peak: float | None) -> dict[str, Any]:
    """Return the result of a step as printed."""
    low, high = measured.quartiles
    flops = step_flops(sizes.network(), sizes.batch) / measured.median
    return {
        "what": "step",
        "name": measured.name,
        "images_per_second": round(sizes.batch / measured.median, 1),
        "milliseconds": round(1e3 * measured.median, 3),
        "quartiles": [round(1e3 * low, 3), round(1e3 * high, 3)],
        "rounds": len(measured.seconds),
        "share_of_peak": None if peak is None else round(flops / peak, 4),
    }


def copy_row(measured: Measured, nbytes: int) -> dict[str, Any]:
    """Return the result of a copy of `nbytes` as printed."""
    low, high = measured.quartiles
    return {
        "what": "copy",
        "name": measured.name,
        "gigabytes_per_second": round(nbytes / measured.median / 1e9, 2),
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
        lines = [columns, *([_shown(row.get(column)) for column in columns] for row in some)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
        blocks += [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        ]
        blocks.append("")
    return "\n".join(blocks)


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return " to ".join(str(item) for item in value)
    return "-" if value is None else str(value)


def our_steps(
    sizes: Sizes, precision: Any, driver: CudaDriver | None, names: Iterable[str] = OUR_VARIANTS
) -> dict[str, Step]:
    """Make the named variants of our step; a driver allocates GPU memory."""
    device = "cpu" if driver is None else f"cuda:{driver.device}"
    steps: dict[str, Step] = {}
    for name in names:
        mode = device_mode(device, precision=precision, **OUR_VARIANTS[name])
        if driver is None:
            step = ResidentStep(mode, sizes)
        else:
            step = ResidentStep(mode, sizes, device, _memory_of(driver), channels_last=True)
        functions = step.compile(mode, fused=True) if "fused" in name else step.functions
        steps[name] = capture(functions, device) if "captured" in name else step.run
    return steps


def _memory_of(driver: CudaDriver) -> Callable[[int], CudaBuffer]:
    return lambda nbytes: CudaBuffer.create(driver, nbytes, "parameters")


def plain_steps(sizes: Sizes, precision: str, device: str, quick: bool = False) -> dict[str, Step]:
    """Make plain PyTorch's step in the usual variants."""
    modes = ["max-autotune"] if quick else [None, "default", "reduce-overhead", "max-autotune"]
    return {
        f"PyTorch, {mode or 'eager'}, LRN as {norm}": plain_step(
            sizes.network(), sizes.batch, device, norm, precision, mode
        )
        for norm in ("module", "slices")
        for mode in modes
    }


def upload_copies(driver: CudaDriver, batch: int, side: int) -> tuple[dict[str, Step], int]:
    """Make a loader's copy of a minibatch to the GPU, and PyTorch's; return also the bytes."""
    layout = SlotLayout(batch, side)
    slot = CudaSlot.create(driver, layout)
    uploader = SlotUploader(driver, [slot])
    rng = np.random.default_rng(0)
    pinned = torch.from_numpy(rng.integers(0, 256, layout.nbytes, np.uint8)).pin_memory()
    target = torch.empty_like(pinned, device=f"cuda:{driver.device}")

    def noise(staged: Slot) -> None:
        staged.pictures[...] = rng.integers(0, 256, staged.pictures.shape, np.uint8)
        staged.valid[...] = batch

    uploader.fill(0, noise)

    def by_uploader() -> None:
        # The staging area already holds the noise: only the copy is timed.
        uploader.fill(0, lambda staged: None)

    return {
        "a minibatch to the GPU, ours": by_uploader,
        "a minibatch to the GPU, PyTorch's copy": lambda: target.copy_(pinned, non_blocking=True),
    }, layout.nbytes


def exchange_seconds(elements: int, rounds: int, repeats: int) -> tuple[list[Measured], int]:
    """Time an exchange of two trainers on one GPU, and a plain copy of its bytes."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    groups = local_groups(2)
    processes = [
        context.Process(
            target=_exchange, args=(group, elements, rounds, repeats, there), daemon=True
        )
        for group in groups
    ]
    for process in processes:
        process.start()
    # A process notices the other's end only if no third process holds that end of the pipe.
    for group in groups:
        group.close()
    there.close()
    try:
        found: list[Measured] = here.recv()
    except EOFError:
        raise InputError("the exchange could not be measured; its own message is above") from None
    finally:
        for process in processes:
            process.join(30)
            process.kill()
    return found, 4 * elements


def _exchange(
    group: LocalGroup,
    elements: int,
    rounds: int,
    repeats: int,
    report: Connection,
) -> None:
    driver = CudaDriver(0)
    own = CudaBuffer.create(driver, 4 * elements, "vector")
    stream = driver.stream()
    values = torch.as_tensor(own.array(elements, "float32"), device="cuda:0")
    values.normal_()
    other = torch.empty_like(values)
    torch.cuda.synchronize()
    vectors = PeerVectors(group, driver, own, "float32")
    exchange = PeerToPeerAllReduce(vectors, stream)
    steps: dict[str, Step] = {
        "an exchange of two trainers on one GPU": lambda: exchange.average(values, [0.5, 0.5])
    }
    if group.rank == 0:
        # Meanwhile the other trainer waits in the next exchange.
        steps["a copy of the same bytes on the GPU"] = lambda: other.copy_(values)
    found = measure(steps, rounds, repeats, torch.cuda.synchronize)
    if group.rank == 0:
        report.send(found)
    group.barrier()
    exchange.close()
    vectors.close()
    group.barrier()
    own.close()


def run_rates(
    data: Path, devices: Sequence[str], steps: int, extra: Iterable[str] = (), skip: int = 20
) -> tuple[float, ...]:
    """Measure the images per second between reports of a whole run, after `skip` reports.

    Raises InputError if the run failed or was too short.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "train.py", "--data_folder", str(data)]
        command += ["--weights_dir", f"{folder}/run", "--print_freq", str(steps)]
        command += ["--devices", *devices, *extra]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            raise InputError(f"{' '.join(command)} has failed:\n{result.stderr}")
        records = read_records(Path(folder) / "run" / "record.jsonl")
    rates = [r.images_per_second for r in records if isinstance(r, TrainRecord)][skip:]
    if not rates:
        raise InputError(f"a run of {data} has no more than {skip} reports; train for longer")
    return tuple(rates)


def run_row(name: str, rates: Sequence[float]) -> dict[str, Any]:
    """Return the result of a run as printed."""
    low, high = (min(rates), max(rates))
    return {
        "what": "run",
        "name": name,
        "images_per_second": round(statistics.median(rates), 1),
        "least and most": [round(low, 1), round(high, 1)],
        "reports": len(rates),
    }


def setting(options: argparse.Namespace) -> dict[str, Any]:
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


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure everything and print a line for each result."""
    rows: list[dict[str, Any]] = []

    def report(row: dict[str, Any]) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)

    report(setting(options))
    sizes = replace(PAPER, batch=options.batch)
    driver, rounds = CudaDriver(0), options.rounds
    stream = driver.stream()
    torch.backends.cudnn.benchmark = True
    with on_stream("cuda:0", stream.handle):
        ours = list(OUR_VARIANTS)[: 1 if options.quick else None]
        steps = our_steps(sizes, options.precision, driver, ours)
        steps |= plain_steps(sizes, options.precision, "cuda:0", options.quick)
        peak = peak_flops(torch.cuda.get_device_name(0), options.precision)
        for measured in measure(steps, rounds, options.repeats, torch.cuda.synchronize, 3):
            report(step_row(measured, sizes, peak))
        copies, nbytes = upload_copies(driver, options.batch, sizes.stored)
        for measured in measure(copies, rounds, options.repeats, torch.cuda.synchronize):
            report(copy_row(measured, nbytes))
    found, nbytes = exchange_seconds(2 * PARAMETERS, rounds, options.repeats)
    for measured in found:
        report(copy_row(measured, nbytes))
    if options.data is not None:
        settings = ["--batch_size", str(options.batch), "--precision", options.precision]
        for name, devices in (("one trainer", 1), ("two trainers on one GPU", 2)):
            rates = run_rates(options.data, ["cuda:0"] * devices, 10, settings + options.settings)
            report(run_row(f"{name}, with loaders", rates))
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Measure, and print; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--precision", default="bfloat16", choices=["float32", "tf32", "bfloat16"])
    parser.add_argument("--batch", type=int, default=256, help="images of a step (default 256)")
    parser.add_argument("--rounds", type=int, default=30, help="measured rounds (default 30)")
    parser.add_argument("--repeats", type=int, default=10, help="in a round (default 10)")
    parser.add_argument("--quick", action="store_true", help="only the fastest of each side")
    parser.add_argument("--data", type=Path, help="a prepared data set, for whole runs")
    parser.add_argument("settings", nargs="*", help="more settings of these runs, after --")
    options = parser.parse_args(arguments)
    missing = missing_for_gpus() if cuda_device_count() else "no GPU was found"
    if missing:
        sys.stderr.write(f"error: this benchmark needs a GPU: {missing}\n")
        return 2
    try:
        rows = run(options)
    except (InputError, torch.cuda.OutOfMemoryError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    print(table(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
