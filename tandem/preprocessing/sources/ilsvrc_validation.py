"""ILSVRC's validation pictures: side by side, numbered, with the classes in a file of their own.

Picture k is of the class on line k of the ground truth, an ILSVRC ID, which the development kit's
table translates to a WordNet ID.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tandem.errors import InputError
from tandem.preprocessing.sources import SOURCES, Folder, Source
from tandem.validation import printable


@SOURCES.register("ilsvrc_validation")
@dataclass(frozen=True)
class IlsvrcValidation(Source):
    """Numbered pictures, ILSVRC's ground truth, and its table from ID to WordNet ID."""

    splits = ("val",)
    expected = "ILSVRC2012_val_00000001.JPEG and so on"
    shuffled = False

    val_label_file: Path | None = None  # ILSVRC IDs of the pictures, one a line
    meta_clsloc_mat: Path | None = None  # ILSVRC's table from ID to wnid

    @staticmethod
    def recognises(folder: Folder) -> bool:
        return bool(folder.pictures)

    def find(self, folder: Folder) -> tuple[list[str], list[str]]:
        label_file, table = (self._path(folder, k) for k in ("val_label_file", "meta_clsloc_mat"))
        names = _by_number(folder)
        ids = _read_ids(label_file)
        if len(ids) != len(names):
            raise InputError(
                f"{label_file} (val_label_file): found {len(ids)} lines, expected {len(names)}, one"
                f" for each picture of {folder.path}"
            )
        wnid_of = _read_synsets(table)
        for line, number in enumerate(ids, 1):
            if number not in wnid_of:
                raise InputError(
                    f"{label_file} (val_label_file): line {line}: found ID {number}, expected one"
                    f" of {table}"
                )
        return names, [wnid_of[number] for number in ids]

    def _path(self, folder: Folder, key: str) -> Path:
        path: Path | None = getattr(self, key)
        if path is None:
            raise InputError(
                f"{folder.path}: the validation pictures lie side by side, so {key} is needed;"
                " found none, expected a path"
            )
        return path


def _by_number(folder: Folder) -> list[str]:
    """Sort pictures by the number at the end of their names: picture k belongs to line k."""
    where = f"{folder.path} ({folder.key})"
    numbers: dict[int, str] = {}
    for name in folder.pictures:
        match = re.search(r"(\d+)\.[^.]*$", name, re.ASCII)
        if match is None:
            raise InputError(
                f"{where}: found {printable(name)}, expected a name that ends in the picture's"
                " number, such as ILSVRC2012_val_00000001.JPEG"
            )
        number = int(match.group(1))
        if number in numbers:
            raise InputError(
                f"{where}: found {printable(numbers[number])} and {printable(name)}, expected one"
                f" picture of number {number}"
            )
        numbers[number] = name
    missing = sorted(set(range(1, len(numbers) + 1)) - set(numbers))
    if missing:
        raise InputError(
            f"{where}: found {len(numbers)} pictures up to number {max(numbers)} without number"
            f" {missing[0]}, expected every number from 1"
        )
    return [numbers[number] for number in sorted(numbers)]


def _read_ids(path: Path) -> Sequence[int]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} (val_label_file): cannot be read: {error}") from None
    for number, line in enumerate(lines, 1):
        if not re.fullmatch(r"\s*\d{1,9}\s*", line, re.ASCII):
            raise InputError(
                f"{path} (val_label_file): line {number}: found {line[:40]!r}, expected an"
                " ILSVRC ID"
            )
    return [int(line) for line in lines]


def _read_synsets(path: Path) -> dict[int, str]:
    """The WordNet ID of each ILSVRC ID: ``synsets``, each with [0] the ID and [1] the wnid."""
    import scipy.io  # slow to import, and only this layout needs it

    def only(value: Any) -> Any:
        return np.asarray(value).item()

    try:
        synsets = scipy.io.loadmat(path)["synsets"].ravel()
        return {int(only(synset[0])): str(only(synset[1])) for synset in synsets}
    except Exception as error:
        # loadmat raises many types of exceptions for files that are not MATLAB's.
        raise InputError(
            f"{path} (meta_clsloc_mat): cannot be read: {error}; expected a MATLAB file with the"
            " table synsets: ID, wnid, ..."
        ) from None
