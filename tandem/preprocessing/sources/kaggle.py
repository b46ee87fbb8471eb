"""ImageNet as Kaggle ships it: ILSVRC/Data/CLS-LOC with a csv of the validation classes.

A line of LOC_val_solution.csv is ``ILSVRC2012_val_00048981,n03995372 85 1 499 272``: a picture, and
the class and the box of each object in it, all of one class. Lines are in no order.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tandem.data.safe_io import read_bytes
from tandem.errors import InputError
from tandem.preprocessing.listed import Listed
from tandem.preprocessing.sources import SOURCES, Folder, Source
from tandem.preprocessing.sources.folders import KAGGLE, list_folder
from tandem.validation import shown

_CSV = "LOC_val_solution.csv"
_MOST_BYTES = 64 << 20  # of the csv; Kaggle's has 2 MB
_LINE = re.compile(r"([^,\s]+),\s*(n\d{8})(?:\s.*)?", re.ASCII)


@SOURCES.register("kaggle")
@dataclass(frozen=True)
class Kaggle(Source):
    """Training pictures by class, flat validation pictures, and Kaggle's csv."""

    layout = "Kaggle's folders"
    expected = f"ILSVRC/Data/CLS-LOC/ with {_CSV} (Kaggle)"

    source: Path

    @staticmethod
    def recognises(folder: Folder) -> bool:
        return _pictures(folder.path) is not None

    def find(self) -> Mapping[str, Listed]:
        root = _pictures(self.source) or self.source
        return {
            split: list_folder(split, Folder.scan(root / split, "source"), self._classified)
            for split in ("train", "val")
        }

    def _classified(self, folder: Folder) -> Iterable[tuple[str, str]]:
        """The validation pictures in order, with the classes of the csv."""
        path = self._csv()
        classes = _read_csv(path)
        for name in folder.pictures:
            wnid = classes.pop(name.rpartition(".")[0], None)
            if wnid is None:
                raise InputError(
                    f"{path} (source): found no line of {name}, expected one for each picture of"
                    f" {folder.path}"
                )
            yield name, wnid
        if classes:
            raise InputError(
                f"{folder.path} (source): found no picture {next(iter(classes))}, expected one for"
                f" each line of {path}"
            )

    def _csv(self) -> Path:
        root = _pictures(self.source) or self.source
        for folder in (self.source, *root.parents[:3]):
            if (folder / _CSV).is_file():
                return folder / _CSV
        raise InputError(
            f"{self.source} (source): found no {_CSV} there or beside ILSVRC/, expected Kaggle's"
            " table of the validation classes"
        )


def _pictures(source: Path) -> Path | None:
    """The folder with Kaggle's train/ and val/, which the source is or holds."""
    source = source.absolute()
    for inner in ("ILSVRC/Data/", "Data/", ""):
        path = source / inner / KAGGLE
        if (path / "train").is_dir():
            return path
    return source if source.name == KAGGLE and (source / "train").is_dir() else None


def _read_csv(path: Path) -> dict[str, str]:
    """The class of each picture, by its name without the suffix."""
    try:
        lines = read_bytes(path, _MOST_BYTES).decode("utf-8-sig").splitlines()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{path} (source): cannot be read: {reason}") from None
    if not any(map(str.strip, lines)):
        raise InputError(
            f"{path} (source): found an empty file, expected a line for each validation picture"
        )
    classes: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if (number == 1 and line.startswith("ImageId,")) or not line.strip():
            continue
        match = _LINE.fullmatch(line)
        if match is None or match[1] in classes:
            raise InputError(
                f"{path} (source): line {number}: found {shown(line)}, expected a picture that"
                " is on no other line, and its class: ILSVRC2012_val_00000001,n01751748 ..."
            )
        classes[match[1]] = match[2]
    return classes
