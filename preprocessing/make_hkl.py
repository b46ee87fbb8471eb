"""JPEGs -> batch files, mean image and manifest. A stopped run continues when it is started again.

All pictures, by paths.yaml:       python preprocessing/make_hkl.py
Smaller pictures, another folder:  python preprocessing/make_hkl.py --image-size 76 \\
                                       --tar-root-dir data/small
Other pictures:                    python preprocessing/make_hkl.py --tar-root-dir data/pets \\
                                       --train-img-dir pets/train --val-img-dir pets/val
Files in the original's layout:    python preprocessing/make_hkl.py --layout c01b
The first 2,560 of each split:     python preprocessing/make_hkl.py --subset 2560
"""


def main(argv: list[str] | None = None) -> int:
    """Run the program; returns its exit status."""
    # Not at the top: the processes that decode pictures import this file too, and need neither.
    from tandem.preprocessing.prepare import prepare
    from tandem.preprocessing.program import run_program

    return run_program(__doc__ or "", prepare, argv)


if __name__ == "__main__":
    raise SystemExit(main())
