"""The tables of contents of tar archives: where in the file each member lies.

Nothing is unpacked, and only headers are read. The standard library's `tarfile` parses each header;
it is not given the archive, of which it would keep every member in memory and whose missing end it
would not report.
"""

import contextlib
import io
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple, Self, cast

from tandem.data.safe_io import open_file
from tandem.errors import InputError, explained
from tandem.validation import one_line, printable

_BLOCK = tarfile.BLOCKSIZE
_EMPTY = bytes(_BLOCK)
_MOST_HEADER = 1 << 20  # bytes of the long name of one member
_MOST_PADDING = 1 << 20  # bytes; archives are padded to records, of 10 KB unless tar is told more
_FILES = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
_PAX = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)
_SKIPPED = (tarfile.XGLTYPE, tarfile.GNUTYPE_LONGLINK)  # headers with nothing that counts here
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


class Member(NamedTuple):
    """A file in an archive: its name, and where its content lies in the archive's file."""

    name: str
    offset: int
    size: int


@dataclass(frozen=True)
class Archive:
    """An uncompressed archive: bytes `start` to `end` of a file. `where` names it in messages."""

    file: BinaryIO
    where: str
    start: int
    end: int

    @classmethod
    @contextlib.contextmanager
    def open(cls, path: Path) -> Iterator[Self]:
        """Context manager: the archive that a file is; raises InputError if it cannot be read."""
        where = f"{path} (source)"
        with explained(where, "cannot be read", ValueError):
            opened = open_file(path)
        with opened as file:
            # Without the buffer, which would read several kilobytes for each header.
            raw = cast(BinaryIO, io.FileIO(file.fileno(), closefd=False))
            with explained(where, "cannot be read"):
                yield cls(raw, where, 0, os.fstat(file.fileno()).st_size)

    def inside(self, member: Member) -> "Archive":
        """The archive that a member is."""
        where = f"{self.where}: {printable(member.name)}"
        return Archive(self.file, where, member.offset, member.offset + member.size)

    def read(self, member: Member, most: int) -> bytes:
        """Read a small member; raises InputError if it has more than `most` bytes."""
        if member.size > most:
            raise InputError(
                f"{self.where}: found {printable(member.name)} of {member.size} bytes, expected at"
                f" most {most}"
            )
        return _read(self.file, member.offset, member.size)

    def members(self) -> Iterator[Member]:
        """List the files in the archive; folders are left out.

        Raises InputError if it is compressed, damaged, or cut off, also where it is cut exactly
        between two members or zeros stand for what is missing, and if a member is no plain file.
        """
        return _members(self.file, self.where, self.start, self.end)


def _members(file: BinaryIO, where: str, start: int, end: int) -> Iterator[Member]:
    position, long_name = start, None
    while True:
        block = _read(file, position, min(_BLOCK, end - position))
        if position == start:
            _refuse_compressed(block, where)
        if len(block) < _BLOCK:
            raise InputError(
                f"{where}: found its end after {position - start} bytes, expected an end-of-archive"
                " block; the archive is incomplete: copy or download it again"
            )
        if block == _EMPTY:
            _check_padding(file, where, start, position, end)
            return
        try:
            header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except (tarfile.HeaderError, ValueError, OverflowError) as error:
            raise InputError(
                f"{where}: found no header of a member at byte {position - start} ({error}),"
                " expected an uncompressed tar archive"
            ) from None
        content = position + _BLOCK
        is_header = header.type in (*_PAX, *_SKIPPED, tarfile.GNUTYPE_LONGNAME)
        size = header.size if is_header or header.type in _FILES else 0
        name = header.name if long_name is None else long_name
        if not 0 <= size <= end - content or (is_header and size > _MOST_HEADER):
            raise InputError(
                f"{where}: found the member {printable(name)} of {size} bytes at byte"
                f" {position - start}, expected at most the {max(end - content, 0)} that follow;"
                " the archive is incomplete or damaged"
            )
        position = content + -(-size // _BLOCK) * _BLOCK
        if header.type == tarfile.GNUTYPE_LONGNAME:
            long_name = _text(_read(file, content, size).partition(b"\0")[0])
        elif header.type in _PAX:
            long_name = _pax_name(_read(file, content, size), where) or long_name
        elif header.type in _FILES:
            long_name = None
            yield Member(name, content, size)
        elif header.type == tarfile.DIRTYPE:
            long_name = None
        elif not is_header:
            raise InputError(
                f"{where}: found {printable(name)}, a link, a sparse file or a device, expected"
                " plain files"
            )


def _read(file: BinaryIO, position: int, size: int) -> bytes:
    file.seek(position)
    return file.read(size)


def _check_padding(file: BinaryIO, where: str, start: int, position: int, end: int) -> None:
    """Refuse an archive with more than padding after its end-of-archive block.

    Programs that load a file in parts write zeros, or nothing, where parts are missing.
    """
    rest = end - position
    if rest > _MOST_PADDING or any(_read(file, position, rest)):
        raise InputError(
            f"{where}: found an end-of-archive block at byte {position - start} of {end - start},"
            " expected one at the end; parts of the archive are missing, or others follow it: copy"
            " or download it again"
        )


def _refuse_compressed(block: bytes, where: str) -> None:
    for magic, kind in _COMPRESSED.items():
        if block.startswith(magic):
            raise InputError(
                f"{where}: found an archive that is compressed by {kind}, expected an uncompressed"
                " one; decompress it first, or unpack it and name the folder"
            )


def _pax_name(content: bytes, where: str) -> str | None:
    """The path in an extended header: records ``length key=value`` and a newline."""
    name = None
    try:
        while content and content[0]:
            length = int(content.partition(b" ")[0])
            record, content = content[:length], content[length:]
            key, equals, value = record.partition(b" ")[2].partition(b"=")
            if length <= 0 or not equals or not record.endswith(b"\n"):
                raise ValueError("no record of a key and a value")
            if key.startswith(b"GNU.sparse."):
                raise ValueError("a sparse file")
            if key == b"size":
                raise ValueError("a member of more than 8 GB")
            if key == b"path":
                name = _text(value[:-1])
    except ValueError as error:
        raise InputError(
            f"{where}: found an extended header with {one_line(error)}, expected plain files"
        ) from None
    return name


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")
