"""All benchmarks of the CPU, one after another: a table, JSON lines and a picture.

    make bench                                 or python -m benchmarks
    python -m benchmarks --only step exchange  some of them

Each runs in its own process, on a machine that should be otherwise idle; all take about an hour.
Results go to `benchmarks/results/`: `TIME.jsonl`, whose first line has hardware and versions, and
`TIME.png`.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.measure import machine, parser_of, setting, table

QUESTIONS = (
    "step",
    "engines",
    "run",
    "loader",
    "exchange",
    "trainers",
    "ddp",
    "placement",
    "parallel",
    "programs",
    "front",
    "preprocessing",
    "start",
    "memory",
    "networks",
    "predicted",
    "profile",
)
RESULTS = Path(__file__).parent / "results"


def ask(question: str) -> list[dict[str, Any]]:
    """Run a benchmark, which reports its own failure; return the rows that it prints."""
    sys.stderr.write(f"{question} ...\n")
    command = [sys.executable, "-m", f"benchmarks.{question}"]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if result.returncode:
        raise SystemExit(f"error: {' '.join(command)} ended with {result.returncode}")
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


def main(arguments: list[str] | None = None) -> int:
    """Measure, save and draw; return the exit status."""
    parser = parser_of(__doc__, prog="python -m benchmarks")
    parser.add_argument("--only", nargs="+", choices=QUESTIONS, default=QUESTIONS, metavar="NAME")
    options = parser.parse_args(arguments)
    rows = [row for question in options.only for row in ask(question)]
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / time.strftime("%Y%m%d-%H%M%S.jsonl")
    lines = [json.dumps(item) for item in (setting(), *rows)]
    path.write_text("\n".join(lines) + "\n")
    from benchmarks.draw import draw  # imports Matplotlib

    draw(rows, path.with_suffix(".png"))
    print(machine())
    print(table(rows))
    print(f"\n{path} and {path.with_suffix('.png').name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
