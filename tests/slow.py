"""The slow tests, in parts that each end within eight minutes on two cores.

All of them:                         python -m tests.slow
Some:                                python -m tests.slow ranks runs
The one whose turn it is at HEAD:    python -m tests.slow --turn
"""

import argparse
import subprocess
import sys
import time

from tests.support.tiny import ROOT

LIMIT = 900  # seconds after which a part is stopped: a loaded machine takes twice as long

PARTS = {
    "placement": ["tests/placement"],
    "shares": ["tests/distributed/test_shares.py"],
    "parallel": ["tests/parallel"],
    "ranks": ["tests/test_ranks.py"],
    "rest": ["tests"],
}
"""Paths of each part. The last has all that the others leave."""


def arguments_of(part: str) -> list[str]:
    """What pytest is told to run the tests of a part."""
    others = [path for name, paths in PARTS.items() if name != part for path in paths]
    left_out = [f"--ignore={path}" for path in others if part == [*PARTS][-1]]
    return ["--numprocesses=2", "--dist=loadfile", "-m=slow", *PARTS[part], *left_out]


def turn() -> str:
    """The part that the commit's hash selects."""
    command = ["git", "rev-parse", "HEAD"]
    commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [*PARTS][int(commit, 16) % len(PARTS)]


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--turn", action="store_true", help="the part that HEAD's hash selects")
    options = parser.parse_args(words)
    if unknown := set(options.parts) - set(PARTS):
        parser.error(
            f"no part is called {', '.join(sorted(unknown))}: there are {', '.join(PARTS)}"
        )
    failed = []
    for part in [turn()] if options.turn else options.parts or PARTS:
        start = time.monotonic()
        try:
            status = subprocess.run(
                [sys.executable, "-m", "pytest", *arguments_of(part)], cwd=ROOT, timeout=LIMIT
            ).returncode
        except subprocess.TimeoutExpired:
            status = 1
        print(f"slow tests, {part}: {time.monotonic() - start:.0f} s, status {status}", flush=True)
        failed += [part] * (status != 0)
    if failed:
        print(f"error: failed, or longer than {LIMIT} s: {' '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main())
