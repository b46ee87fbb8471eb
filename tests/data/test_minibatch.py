"""Filling slots: from batch file to slot, pixel by pixel."""

import os
import pickle
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from tandem.data.augment import Augmentation, ten_crops
from tandem.data.minibatch import MinibatchBuilder, MinibatchRequest
from tandem.data.order import epoch_order, global_minibatch, minibatch_count
from tandem.errors import InputError
from tandem.memory import HostBuffer, RowType, Slot, SlotLayout
from tests.support.coded_pictures import SIZE, coded_picture, label_of, write_coded

CROP = 6
AUGMENTATION = Augmentation(
    crop_size=CROP, rand_crop=True, rand_mirror=True, batch_crop_mirror=False, seed=11
)


PICTURE = SIZE * SIZE * 3


def new_slot(batch: int, size: int) -> Slot:
    layout = SlotLayout.of_pictures(batch, size)
    return Slot.on(HostBuffer.create(layout.nbytes), layout)


def window_by_loops(picture: np.ndarray, origin: np.ndarray, mirrored: int) -> np.ndarray:
    out = np.empty((CROP, CROP, 3), picture.dtype)
    for i in range(CROP):
        for j in range(CROP):
            column = CROP - 1 - j if mirrored else j
            out[i, j] = picture[origin[0] + i, origin[1] + column]
    return out


@pytest.mark.parametrize("layout", ["b01c", "c01b"])
@pytest.mark.parametrize("crop_here", [True, False])
@pytest.mark.parametrize("shuffle", ["none", "files", "images"])
@pytest.mark.parametrize("trainers", [1, 2, 3])
def test_each_picture_arrives_once_with_its_label(
    tmp_path: Path, layout: str, crop_here: bool, shuffle, trainers: int
) -> None:
    dataset = write_coded(tmp_path, (4, 4, 4, 1), layout)
    builder = MinibatchBuilder(dataset, dataset, AUGMENTATION, crop_here)
    assert builder.picture_size == (CROP if crop_here else SIZE)
    slot = new_slot(2, builder.picture_size)
    order = epoch_order(dataset.counts, shuffle, 11, 3)
    arrived, mirrored = [], 0
    for k in range(minibatch_count(13, 2 * trainers)):
        for rank in range(trainers):
            rows = global_minibatch(order, k, 2 * trainers)[2 * rank : 2 * rank + 2]
            builder.fill(slot, MinibatchRequest(0, "train", 3, k, rows))
            for i in range(int(slot.valid)):
                index, label = slot.pictures[i, 0, 0, 1:]
                whole = coded_picture(index, label)
                window = window_by_loops(whole, slot.origins[i], slot.mirrored[i])
                expected = window if crop_here else whole
                np.testing.assert_array_equal(slot.pictures[i], expected)
                assert (slot.indices[i], slot.labels[i]) == (index, label)
                arrived.append((int(index), int(label)))
                mirrored += int(slot.mirrored[i])
    builder.close()
    assert 0 < mirrored < 13
    assert sorted(arrived) == [(i, label_of(i)) for i in range(13)]


@pytest.mark.parametrize("crop_here", [True, False])
def test_the_same_request_gives_the_same_slot_from_a_filler_that_travelled(
    tmp_path: Path, crop_here: bool
) -> None:
    dataset = write_coded(tmp_path, (4, 4))
    builder = MinibatchBuilder(dataset, dataset, AUGMENTATION, crop_here)
    request = MinibatchRequest(0, "train", 2, 1, np.array([7, 0, 3]))
    slots = [new_slot(3, builder.picture_size) for _ in range(2)]
    builder.fill(slots[0], MinibatchRequest(0, "train", 5, 0, np.array([1, 2])))
    builder.fill(slots[0], request)
    pickle.loads(pickle.dumps(builder)).fill(slots[1], pickle.loads(pickle.dumps(request)))
    for name in vars(slots[0]):
        np.testing.assert_array_equal(getattr(slots[0], name), getattr(slots[1], name))


@pytest.mark.parametrize("crop_here", [True, False])
def test_a_crop_that_is_asked_for(tmp_path: Path, crop_here: bool) -> None:
    dataset = write_coded(tmp_path, (4, 4))
    builder = MinibatchBuilder(dataset, dataset, AUGMENTATION, crop_here)
    slot = new_slot(3, builder.picture_size)
    for number, (row, column, mirrored) in enumerate(ten_crops(SIZE, CROP)):
        builder.fill(slot, MinibatchRequest(0, "validation", 0, 1, np.array([6, 2]), number))
        assert slot.origins[:2].tolist() == [[row, column]] * 2
        assert slot.mirrored[:2].tolist() == [mirrored] * 2
        for i, index in enumerate((6, 2)):
            whole = coded_picture(index, label_of(index))
            expected = window_by_loops(whole, np.array([row, column]), mirrored)
            np.testing.assert_array_equal(slot.pictures[i], expected if crop_here else whole)


@pytest.mark.parametrize("crop_here", [True, False])
def test_threads_make_the_same_slot(
    tmp_path: Path, crop_here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.data.reader._LEAST_BYTES", 1)
    dataset, slots = write_coded(tmp_path, (4, 1, 4, 4)), []
    for threads in (1, 3):
        builder = pickle.loads(
            pickle.dumps(MinibatchBuilder(dataset, dataset, AUGMENTATION, crop_here, threads))
        )
        slots.append(new_slot(12, builder.picture_size))
        request = MinibatchRequest(0, "train", 2, 1, np.array([7, 0, 3, 12, 11, 5, 4, 9, 2, 1]))
        builder.fill(slots[-1], request)
        builder.close()
    for name in vars(slots[0]):
        np.testing.assert_array_equal(getattr(slots[0], name), getattr(slots[1], name))


class Call(NamedTuple):
    """A system call that reads: how many bytes, and where each part of them went."""

    nbytes: int
    addresses: tuple[int, ...]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Every `preadv` from now on."""
    made: list[Call] = []
    preadv = os.preadv

    def noted(descriptor: int, views: list[memoryview], offset: int) -> int:
        addresses = tuple(np.frombuffer(view, np.uint8).ctypes.data for view in views)
        made.append(Call(sum(map(len, views)), addresses))
        return preadv(descriptor, views, offset)

    monkeypatch.setattr(os, "preadv", noted)
    return made


def test_whole_pictures_are_read_straight_into_the_slot(tmp_path: Path, calls: list[Call]) -> None:
    dataset = write_coded(tmp_path, (4, 4))
    slot = new_slot(5, SIZE)
    builder = MinibatchBuilder(dataset, dataset, AUGMENTATION, crop_here=False)
    builder.fill(slot, MinibatchRequest(0, "train", 0, 0, np.array([5, 6, 7, 0, 1])))
    places = [slot.pictures[i].ctypes.data for i in range(5)]
    assert [call.addresses for call in calls] == [tuple(places[3:]), tuple(places[:3])]
    assert [call.nbytes for call in calls] == [2 * PICTURE, 3 * PICTURE]


def test_of_a_cropped_picture_only_the_rows_of_the_window_are_read(
    tmp_path: Path, calls: list[Call]
) -> None:
    dataset = write_coded(tmp_path, (4, 4))
    builder = MinibatchBuilder(dataset, dataset, AUGMENTATION, crop_here=True)
    builder.fill(new_slot(5, CROP), MinibatchRequest(0, "train", 0, 0, np.array([5, 6, 7, 0, 1])))
    assert [call.nbytes for call in calls] == [CROP * SIZE * 3] * 5
    assert len({call.addresses for call in calls}) == 1


@pytest.mark.parametrize("crop_here", [True, False])
def test_once_warm_filling_takes_no_memory_of_a_pictures_size(
    tmp_path: Path, crop_here: bool
) -> None:
    dataset = write_coded(tmp_path, (8,), size=200)
    builder = MinibatchBuilder(dataset, dataset, replace(AUGMENTATION, crop_size=190), crop_here)
    slot = new_slot(8, builder.picture_size)
    request = MinibatchRequest(0, "train", 0, 0, np.array([3, 1, 2, 7, 6, 0, 4, 5]))
    builder.fill(slot, request)
    tracemalloc.start()
    try:
        builder.fill(slot, request)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 190 * 190 * 3 / 5


@pytest.mark.parametrize("crop_here", [True, False])
def test_rows_beyond_the_minibatch_are_left_alone(tmp_path: Path, crop_here: bool) -> None:
    dataset = write_coded(tmp_path, (4,))
    builder = MinibatchBuilder(dataset, dataset, AUGMENTATION, crop_here)
    slot = new_slot(4, builder.picture_size)
    for array in vars(slot).values():
        array[...] = 77
    builder.fill(slot, MinibatchRequest(0, "train", 0, 0, np.array([3, 1])))
    assert slot.valid == 2
    for array in (slot.pictures, slot.labels, slot.indices, slot.origins, slot.mirrored):
        assert (array[2:] == 77).all()
        assert (array[:2] != 77).any()


def test_without_pictures_a_slot_gets_everything_else(tmp_path: Path, calls: list[Call]) -> None:
    dataset = write_coded(tmp_path, (4,))
    builder = MinibatchBuilder(dataset, dataset, AUGMENTATION, crop_here=False)
    slots = [new_slot(4, size) for size in (SIZE, 0)]
    for slot in slots:
        calls.clear()
        builder.fill(slot, MinibatchRequest(0, "train", 0, 0, np.array([3, 1])))
    assert calls == []
    for name in ("labels", "indices", "origins", "mirrored", "valid"):
        np.testing.assert_array_equal(getattr(slots[0], name), getattr(slots[1], name))
    cropping = MinibatchBuilder(dataset, dataset, AUGMENTATION, crop_here=True)
    with pytest.raises(ValueError, match="can't take 2 pictures"):
        cropping.fill(slots[1], MinibatchRequest(0, "train", 0, 0, np.array([3, 1])))


def test_an_empty_request_leaves_no_valid_row(tmp_path: Path) -> None:
    dataset = write_coded(tmp_path, (3,))
    builder = MinibatchBuilder(dataset, dataset, AUGMENTATION, crop_here=True)
    slot = new_slot(2, CROP)
    builder.fill(slot, MinibatchRequest(0, "train", 0, 0, np.array([0, 2])))
    assert slot.valid == 2
    builder.fill(slot, MinibatchRequest(0, "train", 0, 1, np.array([], np.int64)))
    assert slot.valid == 0


def test_validation_takes_centres_from_its_own_pictures(tmp_path: Path) -> None:
    train, validation = write_coded(tmp_path / "a", (3,)), write_coded(tmp_path / "b", (2, 2))
    builder = MinibatchBuilder(train, validation, AUGMENTATION, crop_here=True)
    slot = new_slot(4, CROP)
    builder.fill(slot, MinibatchRequest(0, "validation", 0, 0, np.arange(4)))
    for i in range(4):
        expected = coded_picture(i, label_of(i))[1 : 1 + CROP, 1 : 1 + CROP]
        np.testing.assert_array_equal(slot.pictures[i], expected)
    assert not slot.mirrored.any()


def test_a_slot_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    dataset = write_coded(tmp_path, (3,))
    builder = MinibatchBuilder(dataset, dataset, AUGMENTATION, crop_here=True)
    for slot in (new_slot(1, CROP), new_slot(2, SIZE)):
        with pytest.raises(ValueError, match="can't take 2 pictures"):
            builder.fill(slot, MinibatchRequest(0, "train", 0, 0, np.array([0, 2])))


def test_settings_that_do_not_fit_the_pictures_are_refused(tmp_path: Path) -> None:
    dataset = write_coded(tmp_path, (3,))
    with pytest.raises(InputError, match=f"crop_size: found {SIZE + 1}, expected 1 to {SIZE}"):
        MinibatchBuilder(dataset, dataset, replace(AUGMENTATION, crop_size=SIZE + 1), True)
    with pytest.raises(InputError, match="the validation pictures have 8 rows"):
        MinibatchBuilder(
            dataset, replace(dataset, row=RowType("uint8", (8, 8, 3))), AUGMENTATION, True
        )
