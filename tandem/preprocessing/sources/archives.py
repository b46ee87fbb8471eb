"""ImageNet's official archives, read where they are.

ILSVRC2012_img_train.tar holds an archive for each class, ``n01440764.tar``, of its pictures;
ILSVRC2012_img_val.tar holds the validation pictures; the development kit has their classes.
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tandem.errors import InputError
from tandem.preprocessing.ground_truth import PACKED_KIT, by_number, find_kit, kit_files, wnids_of
from tandem.preprocessing.listed import Collector, Listed
from tandem.preprocessing.sources import SOURCES, Folder, Source, is_picture
from tandem.preprocessing.tars import Archive
from tandem.preprocessing.unsupported import TRAIN_TAR, VAL_TAR, compressed
from tandem.validation import printable

log = logging.getLogger(__name__)

_CLASS = re.compile(r"(?:.*/)?(n\d{8})\.tar", re.ASCII)


@SOURCES.register("archives")
@dataclass(frozen=True)
class Archives(Source):
    """The two archives of pictures and the development kit, in one folder."""

    layout = "ImageNet's official archives"
    expected = f"{TRAIN_TAR}, {VAL_TAR} and {PACKED_KIT}"

    source: Path

    @staticmethod
    def recognises(folder: Folder) -> bool:
        return TRAIN_TAR in folder.others or VAL_TAR in folder.others

    def archives(self) -> tuple[Path, ...]:
        for name, other in ((TRAIN_TAR, VAL_TAR), (VAL_TAR, TRAIN_TAR)):
            if not (self.source / name).exists():
                found = compressed(self.source, name) or f"no {name}, expected it beside {other}"
                raise InputError(f"{self.source} (source): found {found}")
        return (self.source / TRAIN_TAR, self.source / VAL_TAR, *kit_files(self.source))

    def find(self) -> Mapping[str, Listed]:
        log.info("%s: reading the contents of %s and %s", self.source, TRAIN_TAR, VAL_TAR)
        return {"train": self._train(), "val": self._val()}

    def _train(self) -> Listed:
        found = Collector(self.source, "train")
        found.add_file(TRAIN_TAR)
        with Archive.open(self.source / TRAIN_TAR) as archive:
            for member in archive.members():
                match = _CLASS.fullmatch(member.name)
                if match is None:
                    raise InputError(
                        f"{archive.where}: found {printable(member.name)}, expected an archive for"
                        " each class, such as n01440764.tar"
                    )
                wnid, before, inner = match[1], len(found.names), archive.inside(member)
                for picture in inner.members():
                    name = picture.name.rpartition("/")[2]
                    if _is_shown_picture(name):
                        found.add(f"{wnid}/{name}", wnid, (picture.offset, picture.size))
                if len(found.names) == before:
                    raise InputError(f"{inner.where}: found no picture, expected at least one")
        return found.listed()

    def _val(self) -> Listed:
        with Archive.open(self.source / VAL_TAR) as archive:
            pictures = [member for member in archive.members() if _is_shown_picture(member.name)]
            order = by_number([member.name for member in pictures], archive.where)
            where = archive.where
        kit = find_kit(self.source)
        if kit is None:
            raise InputError(
                f"{self.source} (source): found no development kit, expected {PACKED_KIT}, which"
                " has the classes of the validation pictures"
            )
        found = Collector(self.source, "val")
        found.add_file(VAL_TAR)
        for position, wnid in zip(order, wnids_of(*kit, len(order), where), strict=True):
            name, offset, size = pictures[position]
            found.add(name.rpartition("/")[2], wnid, (offset, size))
        return found.listed(ordered=True)


def _is_shown_picture(path: str) -> bool:
    """Return whether a member is a picture, and no hidden file, such as macOS adds to each."""
    name = path.rpartition("/")[2]
    return is_picture(name) and not name.startswith(".")
