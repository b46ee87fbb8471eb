"""A split is opened only when every batch file and every label is what the manifest says."""

import pickle
from pathlib import Path

import h5py
import numpy as np
import pytest

from tandem.data.batch_file import locate_batch, write_batch
from tandem.data.dataset import StoredPictures, open_split
from tandem.data.manifest import Manifest, Split
from tandem.errors import InputError

SIDE = 6
PER_FILE = 4
COUNTS = (4, 4, 1)
LABELS = np.arange(9) % 3


def make_manifest(layout: str = "b01c") -> Manifest:
    files = tuple(f"train_hkl/{number:04d}.hkl" for number in range(len(COUNTS)))
    split = Split(files, tuple(f"n{n % 3}/{n}.JPEG" for n in range(9)), LABELS)
    wnids = ("n0", "n1", "n2")
    return Manifest(SIDE, layout, PER_FILE, wnids, 1, {}, {"train": split, "val": split})


def write_files(folder: Path, layout: str = "b01c") -> None:
    folder.mkdir(exist_ok=True)
    for number, count in enumerate(COUNTS):
        pictures = np.full((count, SIDE, SIDE, 3), number, np.uint8)
        write_batch(folder / f"{number:04d}.hkl", pictures, layout)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_files(tmp_path / "train_hkl")
    (tmp_path / "labels").mkdir()
    np.save(tmp_path / "labels" / "train_labels.npy", LABELS)
    return tmp_path


@pytest.mark.parametrize("layout", ["b01c", "c01b"])
def test_it_says_where_everything_is(data: Path, layout: str, monkeypatch) -> None:
    write_files(data / "train_hkl", layout)
    monkeypatch.chdir(data)
    dataset = open_split(make_manifest(layout), Path(), "train", Path("labels"))
    paths = [data / "train_hkl" / f"{number:04d}.hkl" for number in range(3)]
    assert dataset.paths == tuple(map(str, paths))
    assert dataset.offsets == tuple(locate_batch(path).offset for path in paths)
    assert dataset.counts == COUNTS
    assert (dataset.size, dataset.image_size) == (9, SIDE)
    assert dataset.pictures == StoredPictures(layout)
    assert dataset.labels_file == str(data / "labels" / "train_labels.npy")


def test_batch_files_may_lie_elsewhere(data: Path) -> None:
    (data / "train_hkl").rename(data / "moved")
    dataset = open_split(make_manifest(), data, "train", data / "labels", data / "moved")
    assert dataset.paths[0] == str(data / "moved" / "0000.hkl")
    assert pickle.loads(pickle.dumps(dataset)) == dataset  # it travels to a loader


def refused(data: Path, manifest: Manifest | None = None) -> str:
    with pytest.raises(InputError) as caught:
        open_split(manifest or make_manifest(), data, "train", data / "labels")
    return str(caught.value)


@pytest.mark.parametrize("number", range(3))
def test_each_batch_file_is_checked(data: Path, number: int) -> None:
    path = data / "train_hkl" / f"{number:04d}.hkl"
    path.write_bytes(path.read_bytes()[:-500])
    assert str(path) in refused(data)
    path.unlink()
    assert f"{path}: there is no such batch file" in refused(data)


@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ((3, SIDE, SIDE, 3), "b01c"),
        ((5, SIDE, SIDE, 3), "b01c"),
        ((4, SIDE + 1, SIDE + 1, 3), "b01c"),
        ((4, SIDE, SIDE, 3), "c01b"),
    ],
)
def test_another_shape_or_layout_is_refused(
    data: Path, shape: tuple[int, ...], layout: str
) -> None:
    path = data / "train_hkl" / "0001.hkl"
    write_batch(path, np.zeros(shape, np.uint8), layout)
    with h5py.File(path) as file:
        found = file["data"].shape
    message = refused(data)
    assert f"{path}: found shape {found}, expected (4, 6, 6, 3)" in message
    assert "layout b01c" in message


def test_a_last_file_as_long_as_the_others_is_refused(data: Path) -> None:
    path = data / "train_hkl" / "0002.hkl"
    write_batch(path, np.zeros((4, SIDE, SIDE, 3), np.uint8), "b01c")
    assert "expected (1, 6, 6, 3)" in refused(data)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (LABELS[:-1], "found labels of shape (8,), expected (9,)"),
        (LABELS.reshape(3, 3), "found labels of shape (3, 3)"),
        (LABELS.astype(np.int32), "found int32, expected int64"),
        (LABELS.astype(np.float64), "found float64, expected int64"),
        (np.array([0, 1, 2, 0, 2, 1, 0, 1, 2]), "found label 2 for picture 4, expected 1"),
        (np.array([None]), "cannot be read"),
    ],
)
def test_other_labels_are_refused(data: Path, labels: np.ndarray, message: str) -> None:
    path = data / "labels" / "train_labels.npy"
    np.save(path, labels, allow_pickle=True)
    found = refused(data)
    assert message in found
    assert str(path) in found
    assert "make_labels.py" in found


@pytest.mark.parametrize("content", [b"", b"labels", b"PK\x03\x04"])
def test_labels_that_are_no_array_are_refused(data: Path, content: bytes) -> None:
    (data / "labels" / "train_labels.npy").write_bytes(content)
    assert "the labels cannot be read" in refused(data)


def test_missing_labels_name_the_program_that_writes_them(data: Path) -> None:
    (data / "labels" / "train_labels.npy").unlink()
    assert "there are no labels; preprocessing/make_labels.py" in refused(data)
