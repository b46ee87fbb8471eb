"""Files of data sets in folders and archives, read no further than they reach."""

import bz2
import gzip
import lzma
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple

from tandem.data.safe_io import open_file, read_bytes
from tandem.errors import InputError
from tandem.preprocessing.tars import Archive
from tandem.validation import one_line

MOST_RATIO = 1032  # bytes from one byte by gzip and zip: the limit of their format

_PIECE = 1 << 20
_MOST_UNPACKED = 1 << 30  # bytes of an archive; the largest of a known data set have a fifth
_MOST_FILE = 1 << 28  # bytes of one of its files
_DEEPEST = 3  # folders
_OPENERS: dict[bytes, Callable[[BinaryIO], Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ": lzma.open,
}


class Entry(NamedTuple):
    """A file in a folder or an archive."""

    name: str  # with / between
    size: int  # bytes
    read: Callable[[], bytes]


@contextmanager
def reading(where: object) -> Iterator[None]:
    """Context manager: a damaged file, about which libraries raise many types, is InputError."""
    try:
        yield
    except (InputError, MemoryError):
        raise
    except Exception as error:
        reason = getattr(error, "strerror", None) or one_line(error)
        raise InputError(f"{where}: cannot be read: {reason}") from None


def read_exactly(file: IO[bytes], size: int, where: object) -> bytearray:
    """Read `size` bytes in pieces, so that a false claim costs no more than what is there.

    Raises InputError if the file ends before.
    """
    content = bytearray()
    while len(content) < size:
        piece = file.read(min(_PIECE, size - len(content)))
        if not piece:
            raise InputError(
                f"{where}: found its end after {len(content)} bytes, expected {size}; it is"
                " incomplete: copy or download it again"
            )
        content += piece
    return content


@contextmanager
def unpacked(path: Path) -> "Iterator[IO[bytes]]":
    """Context manager: the content of a file, which may be compressed."""
    with reading(path), open_file(path) as file:
        start = file.read(6)
        file.seek(0)
        opener = next(
            (opener for magic, opener in _OPENERS.items() if start[:5].startswith(magic)), None
        )
        if opener is None:
            yield file
        else:
            with opener(file) as content:
                yield content


@contextmanager
def entries(source: Path) -> Iterator[Iterator[Entry]]:
    """Context manager: the files in a folder, or in a tar archive, which may be compressed."""
    if source.is_dir():
        yield _in_folder(source)
        return
    with unpacked(source) as content, tempfile.TemporaryFile() as whole:
        # On the disk, since an archive is read at any place; a bomb ends at the limit.
        size = 0
        while piece := content.read(_PIECE):
            size += len(piece)
            if size > _MOST_UNPACKED:
                raise InputError(
                    f"{source}: found more than {_MOST_UNPACKED} bytes in it, expected an archive"
                    " of a known data set"
                )
            whole.write(piece)
        yield _in_archive(Archive(whole, str(source), 0, size))


def _in_archive(archive: Archive) -> Iterator[Entry]:
    for member in archive.members():
        yield Entry(member.name, member.size, partial(archive.read, member, _MOST_FILE))


def _in_folder(folder: Path) -> Iterator[Entry]:
    for parent, folders, files in os.walk(folder, followlinks=True):
        below = Path(parent).relative_to(folder)
        folders[:] = sorted(folders) if len(below.parts) < _DEEPEST else []
        for file in sorted(files):
            path = Path(parent) / file
            with reading(path):
                size = path.stat().st_size
            yield Entry((below / file).as_posix(), size, partial(_read_file, path))


def _read_file(path: Path) -> bytes:
    with reading(path):
        return read_bytes(path, _MOST_FILE)
