"""Reading any pictures, in both layouts, and what happens when files change under the reader."""

import os
from pathlib import Path

import numpy as np
import pytest
from data.coded import SIZE, coded_picture, label_of, write_coded

from tandem.data.reader import PictureReader
from tandem.errors import InputError

COUNTS = (4, 4, 4, 1)
ORDERS = [
    range(13),
    [12, 0, 5, 6, 7, 8, 3, 4],
    [2, 2, 1, 0],
    [11],
    [],
]


@pytest.mark.parametrize("layout", ["b01c", "c01b"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("max_open", [1, 64])
def test_pictures_are_read_in_any_order(
    tmp_path: Path, layout: str, order: list[int], max_open: int
) -> None:
    reader = PictureReader(write_coded(tmp_path, COUNTS, layout), max_open)
    indices = np.array(order, np.int64)
    out = np.empty((len(indices), SIZE, SIZE, 3), np.uint8)
    reader.read(indices, out)
    for picture, index in zip(out, order, strict=True):
        np.testing.assert_array_equal(picture, coded_picture(index, label_of(index)))
    assert reader.labels(indices).tolist() == [label_of(i) for i in order]
    reader.close()


def test_open_files_are_bounded(tmp_path: Path) -> None:
    reader = PictureReader(write_coded(tmp_path, (1,) * 20), max_open=3)
    before = len(os.listdir("/proc/self/fd"))
    out = np.empty((20, SIZE, SIZE, 3), np.uint8)
    reader.read(np.arange(20), out)
    assert len(os.listdir("/proc/self/fd")) <= before + 3
    reader.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("index", [-1, 13])
def test_an_index_outside_is_refused(tmp_path: Path, index: int) -> None:
    reader = PictureReader(write_coded(tmp_path, COUNTS))
    with pytest.raises(IndexError, match="13"):
        reader.read(np.array([0, index]), np.empty((2, SIZE, SIZE, 3), np.uint8))


@pytest.mark.parametrize("layout", ["b01c", "c01b"])
def test_a_file_that_vanishes_is_named(tmp_path: Path, layout: str) -> None:
    dataset = write_coded(tmp_path, COUNTS, layout)
    reader = PictureReader(dataset)
    Path(dataset.paths[1]).unlink()
    with pytest.raises(InputError, match=r"0001\.hkl"):
        reader.read(np.arange(8), np.empty((8, SIZE, SIZE, 3), np.uint8))


@pytest.mark.parametrize("layout", ["b01c", "c01b"])
def test_a_file_that_shrinks_is_named(tmp_path: Path, layout: str) -> None:
    dataset = write_coded(tmp_path, COUNTS, layout)
    reader = PictureReader(dataset)
    os.truncate(dataset.paths[2], dataset.offsets[2] + 100)
    with pytest.raises(InputError, match=r"0002\.hkl.*truncated"):
        reader.read(np.arange(13), np.empty((13, SIZE, SIZE, 3), np.uint8))
