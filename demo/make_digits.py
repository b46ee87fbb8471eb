"""scikit-learn's handwritten digits as JPEGs in ImageNet's folder layout, for a small trial.

    python demo/make_digits.py --out data/demo/pictures

1,797 real pictures: every fifth for validation (360), the others for training (1,437), as
train/digit_0/0001.JPEG and so on. An existing folder of them is left unchanged.
"""

import json
import logging
import secrets
import shutil
import sys
from pathlib import Path

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tandem.cli import CommandLine, Options, PathOption, option, run_program
from tandem.errors import InputError
from tandem.files import write_json

log = logging.getLogger("tandem.demo")

_RECORD = "digits.json"
_EVERY = 5  # one picture in five is for validation
_QUALITY = 95  # of the JPEGs, per cent of Pillow's scale


class DigitOptions(Options):
    """Options of the program."""

    out: PathOption = option(..., "folder to write", "a path", "text")
    size: int = option(
        72, "rows and columns, pixels", "a whole number from 8 to 4096", ge=8, le=4096
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the program; return its exit status."""
    line = CommandLine(arguments, __doc__)
    return run_program(DigitOptions, lambda o: make_digits(o.out, o.size), line)


def make_digits(folder: Path, size: int) -> None:
    """Write the digits into `folder`, whole or not at all.

    Parameters
    ----------
    folder : Path
        Must not exist, or hold exactly these pictures.
    size : int
        Rows and columns of a picture, pixels.

    Raises
    ------
    InputError
        `folder` has other content or cannot be written.
    """
    record = {"size": size, "quality": _QUALITY, "validation_every": _EVERY}
    if folder.exists():
        _check_existing(folder, record)
        log.info("%s: the digits exist already", folder)
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
        partial.mkdir()
    except OSError as error:
        raise InputError(f"{folder}: cannot be written: {error.strerror}") from None
    try:
        written = _write_pictures(partial, size)
        write_json(partial / _RECORD, record)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    log.info("%s: %d training and %d validation pictures", folder, *written)


def _check_existing(folder: Path, record: dict[str, int]) -> None:
    try:
        found = json.loads((folder / _RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = "other files"
    if found != record:
        raise InputError(
            f"{folder}: found {found}, expected no folder, or digits of {record}; delete it, or"
            " choose another --out"
        )


def _write_pictures(folder: Path, size: int) -> tuple[int, int]:
    from sklearn.datasets import (
        load_digits,  # takes a second to import; only the first run needs it
    )

    digits = load_digits()
    # 16 levels of ink, white on black, to the range of a byte.
    grey = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    counts = {"train": 0, "val": 0}
    for number, (pixels, digit) in enumerate(zip(grey, digits.target, strict=True)):
        split = "val" if number % _EVERY == 0 else "train"
        path = folder / split / f"digit_{digit}" / f"{number:04d}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture = Image.fromarray(pixels).resize((size, size), Image.Resampling.BICUBIC)
        picture.save(path, "JPEG", quality=_QUALITY)
        counts[split] += 1
    return counts["train"], counts["val"]


if __name__ == "__main__":
    raise SystemExit(main())
