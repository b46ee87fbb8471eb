"""A disk that is really full: a sentence, no half-written file, and the same bytes later.

A library that writes by itself meets a full disk in its own way, which no patched function shows:
HDF5 crashed the process. So a file system of a few pages is mounted, which takes the right to
mount; where `unshare` gives it to ordinary users, the tests run once more inside.
"""

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import make_hkl
import make_labels
import make_train_val_txt
import pytest

from tandem.preprocessing import batches, derive, output, prepare, report
from tests.support.picture_files import Pictures, contents

ROOT = Path(make_hkl.__file__).parents[1]
PAGE = os.sysconf("SC_PAGE_SIZE")
_ROOM = 200 * PAGE
_INSIDE = "TANDEM_TESTS_IN_A_NAMESPACE"


@dataclass(frozen=True)
class Disk:
    """A small file system, at `folder`; a filler takes what is to be no room."""

    folder: Path

    @property
    def filler(self) -> Path:
        return self.folder / "filler"

    def free_pages(self) -> int:
        status = os.statvfs(self.folder)
        return status.f_bavail * status.f_frsize // PAGE

    def leave(self, pages: int) -> None:
        """Fill the disk until no more than `pages` pages are free."""
        with self.filler.open("ab", buffering=0) as file:
            while self.free_pages() > pages:
                file.write(bytes(PAGE))

    def give(self, pages: int) -> None:
        """Make room by `pages` pages."""
        os.truncate(self.filler, max(0, self.filler.stat().st_size - pages * PAGE))


def mounts(*prefix: str) -> bool:
    """Whether a file system can be mounted, with `prefix` before the command."""
    script = 'd=$(mktemp -d) && mount -t tmpfs -o size=1m none "$d" && umount "$d"'
    command = [*prefix, "sh", "-c", script]
    try:
        return subprocess.run(command, capture_output=True, timeout=20).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


@pytest.fixture(scope="module")
def may_mount() -> None:
    if shutil.which("mount") is None or not mounts():
        pytest.skip("no file system may be mounted here")


@pytest.fixture
def disk(tmp_path: Path, may_mount: None) -> Iterator[Disk]:
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_ROOM}", "none", str(folder)], check=True)
    try:
        yield Disk(folder)
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.skipif(_INSIDE in os.environ, reason="this is inside")
@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root has no need of it"
)
def test_once_more_where_mounting_is_allowed() -> None:
    if shutil.which("unshare") is None or not mounts("unshare", "-rm"):
        pytest.skip("neither mount nor unshare -rm is allowed here")
    pytest_here = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    inside = subprocess.run(
        ["unshare", "-rm", *pytest_here],
        cwd=ROOT,
        env=os.environ | {_INSIDE: "1"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert inside.returncode == 0, inside.stdout
    assert " passed" in inside.stdout


@pytest.fixture(autouse=True)
def _room_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other programs fill the disk, after a run has found room for its batch files."""
    monkeypatch.setattr(output, "free_bytes", lambda folder: 1 << 40)


@pytest.fixture(autouse=True)
def _bad_picture(pictures: Pictures) -> None:
    """The list of pictures left out takes room too."""
    pictures.spoil(("train", "n03", 1))


PROGRAMS = (make_hkl, make_labels, make_train_val_txt)


@pytest.fixture
def expected(tmp_path: Path, pictures: Pictures) -> dict[str, bytes]:
    out = tmp_path / "undisturbed"
    for program in PROGRAMS:
        assert program.main(pictures.options(out)) == 0
    return contents(out)


def check_refusal(status: int, error: str, out: Path) -> None:
    """One sentence about one of the files, and nothing half written."""
    last = error.splitlines()[-1]
    assert status == 2, error
    assert last.startswith(f"error: {out}/"), last
    assert last.count("No space left on device") == 1, last
    assert ".partial" not in error
    assert "Traceback" not in error
    assert [path for path in out.rglob("*") if ".partial" in path.name] == []


def test_with_every_page_that_is_given_a_run_goes_a_little_further(
    disk: Disk, pictures: Pictures, expected: dict[str, bytes], capsys
) -> None:
    """The disk is full at one place after another, wherever they are."""
    out, named = disk.folder / "out", set()
    out.mkdir()
    for program in PROGRAMS:
        disk.leave(0)
        while status := program.main(pictures.options(out)):
            error = capsys.readouterr().err
            check_refusal(status, error, out)
            named.add(Path(error.splitlines()[-1].split(": ")[1]).name)
            # Nothing of a whole file is lost, and nothing else is kept.
            found = contents(out)
            assert all(found[name] == expected[name] for name in found.keys() & expected.keys())
            assert found.keys() - expected.keys() <= {"progress.npz"}
            disk.give(1)
    assert contents(out) == expected
    assert named >= {"progress.npz", "0000.hkl", "0001.hkl", "train_labels.npy", "train.txt"}


# What writes a file, and how often it has done so before the disk is full.
MOMENTS = [
    *((make_hkl, batches, "write_batch", call) for call in (0, 1, 4)),
    *((make_hkl, batches, "save_progress", call) for call in (0, 4)),
    (make_hkl, prepare, "save_progress", 0),
    (make_hkl, prepare, "write_array", 0),
    (make_hkl, report, "write_text", 0),
    (make_hkl, prepare, "write_manifest", 0),
    *((make_labels, derive, "write_array", call) for call in (0, 1)),
    *((make_train_val_txt, derive, "write_text", call) for call in (0, 1)),
]


def filling(function: Callable, disk: Disk, call: int, pages: int) -> Callable:
    """`function`, but before its call number `call` (from 0) the disk fills."""
    calls = itertools.count()

    def filled(*args: object) -> object:
        if next(calls) == call:
            disk.leave(pages)
        return function(*args)

    return filled


# With one page left, a longer file is begun.
@pytest.mark.parametrize("pages", [0, 1])
@pytest.mark.parametrize(("program", "module", "name", "call"), MOMENTS)
def test_a_disk_that_fills_just_before_a_file(
    disk: Disk, pictures, expected, monkeypatch, capsys, program, module, name, call, pages
) -> None:
    out = disk.folder / "out"
    for earlier in PROGRAMS[: PROGRAMS.index(program)]:
        assert earlier.main(pictures.options(out)) == 0
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(module, name, filling(getattr(module, name), disk, call, pages))
        status = program.main(pictures.options(out))
    assert disk.filler.exists(), "the disk was never filled"
    if status or not pages:  # a file of a page still had room
        check_refusal(status, capsys.readouterr().err, out)
    disk.filler.unlink()
    for each in PROGRAMS[PROGRAMS.index(program) :]:
        assert each.main(pictures.options(out)) == 0
    assert contents(out) == expected


def test_the_program_itself_ends_with_status_2(
    disk: Disk, pictures: Pictures, expected: dict[str, bytes]
) -> None:
    """A library may do its damage when the process ends, after the sentence has been said."""
    out = disk.folder / "out"
    out.mkdir()
    disk.leave(6)
    for workers in ("1", "2"):
        command = [sys.executable, str(ROOT / "preprocessing" / "make_hkl.py")]
        command += [*pictures.options(out), "--workers", workers]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
        check_refusal(ended.returncode, ended.stderr, out)
        assert ended.stderr.splitlines()[-1].endswith("the same command continues from there")
    disk.filler.unlink()
    for program in PROGRAMS:
        assert program.main(pictures.options(out)) == 0
    assert contents(out) == expected
