"""Download the original's published weights, check them, and write a checkpoint of ours.

Download and convert:  python pretrained/fetch.py
A downloaded file:     python pretrained/fetch.py --file parameters_releasing.zip
Another address:       python pretrained/fetch.py --address https://example.org/weights.zip

Interrupted, the same command continues where it was.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tandem.convert.cli import run_fetch


def main(arguments: Sequence[str] | None = None) -> int:
    """Fetch the weights; return the exit status."""
    return run_fetch(arguments, __doc__)


if __name__ == "__main__":
    raise SystemExit(main())
