"""Best validation error and median speed of a run, and whether the error reaches a goal.

python -m tests.gpu.first.summary runs/first_gpu/bfloat16 --goal 0.35
"""

import argparse
import statistics
from pathlib import Path

from benchmarks.original import hidden_share
from tandem.artifacts.metrics_log import TrainRecord, ValidationRecord, read_records

WARM_UP = 3  # reports


def main(arguments: list[str] | None = None) -> int:
    """Print the summary of a run folder; return 1 where a goal is not reached."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--goal", type=float, help="top-1 error to reach, a fraction")
    options = parser.parse_args(arguments)
    records = read_records(options.run / "record.jsonl")
    errors = [(r.top1_error, r.epoch) for r in records if isinstance(r, ValidationRecord)]
    train = [r for r in records if isinstance(r, TrainRecord)][WARM_UP:]
    if train:
        speed = statistics.median(r.images_per_second for r in train)
        hidden = hidden_share(train)
        print(f"{options.run}: median {speed:.0f} images/s, {hidden:.1%} of the loading hidden")
    if not errors:
        print(f"{options.run}: no validation yet")
        return 1
    error, epoch = min(errors)
    print(f"{options.run}: top-1 error {error:.4f} in epoch {epoch}")
    if options.goal is None:
        return 0
    reached = error <= options.goal
    print(f"{'PASS' if reached else 'FAIL'}: at most {options.goal:.2f} is the goal")
    return 0 if reached else 1


if __name__ == "__main__":
    raise SystemExit(main())
