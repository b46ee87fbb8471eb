"""JPEGs -> batch files, mean image and manifest. Interrupted, the same command continues.

ImageNet in any known layout:      python preprocessing/make_hkl.py --source /data/imagenet
All pictures, as in paths.yaml:    python preprocessing/make_hkl.py
Smaller pictures, another folder:  python preprocessing/make_hkl.py --image-size 76 \\
                                       --tar-root-dir data/small
Other pictures:                    python preprocessing/make_hkl.py --tar-root-dir data/pets \\
                                       --train-img-dir pets/train --val-img-dir pets/val
Files in the original's layout:    python preprocessing/make_hkl.py --layout c01b
The first 2,560 of each split:     python preprocessing/make_hkl.py --subset 2560
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main(arguments: list[str] | None = None) -> int:
    """Run the program; return its exit status."""
    # Not at the top: the processes that decode pictures import this file too.
    from tandem.preprocessing.prepare import prepare
    from tandem.preprocessing.program import run_program

    return run_program(__doc__, prepare, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
