"""train.txt and val.txt in Caffe's style ("folder/name label"), from the manifest of make_hkl.py.

As in paths.yaml:    python preprocessing/make_train_val_txt.py
Another data set:    python preprocessing/make_train_val_txt.py --tar-root-dir data/small
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tandem.preprocessing.derive import write_txt
from tandem.preprocessing.program import run_program


def main(arguments: list[str] | None = None) -> int:
    """Run the program; return its exit status."""
    return run_program(__doc__, write_txt, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
