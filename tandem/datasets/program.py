"""Prepare a known data set, or arrays of your own, for training.

Found, or downloaded:          tandem datasets fashion_mnist --out data/fashion
For random crops:              tandem datasets cifar10 --out data/cifar10 --pad 4
A folder or file of yours:     tandem datasets mnist --source data/idx --out data/mnist
Arrays x and y in a file:      tandem datasets arrays --source mine.npz --out data/mine
Random pictures, for a trial:  tandem datasets synthetic --train 4096 --size 64 --out data/random
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from tandem.cli import CommandLine, Options, PathOption, option, run_program
from tandem.datasets import CLASSES, NAMES, class_names, load
from tandem.datasets.arrays import Pair
from tandem.datasets.names import OPTIONS, check_options
from tandem.errors import InputError

log = logging.getLogger(__name__)

_SYNTHETIC = "synthetic alone"


class DatasetOptions(Options):
    """Options of ``tandem datasets``."""

    name: Literal["mnist", "fashion_mnist", "cifar10", "cifar100", "arrays", "synthetic"] = option(
        ..., f"one of {', '.join(NAMES)}", f"one of {', '.join(NAMES)}", "argument"
    )
    out: PathOption = option(
        ..., "folder to write, for --data_folder of train.py", "a folder", "text"
    )
    source: PathOption | None = option(
        None,
        "folder or file to read (default: the usual folders, else a download)",
        "a folder or file",
        "text",
    )
    pad: int = option(
        0, "border of the mean colour, pixels on each side", "at least 0", ge=0, le=1 << 12
    )
    validation_split: float = option(
        0.0,
        "part of the rows, the last ones, for validation, where the file has no x_test",
        "at least 0 and below 1",
        ge=0,
        lt=1,
    )
    labels: Literal["fine", "coarse"] = option(
        "fine", "which classes; cifar100 alone", "fine (100) or coarse (20)", "text"
    )
    train: int = option(1024, f"training pictures; {_SYNTHETIC}", "at least 1")
    test: int = option(256, f"validation pictures; {_SYNTHETIC}", "at least 0")
    size: int = option(32, f"rows and columns, pixels; {_SYNTHETIC}", "at least 1")
    channels: int = option(3, f"colours; {_SYNTHETIC}", "1 or 3")
    classes: int = option(10, f"number of classes; {_SYNTHETIC}", "at least 1")
    seed: int = option(0, f"random seed; {_SYNTHETIC}", "from 0 to 2**64 - 1")


def run_datasets(
    arguments: Sequence[str] | None, description: str | None, program: str | None = None
) -> int:
    """Write the data set that the command line names; return the exit status."""

    def work(options: DatasetOptions) -> None:
        every = {each for own in OPTIONS.values() for each in own}
        chosen = {key: getattr(options, key) for key in options.model_fields_set & every}
        check_options(options.name, chosen, "--")
        if options.validation_split and options.name != "arrays":
            raise InputError(
                f"--validation_split: found {options.validation_split} with {options.name}, which"
                " has validation pictures; expected it with arrays"
            )
        train, test = load(options.name, options.source, **chosen)
        names = (
            class_names(options.name, options.labels)
            if options.name in CLASSES
            else tuple(map(str, range(options.classes)))
            if options.name == "synthetic"
            else None
        )
        if options.validation_split:
            train, test = split_last(train, test, options.validation_split)
        log.info(write(options.out, train, test, names, options.pad))

    return run_program(DatasetOptions, work, CommandLine(arguments, description, program))


def split_last(train: Pair, test: Pair, part: float) -> tuple[Pair, Pair]:
    """Take the last rows for validation, as Keras does."""
    if len(test[0]):
        raise InputError(
            f"--validation_split: found {part}, and {len(test[0])} rows of x_test, expected one of"
            " them"
        )
    from tandem.preprocessing.arrays import training_rows

    (x, y), first = train, training_rows(len(train[0]), part, "--validation_split")
    return (x[:first], y[:first]), (x[first:], y[first:])


def write(
    folder: Path, train: Pair, test: Pair, names: Sequence[str] | None = None, pad: int = 0
) -> str:
    """Write square uint8 pictures with classes as pictures, all else as arrays; say what it was.

    Raises InputError for a border of arrays, and if the folder cannot be written or holds a data
    set.
    """
    from tandem.preprocessing.arrays import are_square, write_arrays, write_pictures

    (x, y), validation = train, test if len(test[0]) else None
    counts = f"{len(x)} training and {len(test[0])} validation"
    if are_square(x) and y.dtype.kind == "i":
        manifest = write_pictures(folder, train, validation, names, pad)
        side = x.shape[1]
        return (
            f"{folder}: {counts} pictures of {side} x {side} in {manifest.classes} classes; for"
            f" train.py: --data_folder {folder} --crop_size {side} --shuffle images"
        )
    if pad:
        raise InputError(f"--pad: found {pad} with arrays {x.shape} in {x.dtype}, expected 0")
    write_arrays(folder, train, validation, names)
    return (
        f"{folder}: {counts} rows of {x.shape[1:]}; for train.py: --network MODEL.keras"
        f" --data_folder {folder}"
    )
