"""Best validation error and median speed of a run.

python -m tests.gpu.first.summary runs/first_gpu/bfloat16
"""

import argparse
import statistics
from pathlib import Path

from tandem.artifacts.metrics_log import TrainRecord, ValidationRecord, read_records


def main(arguments: list[str] | None = None) -> int:
    """Print the summary of a run folder; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="folder of the run")
    run = parser.parse_args(arguments).run
    records = read_records(run / "record.jsonl")
    best = min((r.top1_error, r.epoch) for r in records if isinstance(r, ValidationRecord))
    train = [r for r in records if isinstance(r, TrainRecord)][3:]
    speed = statistics.median(r.images_per_second for r in train)
    waited = sum(r.load_wait_seconds for r in train)
    print(f"{run}: top-1 error {best[0]:.4f} in epoch {best[1]}, median {speed:.0f} images/s")
    print(f"waited for loaders: {waited:.2f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
