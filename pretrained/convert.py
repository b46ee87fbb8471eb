"""Convert weights of other programs, or ours for the original: ``tandem convert``.

The original's folder:     python pretrained/convert.py weights_folder alexnet.safetensors
All commands and options:  python pretrained/convert.py --help
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tandem.__main__ import run_verb


def main(arguments: Sequence[str] | None = None) -> int:
    """Convert weights; return the exit status."""
    return run_verb("convert", arguments, "python pretrained/convert.py")


if __name__ == "__main__":
    raise SystemExit(main())
