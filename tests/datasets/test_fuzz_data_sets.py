"""Damaged headers of every format: either arrays come back, or InputError, and little memory."""

import contextlib
import io
import tarfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandem import datasets
from tandem.datasets.idx import FILES
from tandem.errors import InputError
from tests.support.data_set_files import random_pictures, write_cifar, write_mnist

MOST = 64 << 20  # bytes; the files have some thousands
CHANGES = st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), min_size=1, max_size=4)


def archived(folder: Path) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        archive.add(folder, folder.name)
    return content.getvalue()


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str, bytes]]:
    """By kind: the data set, the name of the file, and what it holds."""
    folder = tmp_path_factory.mktemp("originals")
    pictures = random_pictures(3, 2, (28, 28))
    for name, packed in (("plain", False), ("packed", True)):
        (folder / name).mkdir()
        write_mnist(folder / name, pictures, packed)
    cifar = write_cifar(folder, "cifar100", random_pictures(2, 1, (32, 32, 3)))
    np.savez(folder / "stored.npz", x=pictures[0][0], y=pictures[0][1])
    np.savez_compressed(folder / "packed.npz", x=pictures[0][0], y=pictures[0][1])
    plain, packed_file = FILES[0], f"{FILES[0]}.gz"
    return {
        "idx": ("mnist", plain, (folder / "plain" / plain).read_bytes()),
        "idx.gz": ("mnist", packed_file, (folder / "packed" / packed_file).read_bytes()),
        "tar.gz": ("cifar100", "a.tar.gz", archived(cifar)),
        "npz": ("arrays", "a.npz", (folder / "stored.npz").read_bytes()),
        "compressed npz": ("arrays", "a.npz", (folder / "packed.npz").read_bytes()),
    }


@pytest.mark.parametrize("kind", ["idx", "idx.gz", "tar.gz", "npz", "compressed npz"])
@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(changes=CHANGES, cut=st.integers(0, 400), in_header=st.booleans())
def test_damage_is_refused(
    kind: str,
    changes: list[tuple[int, int]],
    cut: int,
    in_header: bool,
    originals: dict[str, tuple[str, str, bytes]],
    tmp_path: Path,
) -> None:
    name, file, original = originals[kind]
    content = bytearray(original)
    for position, value in changes:
        content[position % (16 if in_header else len(content))] = value
    if name == "mnist":
        write_mnist(tmp_path, random_pictures(3, 2, (28, 28)), packed=file.endswith(".gz"))
    (tmp_path / file).write_bytes(content[: len(content) - cut])
    tracemalloc.start()
    with contextlib.suppress(InputError):
        datasets.load(name, tmp_path if name == "mnist" else tmp_path / file)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < MOST


@settings(max_examples=60, deadline=None, derandomize=True)
@given(shape=st.tuples(*[st.integers(0, 2**32 - 1)] * 3), there=st.integers(0, 100))
def test_an_idx_file_costs_no_more_memory_than_it_has(
    tmp_path_factory: pytest.TempPathFactory, shape: tuple[int, int, int], there: int
) -> None:
    folder = tmp_path_factory.mktemp("idx")
    write_mnist(folder, random_pictures(3, 2, (28, 28)))
    header = b"\0\0\x08\x03" + b"".join(n.to_bytes(4, "big") for n in shape)
    (folder / FILES[0]).write_bytes(header + bytes(there))
    tracemalloc.start()
    with pytest.raises(InputError):
        datasets.load("mnist", folder)
    assert tracemalloc.get_traced_memory()[1] < MOST
    tracemalloc.stop()
