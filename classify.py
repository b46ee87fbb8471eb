"""Name what is in pictures, by the weights that a run has left.

Files and folders:      python classify.py --weights runs/demo/epoch-0016.safetensors cat.jpg pets/
The standard input:     python classify.py --weights FILE - < cat.jpg
A list of files:        xargs --arg-file list.txt python classify.py --weights FILE
Other programs read:    python classify.py --weights FILE --json pets/
Ten crops of each:      python classify.py --weights FILE --ten_crops pets/

The exit status is 1 if a picture could not be read; the others are named all the same.
"""

from collections.abc import Sequence

from tandem.classify.cli import run_classification


def main(arguments: Sequence[str] | None = None) -> int:
    """Classify as the command line says; return the exit status."""
    return run_classification(arguments, description=__doc__)


if __name__ == "__main__":
    raise SystemExit(main())
