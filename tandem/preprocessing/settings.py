"""The settings of preprocessing: paths.yaml, overridden by the command line, checked."""

import argparse
import difflib
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

from tandem.data.manifest import LAYOUTS
from tandem.errors import InputError
from tandem.validation import parse_yaml

DEFAULT_CONFIG = Path(__file__).resolve().parents[2] / "preprocessing" / "paths.yaml"


@dataclass(frozen=True)
class Settings:
    """What preprocessing reads, writes and does; ``paths.yaml`` says what each key means."""

    train_img_dir: Path
    val_img_dir: Path
    tar_root_dir: Path
    val_label_file: Path | None = None
    meta_clsloc_mat: Path | None = None
    misc_dir: Path | None = None
    label_dir: Path | None = None
    image_size: int = 256
    batch_size: int = 256
    layout: str = "b01c"
    seed: int = 1
    subset: int = 0
    max_bad: int = 50
    workers: int = 0

    @property
    def misc_folder(self) -> Path:
        """Where the mean image and the list of skipped pictures go."""
        return self.misc_dir or self.tar_root_dir / "misc"

    @property
    def label_folder(self) -> Path:
        """Where the label arrays go."""
        return self.label_dir or self.tar_root_dir / "labels"

    @property
    def processes(self) -> int:
        """How many processes decode pictures."""
        return self.workers or available_cores()


_PATHS = {
    "train_img_dir": "training pictures, one folder for each class",
    "val_img_dir": "validation pictures, side by side or one folder for each class",
    "val_label_file": "ILSVRC IDs of validation pictures that lie side by side, one a line",
    "meta_clsloc_mat": "ILSVRC's table from ID to wnid",
    "tar_root_dir": "folder of the batch files and the manifest",
    "misc_dir": "folder of the mean image and skipped.txt (default: misc in tar_root_dir)",
    "label_dir": "folder of the label files (default: labels in tar_root_dir)",
}
# Lowest and highest value; the highest sizes keep a file's pixels and sums within their types.
_INTEGERS = {
    "image_size": (1, 65_500, "rows and columns of a stored picture (default 256)"),
    "batch_size": (1, 1 << 24, "pictures per batch file (default 256)"),
    "seed": (0, (1 << 63) - 1, "of the one shuffle of the list (default 1)"),
    "subset": (0, 1 << 32, "pictures of each split; 0: all (default 0)"),
    "max_bad": (0, 1 << 32, "undecodable pictures that may be left out (default 50)"),
    "workers": (0, 4096, "processes that decode; 0: one for each core (default 0)"),
}
_REQUIRED = ("train_img_dir", "val_img_dir", "tar_root_dir")


def available_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def read_settings(argv: list[str] | None, description: str) -> Settings:
    """Read the configuration file and the command line.

    Parameters
    ----------
    argv : list of str, optional
        The command line without the program; by default that of this process.
    description : str
        What ``--help`` says of the program.

    Raises
    ------
    InputError
        An unknown or ill-typed key or option, or a configuration that cannot be read.
    SystemExit
        After ``--help``.
    """
    parser = _parser(description)
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        known = [name for action in parser._actions for name in action.option_strings]
        raise InputError(f"unknown argument {unknown[0]}{_nearest(unknown[0], known)}")
    config = vars(options).pop("config")
    values = _read_config(config)
    values |= {key: value for key, value in vars(options).items() if value is not None}
    missing = [key for key in _REQUIRED if values.get(key) is None]
    if missing:
        raise InputError(f"{config}: {missing[0]} is not set; expected a path")
    return Settings(**values)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(message)


def _parser(description: str) -> argparse.ArgumentParser:
    parser = _Parser(
        description=description,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config", type=Path, default=DEFAULT_CONFIG, metavar="FILE", help="default: paths.yaml"
    )
    for key, meaning in _PATHS.items():
        parser.add_argument(*_spellings(key), type=Path, metavar="PATH", help=meaning)
    for key, (_, _, meaning) in _INTEGERS.items():
        parser.add_argument(*_spellings(key), type=_integer_option(key), metavar="N", help=meaning)
    parser.add_argument(
        *_spellings("layout"), choices=LAYOUTS, help="order of axes in a file (default b01c)"
    )
    return parser


def _spellings(key: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys((f"--{key.replace('_', '-')}", f"--{key}")))


def _integer_option(key: str) -> Any:
    def convert(text: str) -> int:
        try:
            return _checked_integer(key, int(text))
        except (ValueError, InputError):
            low, high, _ = _INTEGERS[key]
            raise argparse.ArgumentTypeError(
                f"found {text!r}, expected an integer from {low} to {high}"
            ) from None

    return convert


def _checked_integer(where: str, value: Any) -> int:
    key = where.rpartition(" ")[2]
    low, high, _ = _INTEGERS[key]
    if type(value) is not int or not low <= value <= high:
        raise InputError(f"{where}: found {value!r}, expected an integer from {low} to {high}")
    return value


def _read_config(path: Path) -> dict[str, Any]:
    try:
        loaded = parse_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: the configuration cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"{path}: the configuration is {error}") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise InputError(f"{path}: found {type(loaded).__name__}, expected keys and values")
    return {key: _checked_value(path, key, value) for key, value in loaded.items()}


def _checked_value(path: Path, key: Any, value: Any) -> Any:
    known = [field.name for field in fields(Settings)]
    if key not in known:
        raise InputError(f"{path}: unknown key {key}{_nearest(str(key), known)}")
    if key in _INTEGERS:
        return _checked_integer(f"{path}: {key}", value)
    if key == "layout":
        if value not in LAYOUTS:
            raise InputError(f"{path}: layout: found {value!r}, expected {' or '.join(LAYOUTS)}")
        return value
    if value is not None and (not isinstance(value, str) or not value):
        raise InputError(f"{path}: {key}: found {value!r}, expected a path")
    return None if value is None else Path(os.path.normpath(path.parent / Path(value).expanduser()))


def _nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name.partition("=")[0], known, n=1)
    return f"; did you mean {close[0]}?" if close else f"; known are {', '.join(known)}"
