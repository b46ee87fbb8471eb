"""Folders of pictures: train/ and val/ in one folder, or each named by its own setting.

In either, pictures lie in one folder for each class, ``n01440764/n01440764_10026.JPEG``, or side by
side with the class in their names, as Hugging Face's archives unpack. Validation pictures may also
lie side by side as ILSVRC ships them, with the classes in its development kit.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tandem.errors import InputError
from tandem.preprocessing.ground_truth import DEVKIT, Part, by_number, find_kit, wnids_of
from tandem.preprocessing.listed import Collector, Listed, class_in
from tandem.preprocessing.sources import SOURCES, Folder, Source
from tandem.validation import counted, is_printable, listed, printable

log = logging.getLogger(__name__)

Numbered = Callable[[Folder], Iterable[tuple[str, str]]]

KAGGLE = "CLS-LOC"  # Kaggle's folder, whose classes of validation pictures stand elsewhere
# What people call the folder of each split.
_TRAIN, _VAL = ("train", "train_images"), ("val", "validation", "val_images")
_EXPECTED = {
    "train": "one folder for each class",
    "val": "one folder for each class, or ILSVRC2012_val_00000001.JPEG and so on",
}


@SOURCES.register("folders")
@dataclass(frozen=True)
class Folders(Source):
    """Folders of training and of validation pictures."""

    layout = "folders of pictures"
    expected = "train/<wnid>/ and val/, by class or flat with ILSVRC2012_devkit_t12.tar.gz"

    source: Path | None = None
    train_img_dir: Path | None = None
    val_img_dir: Path | None = None
    val_label_file: Path | None = None  # ILSVRC IDs of the pictures, one a line
    meta_clsloc_mat: Path | None = None  # ILSVRC's table from ID to wnid

    @staticmethod
    def recognises(folder: Folder) -> bool:
        both = [_named(folder.path, names) for names in (_TRAIN, _VAL)]
        return folder.path.absolute().name != KAGGLE and all(
            path is not None and not any(path.glob("*.tar")) for path in both
        )

    def find(self) -> Mapping[str, Listed]:
        paths = {"train": self.train_img_dir, "val": self.val_img_dir}
        keys = {split: f"{split}_img_dir" for split in paths}
        if self.source is not None:
            paths = {"train": _named(self.source, _TRAIN), "val": _named(self.source, _VAL)}
            keys = dict.fromkeys(paths, "source")
        return {
            split: list_folder(split, Folder.scan(path, keys[split]), self._numbered)
            for split, path in paths.items()
            if path is not None
        }

    def _numbered(self, folder: Folder) -> Iterable[tuple[str, str]]:
        """Pictures that lie side by side, in order, with the classes of the development kit."""
        order = by_number(folder.pictures, f"{folder.path} ({folder.key})")
        wnids = wnids_of(*self._truth(folder), len(order), folder.path)
        return zip((folder.pictures[i] for i in order), wnids, strict=True)

    def _truth(self, folder: Folder) -> tuple[Part, Part]:
        if self.source is not None and (found := find_kit(self.source)):
            return found
        paths = {"val_label_file": self.val_label_file, "meta_clsloc_mat": self.meta_clsloc_mat}
        parts = []
        for key, path in paths.items():
            if self.source is not None and (path is None or not path.is_file()):
                raise InputError(
                    f"{folder.path}: the validation pictures lie side by side; found no"
                    f" development kit in {self.source} (source), expected {DEVKIT}.tar.gz"
                )
            if path is None:
                raise InputError(
                    f"{folder.path}: the validation pictures lie side by side, so {key} is needed;"
                    " found none, expected a path"
                )
            parts.append(Part.read(path, key))
        return parts[0], parts[1]


def list_folder(split: str, folder: Folder, numbered: Numbered) -> Listed:
    """List the pictures of a split; raises InputError if a folder cannot be used.

    `numbered` gives validation pictures that lie side by side, in order, and their classes.
    """
    for name in folder.others:
        if (path := folder.path / name).is_symlink() and not path.exists():
            raise InputError(f"{printable(str(path))} ({folder.key}): the link leads nowhere")
    if folder.others:
        which = (
            "is no picture by its name" if len(folder.others) == 1 else "are no pictures by name"
        )
        log.info("%s: ignored %s that %s", folder.path, counted(folder.others, "file"), which)
    if folder.folders and folder.pictures and split == "train":
        raise InputError(
            f"{folder.path} ({folder.key}): found the picture {printable(folder.pictures[0])}"
            " beside the class folders, expected every picture in the folder of its class"
        )
    found = Collector(folder.path, split)
    if folder.folders and not folder.pictures:
        _add_class_folders(found, folder)
        return found.listed()
    if folder.pictures and not folder.folders:
        classes = [class_in(name) for name in folder.pictures]
        if all(classes):
            for name, wnid in zip(folder.pictures, classes, strict=True):
                _add(found, name, str(wnid))
            return found.listed()
        if split == "val":
            for name, wnid in numbered(folder):
                _add(found, name, wnid)
            return found.listed(ordered=True)
    raise InputError(f"{folder.path} ({folder.key}): found {folder}, expected {_EXPECTED[split]}")


def _add_class_folders(found: Collector, folder: Folder) -> None:
    ignored: list[str] = []
    for wnid in folder.folders:
        # A class stands in the manifest; a picture with such a name is left out later.
        if not is_printable(wnid):
            raise InputError(
                f"{folder.path}: found the class folder {wnid!a}, expected printable characters in"
                " UTF-8"
            )
        inner = Folder.scan(folder.path / wnid, folder.key)
        if not inner.pictures:
            raise InputError(
                f"{inner.path} ({folder.key}): found no picture, expected at least one"
            )
        ignored += [f"{wnid}/{name}" for name in (*inner.others, *inner.folders)]
        for name in inner.pictures:
            _add(found, f"{wnid}/{name}", wnid)
    if ignored:
        names = listed([*map(printable, ignored)], most=4)
        log.warning(
            "%s: ignored in class folders what is no picture by its name: %s", folder.path, names
        )


def _add(found: Collector, name: str, wnid: str) -> None:
    found.add_file(name)
    found.add(name, wnid)


def _named(folder: Path, names: tuple[str, ...]) -> Path | None:
    return next((path for name in names if (path := folder / name).is_dir()), None)
