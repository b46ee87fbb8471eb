"""Parquet files: rows and names that cannot be taken over, and the room for copies."""

from collections import namedtuple
from pathlib import Path

import pytest

from tandem.errors import InputError
from tandem.preprocessing.listing import list_pictures
from tandem.preprocessing.settings import Settings
from tandem.preprocessing.sources import parquet
from tests.support import layouts
from tests.support.source_faults import columns


def settings(root: Path, **changes: int) -> Settings:
    return Settings(source=root / "in", tar_root_dir=root / "out", **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(("content", "label"), [(None, 0), (b"", None), (b"", -1)])
def test_a_row_without_a_picture_or_a_class_is_refused(
    tmp_path: Path, content: bytes | None, label: int | None
) -> None:
    layouts.parquet(tmp_path / "in")
    rows = [{"bytes": c, "path": "n01440764_10026.JPEG"} for c in (b"", content)]
    columns(image=rows, label=[0, label])(tmp_path / "in")
    expected = r"train-00001-of-00002\.parquet \(source\): row 1: found no picture or no class"
    with pytest.raises(InputError, match=expected):
        list_pictures(settings(tmp_path))


def test_a_name_that_is_too_long_for_an_archive_is_replaced(tmp_path: Path) -> None:
    layouts.parquet(tmp_path / "in")
    path = f"n01440764_{'1' * 95}.JPEG"
    rows = [(path, 0), *((digit.name, digit.number) for digit in layouts.of("train")[1::2])]
    images = [{"bytes": b"", "path": name} for name, _ in rows]
    columns(image=images, label=[number for _, number in rows])(tmp_path / "in")
    pictures = list_pictures(settings(tmp_path)).splits["train"].pictures
    assert "n01440764/train-00001-of-00002-000000.jpg" in pictures


def test_pages_that_unpack_to_more_than_memory_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layouts.parquet(tmp_path / "in")
    path = tmp_path / "in/data/train-00000-of-00002.parquet"
    size = parquet._inspect(path).size
    monkeypatch.setattr(parquet, "_MOST_GROUP", size // 100)
    with pytest.raises(InputError, match=r"parquet \(source\): cannot be read: a row group of \d"):
        parquet._inspect(path)


@pytest.mark.parametrize(
    ("subset", "pad", "is_stopped", "expected"),
    [
        (0, 0, False, r"12\.9 MB for the copies of the pictures and the batch"),
        (10, 0, False, r"4\.0 MB for the copies of the pictures and the batch"),
        (10, 128, False, r"15\.8 MB for the copies of the pictures and the batch"),
        (0, 0, True, r"0\.1 MB for the copies of the pictures$"),
    ],
)
def test_the_room_is_for_what_will_be_written(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    subset: int,
    pad: int,
    is_stopped: bool,
    expected: str,
) -> None:
    """Of a subset fewer batch files; of a stopped run some are there."""
    layouts.parquet(tmp_path / "in")
    source = parquet.Parquet(tmp_path / "in", tmp_path / "out", 256, pad, subset)
    if is_stopped:
        layouts.write(tmp_path / "out" / parquet.PROGRESS_NAME, b"")
    monkeypatch.setattr("shutil.disk_usage", lambda path: namedtuple("usage", "free")(0))
    shapes = {
        path: parquet._Shape(rows, 0)
        for path, rows in zip(source.archives(), (20, 20, 13, 12), strict=True)
    }
    with pytest.raises(InputError, match=expected):
        source._check_space(shapes, list(shapes)[:1])
