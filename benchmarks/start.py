"""How long does a run take until its first step?

    python -m benchmarks.start

From the command to the first step's line in the record, at full size on the CPU: `train.py` with a
trainer, its loader and a small data set. Interpreter, PyTorch and PyTensor are in the page cache.
Prints JSON lines, then a table.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.measure import Figure, run
from benchmarks.preprocessing import Sizes, preprocess, write_pictures
from benchmarks.team import run_until

TARGET = 15.0
PATIENCE = 300.0
FULL = ("--batch_size", "64")


def seconds_to_first_step(data: Path, folder: Path, settings: Sequence[str]) -> float:
    """Start a run and end it after its first recorded step; return the seconds."""
    command = [sys.executable, "train.py", "--data_folder", str(data), "--weights_dir", str(folder)]
    command += ["--print_freq", "1", "--devices", "cpu", *settings]
    record = folder / "record.jsonl"
    begun = time.perf_counter()
    run_until(lambda: record.is_file() and record.stat().st_size > 0, command, PATIENCE, 0.02)
    return time.perf_counter() - begun


def answer(
    rounds: int,
    stored: int = 256,
    settings: Sequence[str] = FULL,
    question: str = "start of a run to its first step",
    target: float = TARGET,
) -> Iterator[Figure]:
    """Start a run several times, the first for the page cache."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_pictures(folder, Sizes(pictures=320, different=20))
        for program in ("make_hkl.py", "make_labels.py"):
            preprocess(folder, str(folder / "data"), stored, program)
        seconds = [
            seconds_to_first_step(folder / "data", folder / f"run{number}", settings)
            for number in range(rounds + 1)
        ]
    median = statistics.median(seconds[1:])
    yield Figure(question, "from the command", median, "s", target)


if __name__ == "__main__":
    raise SystemExit(run(__doc__, answer, rounds=3))
