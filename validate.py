"""Loss and errors of saved weights: the program of ``tandem validate``.

A checkpoint:               python validate.py --weights runs/alexnet/epoch-0060.safetensors
All commands and settings:  python validate.py --help
"""

from collections.abc import Sequence

from tandem.__main__ import run_verb


def main(arguments: Sequence[str] | None = None) -> int:
    """Validate saved weights; return the exit status."""
    return run_verb("validate", arguments, "python validate.py")


if __name__ == "__main__":
    raise SystemExit(main())
