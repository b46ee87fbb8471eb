"""The list of all pictures of both splits, with their classes, in the order of the batch files."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tandem.data.class_names import imagenet_names
from tandem.errors import InputError
from tandem.philox import Purpose, permutation
from tandem.preprocessing.index import identity, load_index
from tandem.preprocessing.listed import Listed
from tandem.preprocessing.settings import Settings
from tandem.preprocessing.sources import Source, choose
from tandem.validation import printable

log = logging.getLogger(__name__)

PUBLISHED = (1_281_167, 50_000, 1_000)  # training and validation pictures of ImageNet, classes


@dataclass(frozen=True, eq=False)
class Listing:
    """All pictures. Class i is ``wnids[i]``: the classes of the training pictures, sorted.

    `index` identifies the archives of the pictures and how they are listed, for `save_index`; it is
    empty where a list is quickly made. `copies` is the folder of copies of pictures, if any.
    """

    wnids: tuple[str, ...]
    splits: dict[str, Listed]
    index: str = ""
    copies: Path | None = None


def list_pictures(settings: Settings) -> Listing:
    """List the training and the validation pictures with their classes.

    Each list is shuffled once, unless the order of its source is to be kept. What was read from
    archives for the output folder before is not read again. Raises InputError if the source cannot
    be used, or a validation picture is of a class that training lacks.
    """
    source = choose(settings)
    index, splits = identity(source, settings), None
    if index and settings.source is not None:
        place = settings.source
        folder = source.copies() or (place if place.is_dir() else place.parent)
        splits = load_index(settings.tar_root_dir, index, folder)
    if splits is None:
        splits = _order(source, settings)
    wnids = splits["train"].wnids
    if settings.source is not None:
        log.info(
            "%s: found %s: %d training and %d validation pictures of %d classes",
            settings.source,
            source.layout,
            *(len(splits[split].pictures) for split in ("train", "val")),
            len(wnids),
        )
    return Listing(wnids, splits, index, source.copies())


def _compare(train: Listed, val: Listed, settings: Settings) -> None:
    """Warn where all classes are ImageNet's, and there are fewer or other pictures than it has."""
    found = len(train.pictures), len(val.pictures), len(train.wnids)
    known = imagenet_names()
    if found != PUBLISHED and all(wnid in known for wnid in train.wnids):
        log.warning(
            "%s: found {:,} training and {:,} validation pictures of {:,} classes, and ImageNet has"
            " {:,} and {:,} of {:,}; unless this is a part that you chose, copy or unpack it"
            " again".format(*found, *PUBLISHED),
            settings.source or train.folder,
        )


def _order(source: Source, settings: Settings) -> dict[str, Listed]:
    """The list of each split, labelled by the training classes, shuffled and cut."""
    splits = {}
    found = source.find()
    for split, listed in found.items():
        if not listed.pictures:
            raise InputError(f"{listed.folder}: found no {split} picture, expected at least one")
    train, val = found["train"], found["val"]
    if foreign := sorted(set(val.wnids) - set(train.wnids)):
        others = f" (and {len(foreign) - 1} more classes)" if len(foreign) > 1 else ""
        first = int(np.argmax(val.labels == val.wnids.index(foreign[0])))
        key = "source" if settings.source else "val_img_dir"
        raise InputError(
            f"{val.folder} ({key}): found class {foreign[0]}{others}, for example"
            f" {printable(val.pictures[first])}, which {train.folder} lacks;"
            " expected only classes of the training pictures"
        )
    _compare(train, val, settings)
    if unused := len(train.wnids) - len(val.wnids):
        log.info("%d of %d classes have no validation picture", unused, len(train.wnids))
    number = {wnid: i for i, wnid in enumerate(train.wnids)}
    relabel = np.array([number[wnid] for wnid in val.wnids], np.int64)
    val = replace(val, wnids=train.wnids, labels=relabel[val.labels])
    for split, listed in (("train", train), ("val", val)):
        count = len(listed.pictures)
        order = np.arange(count)
        if not listed.ordered:
            order = permutation(count, settings.seed, 0, Purpose.LISTING)
        splits[split] = listed.take(order[: settings.subset or None])
    return splits
