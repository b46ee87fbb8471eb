"""The tables of contents of zip files, and what one member holds.

Nothing is unpacked, and no name becomes a path. The standard library's `zipfile` is not used: it
would keep two million members in memory, and trusts their sizes.
"""

import io
import os
import struct
import zlib
from collections.abc import Iterator
from typing import BinaryIO

from tandem.data.decode import too_large
from tandem.errors import InputError
from tandem.preprocessing.tars import Archive, Member
from tandem.validation import printable

ZIP = ".zip"
"""The end of a zip file's name; a span of a file of that name is a member with its header."""

_END = struct.Struct("<4s4H2LH")
_LOCATOR = struct.Struct("<4sLQL")  # of the next, in files of more than 4 GB
_END_64 = struct.Struct("<4sQ2H2L4Q")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_MOST_COMMENT = 1 << 16
_MOST_HEADER = 1 << 17  # bytes of a member's own header, with its name and extra fields
_STORED, _DEFLATED = 0, 8
_ENCRYPTED, _SIZES_FOLLOW = 1, 8  # flags
_IN_64 = 0xFFFFFFFF  # stands for a number in the extra field


class Zip(Archive):
    """A zip file; its members are those of `Archive`, from their own headers to their ends."""

    def members(self) -> Iterator[Member]:
        """List the files in the archive, in its order; folders are left out.

        Sizes and offsets are those of its table, see `span`. Raises InputError if it is incomplete,
        if members overlap, lie in another order than the table's, or have names that lead out of a
        folder.
        """
        entries, position, table_end = self._table()
        # Preads of headers go between: the table has a buffer of its own.
        table = io.BufferedReader(io.FileIO(self.file.fileno(), closefd=False), 1 << 20)
        table.seek(position)
        end = 0
        for _ in range(entries):
            member, flags, method = _entry(table, self.where)
            if not end <= member.offset <= member.offset + member.size <= position:
                raise self._fault(f"{printable(member.name)} over or before another member")
            end = member.offset + _LOCAL.size + member.size
            if flags & _ENCRYPTED or method not in (_STORED, _DEFLATED):
                raise self._fault(f"{printable(member.name)}, encrypted or compressed otherwise")
            parts = member.name.split("/")
            if not parts[0] or ".." in parts or {"\\", "\0"} & {*member.name}:
                raise self._fault(f"the name {printable(member.name)}, which leads elsewhere")
            if not member.name.endswith("/"):
                yield member
        if table.tell() != table_end:
            raise self._fault(f"a table of {table.tell() - position} bytes")

    def span(self, member: Member) -> tuple[int, int]:
        """Return where a member lies with its own header, checked against the table."""
        header = os.pread(self.file.fileno(), _LOCAL.size, member.offset)
        if len(header) < _LOCAL.size or not header.startswith(b"PK\3\4"):
            raise self._fault(f"no header of {printable(member.name)}")
        _, _, flags, method, _, _, _, size, _, name, extra = _LOCAL.unpack(header)
        is_known = flags & _SIZES_FOLLOW or size in (member.size, _IN_64)
        if not is_known or method not in (_STORED, _DEFLATED):
            raise self._fault(f"another header of {printable(member.name)}")
        return member.offset, _LOCAL.size + name + extra + member.size

    def read(self, member: Member, most: int) -> bytes:
        """Read a small member; raises InputError if it has more than `most` bytes."""
        offset, size = self.span(member)
        try:
            if size > most + _MOST_HEADER:
                raise ValueError(too_large(size, most))
            return unzipped(os.pread(self.file.fileno(), size, offset), most)
        except ValueError as error:
            raise InputError(f"{self.where}: {printable(member.name)}: {error}") from None

    def _table(self) -> tuple[int, int, int]:
        """Return the number of members, and where their table begins and ends."""
        start = max(0, self.end - _END.size - _MOST_COMMENT)
        tail = os.pread(self.file.fileno(), self.end - start, start)
        place = tail.rfind(b"PK\5\6")
        if place < 0 or len(tail) - place < _END.size:
            raise self._fault("no table of its members at its end")
        _, disk, _, _, entries, size, offset, comment = _END.unpack_from(tail, place)
        table_end = start + place
        locator = place - _LOCATOR.size
        if locator >= 0 and tail.startswith(b"PK\6\7", locator):
            _, _, end_64, _ = _LOCATOR.unpack_from(tail, locator)
            record = os.pread(self.file.fileno(), _END_64.size, min(end_64, self.end))
            if len(record) < _END_64.size or not record.startswith(b"PK\6\6"):
                raise self._fault("no table of its members at its end")
            *_, disk, _, _, entries, size, offset = _END_64.unpack(record)
            table_end = end_64
        whole = place + _END.size + comment == len(tail) and offset + size == table_end
        if disk or not whole:
            raise self._fault("a table of its members for another file")
        return entries, offset, table_end

    def _fault(self, found: str) -> InputError:
        return InputError(
            f"{self.where}: found {found}, expected a whole zip file; it is incomplete or damaged:"
            " copy or download it again"
        )


def unzipped(content: bytes, most: int) -> bytes:
    """Return what a member holds, given its bytes with its own header.

    Raises ValueError if it is damaged, or holds more than `most` bytes.
    """
    _, _, flags, method, _, _, crc, _, _, name, extra = _LOCAL.unpack_from(content)
    found = content[_LOCAL.size + name + extra :]
    if method == _DEFLATED:
        inflating = zlib.decompressobj(-zlib.MAX_WBITS)
        try:
            found = inflating.decompress(found, most + 1)
        except zlib.error as error:
            raise ValueError(f"cannot be inflated ({error})") from None
        if len(found) <= most and not inflating.eof:
            raise ValueError("cannot be inflated (its end is missing)")
    if len(found) > most:
        raise ValueError(too_large(len(found), most))
    if not flags & _SIZES_FOLLOW and zlib.crc32(found) != crc:
        raise ValueError("has another checksum than the zip file says")
    return found


def _entry(table: BinaryIO, where: str) -> tuple[Member, int, int]:
    """Read a line of the table: a member, its flags and its method."""
    fixed = table.read(_ENTRY.size)
    if len(fixed) < _ENTRY.size or not fixed.startswith(b"PK\1\2"):
        raise InputError(f"{where}: found no member where its table has one, expected a zip file")
    _, _, _, flags, method, _, _, _, size, whole, *lengths, _, _, _, offset = _ENTRY.unpack(fixed)
    name, extra, _ = (table.read(length) for length in lengths)
    numbers = iter(_numbers_64(extra))
    whole, size, offset = (next(numbers, n) if n == _IN_64 else n for n in (whole, size, offset))
    return Member(name.decode("utf-8", "surrogateescape"), offset, size), flags, method


def _numbers_64(extra: bytes) -> tuple[int, ...]:
    """The numbers of 64 bits in an extra field."""
    while len(extra) >= 4:
        kind, length = struct.unpack_from("<2H", extra)
        if kind == 1:
            return struct.unpack_from(f"<{min(length, len(extra) - 4) // 8}Q", extra, 4)
        extra = extra[4 + length :]
    return ()
