"""Files that are written whole or not at all."""

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
from safetensors.numpy import save_file

from tandem.errors import InputError
from tandem.files import locked, replacing, write_array, write_json


@pytest.fixture(params=[0o022, 0o027, 0o002])
def mask(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The process's mask, which nobody changes: other threads may create files at any time."""
    former = os.umask(request.param)

    def umask(mask: int) -> NoReturn:
        raise AssertionError(f"the mask is {mask:o} for a moment")

    with monkeypatch.context() as patch:
        patch.setattr(os, "umask", umask)
        yield request.param
    os.umask(former)


def test_a_file_has_the_permissions_of_any_new_one(tmp_path: Path, mask: int) -> None:
    write_json(tmp_path / "a.json", 1)
    write_array(tmp_path / "a.npy", np.zeros(3))
    with replacing(tmp_path / "a.safetensors") as partial:
        save_file({"a": np.zeros(3)}, partial)
    for path in tmp_path.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask, path.name


def test_a_short_write_has_a_reason_and_a_name(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    with pytest.raises(OSError, match="is the disk full") as caught, replacing(path):
        raise OSError("49152 requested and 10208 written")  # as NumPy does
    assert (caught.value.filename, caught.value.errno) == (str(path), errno.ENOSPC)
    assert caught.value.strerror == "49152 requested and 10208 written bytes: is the disk full?"


def test_a_block_that_raises_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(NotADirectoryError), replacing(tmp_path / "a.json") as partial:
        (partial / "b").touch()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_a_network_file_system_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They lock files that are open for writing, as NFS does by byte ranges, and no folders."""
    flock = fcntl.flock

    def of_nfs(descriptor: int, operation: int) -> None:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", of_nfs)
    with locked(tmp_path):
        with pytest.raises(InputError, match="another run is using"), locked(tmp_path):
            pass
        assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    assert list(tmp_path.iterdir()) == []
