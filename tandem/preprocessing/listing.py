"""Which pictures there are, of which class, in which order."""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tandem.data.decode import PICTURE_SUFFIXES
from tandem.errors import InputError
from tandem.philox import Purpose, permutation
from tandem.preprocessing.settings import Settings

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Listed:
    """The pictures of one split, in the order in which they are to lie in the batch files.

    Attributes
    ----------
    folder : Path
        The folder to which the names are relative.
    pictures : tuple of str
        ``class folder/name``, or ``name`` when the pictures lie side by side.
    labels : int64 (pictures,)
        The class of each.
    """

    folder: Path
    pictures: tuple[str, ...]
    labels: np.ndarray

    def take(self, positions: Sequence[int] | np.ndarray) -> "Listed":
        """The pictures at some positions of the list, in that order."""
        index = np.asarray(positions, np.int64)
        return Listed(self.folder, tuple(self.pictures[i] for i in index), self.labels[index])


@dataclass(frozen=True, eq=False)
class Listing:
    """All pictures. Class i is ``wnids[i]``: the training folders, sorted."""

    wnids: tuple[str, ...]
    splits: dict[str, Listed]


def list_pictures(settings: Settings) -> Listing:
    """List the training and the validation pictures with their classes.

    Training pictures are listed by class folder, sorted by name and shuffled once. Validation
    pictures that lie side by side keep the order of their numbers; those in class folders are
    listed like training pictures.

    Raises
    ------
    InputError
        A folder is missing or empty, a validation picture is of a class that training lacks, or
        the ground truth does not fit the pictures.
    """
    wnids, train = _list_class_folders(settings.train_img_dir, "train_img_dir")
    val = _list_validation(settings, wnids)
    unused = len(wnids) - len(np.unique(val.labels))
    if unused:
        log.info("%d of %d classes have no validation picture", unused, len(wnids))
    splits = {"train": _shuffled(train, settings.seed), "val": val}
    if settings.subset:
        splits = {
            name: listed.take(np.arange(min(settings.subset, len(listed.pictures))))
            for name, listed in splits.items()
        }
    return Listing(wnids, splits)


def _shuffled(listed: Listed, seed: int) -> Listed:
    return listed.take(permutation(len(listed.pictures), seed, 0, Purpose.LISTING))


def _list_validation(settings: Settings, wnids: tuple[str, ...]) -> Listed:
    folder = settings.val_img_dir
    folders, pictures = _scan(folder, "val_img_dir")
    if folders and pictures:
        raise InputError(
            f"{folder} (val_img_dir): found both class folders ({folders[0]}, ...) and pictures"
            f" side by side ({pictures[0]}, ...), expected one or the other"
        )
    if pictures:
        return _list_numbered(settings, pictures, wnids)
    if not folders:
        raise InputError(
            f"{folder} (val_img_dir): found neither pictures nor class folders, expected"
            " ILSVRC2012_val_00000001.JPEG and so on, or one folder for each class"
        )
    foreign = sorted(set(folders) - set(wnids))
    if foreign:
        raise InputError(
            f"{folder} (val_img_dir): found class {foreign[0]}"
            f"{f' and {len(foreign) - 1} more' if len(foreign) > 1 else ''}, which"
            f" {settings.train_img_dir} lacks; expected only classes of the training pictures"
        )
    classes, listed = _list_class_folders(folder, "val_img_dir")
    index = np.array([wnids.index(wnid) for wnid in classes], np.int64)
    return _shuffled(Listed(folder, listed.pictures, index[listed.labels]), settings.seed)


def _list_class_folders(folder: Path, key: str) -> tuple[tuple[str, ...], Listed]:
    classes, loose = _scan(folder, key)
    if not classes:
        found = "pictures but no folder" if loose else "no folder"
        raise InputError(f"{folder} ({key}): found {found}, expected one folder for each class")
    if loose:
        raise InputError(
            f"{folder} ({key}): found the picture {loose[0]} beside the class folders,"
            " expected every picture in the folder of its class"
        )
    pictures: list[str] = []
    counts: list[int] = []
    for wnid in classes:
        _, names = _scan(folder / wnid, key)
        if not names:
            raise InputError(f"{folder / wnid} ({key}): found no picture, expected at least one")
        pictures += [f"{wnid}/{name}" for name in names]
        counts.append(len(names))
    labels = np.repeat(np.arange(len(classes), dtype=np.int64), counts)
    return tuple(classes), Listed(folder, tuple(pictures), labels)


def _scan(folder: Path, key: str) -> tuple[list[str], list[str]]:
    """Names of the folders and of the pictures in `folder`, sorted; hidden entries left out."""
    folders, pictures, others = [], [], []
    try:
        for entry in folder.iterdir():
            name = entry.name
            if name.startswith("."):
                continue
            if entry.suffix.lower() in PICTURE_SUFFIXES:
                pictures.append(_checked_name(folder, name))
            elif entry.is_dir():
                folders.append(_checked_name(folder, name))
            else:
                others.append(name)
    except FileNotFoundError:
        raise InputError(f"{folder} ({key}): there is no such folder") from None
    except NotADirectoryError:
        raise InputError(f"{folder} ({key}): found a file, expected a folder") from None
    except PermissionError:
        raise InputError(f"{folder} ({key}): the folder may not be read") from None
    if others:
        log.info("%s: ignored %d files that are no pictures by name", folder, len(others))
    return sorted(folders), sorted(pictures)


def _checked_name(folder: Path, name: str) -> str:
    # A line of train.txt and of skipped.txt is one name, in UTF-8.
    if not name.isprintable():
        raise InputError(
            f"{folder}: found the name {name!r}, expected printable characters in UTF-8"
        )
    return name


def _list_numbered(settings: Settings, names: Sequence[str], wnids: tuple[str, ...]) -> Listed:
    folder = settings.val_img_dir
    label_file = _needed_path(settings, "val_label_file")
    synsets_file = _needed_path(settings, "meta_clsloc_mat")
    ordered = _by_number(folder, names)
    ids = _read_ids(label_file)
    if len(ids) != len(ordered):
        raise InputError(
            f"{label_file} (val_label_file): found {len(ids)} lines, expected {len(ordered)}, one"
            f" for each picture of {folder}"
        )
    wnid_of = _read_synsets(synsets_file)
    labels = [_class_of(number, line, wnid_of, wnids, settings) for line, number in enumerate(ids)]
    return Listed(folder, tuple(ordered), np.array(labels, np.int64))


def _needed_path(settings: Settings, key: str) -> Path:
    path: Path | None = getattr(settings, key)
    if path is None:
        raise InputError(
            f"{settings.val_img_dir}: the validation pictures lie side by side, so {key} is"
            " needed; found none, expected a path"
        )
    return path


def _by_number(folder: Path, names: Sequence[str]) -> list[str]:
    """Sort pictures by the number that ends their name: picture k belongs to line k."""
    numbers: dict[int, str] = {}
    for name in names:
        match = re.search(r"(\d+)\.[^.]*$", name, re.ASCII)
        if match is None:
            raise InputError(
                f"{folder} (val_img_dir): found {name}, expected a name that ends in the picture's"
                " number, as ILSVRC2012_val_00000001.JPEG"
            )
        number = int(match.group(1))
        if number in numbers:
            raise InputError(
                f"{folder} (val_img_dir): found {numbers[number]} and {name}, expected one picture"
                f" of number {number}"
            )
        numbers[number] = name
    missing = sorted(set(range(1, len(names) + 1)) - set(numbers))
    if missing:
        raise InputError(
            f"{folder} (val_img_dir): found {len(names)} pictures up to number {max(numbers)}"
            f" without number {missing[0]}, expected every number from 1"
        )
    return [numbers[number] for number in sorted(numbers)]


def _read_ids(path: Path) -> list[int]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InputError(f"{path} (val_label_file): cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"{path} (val_label_file): found bytes, expected lines of text") from None
    ids = []
    for number, line in enumerate(lines, 1):
        if not re.fullmatch(r"\s*\d{1,9}\s*", line, re.ASCII):
            raise InputError(
                f"{path} (val_label_file): line {number}: found {line[:40]!r}, expected an"
                " ILSVRC ID"
            )
        ids.append(int(line))
    return ids


def _read_synsets(path: Path) -> dict[int, str]:
    """The wnid of each ILSVRC ID: ``synsets``, each with [0] the ID and [1] the wnid."""
    import scipy.io  # slow to import, and only the flat layout needs it

    try:
        synsets = scipy.io.loadmat(path)["synsets"].ravel()
        return {int(_only(synset[0])): str(_only(synset[1])) for synset in synsets}
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(f"{path} (meta_clsloc_mat): cannot be read: {reason}") from None
    except Exception as error:
        # loadmat raises whatever it stumbles over in a file that is none of MATLAB's.
        raise InputError(
            f"{path} (meta_clsloc_mat): found something else ({error}), expected a MATLAB file"
            " with the table synsets: ID, wnid, ..."
        ) from None


def _only(value: Any) -> Any:
    return np.asarray(value).item()


def _class_of(
    number: int, line: int, wnid_of: dict[int, str], wnids: tuple[str, ...], settings: Settings
) -> int:
    where = f"{settings.val_label_file} (val_label_file): line {line + 1}: found ID {number}"
    if number not in wnid_of:
        raise InputError(f"{where}, expected one of {settings.meta_clsloc_mat}")
    wnid = wnid_of[number]
    position = int(np.searchsorted(wnids, wnid))
    if position == len(wnids) or wnids[position] != wnid:
        raise InputError(
            f"{where}, class {wnid}, which {settings.train_img_dir} lacks; expected only classes"
            " of the training pictures"
        )
    return position
