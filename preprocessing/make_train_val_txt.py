"""train.txt and val.txt in Caffe's style ("folder/name label"), from the manifest of make_hkl.py.

By paths.yaml:       python preprocessing/make_train_val_txt.py
Another data set:    python preprocessing/make_train_val_txt.py --tar-root-dir data/small
"""

from tandem.preprocessing.derive import write_txt
from tandem.preprocessing.program import run_program


def main(argv: list[str] | None = None) -> int:
    """Run the program; returns its exit status."""
    return run_program(__doc__ or "", write_txt, argv)


if __name__ == "__main__":
    raise SystemExit(main())
