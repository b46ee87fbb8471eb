"""Sources of pictures: one module for each layout in which people have them.

Every module of this package registers a `Source` when it is imported; a new layout is a new module.
"""

import importlib
import os
import pkgutil
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from tandem.data.decode import PICTURE_SUFFIXES
from tandem.errors import InputError, explained
from tandem.preprocessing.listed import Listed
from tandem.preprocessing.settings import Settings
from tandem.preprocessing.unsupported import hint_for
from tandem.preprocessing.zips import ZIP
from tandem.registry import Choice, Registry
from tandem.validation import printable

_WNID = re.compile(r"n\d{8}", re.ASCII)
_SPLITS = ("train", "val", "validation")
_MOST_SHOWN = 8  # entries of an unknown folder

CLEARER = "name the folders by --train-img-dir and --val-img-dir"


@dataclass(frozen=True)
class Folder:
    """Names of the entries of a folder, sorted, without hidden ones."""

    path: Path
    key: str  # the setting that names the folder, for messages
    folders: tuple[str, ...]
    pictures: tuple[str, ...]  # by their suffixes
    others: tuple[str, ...]

    @classmethod
    def scan(cls, path: Path, key: str) -> "Folder":
        """List a folder; raises InputError where it cannot be read."""
        folders, pictures, others = [], [], []
        with explained(f"{path} ({key})", "the folder cannot be read"), os.scandir(path) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if is_picture(entry.name):
                    if entry.is_symlink() and not Path(entry.path).exists():
                        raise InputError(f"{printable(entry.path)} ({key}): the link leads nowhere")
                    pictures.append(entry.name)
                elif entry.is_dir():
                    folders.append(entry.name)
                else:
                    others.append(entry.name)
        return cls(path, key, *(tuple(sorted(names)) for names in (folders, pictures, others)))

    def __str__(self) -> str:
        found = [f"class folders ({printable(self.folders[0])}, ...)"] if self.folders else []
        if self.pictures:
            found.append(f"pictures side by side ({printable(self.pictures[0])}, ...)")
        return " and ".join(found) or "neither pictures nor class folders"


def is_picture(name: str) -> bool:
    """Return whether a file is a picture by the suffix of its name."""
    return os.path.splitext(name)[1].lower() in PICTURE_SUFFIXES  # noqa: PTH122, a million calls


class Source(Choice, ABC):
    """A layout of pictures in a folder. Subclasses declare the settings that they need."""

    layout: ClassVar[str]  # what it is, to complete "found ..."
    expected: ClassVar[str]  # what the folder holds, to complete "expected ..."

    @staticmethod
    @abstractmethod
    def recognises(folder: Folder) -> bool:
        """Return whether the entries of a folder look like this layout."""

    @abstractmethod
    def find(self) -> Mapping[str, Listed]:
        """List the pictures of both splits.

        Their order does not depend on the file system. Raises InputError, for example for a
        picture without a class.
        """

    def archives(self) -> tuple[Path, ...]:
        """List the files whose reading by `find` takes long, so that its result is kept."""
        return ()

    def copies(self) -> Path | None:
        """Return the folder into which `find` copies pictures, if it does."""
        return None


SOURCES: Registry[Source] = Registry("source")


def choose(settings: Settings) -> Source:
    """Make the source that the settings name; raises InputError unless it is known."""
    if settings.source is None:
        folders = settings.train_img_dir, settings.val_img_dir
        if None in folders or not any(folder and folder.exists() for folder in folders):
            found = "null" if None in folders else f"neither {folders[0]} nor {folders[1]}"
            raise InputError(
                f"source: found {found}, expected a folder that holds ImageNet: --source DIR (or"
                " --train-img-dir DIR and --val-img-dir DIR)"
            )
        return SOURCES.make("folders", vars(settings))
    if settings.source.is_file():
        if settings.source.name.endswith(ZIP):
            return SOURCES.make("kaggle_zip", vars(settings))
        raise InputError(
            f"{settings.source} (source): found a file, expected a folder, or Kaggle's zip file;"
            " archives are read by the name of their folder"
        )
    folder = Folder.scan(settings.source, "source")
    try:
        fitting = [name for name in SOURCES if SOURCES[name].recognises(folder)]
    except OSError as error:
        path = os.path.normpath(error.filename or folder.path)
        raise InputError(f"{path} (source): cannot be read: {error.strerror}") from None
    if len(fitting) == 1:
        return SOURCES.make(fitting[0], vars(settings))
    where = f"{folder.path} (source)"
    if fitting:
        found = " and ".join(SOURCES[name].layout for name in fitting)
        raise InputError(f"{where}: found {found}, expected one of them; or {CLEARER}")
    if hint := hint_for(folder.path):
        raise InputError(f"{where}: found {hint}")
    if folder.folders and (
        folder.path.absolute().name in _SPLITS or all(map(_WNID.fullmatch, folder.folders))
    ):
        raise InputError(
            f"{where}: found {folder}, expected train/ and val/; these look like the class folders"
            " of a split: name the folder above"
        )
    names = [printable(name) for name in (*folder.folders, *folder.pictures, *folder.others)]
    more = f" and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else ""
    raise InputError(
        "\n  ".join(
            (
                f"{where}: found {', '.join(names[:_MOST_SHOWN]) or 'nothing'}{more}, expected one"
                " of the layouts of docs/data-sources.md:",
                *(SOURCES[name].expected for name in SOURCES),
            )
        )
        + f"\nor {CLEARER}"
    )


for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
