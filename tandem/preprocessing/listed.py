"""The pictures of one split: where each of them lies, its name in the manifest, its label."""

import itertools
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tandem.errors import InputError
from tandem.validation import printable

WHOLE = -1  # size of a picture that is a whole file

_WNID = re.compile(r"n\d{8}", re.ASCII)
_TRAINING = re.compile(r"(n\d{8})_(\d+)(?:_(n\d{8}))?", re.ASCII)
_VALIDATION = re.compile(r"(ILSVRC2012_val_\d{8})(?:_(n\d{8}))?", re.ASCII)


class PictureLocation(NamedTuple):
    """The bytes of a picture: `size` of them (or `WHOLE`) in a file, from `offset`."""

    path: str
    offset: int
    size: int


@dataclass(frozen=True, eq=False)
class Places:
    """The places of pictures: in `files`, relative to the folder of the list.

    `file` is the number of each picture's file, int32 (pictures,); `spans` are offset and size in
    it, int64 (pictures, 2), or None where every picture is a whole file.
    """

    files: tuple[str, ...]
    file: np.ndarray
    spans: np.ndarray | None

    def take(self, index: np.ndarray) -> "Places":
        """The places at the given positions, in that order."""
        spans = None if self.spans is None else self.spans[index]
        return Places(self.files, self.file[index], spans)


@dataclass(frozen=True, eq=False)
class Listed:
    """The pictures of one split, in the order in which batch files hold them.

    Names are those of the manifest: ``class folder/name``, or ``name`` for ILSVRC's validation
    pictures. Labels are int64 (pictures,), positions in `wnids`. A list that is `ordered` is not
    shuffled.
    """

    folder: Path
    wnids: tuple[str, ...]
    pictures: tuple[str, ...]
    labels: np.ndarray
    places: Places
    ordered: bool = False

    def take(self, positions: Sequence[int] | np.ndarray) -> "Listed":
        """The pictures at the given positions of the list, in that order."""
        index = np.asarray(positions, np.int64)
        pictures = tuple(self.pictures[i] for i in index)
        return replace(
            self, pictures=pictures, labels=self.labels[index], places=self.places.take(index)
        )

    def place(self, position: int) -> PictureLocation:
        """Return where the picture at a position of the list lies."""
        places = self.places
        path = f"{self.folder}/{places.files[places.file[position]]}"
        offset, size = (0, WHOLE) if places.spans is None else places.spans[position].tolist()
        return PictureLocation(path, offset, size)


class Collector:
    """Collects the pictures of one split, file by file, and makes the list of them."""

    def __init__(self, folder: Path, split: str) -> None:
        self.names: list[str] = []  # relative to the folder of the split, as the source has them
        self.classes: list[str] = []
        self._folder = folder
        self._split = split
        self._known: dict[str, str] = {}  # so that equal classes are one string
        self._files: list[str] = []
        self._file, self._spans = array("i"), array("q")

    def add_file(self, path: str) -> None:
        """Open the next file; pictures are added to the latest."""
        self._files.append(path)

    def add(self, name: str, wnid: str, span: tuple[int, int] | None = None) -> None:
        """Add a picture of the latest file: its offset and size there, or the whole file.

        Either all pictures of a list have a span or none has. An empty `wnid` is given later, by
        `classify`.
        """
        wnid = self._known.setdefault(wnid, wnid)
        self.names.append(_training_name(name, wnid))
        self.classes.append(wnid)
        self._file.append(len(self._files) - 1)
        self._spans.extend(span or ())

    def classify(self, position: int, wnid: str) -> None:
        """Set the class of the picture at a position, and put its folder into the name."""
        self.classes[position] = wnid
        self.names[position] = _training_name(f"{wnid}/{self.names[position]}", wnid)

    def listed(self, ordered: bool = False) -> Listed:
        """Make the list, sorted by name unless it is `ordered`.

        ImageNet's pictures get the official spelling of their names, so that neither the order nor
        the manifest depends on the layout. Raises InputError if two pictures have one name.
        """
        wnids = tuple(sorted(set(self.classes)))
        numbers = {wnid: number for number, wnid in enumerate(wnids)}
        labels = np.fromiter((numbers[wnid] for wnid in self.classes), np.int64, len(self.classes))
        numbered = self._split == "val" and all(map(_is_numbered, self.names, self.classes))
        names = tuple(map(_numbered_name, self.names) if numbered else self.names)
        spans = np.frombuffer(self._spans, np.int64).reshape(-1, 2) if self._spans else None
        places = Places(tuple(self._files), np.frombuffer(self._file or b"", np.int32), spans)
        listed = Listed(self._folder, wnids, names, labels, places, ordered or numbered)
        if ordered:
            return listed
        # As a list of folders, each sorted: a folder n1-a comes after everything in n1.
        if any(a > b for a, b in itertools.pairwise(map(_key, names))):
            listed = listed.take(sorted(range(len(names)), key=lambda i: _key(names[i])))
        for before, name in itertools.pairwise(listed.pictures):
            if before == name:
                raise InputError(
                    f"{self._folder}: found two {self._split} pictures that are"
                    f" {printable(name)}, expected each once"
                )
        return listed


def class_in(name: str) -> str | None:
    """The WordNet ID in a name such as n01440764_10026.JPEG, if it is ImageNet's and has one."""
    stem = _stem(name)
    if match := _TRAINING.fullmatch(stem):
        return match[3] or match[1]
    match = _VALIDATION.fullmatch(stem)
    return match[2] if match else None


def is_imagenet_name(name: str) -> bool:
    """Return whether a name, without folders and suffix, is one of ImageNet's."""
    stem = _stem(name)
    return bool(_TRAINING.fullmatch(stem) or _VALIDATION.fullmatch(stem))


def _is_numbered(name: str, wnid: str) -> bool:
    return bool(_VALIDATION.fullmatch(_stem(name)) and _WNID.fullmatch(wnid))


def _numbered_name(name: str) -> str:
    match = _VALIDATION.fullmatch(_stem(name))
    return _spell(name, f"{match[1]}.JPEG") if match else name


def _training_name(name: str, wnid: str) -> str:
    match = _TRAINING.fullmatch(_stem(name))
    # A name of another class than the picture's says nothing of where it comes from.
    if match is None or match[1] != wnid:
        return name
    return _spell(name, f"{wnid}/{wnid}_{match[2]}.JPEG")


def _spell(name: str, official: str) -> str:
    return name if name == official else official  # one string, not two that are equal


def _stem(name: str) -> str:
    return name.rpartition("/")[2].partition(".")[0]


def _key(name: str) -> str:
    return name.replace("/", "\0")
