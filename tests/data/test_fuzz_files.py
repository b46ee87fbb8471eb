"""Any bytes under the name of any file give a result or one message, in bounded time and memory.

The files are read by a child process whose memory is limited. HDF5 and safetensors are not written
in Python: where they crashed or looped, the child would, and the test says with which bytes.
"""

import io
import json
import os
import selectors
import shutil
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from tandem.artifacts.checkpoint import Checkpoint, save_checkpoint
from tandem.layers.network import NetworkDescription
from tests.support.tiny import prepare, python_path

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="measures memory in /proc"
)

_CHILD = Path(__file__).parents[1] / "support" / "read_for_another.py"
# In which a child that does not loop answers, also on a machine that is busy with other things.
_SECONDS = 20


class Reader:
    """A child that reads files; after a crash or an endless loop, another."""

    def __init__(self, folder: Path) -> None:
        self.data = prepare(folder / "data", 2, 2, classes=2, image_size=2, per_file=2)
        (self.data / "config.yaml").write_text(CONFIGURATION)
        save_checkpoint(self.data / "epoch-0001.safetensors", tiny_checkpoint())
        self._files = folder / "files"
        self._files.mkdir()
        self._child: subprocess.Popen[str] | None = None

    def read(self, kind: str, content: bytes) -> list[str]:
        """What becomes of a file of these bytes, or of the file that `content` makes."""
        path = self.path(kind)
        path.write_bytes(content)
        return self.read_file(kind, path)

    def path(self, kind: str) -> Path:
        return self._files / VALID[kind].rpartition("/")[2]

    def read_file(self, kind: str, path: Path) -> list[str]:
        child = self._child or self._start()
        assert child.stdin is not None
        child.stdin.write(f"{kind}\t{path}\n")
        child.stdin.flush()
        answer = self._answer(child)
        if not answer:
            child.kill()
            status = child.wait()
            self._child = None
            saved = path.with_name(f"offending-{os.getpid()}-{path.name}")
            if path.is_file():
                shutil.copy(path, saved)
            pytest.fail(f"{kind}: the reader looped or crashed (status {status}) over {saved}")
        return list(json.loads(answer))

    def close(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.communicate()

    def _start(self) -> subprocess.Popen[str]:
        child = self._child = subprocess.Popen(
            [sys.executable, str(_CHILD), str(self.data)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"},
        )
        assert self._answer(child) == "ready\n"
        return child

    @staticmethod
    def _answer(child: subprocess.Popen[str]) -> str:
        assert child.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(child.stdout, selectors.EVENT_READ)
            return child.stdout.readline() if selector.select(_SECONDS) else ""


# A valid file of each kind, in the data set that the child has.
VALID = {
    "batch": "train_hkl/0000.hkl",
    "manifest": "manifest.json",
    "labels": "labels/train_labels.npy",
    "labels again": "labels/train_labels.npy",
    "mean": "misc/img_mean.npy",
    "configuration": "config.yaml",
    "checkpoint": "epoch-0001.safetensors",
}


CONFIGURATION = """\
learning_rate: 5e-4  # as text in YAML 1.1
lr_step: [20, 40]
devices: [cpu, cpu]
rand_crop: false
weights_dir: "runs/mine"
"""

# A configuration is named by the user, who may well name a pipe; the others lie where they lie.
FOUND = [kind for kind in VALID if kind != "configuration"]


def tiny_checkpoint() -> Checkpoint:
    weights = {"fc8.weight": np.ones((2, 3), np.float32), "fc8.bias": np.zeros(3, np.float32)}
    momentum = {name: 2 * array for name, array in weights.items()}
    return Checkpoint(
        weights, {"momentum": momentum}, NetworkDescription(67, 3, 0.25, ("n1", "n2", "n3"))
    )


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    reader = Reader(tmp_path_factory.mktemp("fuzz"))
    yield reader
    reader.close()


def expect_an_end(answer: list[str]) -> None:
    assert answer[0] in ("read", "refused"), answer
    if answer[0] == "refused":
        # A line, and of a configuration one for each setting.
        assert len(answer[1].splitlines()) < 50
        assert len(answer[1]) < 10_000


@pytest.mark.parametrize("kind", VALID)
def test_the_valid_files_are_read(reader: Reader, kind: str) -> None:
    """Mutations of a file that is refused anyway would prove nothing."""
    assert reader.read(kind, (reader.data / VALID[kind]).read_bytes()) == ["read"]


# Any bytes, and any mutation


def fuzz(examples: int) -> Callable[[Any], Any]:
    return settings(
        max_examples=examples,
        derandomize=True,
        deadline=1_000 * _SECONDS,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )


@dataclass(frozen=True)
class Mutation:
    """A change of some bytes, from byte `at` of a file."""

    at: int
    kind: str
    value: bytes

    def apply(self, content: bytes) -> bytes:
        at = min(self.at, len(content))
        if self.kind == "truncate":
            return content[:at]
        if self.kind == "insert":
            return content[:at] + self.value + content[at:]
        if self.kind == "splice":
            other = len(content) - at
            return content[:at] + content[other : other + 8 * len(self.value)] + content[at:]
        if self.kind == "delete":
            return content[:at] + content[at + len(self.value) :]
        return content[:at] + self.value + content[at + len(self.value) :]


NUMBERS = [0, 1, 7, 255, 1 << 31, (1 << 32) - 1, 1 << 60, (1 << 63) - 1, (1 << 64) - 1]
VALUES = (
    st.binary(min_size=1, max_size=1)
    | st.sampled_from([struct.pack("<Q", number) for number in NUMBERS])
    | st.sampled_from([b"[", b"{", b'"', b"9" * 5_000, b"-", b"\\ud800", b"null", b"1e999"])
    | st.integers(0, 9_000).map(lambda address: struct.pack("<Q", address))
    | st.binary(max_size=20)
)
# Three in four overwrite, since most others are found out at once.
KINDS = st.sampled_from(["set"] * 12 + ["truncate", "insert", "splice", "delete"])


def mutations(content: bytes) -> st.SearchStrategy[list[Mutation]]:
    # HDF5 leaves long stretches of zeros for later, which nobody reads.
    places = [at for at in range(len(content)) if content[max(0, at - 8) : at + 1].strip(b"\0")]
    one = st.builds(Mutation, st.sampled_from(places), KINDS, VALUES)
    return st.lists(one, min_size=1, max_size=4)


@pytest.mark.parametrize("kind", VALID)
@given(data=st.data())
@fuzz(220)
def test_any_mutation_ends_well(reader: Reader, kind: str, data: st.DataObject) -> None:
    content = (reader.data / VALID[kind]).read_bytes()
    for mutation in data.draw(mutations(content)):
        content = mutation.apply(content)
    expect_an_end(reader.read(kind, content))


SIGNATURES = [b"", b"\x89HDF\r\n\x1a\n", b"\x93NUMPY\x01\x00", b"\x93NUMPY\x02\x00", b"PK\x03\x04"]
STARTS = st.sampled_from([*SIGNATURES, b"\x93NUMPY", b"{", b"[", b"\x80\x04", struct.pack("<Q", 9)])


@pytest.mark.parametrize("kind", VALID)
@given(start=STARTS, rest=st.binary(max_size=200))
@fuzz(60)
def test_any_bytes_are_refused(reader: Reader, kind: str, start: bytes, rest: bytes) -> None:
    answer = reader.read(kind, start + rest)
    expect_an_end(answer)
    assert answer[0] == "refused" or kind == "configuration"  # a comment, for example


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@given(data=st.data())
@fuzz(200)
def test_any_value_in_a_manifest_ends_well(reader: Reader, data: st.DataObject) -> None:
    """What is JSON all the same, and so gets past its parser."""
    manifest = json.loads((reader.data / VALID["manifest"]).read_text())
    place = data.draw(st.sampled_from([manifest, manifest["splits"], manifest["splits"]["val"]]))
    place[data.draw(st.sampled_from(sorted(place)))] = data.draw(JSON | st.lists(JSON, max_size=2))
    expect_an_end(reader.read("manifest", json.dumps(manifest).encode()))


# Claims that memory could not hold, and other particular cases


def npy(descr: str, shape: str, rest: bytes = b"", version: bytes = b"\x01\x00") -> bytes:
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}\n".encode("latin-1")
    width = "<H" if version[0] == 1 else "<I"
    return b"\x93NUMPY" + version + struct.pack(width, len(header)) + header + rest


ARRAYS = {
    "2**60 numbers": npy("'<i8'", f"({1 << 60},)"),
    "more numbers than can be counted": npy("'<i8'", f"({1 << 40}, {1 << 40})"),
    "fewer than none": npy("'<i8'", "(-2,)", bytes(16)),
    "no number of numbers": npy("'<i8'", "(2.0,)", bytes(16)),
    "a truth": npy("'<i8'", "(True, 2)", bytes(16)),
    "objects": npy("'|O'", "(2,)", b"\x80\x04."),
    "fields": npy("[('a', '<i8')]", "(2,)", bytes(16)),
    "fields with objects": npy("[('a', '|O')]", "(2,)", bytes(16)),
    "an array in an array": npy("('<i8', (1073741824, 1073741824))", "(2,)", bytes(16)),
    "dates": npy("'<M8[s]'", "(2,)", bytes(16)),
    "no type": npy("'<q17'", "(2,)", bytes(16)),
    "a large type": npy(f"'|V{1 << 31}'", "(2,)", bytes(16)),
    "a deep header": npy("(" * 5_000, "(2,)"),
    "a header of signs": npy("-" * 9_000 + "1", "(2,)"),
    "a header that no dict takes": b"\x93NUMPY\x01\x00\x0b\x00{[]: 1, 1:2}",
    "keys of two kinds": b"\x93NUMPY\x01\x00\x0d\x00{'a': 1, 2:3}",
    "a program": npy("__import__('os').getpid()", "(2,)"),
    "a long header": b"\x93NUMPY\x02\x00\xff\xff\xff\xff{",
    "another version": npy("'<i8'", "(2,)", bytes(16), b"\x09\x00"),
    "numbers too few": npy("'<i8'", "(2,)", bytes(15)),
    "numbers too many": npy("'<i8'", "(2,)", bytes(17)),
    "nothing": b"",
}


def deep(opening: bytes, closing: bytes, times: int) -> bytes:
    return b'{"format": 1, "layout": ' + opening * times + b"1" + closing * times + b"}"


MANIFESTS = {
    "lists, deep": deep(b"[", b"]", 100_000),
    "objects, deep": deep(b'{"a":', b"}", 100_000),
    "as deep as can be read": deep(b"[", b"]", 950),
    "an integer of 5,000 digits": b'{"format": ' + b"9" * 5_000 + b"}",
    "an integer of 4,000 digits": b'{"format": ' + b"9" * 4_000 + b"}",
    "a number beyond all": b'{"format": 1e999}',
    "not a number": b'{"format": NaN}',
}


@pytest.mark.parametrize("name", ["\ud800", "a\0b", "a\nb 1", "\x1b[2J"])
@pytest.mark.parametrize("key", ["files", "pictures"])
def test_names_that_no_file_has(reader: Reader, key: str, name: str) -> None:
    """Half a surrogate and a zero byte are no path; a line break is two lines of train.txt."""
    manifest = json.loads((reader.data / VALID["manifest"]).read_text())
    manifest["splits"]["train"][key][0] = name
    answer = reader.read("manifest", json.dumps(manifest).encode())
    assert answer[0] == "refused"
    assert "expected printable characters" in answer[1]


CONFIGURATIONS = {
    "a list in itself": b"seed: &a [*a]",
    "a long integer": b"seed: " + b"9" * 5_000,
    "a long text": b"seed: " + b"a" * 100_000,
    "control characters": b'weights_dir: "a\\0b"',
}


def hdf5(fill: Callable[[h5py.File], object]) -> bytes:
    content = io.BytesIO()
    with h5py.File(content, "w") as file:
        fill(file)
    return content.getvalue()


def inflate(file: h5py.File) -> None:
    """One chunk of more zeros than the child has room for."""
    shape = (400, 1000, 1000, 1)
    data = file.create_dataset("data", shape, np.uint8, compression="gzip", chunks=shape)
    packer, zeros = zlib.compressobj(1), bytes(1_000_000)
    data.id.write_direct_chunk(
        (0, 0, 0, 0), b"".join(map(packer.compress, [zeros] * 400)) + packer.flush()
    )


def unfilled(layout: int, shape: tuple[int, ...]) -> Callable[[h5py.File], object]:
    """Declare pixels without writing them."""

    def fill(file: h5py.File) -> None:
        created = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        created.set_layout(layout)
        space = h5py.h5s.create_simple(shape)
        h5py.h5d.create(file.id, b"data", h5py.h5t.STD_U8LE, space, created)

    return fill


def name_much(file: h5py.File) -> None:
    for number in range(1_000):
        file.create_group(f"{number:04}" + "\x1b[2J" * 10)


BATCHES = {
    "pixels that inflate": (inflate, "in chunks, compressed"),
    "pixels never written": (unfilled(h5py.h5d.CONTIGUOUS, (1 << 57, 1, 1, 3)), "no pixels"),
    "pixels in the header": (unfilled(h5py.h5d.COMPACT, (2, 2, 2, 3)), "uncompressed contiguous"),
    "a thousand other things": (name_much, "992 more"),
}


@pytest.mark.parametrize("case", BATCHES)
def test_hdf5_that_claims_or_hides_much(reader: Reader, case: str) -> None:
    fill, expected = BATCHES[case]
    answer = reader.read("batch", hdf5(fill))
    expect_an_end(answer)
    assert expected in answer[1]
    assert "\x1b" not in answer[1]


def safetensors(header: bytes, rest: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + rest


def tensor(dtype: str, shape: list[int], end: int, **metadata: str) -> bytes:
    described = {"fc8.bias": {"dtype": dtype, "shape": shape, "data_offsets": [0, end]}}
    metadata = metadata or {"tandem": STATE}
    return json.dumps({"__metadata__": metadata, **described}).encode()


NETWORK = {"crop_size": 67, "classes": 3, "width": 1.0}
STATE = json.dumps(
    {"format": 1, "momentum": False, "network": NETWORK}
    | {key: {} for key in ("state", "config", "versions", "conditions")}
)

CHECKPOINTS = {
    "a header of 2**60 bytes": struct.pack("<Q", 1 << 60),
    "a header of 90 MB": struct.pack("<Q", 90_000_000) + b"{",
    "2**60 numbers": safetensors(tensor("F32", [1 << 60], 1 << 62)),
    "more numbers than can be counted": safetensors(tensor("F32", [1 << 40, 1 << 40], 4), bytes(4)),
    "no numbers of many": safetensors(tensor("F32", [0, 1 << 62], 0)),
    "no numbers of far too many": safetensors(tensor("F32", [1 << 62, 0, 1 << 62], 0)),
    "many axes": safetensors(tensor("F32", [1] * 100, 4), bytes(4)),
    "numbers too few": safetensors(tensor("F32", [2], 8), bytes(7)),
    "no known numbers": safetensors(tensor("F8_E4M3", [2], 2), bytes(2)),
    "a deep header": safetensors(b"[" * 100_000),
    "deep metadata": safetensors(tensor("F32", [1], 4, tandem="[" * 100_000), bytes(4)),
    "a long integer": safetensors(tensor("F32", [1], 4, tandem="9" * 10_000), bytes(4)),
    "the bytes of another": save({"a": np.zeros(2)}),
}


CASES = {
    "manifest": MANIFESTS,
    "configuration": CONFIGURATIONS,
    "checkpoint": CHECKPOINTS,
    **dict.fromkeys(("labels", "labels again", "mean"), ARRAYS),
}


@pytest.mark.parametrize(("kind", "case"), [(kind, case) for kind in CASES for case in CASES[kind]])
def test_a_file_that_claims_or_stands_for_much(reader: Reader, kind: str, case: str) -> None:
    answer = reader.read(kind, CASES[kind][case])
    expect_an_end(answer)
    assert answer[0] == "refused" or kind in ("configuration", "checkpoint")


@pytest.mark.parametrize("kind", FOUND)
def test_a_file_that_is_mostly_holes(reader: Reader, kind: str) -> None:
    """It takes no room in an archive, and is larger than any memory."""
    path = reader.path(kind)
    shutil.copy(reader.data / VALID[kind], path)
    try:
        os.truncate(path, 1 << 40)
    except OSError:
        pytest.skip("the file system has no files of that size")
    answer = reader.read_file(kind, path)
    path.unlink()
    expect_an_end(answer)
    if kind != "batch":  # of which nothing is read but what describes the pixels
        assert answer[0] == "refused"


@pytest.mark.parametrize("kind", FOUND)
def test_a_pipe_is_not_waited_for(reader: Reader, kind: str) -> None:
    """An archive may hold one under any name, and nobody ever writes into it."""
    path = reader.path(kind)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    answer = reader.read_file(kind, path)
    path.unlink()
    assert answer[0] == "refused"
    assert str(path) in answer[1]
