"""The slow tests, in parts of which each is stopped after fifteen minutes.

All of them:                         python -m tests.slow
Some:                                python -m tests.slow ranks-2 rest-1
The one whose turn it is at HEAD:    python -m tests.slow --turn
"""

import argparse
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMIT = 900  # seconds after which a part is stopped: a loaded machine takes twice as long

# What is divided, and into how many parts; a folder's lack what another entry has of it.
DIVIDED: dict[str, tuple[int, list[str]]] = {
    "fuzz": (2, ["tests/backend/test_fuzz.py"]),
    "backend": (2, ["tests/backend"]),
    "ranks": (4, ["tests/test_ranks.py"]),
    "placement": (2, ["tests/placement"]),
    "parallel": (2, ["tests/parallel"]),
    "rank-pools": (2, ["tests/parallel/test_ranks.py"]),
    "shares": (1, ["tests/distributed/test_shares.py"]),
    "divided": (2, ["tests/test_divided_runs.py"]),
    "norm": (2, ["tests/test_batch_norm_runs.py"]),
    "demo": (1, ["tests/test_demo.py"]),
    "rest": (12, ["tests"]),
}
PARTS = [f"{name}-{k}" for name, (parts, _) in DIVIDED.items() for k in range(1, parts + 1)]


def arguments_of(part: str) -> list[str]:
    """What pytest is told to run the tests of a part."""
    name, _, number = part.rpartition("-")
    parts, paths = DIVIDED[name]
    others = [path for other, (_, paths) in DIVIDED.items() if other != name for path in paths]
    within = [path for path in others if any(path.startswith(f"{own}/") for own in paths)]
    left_out = [f"--ignore={path}" for path in within]
    chosen = [f"--chunk={number}/{parts}", *paths, *left_out]
    return [
        "--numprocesses=2",
        "--dist=loadfile" if name in ("rest", "demo") else "--dist=load",
        "-m=slow",
        *chosen,
    ]


def turn() -> str:
    """The part that the commit's hash selects; the day, where there is no repository."""
    command = ["git", "rev-parse", "HEAD"]
    commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    number = int(commit, 16) if commit else date.today().toordinal()
    return PARTS[number % len(PARTS)]


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--turn", action="store_true", help="the part that HEAD's hash selects")
    options = parser.parse_args(words)
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}: there are {', '.join(PARTS)}")
    failed = []
    for part in [turn()] if options.turn else options.parts or PARTS:
        start = time.monotonic()
        command = [sys.executable, "-m", "pytest", *arguments_of(part)]
        try:
            status = subprocess.run(command, cwd=ROOT, timeout=LIMIT).returncode
        except subprocess.TimeoutExpired:
            status = 1
        print(f"slow tests, {part}: {time.monotonic() - start:.0f} s, status {status}", flush=True)
        failed += [part] * (status != 0)
    if failed:
        print(f"error: failed, or longer than {LIMIT} s: {' '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main())
