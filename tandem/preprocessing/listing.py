"""Lists of the pictures of both splits, with their classes, in the order of the batch files."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tandem.errors import InputError
from tandem.philox import Purpose, permutation
from tandem.preprocessing.settings import Settings
from tandem.preprocessing.sources import SOURCES, Folder
from tandem.validation import printable

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Listed:
    """The pictures of one split, in the order in which batch files hold them.

    Names are relative to the folder: ``class folder/name``, or ``name`` when the pictures lie side
    by side. Labels are int64 (pictures,).
    """

    folder: Path
    pictures: tuple[str, ...]
    labels: np.ndarray

    def take(self, positions: Sequence[int] | np.ndarray) -> "Listed":
        """The pictures at the given positions of the list, in that order."""
        index = np.asarray(positions, np.int64)
        return Listed(self.folder, tuple(self.pictures[i] for i in index), self.labels[index])


@dataclass(frozen=True, eq=False)
class Listing:
    """All pictures. Class i is ``wnids[i]``: the classes of the training pictures, sorted."""

    wnids: tuple[str, ...]
    splits: dict[str, Listed]


def list_pictures(settings: Settings) -> Listing:
    """List the training and the validation pictures with their classes.

    Each list is shuffled once, unless the order of its source is to be kept. Raises InputError if a
    folder is missing or has an unknown layout, a validation picture is of a class that training
    lacks, or what a source needs cannot be used.
    """
    found = {split: _list_split(settings, split) for split in ("train", "val")}
    wnids = tuple(sorted(set(found["train"][1])))
    numbers = {wnid: number for number, wnid in enumerate(wnids)}
    splits = {}
    for split, (names, classes, shuffled) in found.items():
        folder = _folder(settings, split)
        if foreign := sorted(set(classes) - set(wnids)):
            others = f" (and {len(foreign) - 1} more classes)" if len(foreign) > 1 else ""
            example = printable(names[classes.index(foreign[0])])
            raise InputError(
                f"{folder} ({split}_img_dir): found class {foreign[0]}{others}, for example"
                f" {example}, which {settings.train_img_dir} lacks;"
                " expected only classes of the training pictures"
            )
        labels = np.array([numbers[wnid] for wnid in classes], np.int64)
        listed = Listed(folder, tuple(names), labels)
        if shuffled:
            listed = listed.take(permutation(len(names), settings.seed, 0, Purpose.LISTING))
        splits[split] = listed.take(np.arange(len(names))[: settings.subset or None])
    if unused := len(wnids) - len(set(found["val"][1])):
        log.info("%d of %d classes have no validation picture", unused, len(wnids))
    return Listing(wnids, splits)


def _folder(settings: Settings, split: str) -> Path:
    return settings.train_img_dir if split == "train" else settings.val_img_dir


def _list_split(settings: Settings, split: str) -> tuple[list[str], list[str], bool]:
    """Names and classes by the source that recognises the folder, and whether to shuffle them."""
    folder = Folder.scan(_folder(settings, split), f"{split}_img_dir")
    possible = [name for name in SOURCES if split in SOURCES[name].splits]
    fitting = [name for name in possible if SOURCES[name].recognises(folder)]
    if len(fitting) != 1:
        raise InputError(
            f"{folder.path} ({folder.key}): found {folder}, expected"
            f" {', or '.join(SOURCES[name].expected for name in possible)}"
        )
    source = SOURCES.make(fitting[0], vars(settings))
    return *source.find(folder), source.shuffled
