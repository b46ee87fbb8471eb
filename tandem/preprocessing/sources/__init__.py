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

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Folder:
    """Entries of a folder of pictures, sorted by name, without hidden ones.

    Attributes
    ----------
    path : Path
    key : str
        The setting that names the folder, for messages.
    folders, pictures : tuple of str
        Names.
    """

    path: Path
    key: str
    folders: tuple[str, ...]
    pictures: tuple[str, ...]

    @classmethod
    def scan(cls, path: Path, key: str) -> "Folder":
        """List a folder; raises InputError where it cannot be read or a name is not printable."""
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
        except FileNotFoundError:
            raise InputError(f"{path} ({key}): there is no such folder") from None
        except NotADirectoryError:
            raise InputError(f"{path} ({key}): found a file, expected a folder") from None
        except PermissionError:
            raise InputError(f"{path} ({key}): the folder may not be read") from None
        for name in (*folders, *pictures):
            # A line of train.txt and of skipped.txt is one name, in UTF-8.
            if not name.isprintable():
                raise InputError(
                    f"{path}: found the name {name!r}, expected printable characters in UTF-8"
                )
        if others:
            log.info("%s: ignored %d files that are not pictures by their names", path, others)
        return cls(path, key, tuple(sorted(folders)), tuple(sorted(pictures)))

    def __str__(self) -> str:
        found = [f"class folders ({self.folders[0]}, ...)"] if self.folders else []
        found += [f"pictures side by side ({self.pictures[0]}, ...)"] if self.pictures else []
        return " and ".join(found) or "neither pictures nor class folders"


class Source(Choice, ABC):
    """A layout of pictures in a folder. Subclasses declare the settings that they need.

    Attributes
    ----------
    splits : tuple of str
        Which of ``train`` and ``val`` may have this layout.
    expected : str
        What the folder holds, to complete "expected ...".
    shuffled : bool
        Whether the list is shuffled before it is written to batch files.
    """

    splits: ClassVar[tuple[str, ...]]
    expected: ClassVar[str]
    shuffled: ClassVar[bool]

    @staticmethod
    @abstractmethod
    def recognises(folder: Folder) -> bool:
        """Whether the entries of a folder look like this layout."""

    @abstractmethod
    def find(self, folder: Folder) -> tuple[list[str], list[str]]:
        """List the pictures of a folder in an order that does not depend on the file system.

        Returns
        -------
        list of str
            Names relative to the folder.
        list of str
            The class (WordNet ID) of each.

        Raises
        ------
        InputError
            A picture has no class, or a file of settings cannot be used.
        """


SOURCES: Registry[Source] = Registry("source")

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
