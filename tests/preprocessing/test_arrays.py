"""Data sets of arrays: written, read again row by row, recognised, and refused when damaged."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.data.colour import read_covariance
from tandem.data.dataset import open_split
from tandem.data.manifest import ArrayManifest, Manifest, read_any_manifest, read_manifest
from tandem.data.mean_image import read_mean
from tandem.data.reader import PictureReader
from tandem.errors import InputError
from tandem.memory import RowType
from tandem.preprocessing import arrays as module
from tandem.preprocessing.arrays import checksum, matches, write_arrays, write_pictures


def read(folder: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    """All rows and labels of a split, by the reader, in an order of its own."""
    found = open_split(read_any_manifest(folder), folder, split, folder / "labels")
    order = np.random.default_rng(1).permutation(found.size)
    rows = np.empty((found.size, *found.row.shape), found.row.dtype)
    with PictureReader(found, threads=2) as reader:
        reader.read(order, rows)
        labels = reader.labels(order)
    back = np.argsort(order)
    return rows[back], labels[back]


def numbers(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


@pytest.mark.parametrize("shape", [(5,), (4, 3), (4, 3, 2), (6, 6, 3)])
@pytest.mark.parametrize("kind", ["classes", "vectors", "numbers"])
def test_rows_and_targets_are_read_as_they_were_given(
    tmp_path: Path, shape: tuple[int, ...], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FILE_NBYTES", 4 * 4 * int(np.prod(shape)))  # four rows a file
    x, y = numbers(1, 11, *shape), np.arange(11) % 4
    own = {"classes": y, "vectors": numbers(2, 11, 3), "numbers": numbers(2, 11)}[kind]
    manifest = write_arrays(tmp_path / "new", (x[:9], own[:9]), (x[9:], own[9:]))
    assert manifest.counts("train") == (4, 4, 1)
    assert manifest.classes == {"classes": 4, "vectors": 3, "numbers": 1}[kind]
    assert manifest.row == RowType("float32", shape)
    for split, part in (("train", slice(9)), ("val", slice(9, 11))):
        rows, labels = read(tmp_path / "new", split)
        np.testing.assert_array_equal(rows, x[part].astype(np.float32), strict=True)
        expected = own[part].astype(np.int64 if kind == "classes" else np.float32)
        np.testing.assert_array_equal(labels, expected, strict=True)


@pytest.mark.parametrize("shape", [(5,), (6, 6, 3), (6, 7, 1)])
def test_bytes_stay_bytes_unless_a_split_has_other_numbers(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    x = np.random.default_rng(1).integers(0, 256, (9, *shape), np.uint8)
    y = numbers(2, 9, 2)
    for name, validation in (("uint8", x[6:]), ("float32", x[6:] / 2)):
        manifest = write_arrays(tmp_path / name, (x[:6], y[:6]), (validation, y[6:]))
        assert manifest.row == RowType(name, shape)
        for split, rows in (("train", x[:6]), ("val", validation)):
            found, _ = read(tmp_path / name, split)
            np.testing.assert_array_equal(found, rows.astype(name), strict=True)


@pytest.mark.parametrize("axes", ["grey", "one", "colour"])
@pytest.mark.parametrize("pad", [0, 2])
def test_pictures_are_those_of_preprocessing(
    tmp_path: Path, axes: str, pad: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FILE_NBYTES", 5 * (8 + 2 * pad) ** 2 * 3)
    rng, y = np.random.default_rng(4), np.array([2, 0, 1, 1, 0, 2, 1])
    x = rng.integers(0, 256, (7, 8, 8, 3), np.uint8)
    if axes != "colour":
        x[...] = x[..., :1]
    given = {"grey": x[..., 0], "one": x[..., :1], "colour": x}[axes]
    names = ("zebra", "ape", "cow")  # as they are given, not sorted
    write_pictures(tmp_path, (given, y), (given[:3], y[:3]), names, pad)
    manifest = read_manifest(tmp_path)
    assert (manifest.wnids, manifest.pad, manifest.image_size) == (names, pad, 8 + 2 * pad)
    assert manifest.counts("train") == (5, 2)
    colour = [int(x[..., c].mean() + 0.5) for c in range(3)]
    rows, labels = read(tmp_path, "train")
    np.testing.assert_array_equal(labels, y)
    inner = slice(pad, pad + 8)
    np.testing.assert_array_equal(rows[:, inner, inner], x)
    mean = read_mean(tmp_path / "misc" / "img_mean.npy", 8 + 2 * pad)
    inside = x.mean(axis=0).transpose(2, 0, 1)
    np.testing.assert_allclose(mean[:, inner, inner], inside, rtol=1e-6)
    if pad:
        assert rows[:, 0, 0].tolist() == [colour] * 7
        assert mean[:, 0, 0].tolist() == colour
    sampled = x[:, ::4, ::4].reshape(-1, 3).T
    covariance = read_covariance(tmp_path / "misc" / "colour_covariance.npy")
    np.testing.assert_allclose(covariance, np.cov(sampled, ddof=0), rtol=1e-10)


@pytest.mark.parametrize("write", [write_arrays, write_pictures])
def test_either_split_may_be_empty(tmp_path: Path, write: Callable[..., Any]) -> None:
    x, y = np.zeros((3, 4, 4), np.uint8), np.arange(3)
    for name, pairs in (("train", ((x, y), None)), ("val", (None, (x, y)))):
        write(tmp_path / name, *pairs)
        for split in ("train", "val"):
            assert len(read(tmp_path / name, split)[0]) == (3 if split == name else 0)
    with pytest.raises(InputError, match="x: found no rows, expected at least one"):
        write(tmp_path / "none", (x[:0], y[:0]), None)


@pytest.mark.parametrize("write", [write_arrays, write_pictures])
def test_a_folder_is_known_by_its_arrays(tmp_path: Path, write: Callable[..., Any]) -> None:
    x, y = np.arange(32, dtype=np.uint8).reshape(2, 4, 4), np.arange(2)
    folder, source = tmp_path / "data", checksum(x, y, x[:1], y[:1])
    assert not matches(folder, source)
    write(folder, (x, y), (x[:1], y[:1]))
    assert matches(folder, source)
    again = tmp_path / "again"
    write(again, (x, y), (x[:1], y[:1]))
    assert (folder / "manifest.json").read_bytes() == (again / "manifest.json").read_bytes()
    with pytest.raises(InputError, match=r"other arrays \(checksum .*expected the same as before"):
        matches(folder, checksum(x, y, None, None))
    with pytest.raises(InputError, match=r"found manifest\.json of a data set already"):
        write(folder, (x, y), None)
    for path in sorted(p for p in again.rglob("*") if p.is_file() and p.name != "manifest.json"):
        content = bytearray(path.read_bytes())
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(InputError, match=rf"{path}: found a damaged file of SHA-256"):
            matches(again, source)
        path.unlink()
        with pytest.raises(InputError, match=rf"{path}: cannot be read: No such file"):
            matches(again, source)
        shutil.copy(folder / path.relative_to(again), path)
    assert matches(again, source)


def test_a_checksum_is_of_elements_shape_and_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.arange(24, dtype=np.float32).reshape(4, 6)
    expected = checksum(x, None)
    assert expected == checksum(np.asfortranarray(x), None)
    others = [
        (x,),
        (None, x),
        (x.reshape(6, 4), None),
        (x.view(np.int32), None),
        (x + np.eye(4, 6, dtype=np.float32), None),
        (x.astype(np.float64), None),
    ]
    assert len({expected, *(checksum(*other) for other in others)}) == 7
    monkeypatch.setattr(module, "FILE_NBYTES", 30)  # piece by piece
    assert checksum(x, None) == expected


def test_a_data_set_that_was_not_finished_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = np.zeros((3, 2)), np.arange(3)
    with monkeypatch.context() as patch:
        patch.setattr(module, "write_manifest", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            write_arrays(tmp_path, (x, y), None)
    assert not matches(tmp_path, checksum(x, y, None, None))
    write_arrays(tmp_path, (x, y), None)
    assert matches(tmp_path, checksum(x, y, None, None))


X, Y = np.zeros((2, 3)), np.arange(2)
NAN = np.array([[0, 0, 0], [0, np.nan, 0]])
REFUSED = {
    "rows that differ in number": (
        (X, Y[:1]),
        "y: found the shape (1,), expected a row for each of x",
    ),
    "text": ((X.astype(str), Y), "x: found <U32, expected numbers"),
    "no axis": ((np.zeros(2), Y), "expected (n, ...) with 1 to 3 axes of a row"),
    "NaN": ((NAN, Y), "x: found a number that is not finite in row 1"),
    "too large": ((X + 1e39, Y), "x: found a number that is not finite in row 0"),
    "rounded": ((np.array([[0], [-16777217]]), Y), "x: found -16777217, expected whole numbers up"),
    "NaN as target": ((X, NAN[:, 1]), "y: found a number that is not finite in row 1"),
    "a negative class": ((X, -Y), "y: found labels from -1 to 0, expected classes"),
    "prices": ((X, 1_500_000 * Y), "integers that are no classes have to be float32"),
    "a class too high": ((X, Y + 1), "y: found the label 2, expected 0 to 1, as there are 2"),
}


def test_a_second_writer_is_refused_and_leaves_the_first_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, partial = module._write_split, tmp_path / "train_hkl" / ".0000.abc.partial.hkl"
    kept = []

    def meanwhile(*arguments: Any) -> Any:
        partial.touch()
        with pytest.raises(InputError, match="another run is using this folder"):
            write_arrays(tmp_path, (X, Y), None)
        kept.append(partial.exists())
        return write(*arguments)

    monkeypatch.setattr(module, "_write_split", meanwhile)
    write_arrays(tmp_path, (X, Y), None)
    assert kept == [True, True]  # of both splits


@pytest.mark.parametrize("case", REFUSED)
def test_arrays_that_cannot_be_used_are_refused(tmp_path: Path, case: str) -> None:
    pair, message = REFUSED[case]
    with pytest.raises(InputError) as caught:
        write_arrays(tmp_path / "data", pair, None, ["a", "b"] if "high" in case else None)
    assert message in str(caught.value)
    assert not (tmp_path / "data" / "manifest.json").exists()


@pytest.mark.parametrize("x", [X, np.zeros((2, 3, 4), np.uint8), np.zeros((2, 3, 3, 2), np.uint8)])
def test_what_is_no_picture_is_refused(tmp_path: Path, x: np.ndarray) -> None:
    with pytest.raises(InputError, match=r"expected uint8 pictures \(n, S, S\)"):
        write_pictures(tmp_path, (x, Y), None)


# Manifests and files as others might have written them


def damaged(folder: Path, change: Callable[[dict[str, Any]], Any]) -> str:
    """What is said of a data set whose manifest was changed."""
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(InputError) as caught:
        read(folder, "train")
    assert str(folder) in str(caught.value)
    return str(caught.value)


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "format": (lambda m: m.update(format=3), "format is 3, expected 1 or 2"),
    "dtype": (lambda m: m["pixels"].update(dtype="object"), "input should be 'float32' or 'uint8'"),
    "shape": (lambda m: m["pixels"].update(shape=[2]), "found shape (3, 3), expected (3, 2)"),
    "a huge row": (lambda m: m["pixels"].update(shape=[1 << 40]), "bytes a row"),
    "no axis": (lambda m: m["pixels"].update(shape=[]), "at least 1 item"),
    "axes": (lambda m: m["pixels"].update(shape=[3, 1, 1, 1]), "at most 3 items"),
    "rows": (lambda m: m["splits"]["train"].update(rows=1 << 62), "found 1, expected"),
    "more rows": (lambda m: m["splits"]["train"].update(rows=4), "found shape (3, 3), expected (4"),
    "no rows": (lambda m: m["splits"]["train"].update(rows=0, files=[]), "found no rows"),
    "both": (lambda m: m["targets"].update(shape=[1]), "expected one of classes and shape"),
    "classes": (lambda m: m["targets"].update(classes=4), "wnids: found 3, expected 4"),
    "names": (lambda m: m.update(wnids=["a", "b", "b"]), "names of classes, each once"),
    "sum": (lambda m: m["sha256"].update({"labels/train_labels.npy": "0" * 64}), "damaged, or of"),
    "no sum": (lambda m: m["sha256"].clear(), "sha256: found none of"),
    "text": (lambda m: m.update(source="0"), "source"),
    "outside": (lambda m: m["splits"]["train"].update(files=["../a"]), "inside the manifest's"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_manifest_that_contradicts_itself_or_its_files_is_refused(
    tmp_path: Path, change: str
) -> None:
    write_arrays(tmp_path, (np.zeros((3, 3)), np.arange(3)), None)
    function, message = CHANGES[change]
    assert message in damaged(tmp_path, function)


def test_a_manifest_of_arrays_is_none_of_pictures(tmp_path: Path) -> None:
    assert isinstance(write_arrays(tmp_path / "a", (X, Y), None), ArrayManifest)
    with pytest.raises(InputError, match="format is 2, expected 1: the data set has rows of arr"):
        read_manifest(tmp_path / "a")
    assert isinstance(
        write_pictures(tmp_path / "b", (np.zeros((2, 4, 4), np.uint8), Y), None), Manifest
    )


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    write_arrays(folder, (X, Y), (X, Y))
    return folder


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_damage_is_refused_or_harmless(small: Path, data: st.DataObject) -> None:
    """Manifest, labels and header of a batch file with a few other bytes, or cut."""
    names = ["manifest.json", "labels/train_labels.npy", "train_hkl/0000.hkl"]
    path = small / data.draw(st.sampled_from(names))
    whole = path.read_bytes()
    content = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.integers(len(content) // 2, len(content)))]
    path.write_bytes(content)
    rows, labels = np.zeros((2, 3), np.float32), np.arange(2)
    try:
        rows, labels = read(small, "train")
    except InputError:
        pass
    finally:
        path.write_bytes(whole)
    assert (rows.dtype, rows.shape, labels.tolist()) == (np.float32, (2, 3), [0, 1])
