"""A reader of protocol buffers: enough to read Caffe's files without Caffe.

A message is a sequence of fields, each a number, a wire type and a value; the meaning of the
numbers is in the schema, which is not in the file. Nothing is allocated that the file does not
hold. Encoding: https://protobuf.dev/programming-guides/encoding
"""

import struct
from collections.abc import Iterator

_MOST_FIELDS = 100_000  # in one message; numbers in lists come packed, as one field
_MOST_VARINT = 10  # bytes of 64 bits

Value = int | memoryview


class Message:
    """The fields of a message by number; raises ValueError for damaged or truncated data."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._fields: dict[int, list[Value]] = {}
        for count, (number, value) in enumerate(_fields(memoryview(data))):
            if count == _MOST_FIELDS:
                raise ValueError(f"found more than {_MOST_FIELDS} fields in one message")
            self._fields.setdefault(number, []).append(value)

    def messages(self, number: int) -> list["Message"]:
        """All messages in a field."""
        return [Message(value) for value in self.chunks(number)]

    def message(self, number: int) -> "Message":
        """The last message in a field; an empty one without any."""
        return (self.messages(number) or [Message(b"")])[-1]

    def chunks(self, number: int) -> list[memoryview]:
        """All values of a field of bytes."""
        values = self._fields.get(number, [])
        found = [value for value in values if isinstance(value, memoryview)]
        if len(found) != len(values):
            raise ValueError(f"field {number} is of another type")
        return found

    def text(self, number: int) -> str:
        """The text in a field; empty without any."""
        return bytes((self.chunks(number) or [memoryview(b"")])[-1]).decode("utf-8")

    def integers(self, number: int) -> list[int]:
        """All integers of a field, packed or not."""
        found: list[int] = []
        for value in self._fields.get(number, []):
            if isinstance(value, int):
                found.append(value)
            else:
                found += _packed(value)
        return found

    def integer(self, number: int, default: int) -> int:
        """The integer in a field."""
        return [default, *self.integers(number)][-1]

    def real(self, number: int, default: float) -> float:
        """The float32 in a field."""
        found = self.chunks(number)
        if not found:
            return default
        if len(found[-1]) != 4:
            raise ValueError(f"field {number} is not a float")
        return float(struct.unpack("<f", found[-1])[0])


def _fields(data: memoryview) -> Iterator[tuple[int, Value]]:
    position = 0
    while position < len(data):
        tag, position = _varint(data, position)
        number, kind = tag >> 3, tag & 7
        if number == 0:
            raise ValueError("found a field of number 0")
        if kind == 0:
            value, position = _varint(data, position)
            yield number, value
            continue
        if kind == 2:
            size, position = _varint(data, position)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError(f"found a field of wire type {kind}")
        if size > len(data) - position:
            raise ValueError(f"found {len(data) - position} bytes of {size}")
        yield number, data[position : position + size]
        position += size


def _varint(data: memoryview, position: int) -> tuple[int, int]:
    """The integer at a position, and the position after it."""
    value = 0
    for count, byte in enumerate(data[position : position + _MOST_VARINT]):
        value |= (byte & 0x7F) << (7 * count)
        if byte < 0x80:
            return value & (1 << 64) - 1, position + count + 1
    raise ValueError("found an integer that does not end")


def _packed(data: memoryview) -> list[int]:
    found, position = [], 0
    while position < len(data):
        value, position = _varint(data, position)
        found.append(value)
        if len(found) > _MOST_FIELDS:
            raise ValueError(f"found more than {_MOST_FIELDS} integers in one field")
    return found
