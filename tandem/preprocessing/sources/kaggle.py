"""ImageNet as Kaggle ships it, zipped or not: ILSVRC/Data/CLS-LOC with the validation classes.

A line of LOC_val_solution.csv is ``ILSVRC2012_val_00048981,n03995372 85 1 499 272``: a picture, and
the class and the box of each object in it, all of one class. Lines are in no order.
"""

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tandem.data.safe_io import read_bytes
from tandem.errors import InputError, explained
from tandem.preprocessing.listed import Collector, Listed
from tandem.preprocessing.sources import SOURCES, Folder, Source, is_picture
from tandem.preprocessing.sources.folders import KAGGLE, list_folder
from tandem.preprocessing.zips import Zip
from tandem.validation import shown

log = logging.getLogger(__name__)

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
        return _classified(folder.pictures, str(folder.path), _read_csv(path), str(path))

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


_PICTURE = re.compile(rf"(?:.*/)?{KAGGLE}/(?:train/(n\d{{8}})|val)/([^/.][^/]*)", re.ASCII)


@SOURCES.register("kaggle_zip")
@dataclass(frozen=True)
class KaggleZip(Source):
    """The zip file of all of it, read where it is."""

    layout = "Kaggle's zip file"
    expected = "imagenet-object-localization-challenge.zip, Kaggle's, named itself"

    source: Path

    @staticmethod
    def recognises(folder: Folder) -> bool:
        return False  # a file, which is named

    def archives(self) -> tuple[Path, ...]:
        return (self.source,)

    def find(self) -> Mapping[str, Listed]:
        log.info("%s: reading its table of contents", self.source)
        where = f"{self.source} (source)"
        train, val = (Collector(self.source.parent, split) for split in ("train", "val"))
        pictures: dict[str, tuple[int, int]] = {}
        csv = None
        for found in (train, val):
            found.add_file(self.source.name)
        with Zip.open(self.source) as archive:
            for member in archive.members():
                if member.name.rpartition("/")[2] == _CSV:
                    csv = archive.read(member, _MOST_BYTES)
                match = _PICTURE.fullmatch(member.name)
                if match is None or not is_picture(match[2]):
                    continue
                if match[1]:
                    train.add(f"{match[1]}/{match[2]}", match[1], archive.span(member))
                else:
                    pictures[match[2]] = archive.span(member)
        if not train.names or not pictures:
            raise InputError(
                f"{where}: found no pictures in {KAGGLE}/train/ and {KAGGLE}/val/, expected"
                f" Kaggle's zip file; unpack another: unzip {self.source} -d DIR, and --source DIR"
            )
        if csv is None:
            raise InputError(f"{where}: found no {_CSV}, expected Kaggle's whole zip file")
        classes = _parse_csv(csv, f"{where}: {_CSV}")
        for name, wnid in _classified(sorted(pictures), str(self.source), classes, _CSV):
            val.add(name, wnid, pictures[name])
        return {"train": train.listed(), "val": val.listed(ordered=True)}


def _classified(
    pictures: Iterable[str], place: str, classes: dict[str, str], table: str
) -> Iterator[tuple[str, str]]:
    """Give each validation picture its class; refuse one without a line, and a line without one."""
    for name in pictures:
        wnid = classes.pop(name.rpartition(".")[0], None)
        if wnid is None:
            raise InputError(
                f"{table} (source): found no line of {name}, expected one for each picture of"
                f" {place}"
            )
        yield name, wnid
    if classes:
        raise InputError(
            f"{place} (source): found no picture {next(iter(classes))}, expected one for each line"
            f" of {table}"
        )


def _read_csv(path: Path) -> dict[str, str]:
    """The class of each picture, by its name without the suffix."""
    where = f"{path} (source)"
    with explained(where, "cannot be read", ValueError):
        content = read_bytes(path, _MOST_BYTES)
    return _parse_csv(content, where)


def _parse_csv(content: bytes, where: str) -> dict[str, str]:
    with explained(where, "cannot be read", ValueError):
        lines = content.decode("utf-8-sig").splitlines()
    if not any(map(str.strip, lines)):
        raise InputError(
            f"{where}: found an empty file, expected a line for each validation picture"
        )
    classes: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if (number == 1 and line.startswith("ImageId,")) or not line.strip():
            continue
        match = _LINE.fullmatch(line)
        if match is None or match[1] in classes:
            raise InputError(
                f"{where}: line {number}: found {shown(line)}, expected a picture that"
                " is on no other line, and its class: ILSVRC2012_val_00000001,n01751748 ..."
            )
        classes[match[1]] = match[2]
    return classes
