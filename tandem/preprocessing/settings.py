"""The settings of preprocessing: paths.yaml, overridden by the command line."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tandem.cli import CommandLine, Options, PathOption, option, to_path
from tandem.config.hardware import available_cores
from tandem.data.manifest import Layout, Resize
from tandem.errors import InputError
from tandem.validation import read_yaml

DEFAULT_CONFIG = Path(__file__).resolve().parents[2] / "preprocessing" / "paths.yaml"

_PATHS = ("source", "_dir", "_file", "_mat")  # ends of the keys of paths
_MOST_PIXELS = 65_500  # rows or columns
_ANSWERS = {
    **dict.fromkeys(("output", "out", "output_dir", "target"), "tar_root_dir"),
    **dict.fromkeys(("data", "data_dir", "dataset", "imagenet", "input", "root"), "source"),
    **dict.fromkeys(("train", "train_dir", "traindir"), "train_img_dir"),
    **dict.fromkeys(("val", "val_dir", "valdir"), "val_img_dir"),
    **dict.fromkeys(("size", "img_size", "resize_height", "resize_width"), "image_size"),
    **dict.fromkeys(("padding", "border"), "pad"),
    **dict.fromkeys(("j", "num_workers", "jobs", "processes", "threads"), "workers"),
    **dict.fromkeys(("limit", "max_images"), "subset"),
    **dict.fromkeys(
        ("valtxt_filename", "traintxt_filename"),
        "tar_root_dir is the folder of val.txt and train.txt",
    ),
    "shuffle": "the list is always shuffled, once; seed chooses the order",
}


def _path(default: Path | None, meaning: str) -> Any:
    return option(default, meaning, "a path or null" if default is None else "a path", "text")


def _number(default: int, meaning: str, low: int, high: int) -> Any:
    return option(default, meaning, f"a whole number from {low} to {high}", ge=low, le=high)


class Settings(Options):
    """The settings of preprocessing: what it reads, writes and does."""

    source: PathOption | None = _path(
        None, "folder of ImageNet in any known layout, instead of train_img_dir and val_img_dir"
    )
    train_img_dir: PathOption | None = _path(None, "training pictures, one folder for each class")
    val_img_dir: PathOption | None = _path(
        None, "validation pictures, side by side or one folder for each class"
    )
    tar_root_dir: PathOption = _path(
        Path("data/imagenet"), "folder of the batch files and the manifest"
    )
    val_label_file: PathOption | None = _path(
        None, "ILSVRC IDs of validation pictures that lie side by side, one a line"
    )
    meta_clsloc_mat: PathOption | None = _path(None, "ILSVRC's table from ID to wnid")
    misc_dir: PathOption | None = _path(
        None, "folder of the mean image and skipped.txt (default: misc in tar_root_dir)"
    )
    label_dir: PathOption | None = _path(
        None, "folder of the label files (default: labels in tar_root_dir)"
    )
    # The highest sizes keep a file's pixels and sums within their types.
    image_size: int = _number(
        256, "rows and columns of a stored picture without its border, pixels", 1, _MOST_PIXELS
    )
    pad: int = _number(0, "border of the mean colour around a stored picture, pixels", 0, 32_750)
    batch_size: int = _number(256, "pictures per batch file", 1, 1 << 24)
    resize: Resize = option(
        "squash",
        "squash: the whole picture; shorter_side: its proportions stay, the middle square is kept",
        "squash or shorter_side",
    )
    layout: Layout = option("b01c", "order of axes in a file", "b01c or c01b")
    seed: int = _number(1, "of the one shuffle of the list", 0, (1 << 63) - 1)
    subset: int = _number(0, "pictures of each split; 0: all", 0, 1 << 32)
    max_bad: int = _number(50, "undecodable pictures that may be left out", 0, 1 << 32)
    workers: int = _number(0, "processes that decode; 0: one for each core", 0, 4096)

    @property
    def stored_size(self) -> int:
        """Rows and columns of a stored picture with its border."""
        return self.image_size + 2 * self.pad

    @property
    def misc_folder(self) -> Path:
        return self.misc_dir or self.tar_root_dir / "misc"

    @property
    def label_folder(self) -> Path:
        return self.label_dir or self.tar_root_dir / "labels"

    @property
    def processes(self) -> int:
        return self.workers or len(available_cores())


def read_settings(
    arguments: Sequence[str] | None, description: str | None, program: str | None = None
) -> Settings:
    """Read the configuration file and the command line. Errors as of `CommandLine.read`.

    Folders of pictures on the command line replace the source in the file. Raises InputError where
    the command line has both, and where pictures with their border are too large.
    """
    line = CommandLine(arguments, description, program, _ANSWERS)
    typed = line.read(Settings, DEFAULT_CONFIG, lambda _: {}).model_fields_set
    settings = line.read(Settings, DEFAULT_CONFIG, _read_paths)
    if settings.stored_size > _MOST_PIXELS:
        most, size = (_MOST_PIXELS - settings.image_size) // 2, settings.image_size
        raise InputError(
            f"--pad: found {settings.pad}, expected at most {most} with image_size {size}"
        )
    if not (folders := typed & {"train_img_dir", "val_img_dir"}):
        return settings
    if "source" in typed:
        named = " and ".join(f"--{key}" for key in sorted(folders))
        raise InputError(f"--source: found {named} too, expected one or the other")
    return settings.model_copy(update={"source": None})


def _read_paths(file: Path) -> dict[str, Any]:
    """Read a file in which relative paths are relative to its own folder."""
    values = read_yaml(file)
    for key in values.keys() & {key for key in Settings.model_fields if key.endswith(_PATHS)}:
        if isinstance(path := to_path(values[key]), Path):
            values[key] = Path(os.path.normpath(file.parent / path))
    return values
