"""Protocol buffers, against those that the protobuf library writes, and damaged ones."""

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.convert.wire import Message
from tests.support.caffe_files import PROTO


def test_fields_of_every_kind() -> None:
    net = PROTO["Net"](name="ünder")
    layer = net.layer.add(name="norm", type="LRN", bottom=["a", "b"])
    layer.LRN.local_size, layer.LRN.alpha = 300, 0.25
    layer.Convolution.stride.extend([4, 2])
    blob = layer.blobs.add()
    blob.data.extend([1.5, -2.0])
    blob.shape.dim.extend([1, 70_000, 2])
    read = Message(net.SerializeToString())
    assert read.text(1) == "ünder"
    (found,) = read.messages(100)
    assert [bytes(chunk) for chunk in found.chunks(3)] == [b"a", b"b"]
    assert found.message(118).integer(1, 5) == 300
    assert found.message(118).real(2, 1.0) == 0.25
    assert found.message(106).integers(6) == [4, 2]
    (data,) = found.messages(7)[0].chunks(5)
    assert struct.unpack("<2f", data) == (1.5, -2.0)
    assert found.messages(7)[0].message(7).integers(1) == [1, 70_000, 2]


def test_fields_that_are_not_there() -> None:
    empty = Message(b"")
    assert (empty.text(1), empty.integer(2, 7), empty.real(3, 0.5)) == ("", 7, 0.5)
    assert empty.messages(4) == empty.integers(5) == empty.chunks(6) == []
    assert empty.message(4).integer(1, 3) == 3


def test_the_last_of_several_counts() -> None:
    twice = PROTO["Norm"](local_size=3).SerializeToString()
    twice += PROTO["Norm"](local_size=9, alpha=2).SerializeToString()
    assert Message(twice).integer(1, 5) == 9


def test_numbers_that_are_not_packed_in_one_piece() -> None:
    one, two = (PROTO["BlobProto"](data=[n]).SerializeToString() for n in (1.0, 2.0))
    single = struct.pack("<Bf", 5 << 3 | 5, 3.0)
    chunks = Message(one + two + single).chunks(5)
    assert struct.unpack("<3f", b"".join(chunks)) == (1.0, 2.0, 3.0)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\x80", "does not end"),
        (b"\x80" * 11, "does not end"),
        (b"\x00\x00", "number 0"),
        (b"\x0b", "wire type 3"),
        (b"\x0f", "wire type 7"),
        (b"\x0a\x05abc", "3 bytes of 5"),
        (b"\x0d\x00\x00", "2 bytes of 4"),
        (b"\x09\x00", "1 bytes of 8"),
        (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7f", "0 bytes of"),
        (b"\x08\x01" * 100_001, "more than 100000 fields"),
    ],
)
def test_what_is_no_message(content: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Message(content)


def test_fields_of_another_type() -> None:
    number, text = Message(b"\x08\x05"), Message(b"\x0a\x03abc")
    for wrong in (lambda: number.chunks(1), lambda: number.text(1), lambda: text.real(1, 0.0)):
        with pytest.raises(ValueError, match="field 1 is"):
            wrong()
    with pytest.raises(ValueError, match="more than 100000 integers"):
        Message(b"\x0a\xa1\x8d\x06" + b"\1" * 100_001).integers(1)


@settings(max_examples=300, derandomize=True)
@given(st.binary(max_size=60))
def test_anything_is_a_message_or_an_error(content: bytes) -> None:
    try:
        message = Message(content)
        for number in range(16):
            message.integers(number)
            message.messages(number)
            message.text(number)
    except ValueError:
        pass
