"""scikit-learn's handwritten digits as JPEGs in ImageNet's folder layout, for a small trial.

    python demo/make_digits.py --out data/demo/pictures

They are those of `tandem demo`. An existing folder of them is left unchanged.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tandem.cli import CommandLine, run_program
from tandem.demo import DigitOptions, make_digits


def main(arguments: list[str] | None = None) -> int:
    """Run the program; return its exit status."""
    line = CommandLine(arguments, __doc__)
    return run_program(DigitOptions, lambda o: make_digits(o.out, o.size), line)


if __name__ == "__main__":
    raise SystemExit(main())
