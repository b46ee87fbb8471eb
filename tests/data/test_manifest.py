"""The manifest: written, read again, and refused when a value in it cannot be right."""

import errno
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.data import manifest as manifest_module
from tandem.data.manifest import FORMAT, Manifest, Split, read_manifest, write_manifest
from tandem.errors import InputError


def make_manifest() -> Manifest:
    train = Split(
        files=("train_hkl/0000.hkl", "train_hkl/0001.hkl", "train_hkl/0002.hkl"),
        pictures=("n02/a b.JPEG", "n01/b.JPEG", "n02/ü.JPEG", "n01/c.JPEG", "n01/d.JPEG"),
        labels=np.array([1, 0, 1, 0, 0]),
    )
    val = Split(("val_hkl/0000.hkl",), ("ILSVRC2012_val_00000001.JPEG",), np.array([1]))
    return Manifest(8, "c01b", 2, ("n01", "n02"), 7, {"numpy": "2"}, {"train": train, "val": val})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "manifest.json"
    write_manifest(path, make_manifest())
    return path


@pytest.mark.parametrize("by_folder", [False, True])
def test_what_is_written_is_read(path: Path, by_folder: bool) -> None:
    written, read = make_manifest(), read_manifest(path.parent if by_folder else path)
    for name in ("image_size", "layout", "pictures_per_file", "wnids", "seed", "versions"):
        assert getattr(read, name) == getattr(written, name)
    assert read.splits.keys() == {"train", "val"}
    for name, split in read.splits.items():
        assert split.files == written.splits[name].files
        assert split.pictures == written.splits[name].pictures
        assert split.labels.dtype == np.int64
        np.testing.assert_array_equal(split.labels, written.splits[name].labels)


def test_how_pictures_were_resized_is_written_only_if_it_is_not_the_default(path: Path) -> None:
    """A manifest of before is read, and one of today has its bytes."""
    before = path.read_text()
    assert "resize" not in before
    assert read_manifest(path).resize == "squash"
    write_manifest(path, replace(make_manifest(), resize="shorter_side"))
    assert read_manifest(path).resize == "shorter_side"
    assert path.read_text().replace(' "resize": "shorter_side",\n', "") == before


def test_the_border_is_written_only_if_there_is_one(path: Path) -> None:
    before = path.read_text()
    assert read_manifest(path).pad == 0
    write_manifest(path, replace(make_manifest(), pad=2))
    assert read_manifest(path).pad == 2
    assert path.read_text().replace(' "pad": 2,\n', "") == before


def test_counts_and_shapes() -> None:
    manifest = make_manifest()
    assert manifest.classes == 2
    assert manifest.counts("train") == (2, 2, 1)
    assert manifest.counts("val") == (1,)
    assert manifest.batch_shape(5) == (3, 8, 8, 5)


INTEGER = "input should be a valid integer"
GONE = object()
CHANGES: dict[str, tuple[str, Any, str]] = {
    "another format": ("format", 2, "format is 2, expected 1"),
    "text for a number": ("image_size", "8", f'image_size is "8": {INTEGER}'),
    "a truth for a number": ("image_size", True, f"image_size is true: {INTEGER}"),
    "a fraction": ("seed", 1.5, f"seed is 1.5: {INTEGER}"),
    "no size": ("image_size", 0, "greater than or equal to 1"),
    "unknown layout": ("layout", "bc01", "input should be 'b01c' or 'c01b'"),
    "a negative border": ("pad", -1, "pad is -1: input should be greater"),
    "a border of text": ("pad", "1", 'pad is "1": input should be a valid integer'),
    "a border without a picture": ("pad", 4, "less than half of image_size"),
    "a class twice": ("wnids", ["n01", "n01"], "names of classes, each once"),
    "other class count": ("classes", 3, "classes is 3, expected 2"),
    "a label too high": ("splits.train.labels", [1, 0, 2, 0, 0], "from 0 to 2"),
    "a negative label": ("splits.val.labels", [-1], "from -1 to -1"),
    "a label too few": ("splits.train.labels", [1, 0, 1, 0], "found 4, expected 5"),
    "a label of text": ("splits.train.labels", [1, 0, "1", 0, 0], "expected a list of integers"),
    "a huge label": ("splits.val.labels", [1 << 70], "beyond 64 bits"),
    "a picture too many": ("splits.val.pictures", ["a", "b"], "found 1, expected 2"),
    "no pictures for a label": ("splits.val.pictures", [], "found 1, expected 0"),
    "a nameless picture": ("splits.val.pictures", [1], "input should be a valid string"),
    "a file too few": ("splits.train.files", ["a", "b"], "found 2, expected 3"),
    "a file twice": ("splits.train.files", ["a", "b", "a"], "named twice"),
    "a path outside": ("splits.val.files", ["../0000.hkl"], "inside the manifest's"),
    "an absolute path": ("splits.val.files", ["/0000.hkl"], "inside the manifest's"),
    "a split of text": ("splits.val", "all", "input should be a dictionary"),
    "no seed": ("seed", GONE, "seed is missing"),
    "no splits": ("splits", GONE, "splits is missing"),
    "no labels": ("splits.val.labels", GONE, "splits.val.labels is missing"),
    "no versions": ("versions", GONE, "versions is missing"),
    "no validation": ("splits.val", GONE, "splits: found ['train'], expected ['train', 'val']"),
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda name: name.replace(" ", "_"))
def test_a_wrong_or_missing_value_is_refused(path: Path, change: str) -> None:
    key, value, message = CHANGES[change]
    inner = content = json.loads(path.read_text())
    *outer, last = key.split(".")
    for name in outer:
        inner = inner[name]
    inner[last] = value
    if value is GONE:
        del inner[last]
    path.write_text(json.dumps(content))
    with pytest.raises(InputError) as caught:
        read_manifest(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b"[" * 100_000])
def test_a_file_that_is_no_manifest_is_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"manifest\.json: (not JSON|holds \[\])"):
        read_manifest(path)


def test_a_missing_manifest_names_the_program_that_writes_it(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no manifest.*/generate_data\.sh \(or `tandem pre"):
        read_manifest(tmp_path / "manifest.json")


def test_a_file_of_another_program_is_no_manifest(path: Path) -> None:
    path.write_text('{"name": "a web app", "start_url": "/"}')
    with pytest.raises(InputError) as caught:
        read_manifest(path)
    assert str(caught.value) == (
        f"{path}: format is null, expected {FORMAT}; the file is no manifest of preprocessing"
    )


@pytest.mark.parametrize("name", ["is_dir", "read"])
def test_a_folder_or_file_without_permission_is_refused(
    path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(path: Path, *_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    if name == "is_dir":
        monkeypatch.setattr(Path, "is_dir", denied)
    else:
        monkeypatch.setattr(manifest_module, "read_bytes", denied)
    with pytest.raises(InputError) as caught:
        read_manifest(path)
    assert str(caught.value) == f"{path}: the manifest cannot be read: Permission denied"


def test_a_name_that_no_file_can_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the manifest cannot be read: File name too long"):
        read_manifest(tmp_path / ("long" * 100))
