"""Sources of pictures: one module for each layout in which people have them.

Every module of this package registers a `Source` when it is imported; a new layout is a new module.
"""

import importlib
import logging
import pkgutil
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from tandem.data.decode import PICTURE_SUFFIXES
from tandem.errors import InputError
from tandem.registry import Choice, Registry
from tandem.validation import printable

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Folder:
    """Names of the entries of a folder of pictures, sorted, without hidden ones."""

    path: Path
    key: str  # the setting that names the folder, for messages
    folders: tuple[str, ...]
    pictures: tuple[str, ...]

    @classmethod
    def scan(cls, path: Path, key: str) -> "Folder":
        """List a folder; raises InputError where it cannot be read or a class is not printable."""
        folders, pictures, others = [], [], 0
        try:
            for entry in path.iterdir():
                if entry.name.startswith("."):
                    continue
                if entry.suffix.lower() in PICTURE_SUFFIXES:
                    pictures.append(entry.name)
                elif entry.is_dir():
                    folders.append(entry.name)
                else:
                    others += 1
        except OSError as error:
            raise InputError(
                f"{path} ({key}): the folder cannot be read: {error.strerror}"
            ) from None
        for name in folders:
            # A class stands in the manifest; a picture with such a name is left out later.
            if not name.isprintable():
                raise InputError(
                    f"{path}: found the class folder {name!a}, expected printable characters in"
                    " UTF-8"
                )
        if others:
            log.info("%s: ignored %d files that are not pictures by their names", path, others)
        return cls(path, key, tuple(sorted(folders)), tuple(sorted(pictures)))

    def __str__(self) -> str:
        found = [f"class folders ({self.folders[0]}, ...)"] if self.folders else []
        if self.pictures:
            found.append(f"pictures side by side ({printable(self.pictures[0])}, ...)")
        return " and ".join(found) or "neither pictures nor class folders"


class Source(Choice, ABC):
    """A layout of pictures in a folder. Subclasses declare the settings that they need."""

    splits: ClassVar[tuple[str, ...]]  # which of train and val may have this layout
    expected: ClassVar[str]  # what the folder holds, to complete "expected ..."
    shuffled: ClassVar[bool]  # whether the list is shuffled before it is written to batch files

    @staticmethod
    @abstractmethod
    def recognises(folder: Folder) -> bool:
        """Whether the entries of a folder look like this layout."""

    @abstractmethod
    def find(self, folder: Folder) -> tuple[list[str], list[str]]:
        """List names relative to the folder and the class (WordNet ID) of each.

        Their order does not depend on the file system. Raises InputError, for example for a
        picture without a class.
        """


SOURCES: Registry[Source] = Registry("source")

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
