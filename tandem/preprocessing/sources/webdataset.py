"""Archives in webdataset's form, such as timm/imagenet-1k-wds, read where they are.

The files of a sample follow each other and have one name up to their suffixes: the picture,
``.cls`` with the number of its class, and ``.json`` that may have its first file name. ImageNet's
pictures are known by either name; the numbers of classes are those of the sorted WordNet IDs.
"""

import logging
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.data.class_names import imagenet_names
from tandem.data.safe_io import read_bytes
from tandem.errors import InputError
from tandem.preprocessing.listed import Collector, Listed, class_in, is_imagenet_name
from tandem.preprocessing.sources import SOURCES, Folder, Source, is_picture
from tandem.preprocessing.tars import Archive, Member
from tandem.validation import counted, listed, one_line, parse_json, printable, shown

log = logging.getLogger(__name__)

_SHARD = re.compile(
    r"(?!ILSVRC2012_img_)(?:.*[^a-zA-Z])?(train|validation|val)(?![a-zA-Z])\D*(\d{1,9})?.*\.tar",
    re.ASCII,
)
SPLITS = {"train": "train", "val": "val", "validation": "val"}  # by what names of files say
_MOST_CLASS, _MOST_JSON = 32, 1 << 20  # bytes
_INFO, _MOST_INFO = "_info.json", 16 << 20  # timm's list of all archives, which has 0.1 MB
_UNKNOWN = -1  # the class of a sample without a number


@SOURCES.register("webdataset")
@dataclass(frozen=True)
class Webdataset(Source):
    """Archives of samples, numbered from 0 in each split."""

    layout = "archives in webdataset's form"
    expected = "imagenet1k-train-0000.tar, imagenet1k-validation-00.tar and so on (webdataset)"

    source: Path

    @staticmethod
    def recognises(folder: Folder) -> bool:
        return any(map(_SHARD.fullmatch, folder.others))

    def archives(self) -> tuple[Path, ...]:
        shards = find_shards(self.source)
        return tuple(self.source / name for names in shards.values() for name in names)

    def find(self) -> Mapping[str, Listed]:
        return list_shards(self.source, find_shards(self.source))


def find_shards(folder: Path) -> dict[str, list[str]]:
    """Names of the archives of each split; raises InputError if one of them is missing."""
    where = f"{folder} (source)"
    found: dict[str, dict[int, str]] = {"train": {}, "val": {}}
    names = Folder.scan(folder, "source").others
    if _INFO in names and (missing := sorted(_named_in(folder / _INFO) - {*names})):
        raise InputError(
            f"{where}: found no {printable(listed(missing))}, expected the archives that {_INFO}"
            " names; move that file away to do without them"
        )
    for name in names:
        if match := _SHARD.fullmatch(name):
            numbers = found[SPLITS[match[1]]]
            number = int(match[2] or 0)
            if number in numbers:
                raise InputError(
                    f"{where}: found {numbers[number]} and {name}, expected one archive of each"
                    " number"
                )
            numbers[number] = name
    for split, numbers in found.items():
        check_numbers(where, split, numbers)
    return {split: [numbers[i] for i in sorted(numbers)] for split, numbers in found.items()}


def _named_in(path: Path) -> set[str]:
    """The names of the archives of both splits in timm's list of them."""
    try:
        splits = parse_json(read_bytes(path, _MOST_INFO))["splits"]
        return {str(n) for split in SPLITS.keys() & splits for n in splits[split]["filenames"]}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise InputError(
            f"{path} (source): cannot be read: {one_line(error)}; expected the names of the"
            " archives of each split: copy or download it again"
        ) from None


def check_numbers(where: str, split: str, numbers: Mapping[int, str]) -> None:
    """Refuse the numbered files of a split where there is none or a gap between two."""
    if not numbers:
        raise InputError(f"{where}: found no file of {split} pictures, expected at least one")
    first = min(*numbers, 1)
    for number in range(first, max(numbers)):
        if number not in numbers:
            raise InputError(
                f"{where}: found {counted(numbers, 'file')} of {split} pictures up to"
                f" {numbers[max(numbers)]} without number {number}, expected all of them"
            )


def list_shards(folder: Path, shards: Mapping[str, Sequence[str]]) -> dict[str, Listed]:
    """List the samples of the archives of each split; raises InputError."""
    found = {split: _Samples(folder, split) for split in ("train", "val")}
    for split, samples in found.items():
        log.info("%s: reading the contents of %d %s archives", folder, len(shards[split]), split)
        for name in shards[split]:
            samples.add_archive(name)
    wnid_of = found["train"].numbered_classes()
    return {split: samples.listed(wnid_of) for split, samples in found.items()}


class _Samples:
    """The samples of one split, with the numbers of their classes."""

    def __init__(self, folder: Path, split: str) -> None:
        self._folder = folder
        self._found = Collector(folder, split)
        self._numbers = array("i")

    def add_archive(self, name: str) -> None:
        """Add the samples of an archive."""
        self._found.add_file(name)
        with Archive.open(self._folder / name) as archive:
            for key, files in _grouped(archive):
                self._add(archive, key, files)

    def numbered_classes(self) -> dict[int, str]:
        """The class of each number, by those samples whose names have both.

        Without any, the numbers must be ImageNet's thousand, of its sorted WordNet IDs: those of
        another data set would get wrong classes. Raises InputError.
        """
        if not any(self._found.classes):
            return self._sorted_classes()
        classes: dict[int, str] = {}
        for number, wnid, name in zip(
            self._numbers, self._found.classes, self._found.names, strict=True
        ):
            if wnid and number != _UNKNOWN:
                self._check(classes.setdefault(number, wnid), wnid, number, name)
        return classes

    def _sorted_classes(self) -> dict[int, str]:
        classes = dict(enumerate(imagenet_names()))
        if (numbers := set(self._numbers)) and numbers != classes.keys():
            raise InputError(
                f"{self._folder} (source): found classes by number alone, {len(numbers)} from"
                f" {min(numbers)} to {max(numbers)}, expected ImageNet's {len(classes)}, or WordNet"
                " IDs in names; write other data sets into train/<class>/ and val/<class>/ first"
            )
        return classes

    def listed(self, wnid_of: Mapping[int, str]) -> Listed:
        """The list, with the classes of those samples that only have numbers."""
        names, classes = self._found.names, self._found.classes
        for i, number in enumerate(self._numbers):
            if classes[i]:
                self._check(wnid_of.get(number, classes[i]), classes[i], number, names[i])
            elif (wnid := wnid_of.get(number)) is not None:
                self._found.classify(i, wnid)
            else:
                raise InputError(
                    f"{self._folder} (source): {printable(names[i])}: found class {number},"
                    f" expected one of {len(wnid_of)} known classes"
                )
        return self._found.listed()

    def _check(self, known: str, wnid: str, number: int, name: str) -> None:
        if known != wnid:
            raise InputError(
                f"{self._folder} (source): {printable(name)}: found class {number} for {wnid},"
                f" expected another: it is that of {known} elsewhere"
            )

    def _add(self, archive: Archive, key: str, files: Mapping[str, Member]) -> None:
        where = f"{archive.where}: {printable(key)}"
        pictures = [suffix for suffix in files if is_picture(f"a.{suffix}")]
        if len(pictures) != 1:
            raise InputError(
                f"{where}: found {len(pictures)} pictures with this name, expected one, such as"
                f" {printable(key)}.jpg"
            )
        name, number = key, _UNKNOWN
        if "cls" in files:
            number = _number(archive.read(files["cls"], _MOST_CLASS), where)
        if "json" in files and not (is_imagenet_name(key) and "cls" in files):
            about = _read_json(archive.read(files["json"], _MOST_JSON), where)
            if isinstance(about.get("filename"), str) and is_imagenet_name(about["filename"]):
                name = about["filename"].rpartition("/")[2].partition(".")[0]
            if type(label := about.get("label")) is int and number == _UNKNOWN:
                number = _number(str(label).encode(), where)
        wnid = class_in(name) or ""
        if not wnid and number == _UNKNOWN:
            raise InputError(
                f"{where}: found no class, expected its number in {printable(key)}.cls or the"
                " WordNet ID in the name"
            )
        picture = files[pictures[0]]
        file = f"{wnid}/{name}.{pictures[0]}" if wnid else f"{name}.{pictures[0]}"
        self._found.add(file, wnid, (picture.offset, picture.size))
        self._numbers.append(number)


def _grouped(archive: Archive) -> Iterator[tuple[str, dict[str, Member]]]:
    """The samples of an archive: the name of each, and its files by suffix, in lower case."""
    before, files = "", dict[str, Member]()
    for member in archive.members():
        folder, _, base = member.name.rpartition("/")
        stem, _, suffix = base.partition(".")
        if not stem:  # a hidden file
            continue
        key = f"{folder}/{stem}" if folder else stem
        if key != before:
            if files:
                yield before, files
            before, files = key, {}
        if files.setdefault(suffix.lower(), member) is not member:
            raise InputError(
                f"{archive.where}: found {printable(member.name)} twice, expected it once"
            )
    if files:
        yield before, files


def _number(content: bytes, where: str) -> int:
    if not re.fullmatch(rb"\s*\d{1,9}\s*", content):
        raise InputError(f"{where}: found class {content[:20]!r}, expected a number")
    return int(content)


def _read_json(content: bytes, where: str) -> Mapping[str, Any]:
    try:
        about = parse_json(content)
    except ValueError as error:
        raise InputError(f"{where}.json: {error}") from None
    if not isinstance(about, dict):
        raise InputError(f"{where}.json: found {shown(about)}, expected keys and values")
    return about
