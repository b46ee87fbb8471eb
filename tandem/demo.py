"""AlexNet on scikit-learn's handwritten digits, by two trainers: pictures, batch files, a run.

In any folder:       tandem demo
A shorter one:       tandem demo --n_epochs 4
Without a training:  tandem demo --prepare

1,797 real pictures: every fifth for validation (360), the others for training (1,437), as
data/demo/pictures/train/digit_0/0001.JPEG and so on. The run is in runs/demo. The same command
continues it, or validates a finished one.
"""

import json
import logging
import secrets
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from tandem.artifacts.run_folder import CONFIGURATION, list_checkpoints
from tandem.cli import CommandLine, Options, PathOption, option, run_program
from tandem.config.command_line import load_config
from tandem.errors import InputError, explained
from tandem.files import write_json
from tandem.launch.local import LocalLauncher
from tandem.launch.programs import execute_validation
from tandem.launch.train import run_training
from tandem.plot import draw_runs
from tandem.preprocessing.program import run_preprocessing
from tandem.validation import MOST

log = logging.getLogger(__name__)

SETTINGS = Path(__file__).with_name("demo.yaml")
_SIZE = 72  # rows and columns of a picture
_RECORD = "digits.json"
_EVERY = 5  # one picture in five is for validation
_QUALITY = 95  # of the JPEGs, per cent of Pillow's scale


class DigitOptions(Options):
    """Options of ``demo/make_digits.py``."""

    out: PathOption = option(..., "folder to write", "a path", "text")
    size: int = option(
        _SIZE, "rows and columns, pixels", "a whole number from 8 to 4096", ge=8, le=4096
    )


class DemoOptions(Options):
    """Options of ``tandem demo``."""

    n_epochs: int = option(16, "epochs in all", "a whole number of at least 1", ge=1, le=MOST)
    prepare: bool = option(False, "make the pictures and batch files alone", "true or false")


def run_demo(
    arguments: Sequence[str] | None, description: str | None, program: str | None = None
) -> int:
    """Make digits, train on them, draw the run and validate it; return the exit status."""
    return run_program(DemoOptions, demo, CommandLine(arguments, description, program))


def demo(options: DemoOptions) -> int:
    """Do the demo in the current folder, from where an earlier one ended; the exit status.

    Raises InputError where a folder has other content, or scikit-learn is missing.
    """
    pictures, data = Path("data/demo/pictures"), Path("data/demo")
    make_digits(pictures, _SIZE)
    folders = ("--train-img-dir", pictures / "train", "--val-img-dir", pictures / "val")
    sizes = ("--tar-root-dir", data, "--image-size", _SIZE)
    if (status := run_preprocessing([*map(str, (*folders, *sizes))], None)) or options.prepare:
        return status
    settings = ["--config", str(SETTINGS), "--n_epochs", str(options.n_epochs)]
    config = load_config(settings)
    if (config.weights_path / CONFIGURATION).exists():
        settings += ["--resume_train", "true"]
    else:
        log.info(
            "demo: %d epochs in a few minutes; in the first three or four the network only guesses",
            options.n_epochs,
        )
    if status := run_training(settings, None):
        return status
    draw_runs(config.weights_path, curves := config.weights_path / "curves.png")
    log.info("wrote %s", curves)
    weights = list_checkpoints(config.weights_path)[-1]
    log.info("demo: validating %s once more", weights)
    outcome, record = execute_validation(weights, config, LocalLauncher())
    if record is not None:
        sys.stdout.write(
            f"demo: top-1 error {100 * record.top1_error:.2f} %, top-5 error"
            f" {100 * record.top5_error:.2f} % of {record.images} validation pictures; see"
            f" {config.weights_dir}\n"
        )
    return outcome.status


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
    with explained(folder, "cannot be written"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
        partial.mkdir()
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
    try:
        from sklearn.datasets import load_digits  # takes a second; only the first run needs it
    except ModuleNotFoundError as error:
        raise InputError(
            f"demo: found no {error.name}, expected scikit-learn, which has the pictures: pip"
            " install scikit-learn"
        ) from error

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
