"""Tables of contents of archives, against the standard library's."""

import io
import tarfile
from pathlib import Path

import pytest

from tandem.preprocessing.tars import Archive


@pytest.mark.parametrize("kind", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_a_long_name_is_that_of_the_next_member_alone(tmp_path: Path, kind: int) -> None:
    long = "folder-" * 40
    folder = tarfile.TarInfo(long)
    folder.type = tarfile.DIRTYPE
    files = {"first": b"1", f"{long}/a": b"22", "second": bytes(700), "third": b"4"}
    with tarfile.open(tmp_path / "a.tar", "w", format=kind) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
            if name == "second":
                archive.addfile(folder)
    with Archive.open(tmp_path / "a.tar") as found:
        members = [*found.members()]
        assert {m.name: found.read(m, most=700) for m in members} == files
    assert len(members) == len(files)
