"""Batch files: readable by hickle, located without it, and refused when they are anything else."""

import contextlib
import dataclasses
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import h5py
import hickle
import numpy as np
import pytest

from tandem.data import batch_file
from tandem.data.batch_file import locate_batch, write_batch
from tandem.errors import InputError

SHAPES = {"b01c": (5, 6, 6, 3), "c01b": (3, 6, 6, 5)}


def make_pictures() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, SHAPES["b01c"], np.uint8)


def pixels_at(path: Path) -> np.ndarray:
    """What lies in the file where `locate_batch` says."""
    location = locate_batch(path)
    count = int(np.prod(location.shape))
    flat = np.fromfile(path, np.uint8, count, offset=location.offset)
    return flat.reshape(location.shape)


@pytest.mark.parametrize("layout", SHAPES)
def test_pixels_lie_where_they_are_located(tmp_path: Path, layout: str) -> None:
    pictures = make_pictures()
    write_batch(tmp_path / "0.hkl", pictures, layout)
    stored = pixels_at(tmp_path / "0.hkl")
    assert stored.shape == SHAPES[layout]
    for number, picture in enumerate(pictures):
        found = stored[number] if layout == "b01c" else stored[..., number].transpose(1, 2, 0)
        np.testing.assert_array_equal(found, picture)
    np.testing.assert_array_equal(hickle.load(tmp_path / "0.hkl"), stored)


def test_part_of_an_array_is_written_like_a_copy(tmp_path: Path) -> None:
    pictures = make_pictures()
    write_batch(tmp_path / "0.hkl", pictures[::2], "b01c")
    np.testing.assert_array_equal(pixels_at(tmp_path / "0.hkl"), pictures[[0, 2, 4]])


def test_the_same_pictures_give_the_same_bytes(tmp_path: Path) -> None:
    write_batch(tmp_path / "0.hkl", make_pictures(), "b01c")
    time.sleep(1.1)  # HDF5's times are in seconds
    write_batch(tmp_path / "1.hkl", make_pictures(), "b01c")
    assert (tmp_path / "0.hkl").read_bytes() == (tmp_path / "1.hkl").read_bytes()


@contextlib.contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    """Let no file of this process grow beyond a size: what is written there is cut, then refused.

    Python has made the signal an error already.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_write_that_fails_anywhere_leaves_the_older_file(tmp_path: Path) -> None:
    path = tmp_path / "0.hkl"
    write_batch(path, make_pictures(), "b01c")
    before = path.read_bytes()
    for room in range(0, len(before), 97):
        with largest_file(room), pytest.raises(OSError, match="File too large") as caught:
            write_batch(path, 255 - make_pictures(), "b01c")
        assert caught.value.filename == str(path)
        assert path.read_bytes() == before
        assert list(tmp_path.iterdir()) == [path]
    with largest_file(len(before)):
        write_batch(path, 255 - make_pictures(), "b01c")
    np.testing.assert_array_equal(pixels_at(path), 255 - make_pictures())


def test_files_of_older_hickle_are_located(tmp_path: Path) -> None:
    pictures = make_pictures()
    with h5py.File(tmp_path / "old.hkl", "w") as file:
        file["data_0"] = pictures
    np.testing.assert_array_equal(pixels_at(tmp_path / "old.hkl"), pictures)


def refused(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        locate_batch(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    return message


@pytest.mark.parametrize("missing", [1, 100, 400, 3_000])
def test_a_truncated_file_is_refused(tmp_path: Path, missing: int) -> None:
    path = tmp_path / "0.hkl"
    write_batch(path, make_pictures(), "b01c")
    content = path.read_bytes()
    path.write_bytes(content[:-missing])
    assert "trunc" in refused(path)


def test_pixels_beyond_the_end_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where HDF5 itself does not notice: its own check is of the size it recorded."""
    path = tmp_path / "0.hkl"
    write_batch(path, make_pictures(), "b01c")
    found = locate_batch(path)
    beyond = dataclasses.replace(found, offset=path.stat().st_size - 1)
    monkeypatch.setattr(batch_file, "_locate_dataset", lambda *_: beyond)
    assert "truncated: found" in refused(path)


@pytest.mark.parametrize(
    ("array", "found"),
    [
        (np.zeros((5, 6, 6, 3), np.float32), "float32"),
        (np.zeros((5, 6, 6, 3), np.int8), "int8"),
        (np.zeros((5, 6, 7, 3), np.uint8), "(5, 6, 7, 3)"),
        (np.zeros((5, 6, 6, 4), np.uint8), "(5, 6, 6, 4)"),
        (np.zeros((6, 6, 3), np.uint8), "(6, 6, 3)"),
        (np.zeros((0, 6, 6, 3), np.uint8), "(0, 6, 6, 3)"),
        (np.uint8(1), "()"),
    ],
)
def test_another_dtype_or_shape_is_refused(tmp_path: Path, array: np.ndarray, found: str) -> None:
    with h5py.File(tmp_path / "0.hkl", "w") as file:
        file["data"] = array
    assert f"found dtype {found}" in (message := refused(tmp_path / "0.hkl")) or (
        f"found shape {found}" in message
    )


@pytest.mark.parametrize("options", [{"compression": "gzip"}, {"chunks": (1, 6, 6, 3)}])
def test_compressed_or_chunked_pixels_are_refused(tmp_path: Path, options: dict) -> None:
    with h5py.File(tmp_path / "0.hkl", "w") as file:
        file.create_dataset("data", data=make_pictures(), **options)
    assert "uncompressed contiguous" in refused(tmp_path / "0.hkl")


def test_a_file_without_data_is_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "0.hkl", "w") as file:
        file["images"] = make_pictures()
        file.create_group("data")
    assert "found data, images, expected the dataset /data" in refused(tmp_path / "0.hkl")


def test_a_file_that_is_not_hdf5_is_refused(tmp_path: Path) -> None:
    (tmp_path / "0.hkl").write_bytes(b"\x80\x04pickle")
    assert "h5py cannot open" in refused(tmp_path / "0.hkl")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    assert "there is no such batch file" in refused(tmp_path / "0.hkl")
