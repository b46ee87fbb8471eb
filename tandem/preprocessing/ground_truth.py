"""ILSVRC's classes of the numbered validation pictures, from its development kit.

Picture k is of the class on line k of the ground truth, an ILSVRC ID, which the kit's table
translates to a WordNet ID.
"""

import gzip
import io
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tandem.data.safe_io import open_file, read_bytes
from tandem.errors import InputError, explained
from tandem.preprocessing.tars import Archive
from tandem.validation import printable

DEVKIT = "ILSVRC2012_devkit_t12"
PACKED_KIT = f"{DEVKIT}.tar.gz"
# Ground truth and table in the kits of 2012 and 2014, in which they have the same content.
_NAMES = (
    ("ILSVRC2012_validation_ground_truth.txt", "meta.mat"),
    ("ILSVRC2014_clsloc_validation_ground_truth.txt", "meta_clsloc.mat"),
)
_MOST_BYTES = 64 << 20  # of a whole kit, unpacked; the one of 2012 has 3 MB


@dataclass(frozen=True)
class Part:
    """A file of the development kit: what messages call it, and its content."""

    name: str
    content: bytes

    @classmethod
    def read(cls, path: Path, key: str) -> "Part":
        """Read a file; raises InputError."""
        name = f"{path} ({key})"
        with explained(name, "cannot be read", ValueError):
            return cls(name, read_bytes(path, _MOST_BYTES))


def kit_files(folder: Path) -> tuple[Path, ...]:
    """The files of a development kit in a folder: ground truth and table, or one archive.

    Raises InputError where the folder of a kit cannot be read.
    """
    try:
        return _kit_files(folder)
    except OSError as error:
        path = os.path.normpath(error.filename or folder)
        raise InputError(f"{path} (source): cannot be read: {error.strerror}") from None


def _kit_files(folder: Path) -> tuple[Path, ...]:
    for kit in (folder / "data", *sorted(folder.glob("ILSVRC*devkit*/data"))):
        for names in _NAMES:
            paths = tuple(kit / name for name in names)
            if all(path.is_file() for path in paths):
                return paths
    packed = folder / PACKED_KIT
    return (packed,) if packed.is_file() else ()


def find_kit(folder: Path) -> tuple[Part, Part] | None:
    """Ground truth and table of a development kit in a folder, unpacked or not, if there is one.

    Raises InputError if it cannot be read.
    """
    match kit_files(folder):
        case (truth, table):
            return Part.read(truth, "source"), Part.read(table, "source")
        case (packed,):
            return _unpack(packed)
    return None


def wnids_of(truth: Part, table: Part, count: int, pictures: object) -> list[str]:
    """The WordNet IDs of `count` pictures, numbered from 1; raises InputError."""
    ids = _read_ids(truth)
    if len(ids) != count:
        raise InputError(
            f"{truth.name}: found {len(ids)} lines, expected {count}, one for each picture of"
            f" {pictures}"
        )
    wnid_of = _read_synsets(table)
    for line, number in enumerate(ids, 1):
        if number not in wnid_of:
            raise InputError(
                f"{truth.name}: line {line}: found ID {number}, expected one of {table.name}"
            )
    return [wnid_of[number] for number in ids]


def by_number(names: Sequence[str], where: str) -> list[int]:
    """Positions of pictures in the order of the numbers that end their names, 1, 2 and so on."""
    positions: dict[int, int] = {}
    for position, name in enumerate(names):
        match = re.search(r"(\d{1,18})\.[^.]*$", name, re.ASCII)
        if match is None:
            raise InputError(
                f"{where}: found {printable(name)}, expected a name that ends in the picture's"
                " number, such as ILSVRC2012_val_00000001.JPEG"
            )
        number = int(match[1])
        if number in positions:
            raise InputError(
                f"{where}: found {printable(names[positions[number]])} and {printable(name)},"
                f" expected one picture of number {number}"
            )
        positions[number] = position
    missing = sorted(set(range(1, len(positions) + 1)) - set(positions))
    if missing:
        raise InputError(
            f"{where}: found {len(positions)} pictures up to number {max(positions)} without number"
            f" {missing[0]}, expected every number from 1"
        )
    return [positions[number] for number in sorted(positions)]


def _unpack(path: Path) -> tuple[Part, Part]:
    where = f"{path} (source)"
    try:
        with open_file(path) as file, gzip.GzipFile(fileobj=file) as unpacked:
            content = unpacked.read(_MOST_BYTES + 1)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise InputError(f"{where}: cannot be read: {error}; copy or download it again") from None
    if len(content) > _MOST_BYTES:
        raise InputError(
            f"{where}: found more than {_MOST_BYTES} bytes in it, expected the development kit"
        )
    found = {
        member.name.rpartition("/")[2]: Part(
            f"{where}: {member.name}", content[member.offset : member.offset + member.size]
        )
        for member in Archive(io.BytesIO(content), where, 0, len(content)).members()
    }
    for truth, table in _NAMES:
        if truth in found and table in found:
            return found[truth], found[table]
    truth, table = _NAMES[0]
    raise InputError(f"{where}: found neither {truth} nor {table}, expected both")


def _read_ids(truth: Part) -> Sequence[int]:
    try:
        lines = truth.content.decode().splitlines()
    except UnicodeDecodeError as error:
        raise InputError(f"{truth.name}: cannot be read: {error}") from None
    for number, line in enumerate(lines, 1):
        if not re.fullmatch(r"\s*\d{1,9}\s*", line, re.ASCII):
            raise InputError(
                f"{truth.name}: line {number}: found {line[:40]!r}, expected an ILSVRC ID"
            )
    return [int(line) for line in lines]


def _read_synsets(table: Part) -> Mapping[int, str]:
    """The WordNet ID of each ILSVRC ID: ``synsets``, each with [0] the ID and [1] the wnid."""
    import scipy.io  # slow to import, and only this layout needs it

    def only(value: Any) -> Any:
        return np.asarray(value).item()

    try:
        synsets = scipy.io.loadmat(io.BytesIO(table.content))["synsets"].ravel()
        return {int(only(synset[0])): str(only(synset[1])) for synset in synsets}
    except Exception as error:
        # loadmat raises many types of exceptions for files that are not MATLAB's.
        raise InputError(
            f"{table.name}: cannot be read: {error}; expected a MATLAB file with the table synsets:"
            " ID, wnid, ..."
        ) from None
