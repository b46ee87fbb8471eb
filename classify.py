"""Name what is in pictures, with the weights of a run.

Files and folders:      python classify.py --weights runs/demo/epoch-0016.safetensors cat.jpg pets/
The standard input:     python classify.py --weights FILE - < cat.jpg
A list of files:        xargs --arg-file list.txt python classify.py --weights FILE
JSON, for programs:     python classify.py --weights FILE --json pets/
Ten crops of each:      python classify.py --weights FILE --ten_crops pets/

The exit status is 1 if a picture could not be read; the others are classified.
"""

from collections.abc import Sequence

from tandem.classify.cli import run_classification


def main(arguments: Sequence[str] | None = None) -> int:
    """Classify pictures; return the exit status."""
    return run_classification(arguments, description=__doc__)


if __name__ == "__main__":
    raise SystemExit(main())
