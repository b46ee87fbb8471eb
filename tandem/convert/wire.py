"""Protocol buffers, as they lie in a file: enough to read Caffe's without Caffe.

A message is a sequence of fields, each a number, a wire type and a value; what the numbers mean
stands in the schema of the message, and the reader has to know it. Nothing is reserved that the
file does not hold.

References
----------
https://protobuf.dev/programming-guides/encoding
"""

import struct
from collections.abc import Iterator

_MOST_FIELDS = 100_000  # in one message; numbers in lists come packed, as one field
_MOST_VARINT = 10  # bytes of 64 bits

Value = int | memoryview


class Message:
    """The fields of one message, by their numbers.

    Parameters
    ----------
    data : bytes or memoryview
        The message.

    Raises
    ------
    ValueError
        It is no message, or is cut off.
    """

    def __init__(self, data: bytes | memoryview) -> None:
        self._fields: dict[int, list[Value]] = {}
        for count, (number, value) in enumerate(_fields(memoryview(data))):
            if count == _MOST_FIELDS:
                raise ValueError(f"found more than {_MOST_FIELDS} fields in one message")
            self._fields.setdefault(number, []).append(value)

    def messages(self, number: int) -> list["Message"]:
        """Every message in a field."""
        return [Message(value) for value in self.chunks(number)]

    def message(self, number: int) -> "Message":
        """The message in a field; an empty one where there is none."""
        return (self.messages(number) or [Message(b"")])[-1]

    def chunks(self, number: int) -> list[memoryview]:
        """Every value of a field that holds bytes."""
        values = self._fields.get(number, [])
        found = [value for value in values if isinstance(value, memoryview)]
        if len(found) != len(values):
            raise ValueError(f"field {number} is of another type")
        return found

    def text(self, number: int) -> str:
        """The text in a field; empty where there is none."""
        return bytes((self.chunks(number) or [memoryview(b"")])[-1]).decode("utf-8")

    def integers(self, number: int) -> list[int]:
        """Every integer of a field, be they packed or not."""
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
            raise ValueError(f"field {number} is no float")
        return float(struct.unpack("<f", found[-1])[0])


def _fields(data: memoryview) -> Iterator[tuple[int, Value]]:
    place = 0
    while place < len(data):
        tag, place = _varint(data, place)
        number, kind = tag >> 3, tag & 7
        if number == 0:
            raise ValueError("found a field of number 0")
        if kind == 0:
            value, place = _varint(data, place)
            yield number, value
            continue
        if kind == 2:
            size, place = _varint(data, place)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError(f"found a field of wire type {kind}")
        if size > len(data) - place:
            raise ValueError(f"found {len(data) - place} bytes where {size} are announced")
        yield number, data[place : place + size]
        place += size


def _varint(data: memoryview, place: int) -> tuple[int, int]:
    """The integer that begins at a place, and the place after it."""
    value = 0
    for count, byte in enumerate(data[place : place + _MOST_VARINT]):
        value |= (byte & 0x7F) << (7 * count)
        if byte < 0x80:
            return value & (1 << 64) - 1, place + count + 1
    raise ValueError("found an integer that does not end")


def _packed(data: memoryview) -> list[int]:
    found, place = [], 0
    while place < len(data):
        value, place = _varint(data, place)
        found.append(value)
        if len(found) > _MOST_FIELDS:
            raise ValueError(f"found more than {_MOST_FIELDS} integers in one field")
    return found
