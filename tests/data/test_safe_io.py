"""Untrusted files: nothing is read or allocated because they claim it."""

import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from tandem.data.safe_io import read_npy


def take(dtype: np.dtype, shape: tuple[int, ...]) -> None:
    """A check that takes every array."""


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["<i8", ">f4", "?"])
def test_what_numpy_writes_is_read(tmp_path: Path, dtype: str, order: str) -> None:
    array = np.asarray(np.arange(6).reshape(2, 3), dtype, order=order)
    np.save(tmp_path / "a.npy", array)
    found = read_npy(tmp_path / "a.npy", take)
    np.testing.assert_array_equal(found, array)
    assert found.dtype == array.dtype


def test_a_header_of_gigabytes_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    path.write_bytes(b"\x93NUMPY\x02\x00\xff\xff\xff\xff{")
    os.truncate(path, 1 << 33)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="no header"):
            read_npy(path, take)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
