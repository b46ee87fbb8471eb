"""Reading any pictures, in both layouts, and what happens when files change under the reader."""

import os
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tandem.data.reader import PictureReader
from tandem.errors import InputError
from tests.support.coded_pictures import SIZE, coded_picture, label_of, write_coded
from tests.support.tiny import open_files

COUNTS = (4, 4, 4, 1)
PICTURE = SIZE * SIZE * 3
ORDERS = [range(13), [12, 0, 5, 6, 7, 8, 3, 4], [2, 2, 1, 0], [11], []]


def new_rows(count: int) -> np.ndarray:
    return np.empty((count, SIZE, SIZE, 3), np.uint8)


def check_pictures(reader: PictureReader, order: list[int]) -> None:
    out = new_rows(len(order))
    reader.read(np.array(order, np.int64), out)
    for picture, index in zip(out, order, strict=True):
        np.testing.assert_array_equal(picture, coded_picture(index, label_of(index)))


@pytest.mark.parametrize("layout", ["b01c", "c01b"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("max_open", [1, 64])
def test_pictures_are_read_in_any_order(
    tmp_path: Path, layout: str, order: list[int], max_open: int
) -> None:
    with PictureReader(write_coded(tmp_path, COUNTS, layout), max_open) as reader:
        check_pictures(reader, order)
        assert reader.labels(order).tolist() == [label_of(i) for i in order]


def test_neighbours_are_read_with_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, preadv = [], os.preadv

    def counted(descriptor: int, views: list[memoryview], offset: int) -> int:
        sizes.append(sum(map(len, views)) // PICTURE)
        return preadv(descriptor, views, offset)

    reader = PictureReader(write_coded(tmp_path, (6, 6)))
    monkeypatch.setattr(os, "preadv", counted)
    check_pictures(reader, [8, 1, 2, 3, 7, 10, 4, 5, 6])
    assert sizes == [5, 3, 1]


@pytest.mark.parametrize("layout", ["b01c", "c01b"])
@pytest.mark.parametrize("most", [1, 7, PICTURE, PICTURE + 1])
def test_short_reads_are_continued(tmp_path: Path, monkeypatch, layout: str, most: int) -> None:
    preadv = os.preadv

    def short(descriptor: int, views: list[memoryview], offset: int) -> int:
        granted, left = [], most
        for view in views:
            granted.append(view[:left])
            left -= len(granted[-1])
        return preadv(descriptor, granted, offset)

    reader = PictureReader(write_coded(tmp_path, COUNTS, layout))
    monkeypatch.setattr(os, "preadv", short)
    check_pictures(reader, [12, 0, 5, 6, 7, 8, 3, 4])


@pytest.mark.parametrize("layout", ["b01c", "c01b"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("threads", [1, 3])
def test_bands_are_rows_of_the_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, order: list[int], threads: int
) -> None:
    monkeypatch.setattr("tandem.data.reader._LEAST_BYTES", PICTURE)
    reader = PictureReader(write_coded(tmp_path, COUNTS, layout), max_open=1, threads=threads)
    tops = np.arange(len(order)) % 5
    arrived = []

    def check(place: int, band: np.ndarray) -> None:
        picture = coded_picture(order[place], label_of(order[place]))
        np.testing.assert_array_equal(band, picture[tops[place] : tops[place] + 5])
        arrived.append(place)

    reader.bands(order, tops, 5, check)
    assert sorted(arrived) == list(range(len(order)))


def test_bands_come_in_the_order_of_the_files(tmp_path: Path) -> None:
    reader = PictureReader(write_coded(tmp_path, COUNTS))
    places: list[int] = []
    reader.bands([12, 0, 5], np.zeros(3, np.int64), 1, lambda place, _: places.append(place))
    assert places == [1, 2, 0]


def test_more_neighbours_than_one_call_takes(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("tandem.data.reader._MOST_BUFFERS", 3)
    check_pictures(PictureReader(write_coded(tmp_path, (13,))), list(range(13)))


def test_open_files_are_bounded_and_those_used_last_stay(tmp_path: Path) -> None:
    dataset = write_coded(tmp_path, (1,) * 20)
    reader = PictureReader(dataset, max_open=3)
    before = open_files()
    reader.read(np.arange(20), new_rows(20))
    reader.read([17], new_rows(1))
    reader.read([2], new_rows(1))
    kept = {str(Path(f"/proc/self/fd/{d}").readlink()) for d in reader._files.descriptors}
    assert kept == {dataset.paths[2], dataset.paths[17], dataset.paths[19]}
    assert open_files() == before + 3
    reader.close()
    assert open_files() == before
    check_pictures(reader, [3])
    reader.close()


# Threads


@pytest.fixture
def few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let threads share even a picture or two."""
    monkeypatch.setattr("tandem.data.reader._LEAST_BYTES", PICTURE)


def test_threads_share_what_is_read_equally(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few_bytes: None
) -> None:
    """Each waits for the others at its first call, so one alone would not come through."""
    meeting, read, preadv = threading.Barrier(3, timeout=5), Counter(), os.preadv

    def counted(descriptor: int, views: list[memoryview], offset: int) -> int:
        thread = threading.get_ident()
        if thread not in read:
            read[thread] = 0
            meeting.wait()
        count = preadv(descriptor, views, offset)
        read[thread] += count
        return count

    with PictureReader(write_coded(tmp_path, COUNTS), max_open=1, threads=3) as reader:
        monkeypatch.setattr(os, "preadv", counted)
        check_pictures(reader, [12, 0, 5, 6, 7, 8, 3, 4, 1])
        assert list(read.values()) == [3 * PICTURE] * 3
        before = threading.active_count()
        check_pictures(reader, list(range(12)))
        assert threading.active_count() == before
    assert threading.active_count() == before - 2


def test_a_few_small_pictures_are_read_without_threads(tmp_path: Path) -> None:
    before = threading.active_count()
    check_pictures(PictureReader(write_coded(tmp_path, COUNTS), threads=3), list(range(13)))
    assert threading.active_count() == before


def test_no_thread_closes_a_file_from_which_another_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few_bytes: None
) -> None:
    """One file may stay open, and each thread has opened its own before any of them reads."""
    meeting, preadv, before = threading.Barrier(4, timeout=5), os.preadv, open_files()

    def late(descriptor: int, views: list[memoryview], offset: int) -> int:
        meeting.wait()
        return preadv(descriptor, views, offset)

    dataset = write_coded(tmp_path, (1,) * 4)
    with PictureReader(dataset, max_open=1, threads=4) as reader:
        monkeypatch.setattr(os, "preadv", late)
        check_pictures(reader, [3, 1, 0, 2])
        assert open_files() == before + 1
    assert open_files() == before


@pytest.mark.parametrize("threads", [2, 4])
def test_threads_read_any_pictures(tmp_path: Path, few_bytes: None, threads: int) -> None:
    rng = np.random.default_rng(threads)
    dataset = write_coded(tmp_path, (1,) * 30 + (4,) * 10)
    with PictureReader(dataset, max_open=2, threads=threads) as reader:
        for _ in range(50):
            check_pictures(reader, rng.integers(0, 70, 17).tolist())


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_a_fault_in_any_thread_is_raised(tmp_path: Path, few_bytes: None, gone: int) -> None:
    dataset = write_coded(tmp_path, (4, 4, 4))
    Path(dataset.paths[gone]).unlink()
    reader = PictureReader(dataset, threads=3)
    with pytest.raises(InputError, match=rf"000{gone}\.hkl: the batch file was removed"):
        reader.read(np.arange(12), new_rows(12))
    reader.close()


def test_when_a_fault_is_raised_no_thread_reads_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few_bytes: None
) -> None:
    done, preadv, main = [], os.preadv, threading.get_ident()

    def slow(descriptor: int, views: list[memoryview], offset: int) -> int:
        if threading.get_ident() == main:
            raise OSError(5, "Input/output error")
        time.sleep(0.1)
        done.append(preadv(descriptor, views, offset))
        return done[-1]

    reader = PictureReader(write_coded(tmp_path, (4, 4)), threads=2)
    monkeypatch.setattr(os, "preadv", slow)
    with pytest.raises(InputError, match="Input/output error"):
        reader.read(np.arange(8), new_rows(8))
    assert done == [4 * PICTURE]


@pytest.mark.parametrize("index", [-1, 13])
def test_an_index_outside_is_refused(tmp_path: Path, index: int) -> None:
    reader = PictureReader(write_coded(tmp_path, COUNTS))
    with pytest.raises(IndexError, match=f"picture {index} of a split of 13"):
        reader.read(np.array([0, index]), new_rows(2))
    with pytest.raises(IndexError, match="13"):
        reader.labels([index])


@pytest.mark.parametrize(
    "out",
    [
        new_rows(3),
        new_rows(2).astype(np.int8),
        np.empty((2, SIZE, SIZE, 4), np.uint8)[..., :3],
        np.empty((2, 3, SIZE, SIZE), np.uint8),
    ],
)
def test_a_destination_that_does_not_fit_is_refused(tmp_path: Path, out: np.ndarray) -> None:
    reader = PictureReader(write_coded(tmp_path, COUNTS))
    with pytest.raises(ValueError, match="pictures are read into uint8"):
        reader.read([0, 1], out)


@pytest.mark.parametrize("layout", ["b01c", "c01b"])
def test_a_file_that_shrinks_or_vanishes_is_named(tmp_path: Path, layout: str) -> None:
    dataset = write_coded(tmp_path, COUNTS, layout)
    os.truncate(dataset.paths[2], dataset.offsets[2] + 100)
    found, expected = dataset.offsets[2] + 100, dataset.offsets[2] + 4 * PICTURE
    message = rf"0002\.hkl: truncated: found {found} bytes, expected at least {expected}"
    with pytest.raises(InputError, match=message):
        PictureReader(dataset).read(np.arange(13), new_rows(13))
    Path(dataset.paths[1]).unlink()
    with pytest.raises(InputError, match=r"0001\.hkl: the batch file was removed"):
        PictureReader(dataset).read(np.arange(8), new_rows(8))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    dataset = write_coded(tmp_path, COUNTS)
    reader = PictureReader(replace(dataset, paths=(str(tmp_path), *dataset.paths[1:])))
    with pytest.raises(InputError, match=f"{tmp_path}: .*directory"):
        reader.read([0], new_rows(1))


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (np.arange(12), r"found labels int64 \(12,\), expected int64 \(13,\)"),
        (np.arange(13.0), "found labels float64"),
        (np.array([None] * 13), "can't be read"),
    ],
)
def test_labels_that_do_not_fit_are_refused(tmp_path: Path, labels, message: str) -> None:
    dataset = write_coded(tmp_path, COUNTS)
    np.save(dataset.labels_file, labels)
    with pytest.raises(InputError, match=rf"labels\.npy: .*{message}"):
        PictureReader(dataset).labels([0])
