"""Name what is in pictures, with the weights of a run: the program of ``tandem classify``.

Files and folders:         python classify.py --weights FILE cat.jpg pets/
All commands and options:  python classify.py --help
"""

from collections.abc import Sequence

from tandem.__main__ import run_verb


def main(arguments: Sequence[str] | None = None) -> int:
    """Classify pictures; return the exit status."""
    return run_verb("classify", arguments, "python classify.py")


if __name__ == "__main__":
    raise SystemExit(main())
