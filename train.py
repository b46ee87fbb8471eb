"""Train AlexNet with several processes: the program of ``tandem train``.

Two trainers, two loaders:  python train.py --devices cpu cpu
All commands and settings:  python train.py --help
"""

from collections.abc import Sequence

from tandem.__main__ import run_verb


def main(arguments: Sequence[str] | None = None) -> int:
    """Train; return the exit status."""
    return run_verb("train", arguments, "python train.py")


if __name__ == "__main__":
    raise SystemExit(main())
