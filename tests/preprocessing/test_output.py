"""The output is checked before the long work: its folders first, then room for batch files."""

import errno
import os
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import make_hkl
import pytest

from tandem.preprocessing import batches, prepare
from tests.support.picture_files import PER_FILE, Pictures, Refusal


@pytest.mark.parametrize("option", ["--tar-root-dir", "--misc-dir", "--label-dir"])
@pytest.mark.parametrize("below", ["", "further/below"])
def test_output_is_checked_before_pictures_are_listed(
    pictures: Pictures, out: Path, option: str, below: str, monkeypatch, refusal: Refusal
) -> None:
    monkeypatch.setattr(prepare, "list_pictures", lambda settings: pytest.fail("listed"))
    file = pictures.root / "file"
    file.write_bytes(b"precious")
    error = refusal(option, str(file / below))
    assert f"{file / below}: the folder cannot be made: {file} is no folder" in error
    assert file.read_bytes() == b"precious"
    assert not out.exists()


def test_output_that_is_not_writable_is_refused_before_pictures_are_listed(
    out: Path, monkeypatch: pytest.MonkeyPatch, refusal: Refusal
) -> None:
    monkeypatch.setattr(prepare, "list_pictures", lambda settings: pytest.fail("listed"))
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != out.parent)
    expected = f"{out.parent}: found a folder that is not writable, expected one that is"
    assert expected in refusal("--misc-dir", str(out.parent))
    assert not out.exists()


def test_batch_files_that_do_not_fit_are_refused_before_they_are_made(
    pictures: Pictures, out: Path, monkeypatch: pytest.MonkeyPatch, refusal: Refusal
) -> None:
    usage, free = namedtuple("usage", "free"), 19 * 8 * 8 * 3
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(free - 1))
    expected = f"{out} (tar_root_dir): found 0.0 MB free, expected 0.1 MB for the batch files"
    assert expected in refusal()
    assert not out.exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(41_250_000_000))
    expected = "found 41.2 GB free, expected 244.6 GB for the batch files"
    assert expected in refusal("--image-size", "65500")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(free))
    assert make_hkl.main(pictures.options(out)) == 0
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0))
    assert make_hkl.main(pictures.options(out)) == 0  # it is there already


def test_a_stopped_run_needs_room_for_the_rest_alone(
    pictures: Pictures, out: Path, monkeypatch: pytest.MonkeyPatch, refusal: Refusal
) -> None:
    written, write = [], batches.write_batch

    def full(path: Path, *about: Any) -> None:
        if len(written) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, *about)
        written.append(path)

    with monkeypatch.context() as patch:
        patch.setattr(batches, "write_batch", full)
        assert "No space left on device" in refusal()
    usage, rest = namedtuple("usage", "free"), (19 - 2 * PER_FILE) * 8 * 8 * 3
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(rest - 1))
    assert "for the batch files that are still to be written" in refusal()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(rest))
    assert make_hkl.main(pictures.options(out)) == 0
