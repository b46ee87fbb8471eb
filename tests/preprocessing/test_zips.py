"""Kaggle's zip file: read where it is, and refused where it could mislead."""

import io
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import make_hkl
import pytest

from tandem.errors import InputError
from tandem.preprocessing.zips import Zip, unzipped
from tests.preprocessing.test_sources import expected, options, output
from tests.support import layouts
from tests.support.picture_files import contents

__all__ = ["expected"]  # the fixture: what every layout gives

FILES = {"a/first.txt": b"1" * 5000, "a/second.txt": bytes(range(256)), "third": b""}


def zipped(files: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def kaggle_zip(folder: Path, path: Path, method: int = zipfile.ZIP_DEFLATED) -> Path:
    layouts.kaggle(folder)
    path.write_bytes(zipped(contents(folder), method))
    return path


def refused(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert make_hkl.main(options(path.parent / "out", "--source", str(path))) == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_kaggles_zip_gives_the_same_bytes(
    tmp_path: Path,
    expected: dict[str, bytes],
    method: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = kaggle_zip(tmp_path / "in", tmp_path / "k.zip", method)
    arguments = options(tmp_path / "out", "--source", str(path))
    assert make_hkl.main(arguments) == 0
    assert output(tmp_path / "out") == expected
    text = capsys.readouterr().err
    counts = f"{layouts.TRAIN} training and {layouts.VAL} validation pictures of 10 classes"
    assert f"{path}: found Kaggle's zip file: {counts}" in text
    assert f"{counts}, and ImageNet has 1,281,167 and 50,000 of 1,000" in text
    assert make_hkl.main(arguments) == 0  # by its index
    assert "everything is there already" in capsys.readouterr().err


def test_another_zip_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.zip").write_bytes(zipped(FILES))
    assert f"unpack another: unzip {tmp_path}/x.zip -d DIR" in refused(tmp_path / "x.zip", capsys)
    (tmp_path / "x.txt").touch()
    assert "found a file, expected a folder, or Kaggle's zip" in refused(tmp_path / "x.txt", capsys)
    files = {
        f"ILSVRC/Data/CLS-LOC/{name}": b"" for name in ("train/n01440764/a.JPEG", "val/b.JPEG")
    }
    (tmp_path / "y.zip").write_bytes(zipped(files))
    assert "found no LOC_val_solution.csv" in refused(tmp_path / "y.zip", capsys)


def members(path: Path) -> dict[str, bytes]:
    with Zip.open(path) as archive:
        return {member.name: archive.read(member, 5000) for member in archive.members()}


@pytest.mark.parametrize("limit", [0, 1 << 31])
def test_members_are_those_of_the_standard_library(
    tmp_path: Path, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a limit of 0 the table is that of a file of more than 4 GB."""
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in (FILES | {"empty/": b""}).items():
            archive.writestr(name, content)
        monkeypatch.setattr(zipfile, "ZIP64_LIMIT", limit)
    assert members(tmp_path / "a.zip") == FILES


def test_what_is_streamed_has_its_sizes_after_it(tmp_path: Path) -> None:
    class Stream(io.BytesIO):
        def seekable(self) -> bool:
            return False

        def seek(self, *_: int) -> int:
            raise OSError

        def tell(self) -> int:
            raise OSError

    stream = Stream()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a", b"1" * 5000)
    (tmp_path / "a.zip").write_bytes(stream.getvalue())
    assert members(tmp_path / "a.zip") == {"a": b"1" * 5000}


def of_two(content: bytes) -> bytes:
    """Let both lines of the table point to the first member."""
    second = content.rindex(b"PK\1\2")
    return content[: second + 42] + bytes(4) + content[second + 46 :]


FAULTS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "cut": (lambda content: content[:-30], "no table of its members"),
    "longer": (lambda content: content + b"x", "a table of its members for another file"),
    "missing": (lambda content: content[50:], "a table of its members for another file"),
    "overlapping": (of_two, "over or before another member"),
    "header": (lambda content: b"XX" + content[2:], "no header of b"),
    "checksum": (lambda content: content.replace(b"one", b"two", 1), "another checksum"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_damage_is_refused(tmp_path: Path, fault: str) -> None:
    damage, message = FAULTS[fault]
    content = zipped({"b": b"one", "c": b"one"}, zipfile.ZIP_STORED)
    (tmp_path / "a.zip").write_bytes(damage(content))
    with pytest.raises(InputError, match=message):
        members(tmp_path / "a.zip")


@pytest.mark.parametrize("name", ["/etc/passwd", "../up", "a/../../up", "a\\..\\b"])
def test_names_that_lead_elsewhere_are_refused(tmp_path: Path, name: str) -> None:
    content = zipped({"x" * len(name): b"1"}).replace(b"x" * len(name), name.encode())
    (tmp_path / "a.zip").write_bytes(content)
    with pytest.raises(InputError, match="leads elsewhere"):
        members(tmp_path / "a.zip")


def test_encrypted_members_are_refused(tmp_path: Path) -> None:
    content = bytearray(zipped({"a": b"1"}))
    content[content.rindex(b"PK\1\2") + 8] |= 1
    (tmp_path / "a.zip").write_bytes(content)
    with pytest.raises(InputError, match="a, encrypted"):
        members(tmp_path / "a.zip")


def test_a_bomb_is_not_inflated(tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(content := zipped({"a": bytes(50_000_000)}))
    with pytest.raises(InputError, match="found 5001 bytes, expected at most 5000"):
        members(tmp_path / "a.zip")
    nbytes = struct.unpack_from("<L", content, 18)[0]
    with pytest.raises(ValueError, match="found 101 bytes, expected at most 100"):
        unzipped(content[: 31 + nbytes], 100)
    with pytest.raises(ValueError, match="its end is missing"):
        unzipped(content[:1000], 100_000_000)
